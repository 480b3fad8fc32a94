"""One job from spec to adapter: read the rows, learn, measure, keep what a kill must not lose.

A loop of our own, not a subclass of transformers' Trainer: on the same rows, losses and thread it is 1.5
to 2 times as fast (`benchmarks/training.py`), and its checkpoints are atomic and hold no pickles. Knows
no HTTP and no database. Loads torch; next: `learner.py`, `checkpoints.py`.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from tuneship.training.base_model import load_base, load_encoder
from tuneship.training.batches import Indices, epoch_batches
from tuneship.training.checkpoints import Checkpoints, make_directory, remove_leftovers
from tuneship.training.device import choose_threads, devices_there, kept_number_format
from tuneship.training.distributed import Others, Ranks, Setup
from tuneship.training.learner import Learner
from tuneship.training.micro_batches import MOST_TOKENS, bytes_per_token, tokens_at_once
from tuneship.training.parity_notes import save_parity
from tuneship.training.progress_file import ProgressFile, Reason, StopRequest, TrainingFailed
from tuneship.training.schedule import EvaluationSchedule, learning_rate
from tuneship.training.spec import DataKeys, TrainingSpec
from tuneship.training.speed import TrainingSpeed
from tuneship.training.tokenized_examples import (
    Encoder,
    ReadRows,
    TokenizedExamples,
    carve_out,
    read_rows,
)

MOST_TOKENS_MEASURING = 2_048
CHECKPOINT_SECONDS = 600.0
PLAIN = DataKeys()
# exp of more is no number a JSON line could hold.
HIGHEST_EXPONENT = 700.0


@dataclass(frozen=True)
class Data:
    """Rows to learn from and rows to measure with; the two may share one set of tokens."""

    training: TokenizedExamples
    training_indices: Indices
    validation: TokenizedExamples
    validation_indices: Indices

    def fingerprint(self, spec: TrainingSpec) -> str:
        """Of everything that decides the course of the training."""
        digest = hashlib.sha256(
            json.dumps(
                [spec.base_model, spec.validation_frequency, asdict(spec.hyperparameters)]
            ).encode()
        )
        for rows in (self.training, self.validation):
            for array in (rows.tokens, rows.learnt, rows.starts):
                digest.update(array.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Standing:
    """Where the training stands after a step; with the learner's tensors all that a resume needs."""

    step: int = 0
    validation_loss: float = math.inf
    accuracy: float = 0.0
    best_step: int = 0
    best_loss: float = math.inf
    epoch_loss: float = 0.0
    """Sum of the losses of this epoch's steps."""
    tokens_at_once: int = 0
    """Padded tokens that go through the model at once; kept, since other parts would round otherwise."""
    devices: int = 1
    """That learnt until here."""


class TrainingLoop:
    """The loop over the steps of one job."""

    def __init__(  # noqa: PLR0913 (what a run is made of)
        self,
        spec: TrainingSpec,
        data: Data,
        learner: Learner,
        progress: ProgressFile,
        stop: StopRequest,
        keys: DataKeys = PLAIN,
        others: Others | None = None,
    ) -> None:
        """Nothing is learnt yet; see `execute`. `others`: that help `learner`, and were set up."""
        self._settings = spec.hyperparameters
        self._spec = spec
        self._data = data
        self._learner = learner
        self._ranks = Ranks(learner, others)
        self._progress = progress
        self._stop = stop
        self._keys = keys
        fingerprint = data.fingerprint(spec)
        self._checkpoints = Checkpoints(spec.checkpoint_dir, fingerprint, keys.checkpoints)
        examples = len(data.training_indices)
        self._steps_per_epoch = math.ceil(examples / self._settings.batch_size)
        self._total_steps = self._steps_per_epoch * self._settings.epochs
        self._evaluations = EvaluationSchedule(
            spec.validation_frequency,
            steps_per_epoch=self._steps_per_epoch,
            total_steps=self._total_steps,
        )
        self._standing = Standing(devices=self._ranks.count)
        self._best = learner.adapter()
        self._loss = self._rate = 0.0

    def execute(self, deadline: float, clock: Callable[[], float] = time.monotonic) -> Standing:
        """Learn to the end, or to the `deadline` of the clock (seconds)."""
        self._resume()
        self._announce()
        self._fit_memory()
        if self._standing.step == 0:
            self._measure()
        saved_at = clock()
        pace = TrainingSpeed(clock)
        for batch in self._remaining_batches():
            if self._has_stalled():
                self._tell_early_end()
                break
            pace.begin_step()
            self._learn(batch)
            pace.end_step(int(self._data.training.lengths[batch].sum()))
            evaluated = self._evaluations.is_due(self._standing.step)
            if evaluated:
                self._measure()
                self._keep_best()
            self._report(evaluated=evaluated)
            if evaluated or clock() - saved_at > CHECKPOINT_SECONDS:
                self._save()
                saved_at = clock()
            if news := pace.news():
                self._progress.write("pace", **news)
            self._stop.raise_if_requested()
            if clock() >= deadline and self._standing.step < self._total_steps:
                self._end_early()
        return self._standing

    def save_best(self, directory: Path) -> None:
        """Write the adapter with the lowest validation loss, which the learner then holds."""
        self._learner.put(self._best)
        self._learner.save_adapter(directory, self._best, self._keys.adapter)

    def _remaining_batches(self) -> Iterator[Indices]:
        indices = self._data.training_indices
        done = self._standing.step
        for epoch in range(done // self._steps_per_epoch, self._settings.epochs):
            batches = epoch_batches(
                indices, self._settings.batch_size, seed=self._settings.seed, epoch=epoch
            )
            yield from batches[max(0, done - epoch * self._steps_per_epoch) :]

    def _has_stalled(self) -> bool:
        """Whether the patience is used up. It follows from the step of the best measurement alone, so an attempt that
        resumes decides as the first one did.
        """
        patience, standing = self._settings.early_stopping_patience, self._standing
        if patience is None:
            return False
        done, best = (
            self._evaluations.count(standing.step),
            self._evaluations.count(standing.best_step),
        )
        return done - best >= patience

    def _tell_early_end(self) -> None:
        standing = self._standing
        self._progress.write(
            "ended_early",
            step=standing.step,
            best_step=standing.best_step,
            patience=self._settings.early_stopping_patience,
        )

    def _fit_memory(self) -> None:
        """Choose once in a job how much of a batch goes through the model at once."""
        if self._standing.tokens_at_once:
            return
        each = bytes_per_token(self._learner, self._data.training)
        free = self._ranks.free_memory()
        most, longest = tokens_at_once(each, free), int(self._data.training.lengths.max())
        self._standing = replace(self._standing, tokens_at_once=most)
        if most < MOST_TOKENS:
            self._progress.log(
                "warning" if most < longest else "info",
                f"up to {most} tokens are learnt from at once: each takes {each / 1024:.0f} KB, and {free >> 20} MB "
                f"are free; the longest example has {longest}",
            )

    def _learn(self, indices: Indices) -> None:
        step = self._standing.step + 1
        self._rate = learning_rate(
            step,
            peak=self._settings.learning_rate,
            warmup_steps=self._settings.warmup_steps,
            total_steps=self._total_steps,
        )
        self._loss = self._ranks.learn(
            self._data.training,
            indices,
            tokens_at_once=self._standing.tokens_at_once,
            step=step,
            rate=self._rate,
        )
        if not math.isfinite(self._loss):
            raise TrainingFailed(
                Reason.LOSS_NOT_FINITE,
                f"the training loss of step {step} is not a finite number; a lower learning rate "
                "usually helps",
            )
        first = step % self._steps_per_epoch == 1 or self._steps_per_epoch == 1
        before = 0.0 if first else self._standing.epoch_loss
        self._standing = replace(self._standing, step=step, epoch_loss=before + self._loss)

    def _measure(self) -> None:
        total = self._ranks.measure(
            self._data.validation,
            self._data.validation_indices,
            tokens_at_once=min(MOST_TOKENS_MEASURING, self._standing.tokens_at_once),
            stop=self._stop,
        )
        loss = total.loss / total.tokens
        if not math.isfinite(loss):
            raise TrainingFailed(
                Reason.LOSS_NOT_FINITE,
                f"the validation loss after step {self._standing.step} is not a finite number; "
                "a lower learning rate usually helps",
            )
        self._standing = replace(
            self._standing, validation_loss=loss, accuracy=total.right / total.tokens
        )

    def _keep_best(self) -> None:
        standing = self._standing
        if standing.validation_loss < standing.best_loss:
            self._best = self._learner.adapter()
            self._standing = replace(
                standing, best_step=standing.step, best_loss=standing.validation_loss
            )

    def _save(self) -> None:
        tensors = self._learner.state()
        tensors |= {f"best/{name}": value for name, value in self._best.items()}
        state = {name: value for name, value in asdict(self._standing).items() if value != math.inf}
        self._checkpoints.save(self._standing.step, state, tensors)

    def _resume(self) -> None:
        checkpoint = self._checkpoints.latest()
        if checkpoint is None:
            return
        self._learner.restore(checkpoint.tensors)
        self._best = {
            name.removeprefix("best/"): value
            for name, value in checkpoint.tensors.items()
            if name.startswith("best/")
        }
        before, devices = Standing(**checkpoint.state), self._ranks.count
        self._standing = before
        if before.devices != devices:  # what was chosen for so many does not fit others
            self._standing = replace(before, tokens_at_once=0, devices=devices)
            self._progress.log(
                "warning",
                f"{before.devices} devices learnt until step {before.step}, {devices} go on: the same up to rounding",
            )

    def _end_early(self) -> None:
        self._save()
        raise TrainingFailed(
            Reason.MAX_RUNTIME_EXCEEDED,
            f"the job's maximum runtime was over after step {self._standing.step} of "
            f"{self._total_steps}",
        )

    def _announce(self) -> None:
        self._progress.step = self._standing.step
        self._progress.write(
            "started",
            total_steps=self._total_steps,
            total_epochs=self._settings.epochs,
            training_examples=len(self._data.training_indices),
            validation_examples=len(self._data.validation_indices),
            trainable_parameters=self._learner.trainable_parameters,
            resumed_from_step=self._standing.step,
        )

    def _report(self, *, evaluated: bool) -> None:
        standing = self._standing
        epoch = math.ceil(standing.step / self._steps_per_epoch)
        self._progress.write(
            "step",
            step=standing.step,
            epoch=standing.step / self._steps_per_epoch,
            current_epoch=epoch,
            training_loss=self._loss,
            learning_rate=self._rate,
            validation_loss=standing.validation_loss,
            accuracy=standing.accuracy,
            perplexity=math.exp(min(standing.validation_loss, HIGHEST_EXPONENT)),
            # The measurement before step 1 stands in the first entry.
            evaluated=evaluated or standing.step == 1,
        )
        if standing.step % self._steps_per_epoch == 0:
            self._progress.write(
                "epoch",
                epoch=epoch,
                training_loss=standing.epoch_loss / self._steps_per_epoch,
                validation_loss=standing.validation_loss,
            )


def train(spec: TrainingSpec, keys: DataKeys, progress: ProgressFile, stop: StopRequest) -> None:
    """Do the job of `spec` and write its last line. `keys` open and seal its files.

    Raises TrainingFailed or TrainingCancelled when it ends otherwise.
    """
    deadline = time.monotonic() + spec.max_runtime_seconds
    with Others(count_ranks(spec, progress)) as others:
        base = load_base(spec.base_model, partial(kept_number_format, spec.checkpoint_dir))
        threads = choose_threads(spec.threads, base.num_parameters(), others.ranks)
        torch.set_num_threads(threads)
        others.set_up(
            Setup(
                ranks=others.ranks,
                base_model=spec.base_model,
                number_format=str(base.dtype).removeprefix("torch."),
                threads=threads,
                hyperparameters=spec.hyperparameters,
            )
        )
        stop.raise_if_requested()
        encoder = load_encoder(spec.base_model, base)
        data = read_data(spec, encoder, progress, keys)
        stop.raise_if_requested()
        learner = Learner(base, spec.hyperparameters)
        run = TrainingLoop(spec, data, learner, progress, stop, keys, others)
        standing = run.execute(deadline)

    def fill(directory: Path) -> None:
        run.save_best(directory)
        encoder.template.save(directory, keys.adapter)
        save_parity(directory, learner, encoder, keys.adapter)

    remove_leftovers(spec.output_dir)
    adapter = spec.output_dir / "adapter"
    make_directory(adapter, fill)
    progress.end(
        "completed",
        adapter_dir=str(adapter),
        best_step=standing.best_step,
        validation_loss=standing.best_loss,
    )


def count_ranks(spec: TrainingSpec, progress: ProgressFile) -> int:
    """How many processes this job gets: as its service wishes, where there is something for each to do."""
    there = devices_there(spec.devices)
    if there < spec.devices:
        progress.log("warning", f"{spec.devices} devices are asked for, and there are {there}")
    count = min(there, spec.hyperparameters.batch_size)
    if count > 1:
        progress.log("info", f"{count} devices learn together, each its share of every batch")
    return count


def read_data(
    spec: TrainingSpec, encoder: Encoder, progress: ProgressFile, keys: DataKeys = PLAIN
) -> Data:
    """The rows of both files; without a validation file some training rows are set aside."""
    read = partial(read_rows, dataset_format=spec.dataset_format, encoder=encoder)
    training = _told(read(spec.training_file, key=keys.training), "training", encoder, progress)
    if spec.validation_file is not None:
        measuring = read(spec.validation_file, key=keys.validation)
        validation = _told(measuring, "validation", encoder, progress)
        return Data(training, np.arange(len(training)), validation, np.arange(len(validation)))
    if len(training) < 2:
        raise TrainingFailed(
            Reason.DATA_UNREADABLE, "one example is too few to train on one and measure on another"
        )
    learnt, measured = carve_out(training)
    progress.log(
        "warning",
        f"no validation dataset: {len(measured)} of {len(training)} training examples are set "
        "aside for validation",
    )
    return Data(training, learnt, training, measured)


def _told(read: ReadRows, name: str, encoder: Encoder, progress: ProgressFile) -> TokenizedExamples:
    """The rows, once the log says what the context length did to them."""
    if read.truncated:
        progress.log(
            "warning",
            f"{read.truncated} {name} examples are longer than the context length of "
            f"{encoder.context_length} tokens and were cut; {read.dropped} of them had nothing "
            "left to learn and were dropped",
        )
    return read.rows
