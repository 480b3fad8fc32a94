"""One job from spec to adapter: reads the rows, learns, evaluates, and saves checkpoints for a restart.

Its own loop, not a subclass of transformers' Trainer: on the same rows, losses and thread it is 1.5 to 2 times as
fast (`benchmarks/training.py`), and its checkpoints are atomic and hold no pickles. Knows no HTTP and no database.
Loads torch; next: `objective.py`, `learner.py`, `checkpoints.py`.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tuneship.contract.common import count
from tuneship.training.base_model import load_base, load_encoder
from tuneship.training.checkpoints import Checkpoints, make_directory, remove_leftovers
from tuneship.training.device import (
    available_devices,
    choose_threads,
    number_format_of_job,
    report_gpus,
)
from tuneship.training.distributed import RankGroup, Setup, WorkerRanks
from tuneship.training.examples.batches import Indices, epoch_batches
from tuneship.training.examples.data_files import Data, read_data
from tuneship.training.examples.micro_batches import (
    MAX_MICRO_BATCH_TOKENS,
    affordable_tokens,
    bytes_per_token,
)
from tuneship.training.learner import Learner
from tuneship.training.objective import AnswerEnds, Measures, SupervisedFineTuning
from tuneship.training.parity_notes import save_parity
from tuneship.training.progress_file import ProgressFile, Reason, StopRequest, TrainingFailed
from tuneship.training.row_losses import MeasuredRows, adapted, drawn_parts
from tuneship.training.schedule import EvaluationSchedule, learning_rate
from tuneship.training.spec import NO_KEYS, DataKeys, TrainingSpec
from tuneship.training.speed import TrainingSpeed

# An evaluation keeps no activations, so larger micro-batches are not quicker, and a stop waits for one of them.
MAX_EVALUATION_TOKENS = 2_048
CHECKPOINT_INTERVAL_S = 600.0
APPENDED_END = (
    "is put behind each answer, in training and serving alike: "
    "the chat template of the base model writes nothing there"
)


@dataclass(frozen=True)
class Standing:
    """The state of the loop after a step; with the learner's tensors it is all that a resume needs."""

    step: int = 0
    # The results of the latest evaluation; empty before the first.
    measures: Measures = field(default_factory=dict[str, float])
    best_step: int = 0
    # The deciding measure at `best_step`; None before the first evaluation after a step.
    best: float | None = None
    # The share of ends learnt at `best_step`; None where it was not measured.
    best_ends: float | None = None
    # Sum of the losses of this epoch's steps.
    epoch_loss: float = 0.0
    # Chosen once in a job, since another size would round differently; 0: not chosen yet.
    micro_batch_tokens: int = 0
    # How many devices have trained up to here.
    devices: int = 1

    def to_state(self) -> dict[str, Any]:
        """The state as a checkpoint's JSON."""
        best = {} if self.best is None else {"best_loss": self.best}
        best |= {} if self.best_ends is None else {"best_ends": self.best_ends}
        return {
            "step": self.step,
            **self.measures,
            "best_step": self.best_step,
            **best,
            "epoch_loss": self.epoch_loss,
            "tokens_at_once": self.micro_batch_tokens,
            "devices": self.devices,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Standing":
        """The inverse of `to_state`: a name that is not of the loop's own is a measure."""
        rest = dict(state)
        return cls(
            step=rest.pop("step"),
            best_step=rest.pop("best_step"),
            best=rest.pop("best_loss", None),
            best_ends=rest.pop("best_ends", None),
            epoch_loss=rest.pop("epoch_loss"),
            micro_batch_tokens=rest.pop("tokens_at_once"),
            devices=rest.pop("devices"),
            measures=rest,
        )


class TrainingLoop:
    """The loop over the steps of one job."""

    def __init__(  # noqa: PLR0913 (the parts of a job)
        self,
        spec: TrainingSpec,
        data: Data,
        learner: Learner,
        progress: ProgressFile,
        stop: StopRequest,
        keys: DataKeys = NO_KEYS,
        worker_ranks: WorkerRanks | None = None,
    ) -> None:
        """Wait for the worker ranks, which were set up already; `execute` runs the loop."""
        self._settings = spec.hyperparameters
        self._data = data
        self._learner = learner
        self._objective = learner.objective
        self._ranks = RankGroup(learner, worker_ranks)
        self._progress = progress
        self._stop = stop
        fingerprint, earlier = (data.fingerprint(spec, of_26_12_0=old) for old in (False, True))
        self._checkpoints = Checkpoints(spec.checkpoint_dir, fingerprint, keys.checkpoints, earlier)
        self._adapter_key = keys.adapter
        examples = len(data.training_indices)
        self._steps_per_epoch = math.ceil(examples / self._settings.batch_size)
        self._total_steps = self._steps_per_epoch * self._settings.epochs
        self._evaluations = EvaluationSchedule(
            spec.validation_frequency,
            steps_per_epoch=self._steps_per_epoch,
            total_steps=self._total_steps,
        )
        self._standing = Standing(devices=self._ranks.size)
        self._best_adapter = learner.adapter()
        self._loss = self._rate = 0.0

    def execute(self, deadline: float, clock: Callable[[], float] = time.monotonic) -> Standing:
        """Learn until the last step or an early stop. Raises TrainingFailed when `clock` passes the deadline first."""
        self._begin()
        if not self._standing.micro_batch_tokens:
            self._choose_micro_batch_size()
        if self._standing.step == 0:
            self._evaluate()
        saved_at = clock()
        speed = TrainingSpeed(clock)
        for batch in self._remaining_batches():
            if self._has_stalled():
                self._progress.write(
                    "ended_early",
                    step=self._standing.step,
                    best_step=self._standing.best_step,
                    patience=self._settings.early_stopping_patience,
                )
                break
            speed.begin_step()
            self._learn(batch)
            speed.end_step(int(self._data.training.lengths[batch].sum()))
            is_evaluated = self._evaluations.is_due(self._standing.step)
            if is_evaluated:
                self._evaluate()
                self._keep_if_best()
            self._report_step(is_evaluated=is_evaluated)
            if is_evaluated or clock() - saved_at > CHECKPOINT_INTERVAL_S:
                self._save()
                saved_at = clock()
            if report := speed.due_report():
                self._progress.write("pace", **report)
            self._stop.raise_if_requested()
            if clock() >= deadline and self._standing.step < self._total_steps:
                self._save()
                raise TrainingFailed(
                    Reason.MAX_RUNTIME_EXCEEDED,
                    f"the job's maximum runtime was over after step {self._standing.step} of "
                    f"{self._total_steps}",
                )
        return self._standing

    def measure_rows(
        self, choosing: Indices, judging: Indices, spec: TrainingSpec, key: str | None
    ) -> None:
        """Report losses by row of the base model, the best adapter, and the compared adapter if there is one."""
        tokens = min(MAX_EVALUATION_TOKENS, self._standing.micro_batch_tokens)
        stop = self._stop.raise_if_requested
        rows, compared = MeasuredRows(self._data, choosing, judging, tokens, stop), None
        self._learner.clear_adapter()
        rows.measured("start", self._learner)
        if spec.compared_adapter is not None:
            try:
                with adapted(self._learner.model, spec.compared_adapter, key):
                    rows.measured("compared", self._learner)
                compared = spec.compared_model
            # Its files may be gone, or be of a kind that is not known here: the job is good without it.
            except (OSError, ValueError, LookupError, AttributeError, RuntimeError) as error:
                self._progress.log(
                    "warning", f"the model in comparison was not measured: {type(error).__name__}"
                )
        self._learner.load_adapter(self._best_adapter)
        rows.measured("served", self._learner)
        self._progress.write("row_losses", losses=rows.facts(compared))

    def save_best(self, directory: Path) -> None:
        """Write the best adapter, which the learner then holds."""
        self._learner.load_adapter(self._best_adapter)
        self._learner.save_adapter(directory, self._best_adapter, self._adapter_key)

    def _begin(self) -> None:
        """Continue from the latest checkpoint, if there is one, and report its step."""
        checkpoint, devices = self._checkpoints.latest(), self._ranks.size
        if checkpoint is not None:
            self._learner.restore(checkpoint.tensors)
            self._best_adapter = {
                name.removeprefix("best/"): value
                for name, value in checkpoint.tensors.items()
                if name.startswith("best/")
            }
            before = self._standing = Standing.from_state(checkpoint.state)
            if before.devices != devices:
                # Each device has another amount of memory free now: the micro-batch size is chosen again.
                self._standing = replace(before, micro_batch_tokens=0, devices=devices)
                self._progress.log(
                    "warning",
                    f"{count(before.devices, 'device')} trained until step {before.step}, now {devices}: "
                    "the results are the same up to rounding",
                )

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

    def _choose_micro_batch_size(self) -> None:
        per_token = bytes_per_token(self._learner, self._data.training)
        free = self._ranks.free_memory()
        tokens = affordable_tokens(per_token, free)
        longest = int(self._data.training.lengths.max())
        self._standing = replace(self._standing, micro_batch_tokens=tokens)
        if tokens < MAX_MICRO_BATCH_TOKENS:
            self._progress.log(
                "warning" if tokens < longest else "info",
                f"micro-batches hold up to {tokens} tokens: each token takes {per_token / 1024:.0f} KB, and "
                f"{free >> 20} MB are free; the longest example has {longest} tokens",
            )

    def _remaining_batches(self) -> Iterator[Indices]:
        indices = self._data.training_indices
        done = self._standing.step
        for epoch in range(done // self._steps_per_epoch, self._settings.epochs):
            batches = epoch_batches(
                indices, self._settings.batch_size, seed=self._settings.seed, epoch=epoch
            )
            yield from batches[max(0, done - epoch * self._steps_per_epoch) :]

    def _has_stalled(self) -> bool:
        """Whether the patience of early stopping is used up.

        The answer follows from the number of the best step alone, so a resumed attempt decides as the first one did.
        """
        patience, standing = self._settings.early_stopping_patience, self._standing
        if patience is None:
            return False
        since_best = self._evaluations.count(standing.step) - self._evaluations.count(
            standing.best_step
        )
        return since_best >= patience

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
            micro_batch_tokens=self._standing.micro_batch_tokens,
            step=step,
            rate=self._rate,
        )
        self._check_finite(self._loss, f"training loss of step {step}")
        is_first_of_epoch = (step - 1) % self._steps_per_epoch == 0
        before = 0.0 if is_first_of_epoch else self._standing.epoch_loss
        self._standing = replace(self._standing, step=step, epoch_loss=before + self._loss)

    def _evaluate(self) -> None:
        totals = self._ranks.evaluate(
            self._data.validation,
            self._data.validation_indices,
            micro_batch_tokens=min(MAX_EVALUATION_TOKENS, self._standing.micro_batch_tokens),
            stop=self._stop,
        )
        measures = self._objective.measures(totals)
        name = self._objective.deciding_measure
        step = self._standing.step
        self._check_finite(measures[name], f"{name.replace('_', ' ')} after step {step}")
        self._standing = replace(self._standing, measures=measures)

    @staticmethod
    def _check_finite(value: float, name: str) -> None:
        if not math.isfinite(value):
            raise TrainingFailed(
                Reason.LOSS_NOT_FINITE,
                f"the {name} is not a finite number; a lower learning rate usually helps",
            )

    def _keep_if_best(self) -> None:
        standing = self._standing
        value = standing.measures[self._objective.deciding_measure]
        is_lower = standing.best is None or value < standing.best
        is_higher = standing.best is None or value > standing.best
        if is_lower if self._objective.lower_is_better else is_higher:
            self._best_adapter = self._learner.adapter()
            self._standing = replace(
                standing,
                best_step=standing.step,
                best=value,
                best_ends=standing.measures.get("ends_learnt"),
            )

    def _save(self) -> None:
        tensors = self._learner.state()
        tensors |= {f"best/{name}": value for name, value in self._best_adapter.items()}
        self._checkpoints.save(self._standing.step, self._standing.to_state(), tensors)

    def _report_step(self, *, is_evaluated: bool) -> None:
        standing = self._standing
        epoch = math.ceil(standing.step / self._steps_per_epoch)
        self._progress.write(
            "step",
            step=standing.step,
            epoch=standing.step / self._steps_per_epoch,
            current_epoch=epoch,
            training_loss=self._loss,
            learning_rate=self._rate,
            **self._objective.reported(standing.measures),
            # The first entry holds the evaluation before step 1.
            evaluated=is_evaluated or standing.step == 1,
        )
        if standing.step % self._steps_per_epoch == 0:
            name = self._objective.deciding_measure
            self._progress.write(
                "epoch",
                epoch=epoch,
                training_loss=standing.epoch_loss / self._steps_per_epoch,
                **{name: standing.measures[name]},
            )


def train(spec: TrainingSpec, keys: DataKeys, progress: ProgressFile, stop: StopRequest) -> None:
    """Do the job of `spec` and write the last line of its progress. `keys` open and seal its files.

    Raises TrainingFailed or TrainingCancelled when it ends otherwise.
    """
    deadline = time.monotonic() + spec.max_runtime_seconds
    with WorkerRanks(_count_ranks(spec, progress)) as worker_ranks:
        base = load_base(
            spec.base_model, lambda count: number_format_of_job(spec.checkpoint_dir, count)
        )
        threads = choose_threads(spec.threads, base.num_parameters(), worker_ranks.ranks)
        torch.set_num_threads(threads)
        encoder = load_encoder(spec.base_model, base, spec.today)
        ends = AnswerEnds(encoder.end_tokens, encoder.context_length)
        objective = SupervisedFineTuning(ends)
        worker_ranks.set_up(
            Setup(
                ranks=worker_ranks.ranks,
                base_model=spec.base_model,
                number_format=str(base.dtype).removeprefix("torch."),
                device=base.device.type,
                threads=threads,
                hyperparameters=spec.hyperparameters,
                ends=ends,
            )
        )
        stop.raise_if_requested()
        if encoder.format.appended_end is not None:
            progress.log("info", f"{encoder.format.appended_end} {APPENDED_END}")
        data = read_data(spec, encoder, objective, progress, keys)
        stop.raise_if_requested()
        learner = Learner(base, spec.hyperparameters, objective)
        parts = None if spec.comparison_seed is None else drawn_parts(data, spec.comparison_seed)
        if parts is not None:
            data = replace(data, validation_indices=parts[0])
        loop = TrainingLoop(spec, data, learner, progress, stop, keys, worker_ranks)
        standing = loop.execute(deadline)
        if parts is not None and time.monotonic() < deadline:
            loop.measure_rows(*parts, spec, keys.compared)

    def write_files(directory: Path) -> None:
        loop.save_best(directory)
        # So that programs that read the model's own template write functions as its examples had them.
        template = encoder.template.with_tools if data.has_tools else encoder.template
        template.save(directory, keys.adapter)
        save_parity(directory, learner, encoder, keys.adapter)

    remove_leftovers(spec.output_dir)
    adapter = spec.output_dir / "adapter"
    make_directory(adapter, write_files)
    progress.end(
        "completed",
        adapter_dir=str(adapter),
        best_step=standing.best_step,
        ends_learnt=standing.best_ends,
        appended_end=encoder.format.appended_end,
        **{objective.deciding_measure: standing.best},
    )


def _count_ranks(spec: TrainingSpec, progress: ProgressFile) -> int:
    """The number of processes for this job: one for each device, but no more than a batch has examples."""
    available = available_devices(spec.devices)
    if available < spec.devices:
        progress.log("warning", f"devices requested: {spec.devices}, available: {available}")
    count = min(available, spec.hyperparameters.batch_size)
    report_gpus(count, spec, progress)
    if count > 1:
        progress.log("info", f"{count} devices train together, each on its share of every batch")
    return count
