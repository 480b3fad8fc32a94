"""Several processes train one job, each on a device of its own: how rank 0 has the worker ranks help.

Rank 0 is the whole job: it reads the data, decides, measures time, writes. The worker ranks (`worker_rank.py`) hold the
same model and know nothing of the job. At each step they get the adapter's weights and some of the batch's rows, and
return the gradient; rank 0 adds the gradients up, in the order of the ranks, and takes the step. So the weights of two
ranks cannot drift apart, a checkpoint is the same as for one process, and the next attempt may have another number of
them.

Weights and gradients lie in anonymous memory that the processes share; tasks and replies go over pairs of connected
sockets. Both work without network (`tuneship/isolation/isolation.py`), where NCCL and gloo would not. An adapter is
small: 40 million numbers are 160 MB in each direction. Next: `worker_rank.py`, `training_loop.py`.
"""

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Pipe
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from tuneship.training.device import free_memory
from tuneship.training.examples.batches import (
    Indices,
    PaddedBatch,
    collate,
    micro_batches,
    split_among_ranks,
)
from tuneship.training.examples.tokenized_examples import TokenizedExamples
from tuneship.training.learner import Learner
from tuneship.training.objective import AnswerEnds, Totals, add_totals
from tuneship.training.progress_file import RankLost, Reason, StopRequest, TrainingFailed
from tuneship.training.spec import ResolvedHyperparameters

# The launched process dies with the one that started it, and is isolated like it.
LAUNCH_ARGUMENTS = ("-m", "tuneship.processes.launch")
# A task with this step is an evaluation.
EVALUATE = 0
BYTES_PER_WEIGHT = 4


@dataclass(frozen=True)
class Setup:
    """The first message to a worker rank."""

    # How many processes the job has.
    ranks: int
    base_model: str
    number_format: str
    # That of rank 0: `cuda` or `cpu`.
    device: str
    threads: int
    hyperparameters: ResolvedHyperparameters
    ends: AnswerEnds

    @classmethod
    def from_json(cls, text: bytes) -> "Setup":
        """The inverse of `json.dumps(asdict(...))`."""
        fields: dict[str, Any] = json.loads(text)
        settings: dict[str, Any] = fields.pop("hyperparameters")
        settings["target_modules"] = tuple(settings["target_modules"])
        ends: dict[str, Any] = fields.pop("ends")
        return cls(
            **fields,
            hyperparameters=ResolvedHyperparameters(**settings),
            ends=AnswerEnds(tuple(ends["tokens"]), ends["context_length"]),
        )


@dataclass(frozen=True)
class Task:
    """Work on the following rows: the gradient of a step, or an evaluation."""

    # The step to learn for, or EVALUATE.
    step: int
    # Terms of the loss over the whole step, of all ranks.
    loss_terms: int
    micro_batch_tokens: int


class WorkerRank:
    """One worker rank with its process."""

    def __init__(self, rank: int, memory: int) -> None:
        """Start the process. `memory` is the descriptor of the shared memory. Raises OSError."""
        self.rank = rank
        self._connection, theirs = Pipe()
        descriptors = (theirs.fileno(), memory)
        command = [
            sys.executable,
            *LAUNCH_ARGUMENTS,
            str(os.getpid()),
            "inherited",
            "tuneship.training.worker_rank",
        ]
        try:
            self._process = subprocess.Popen(  # noqa: S603 (our own module)
                [*command, str(rank), *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
            )
        finally:
            theirs.close()

    def send(self, *messages: bytes) -> None:
        """Send messages. Raises RankLost."""
        try:
            for message in messages:
                self._connection.send_bytes(message)
        except OSError:  # its end of the connection is closed
            raise self._lost() from None

    def receive(self) -> dict[str, Any]:
        """Wait for the next reply. Raises RankLost, or the TrainingFailed that the process ended with."""
        try:
            fields: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise self._lost() from None
        if "reason" in fields:
            raise TrainingFailed(Reason(fields["reason"]), fields["message"])
        return fields

    def kill(self) -> None:
        """Kill the process and wait until it has ended."""
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _lost(self) -> RankLost:
        return RankLost(self.rank, self._process.wait())


class WorkerRanks:
    """The worker ranks of a job (none on one device); leaving its `with` block ends them."""

    def __init__(self, ranks: int) -> None:
        """Start `ranks - 1` processes; call it in a thread that lives as long as this process."""
        self.ranks = ranks
        self.memory = os.memfd_create("ranks") if ranks > 1 else -1
        self.workers: list[WorkerRank] = []
        try:
            for rank in range(1, ranks):
                self.workers.append(WorkerRank(rank, self.memory))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Return self; the processes run already."""
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """End the processes."""
        self.close()

    def close(self) -> None:
        """End the processes and free the shared memory."""
        for worker in self.workers:
            worker.kill()
        if self.memory >= 0:
            os.close(self.memory)
        self.workers, self.memory = [], -1

    def set_up(self, setup: Setup) -> None:
        """Have each load the model, while this process does other things."""
        for worker in self.workers:
            worker.send(json.dumps(asdict(setup)).encode())


class RankGroup:
    """All processes of a job, including this one, used as one learner."""

    def __init__(self, learner: Learner, worker_ranks: WorkerRanks | None = None) -> None:
        """Wait until the worker ranks are ready. Raises RankLost and TrainingFailed, as every method does."""
        self._learner = learner
        self._workers = worker_ranks.workers if worker_ranks else []
        self.size = 1 + len(self._workers)
        if worker_ranks and self._workers:
            self._shared = map_shared_memory(
                worker_ranks.memory, self.size, learner.trainable_parameters
            )
        self._free_bytes = [worker.receive()["free_memory"] for worker in self._workers]

    def free_memory(self) -> int:
        """Free bytes of the process that has the least."""
        return min([free_memory(self.size), *self._free_bytes])

    def learn(
        self,
        rows: TokenizedExamples,
        indices: Indices,
        *,
        micro_batch_tokens: int,
        step: int,
        rate: float,
    ) -> float:
        """Take one optimizer step over the rows `indices`; returns their mean loss, finite or not."""
        terms = self._learner.objective.loss_terms(rows, indices)
        task = Task(step, terms, micro_batch_tokens)
        own_indices, busy_workers = self._distribute(task, rows, indices)
        batches = collate_micro_batches(rows, own_indices, micro_batch_tokens)
        if not busy_workers:
            return self._learner.learn(batches, terms, step=step, rate=rate)
        loss = self._learner.backward(batches, terms, step=step).item()
        for worker in busy_workers:
            loss += worker.receive()["loss"]
            self._learner.add_gradient(self._shared[worker.rank])
        self._learner.optimizer_step(rate)
        return loss

    def evaluate(
        self,
        rows: TokenizedExamples,
        indices: Indices,
        *,
        micro_batch_tokens: int,
        stop: StopRequest,
    ) -> Totals:
        """The objective's sums over the rows `indices`. Raises TrainingCancelled between two micro-batches."""
        task = Task(EVALUATE, 0, micro_batch_tokens)
        own_indices, busy_workers = self._distribute(task, rows, indices)
        totals = evaluate_rows(
            self._learner, rows, own_indices, micro_batch_tokens, stop.raise_if_requested
        )
        for worker in busy_workers:
            totals = add_totals(totals, worker.receive())
        return totals

    def _distribute(
        self, task: Task, rows: TokenizedExamples, indices: Indices
    ) -> tuple[Indices, list[WorkerRank]]:
        """Send each worker rank its rows. Returns the rows of this process, and the workers that got some.

        A small batch may not have a row for every rank.
        """
        own_indices, *their_indices = split_among_ranks(indices, rows.lengths, self.size)
        parts = [
            (worker, rows.select(part))
            for worker, part in zip(self._workers, their_indices, strict=True)
            if len(part)
        ]
        if parts:
            self._learner.copy_weights_to(self._shared[0])
        message = json.dumps(asdict(task)).encode()
        for worker, part in parts:
            arrays = (part.tokens, part.loss_mask, part.starts)
            worker.send(message, *(array.tobytes() for array in arrays))
        return own_indices, [worker for worker, _ in parts]


def collate_micro_batches(
    rows: TokenizedExamples, indices: Indices, micro_batch_tokens: int
) -> list[PaddedBatch]:
    """The rows `indices`, cut into padded micro-batches of at most this many tokens."""
    parts = micro_batches(indices, rows.lengths, micro_batch_tokens)
    return [collate(rows, part) for part in parts]


def evaluate_rows(
    learner: Learner,
    rows: TokenizedExamples,
    indices: Indices,
    micro_batch_tokens: int,
    before_each: Callable[[], None] = lambda: None,
) -> Totals:
    """The objective's sums over the rows `indices`, by this process; `before_each` runs before each micro-batch."""
    totals: Totals = {}
    # One rectangle at a time, unlike a step: a validation set may be large.
    for part in micro_batches(indices, rows.lengths, micro_batch_tokens):
        before_each()
        totals = add_totals(totals, learner.evaluate(collate(rows, part)))
    return totals


def map_shared_memory(memory: int, ranks: int, parameters: int) -> Tensor:
    """The shared memory as a tensor of shape (ranks, parameters): rank 0's weights, then each worker's gradient."""
    os.ftruncate(memory, ranks * parameters * BYTES_PER_WEIGHT)
    numbers = torch.frombuffer(mmap.mmap(memory, 0), dtype=torch.float32)
    return numbers.view(ranks, parameters)


def receive_rows(connection: Connection) -> TokenizedExamples:
    """The rows that `RankGroup` sends after a task."""
    return TokenizedExamples(
        np.frombuffer(connection.recv_bytes(), np.int32),
        np.frombuffer(connection.recv_bytes(), np.bool_),
        np.frombuffer(connection.recv_bytes(), np.int64),
    )
