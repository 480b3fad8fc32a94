"""A further process of a job on several devices: `python -m tuneship.training.worker_rank RANK LINE MEMORY`.

Rank 0 starts it, sends it rows and takes its gradients (`distributed.py`). It has no file of the job, no key and no
say, and ends when rank 0 is gone. LINE is its end of a pair of sockets and MEMORY what all ranks share, both
descriptors.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from tuneship.training.__main__ import failure_of
from tuneship.training.base_model import load_base
from tuneship.training.device import free_memory, use_device
from tuneship.training.distributed import (
    MEASURE,
    Setup,
    Task,
    collated,
    measured,
    receive_rows,
    shared_numbers,
)
from tuneship.training.learner import Learner
from tuneship.training.tokenized_examples import TokenizedExamples


def main(arguments: list[str]) -> int:
    """Help until rank 0 closes the line; 1 after a failure, which rank 0 was told."""
    rank, line, memory = map(int, arguments)
    with Connection(line) as connection:
        try:
            help_rank_0(rank, connection, memory)
        except Exception as error:  # noqa: BLE001 (whatever it is, the job must end with it)
            failure = failure_of(error)
            answer(connection, reason=failure.reason.value, message=failure.message)
            return 1
    return 0


def help_rank_0(rank: int, line: Connection, memory: int) -> None:
    """Set up as told, then do one task after the other."""
    messages = received(line)
    text = next(messages, None)
    if text is None:
        return
    setup = Setup.from_json(text)
    use_device(rank)
    torch.set_num_threads(setup.threads)
    base = load_base(setup.base_model, lambda _: getattr(torch, setup.number_format))
    learner = Learner(base, setup.hyperparameters, rank)
    shared = shared_numbers(memory, setup.ranks, learner.trainable_parameters)
    answer(line, free_memory=free_memory(setup.ranks))
    for text in messages:
        task, rows = Task(**json.loads(text)), receive_rows(line)
        learner.pick_up(shared[0])
        if task.step == MEASURE:
            found = measured(learner, rows, rows.all, task.tokens_at_once)
            answer(line, **asdict(found))
        else:
            answer(line, loss=learnt(learner, task, rows, shared[rank]))


def learnt(learner: Learner, task: Task, rows: TokenizedExamples, place: Tensor) -> float:
    """The loss of `rows`; their gradient is in `place` then."""
    parts = collated(rows, rows.all, task.tokens_at_once)
    loss = learner.backward(parts, task.tokens, step=task.step).item()
    learner.take_gradient(place)
    return loss


def received(line: Connection) -> Iterator[bytes]:
    """Messages until rank 0 is gone."""
    while True:
        try:
            yield line.recv_bytes()
        except (EOFError, ConnectionResetError):
            return


def answer(line: Connection, **fields: Any) -> None:
    """Tell rank 0."""
    line.send_bytes(json.dumps(fields).encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
