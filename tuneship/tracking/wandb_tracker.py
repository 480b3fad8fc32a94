"""Weights & Biases: the folder of an offline run for each training, which `wandb sync` uploads when somebody wants it.

Nothing is sent from here, and the run has nothing about the machine, the program, or its output. Its id is that of the
job; a run that is written again with a release replaces its folder.
"""

import shutil
from pathlib import Path

import wandb

from tuneship.tracking.tracked_run import TrackedRun, TrackingTarget

# Made by wandb: `offline-run-<date>_<time>-<id>`.
FOLDERS = "wandb/offline-run-*-{}"
# Made by us in a folder that is whole: one whose process was killed lacks it.
WHOLE = ".tuneship-whole"


class WandbTracker:
    """Writes offline runs below one folder."""

    def __init__(self, target: TrackingTarget) -> None:
        """Name the folder, which the first run makes."""
        self._folder = Path(target.place)
        self._project = target.group

    def write(self, run: TrackedRun) -> str:
        """Write the folder of the run and return its path."""
        self._folder.mkdir(parents=True, exist_ok=True)
        before = set(self._folder.glob(FOLDERS.format(run.job_id)))
        whole = [folder for folder in before if (folder / WHOLE).exists()]
        # A job that has ended does not change: without a release there is nothing to add to its folder.
        if run.release is None and whole:
            return str(whole[0])
        settings = wandb.Settings(
            mode="offline",
            console="off",
            silent=True,
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            host="",
            root_dir=str(self._folder),
        )
        logged = wandb.init(
            dir=str(self._folder),
            project=self._project,
            id=run.job_id,
            name=f"{run.model_name} {run.job_id}",
            config={**run.parameters, "datasets": [one.model_dump() for one in run.datasets]},
            settings=settings,
        )
        self._log(logged, run)
        logged.finish(exit_code=0 if run.status == "completed" else 1)
        # wandb names the folder by the second, so a quick repetition may be in the same one.
        made = Path(logged.dir).parent
        (made / WHOLE).touch()
        for folder in before - {made}:
            shutil.rmtree(folder)
        return str(made)

    def _log(self, logged: wandb.Run, run: TrackedRun) -> None:
        # A step is written once, with all its values, and steps must not go down.
        steps: dict[int, dict[str, float]] = {}
        for name, step, value, _ in run.points():
            steps.setdefault(step, {})[name] = value
        for step, values in sorted(steps.items()):
            logged.log(values, step=step)
        summary = {"job_id": run.job_id, "status": run.status, "model": run.model}
        logged.summary.update(summary)
        if run.release is None:
            return
        about = run.release.model_dump(include={"run_key", "outcome", "reason", "gates"})
        logged.summary.update({"release": about, **run.release.measures})
        folder = Path(logged.dir) / "release"
        folder.mkdir()
        for file in run.release.files:
            # Copied, because wandb would store a link to the report instead.
            copy = shutil.copyfile(file, folder / file.name)
            logged.save(str(copy), base_path=logged.dir, policy="now")


def tracker(target: TrackingTarget) -> WandbTracker:
    """The tracker of a folder."""
    return WandbTracker(target)
