"""A worker rank of a job on several devices: `python -m tuneship.training.worker_rank RANK CONNECTION MEMORY`.

Rank 0 starts it, sends it rows and takes its gradients (`distributed.py`). It has no file of the job and no key,
decides nothing, and ends when rank 0 is gone. CONNECTION is the descriptor of its end of a pair of sockets, MEMORY that
of the memory that all ranks share.
"""

import json
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from tuneship.training.__main__ import failure_of
from tuneship.training.base_model import load_base
from tuneship.training.device import device, free_memory, use_device
from tuneship.training.distributed import (
    EVALUATE,
    Setup,
    Task,
    collate_micro_batches,
    evaluate_rows,
    map_shared_memory,
    receive_rows,
)
from tuneship.training.learner import Learner
from tuneship.training.objective import SupervisedFineTuning
from tuneship.training.progress_file import Reason, TrainingFailed

# CUDA must name its threads, and isolation lets rank 0 alone do that.
NO_GPU = "a further process of the job cannot use its GPU: set TUNESHIP_TRAINING_DEVICES to 1"


def main(arguments: list[str]) -> int:
    """Serve rank 0 until it closes the connection; exit code 1 after a failure, which is reported to rank 0."""
    rank, descriptor, memory = map(int, arguments)
    with Connection(descriptor) as connection:
        try:
            serve_rank_0(rank, connection, memory)
        except Exception as error:  # noqa: BLE001 (whatever it is, the job must end with it)
            failure = failure_of(error)
            reply(connection, reason=failure.reason.value, message=failure.message)
            return 1
    return 0


def serve_rank_0(rank: int, connection: Connection, memory: int) -> None:
    """Load the model as the first message says, then do one task after the other."""
    messages = received(connection)
    text = next(messages, None)
    if text is None:
        return
    setup = Setup.from_json(text)
    if setup.device != device().type:
        raise TrainingFailed(Reason.INTERNAL, NO_GPU)
    use_device(rank)
    torch.set_num_threads(setup.threads)
    base = load_base(setup.base_model, lambda _: getattr(torch, setup.number_format))
    learner = Learner(base, setup.hyperparameters, SupervisedFineTuning(setup.ends), rank)
    shared = map_shared_memory(memory, setup.ranks, learner.trainable_parameters)
    reply(connection, free_memory=free_memory(setup.ranks))
    for text in messages:
        task, rows = Task(**json.loads(text)), receive_rows(connection)
        learner.copy_weights_from(shared[0])
        if task.step == EVALUATE:
            totals = evaluate_rows(learner, rows, rows.all_indices, task.micro_batch_tokens)
            reply(connection, **totals)
        else:
            batches = collate_micro_batches(rows, rows.all_indices, task.micro_batch_tokens)
            loss = learner.backward(batches, task.loss_terms, step=task.step).item()
            # Rank 0 reads the gradient once it has the reply.
            learner.move_gradient_to(shared[rank])
            reply(connection, loss=loss)


def received(connection: Connection) -> Iterator[bytes]:
    """Yield messages until rank 0 has ended."""
    while True:
        try:
            yield connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            return


def reply(connection: Connection, **fields: Any) -> None:
    """Send rank 0 a JSON object."""
    connection.send_bytes(json.dumps(fields).encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
