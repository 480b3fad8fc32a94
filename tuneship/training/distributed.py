"""Several processes learn one job, each on a device of its own: how the first of them, rank 0, has the others help.

Rank 0 is the whole job: it reads the data, decides, measures time, writes. The others (`worker_rank.py`) hold the
same model and know nothing of the job. At each step they get the adapter's weights and some of the batch's rows, and
give back the gradient; rank 0 adds the gradients up, in the order of the ranks, and takes the step. So no two
processes can come to differ, a checkpoint holds what it holds for one process, and another attempt may have another
number of them.

Weights and gradients lie in memory that the processes share and nobody else can name; orders go over pairs of connected
sockets. Both work without network (`tuneship/runtime/isolation.py`), where NCCL and gloo would not. An adapter is
small: 40 million numbers are 160 MB each way. Next: `worker_rank.py`, `run.py`.
"""

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Pipe
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from tuneship.training.batches import Indices, PaddedBatch, collate, limited_batches, shares
from tuneship.training.device import free_memory
from tuneship.training.learner import Learner, TokenLoss
from tuneship.training.progress_file import RankLost, Reason, StopRequest, TrainingFailed
from tuneship.training.spec import ResolvedHyperparameters
from tuneship.training.tokenized_examples import TokenizedExamples

# Dies with the process that started it, and is isolated like it.
LAUNCH = ("-m", "tuneship.runtime.launch")
# As a task's step: nothing is learnt.
MEASURE = 0


@dataclass(frozen=True)
class Setup:
    """What a further process is told first."""

    ranks: int
    """How many processes the job has."""
    base_model: str
    number_format: str
    threads: int
    hyperparameters: ResolvedHyperparameters

    @classmethod
    def from_json(cls, text: bytes) -> "Setup":
        """The inverse of `json.dumps(asdict(...))`."""
        fields: dict[str, Any] = json.loads(text)
        settings: dict[str, Any] = fields.pop("hyperparameters")
        settings["target_modules"] = tuple(settings["target_modules"])
        return cls(**fields, hyperparameters=ResolvedHyperparameters(**settings))


@dataclass(frozen=True)
class Task:
    """What is to be done with the rows that follow it."""

    step: int
    """To learn for; or MEASURE."""
    tokens: int
    """That are learnt in the whole step, by all processes."""
    tokens_at_once: int


class Other:
    """A further process, from its start to its end."""

    def __init__(self, rank: int, memory: int) -> None:
        """Start it. `memory`: descriptor of what all share. Raises `OSError`."""
        self.rank = rank
        self._line, theirs = Pipe()
        descriptors = (theirs.fileno(), memory)
        command = [
            sys.executable,
            *LAUNCH,
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

    def tell(self, *messages: bytes) -> None:
        """Send them. Raises RankLost."""
        try:
            for message in messages:
                self._line.send_bytes(message)
        except OSError:  # its end of the line is closed
            raise self._lost() from None

    def answer(self) -> dict[str, Any]:
        """Wait for it. Raises RankLost, or the TrainingFailed that it ended with."""
        try:
            fields: dict[str, Any] = json.loads(self._line.recv_bytes())
        except (EOFError, OSError):
            raise self._lost() from None
        if "reason" in fields:
            raise TrainingFailed(Reason(fields["reason"]), fields["message"])
        return fields

    def end(self) -> None:
        """At once; waits until it is gone."""
        self._process.kill()
        self._process.wait()
        self._line.close()

    def _lost(self) -> RankLost:
        return RankLost(self.rank, self._process.wait())


class Others:
    """The further processes of a job: none where it has one device. To be left by its `with`, which ends them."""

    def __init__(self, ranks: int) -> None:
        """Start `ranks - 1` processes, from the thread that lives as long as this process."""
        self.ranks = ranks
        self.memory = os.memfd_create("ranks") if ranks > 1 else -1
        self.each: list[Other] = []
        try:
            for rank in range(1, ranks):
                self.each.append(Other(rank, self.memory))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """As it was made."""
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """End them."""
        self.close()

    def close(self) -> None:
        """End them."""
        for other in self.each:
            other.end()
        if self.memory >= 0:
            os.close(self.memory)
        self.each, self.memory = [], -1

    def set_up(self, setup: Setup) -> None:
        """Have each load the model, while this process does other things."""
        for other in self.each:
            other.tell(json.dumps(asdict(setup)).encode())


class Ranks:
    """All processes of a job, this one included, as one that learns."""

    def __init__(self, learner: Learner, others: Others | None = None) -> None:
        """Waits until the others are ready. Raises RankLost and TrainingFailed, as all that follows does."""
        self._learner = learner
        self._others = others.each if others else []
        self.count = 1 + len(self._others)
        if others and self._others:
            self._shared = shared_numbers(others.memory, self.count, learner.trainable_parameters)
        self._free = [other.answer()["free_memory"] for other in self._others]

    def free_memory(self) -> int:
        """Bytes that the process with the least can still take."""
        return min(free_memory(self.count), *self._free) if self._free else free_memory()

    def learn(
        self,
        rows: TokenizedExamples,
        indices: Indices,
        *,
        tokens_at_once: int,
        step: int,
        rate: float,
    ) -> float:
        """One optimizer step over the rows `indices`; returns their mean loss, finite or not."""
        task = Task(step, rows.targets(indices), tokens_at_once)
        mine, asked = self._hand_out(task, rows, indices)
        parts = collated(rows, mine, tokens_at_once)
        if not asked:
            return self._learner.learn(parts, task.tokens, step=step, rate=rate)
        loss = self._learner.backward(parts, task.tokens, step=step).item()
        for other in asked:
            loss += other.answer()["loss"]
            self._learner.add_gradient(self._shared[other.rank])
        self._learner.take_step(rate)
        return loss

    def measure(
        self, rows: TokenizedExamples, indices: Indices, *, tokens_at_once: int, stop: StopRequest
    ) -> TokenLoss:
        """Loss and hits over the rows `indices`. Raises TrainingCancelled between two batches."""
        mine, asked = self._hand_out(Task(MEASURE, 0, tokens_at_once), rows, indices)
        total = measured(self._learner, rows, mine, tokens_at_once, stop.raise_if_requested)
        for other in asked:
            total += TokenLoss(**other.answer())
        return total

    def _hand_out(
        self, task: Task, rows: TokenizedExamples, indices: Indices
    ) -> tuple[Indices, Sequence[Other]]:
        """The rows that stay here, and the others that got some: a small batch may not be enough for all."""
        mine, *theirs = shares(indices, rows.lengths, self.count)
        shared_out = [
            (other, rows.of(share))
            for other, share in zip(self._others, theirs, strict=True)
            if len(share)
        ]
        if shared_out:
            self._learner.lay_down(self._shared[0])
        order = json.dumps(asdict(task)).encode()
        for other, part in shared_out:
            other.tell(
                order, *(array.tobytes() for array in (part.tokens, part.learnt, part.starts))
            )
        return mine, [other for other, _ in shared_out]


def collated(rows: TokenizedExamples, indices: Indices, tokens_at_once: int) -> list[PaddedBatch]:
    """The rows `indices` in parts for which memory is enough."""
    parts = limited_batches(indices, rows.lengths, tokens_at_once)
    return [collate(rows, part) for part in parts]


def measured(
    learner: Learner,
    rows: TokenizedExamples,
    indices: Indices,
    tokens_at_once: int,
    between: Callable[[], None] = lambda: None,
) -> TokenLoss:
    """Loss and hits of one process over the rows `indices`; `between` runs before each batch."""
    total = TokenLoss(0.0, 0, 0)
    for part in limited_batches(indices, rows.lengths, tokens_at_once):
        between()
        total += learner.measure(collate(rows, part))
    return total


def shared_numbers(memory: int, ranks: int, count: int) -> Tensor:
    """Shape (ranks, count): in line 0 the weights that rank 0 laid down, in the others each rank's gradient."""
    os.ftruncate(memory, ranks * count * 4)
    numbers = torch.frombuffer(mmap.mmap(memory, 0), dtype=torch.float32)
    return numbers.view(ranks, count)


def receive_rows(line: Connection) -> TokenizedExamples:
    """What `Ranks` sends behind a task."""
    return TokenizedExamples(
        np.frombuffer(line.recv_bytes(), np.int32),
        np.frombuffer(line.recv_bytes(), np.bool_),
        np.frombuffer(line.recv_bytes(), np.int64),
    )
