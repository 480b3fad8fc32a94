"""Workers of every kind as the product starts them, with the intruder in place of the module that they would run."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.waiting import until
from tests.unit.isolation.attacks.intrusion_targets import Targets, opened
from tuneship.processes.worker_processes import LocalProcesses
from tuneship.processes.worker_protocol import Runtime, Worker, WorkerSpec
from tuneship.replicas import local_replicas
from tuneship.service.access.isolation import worker_folder
from tuneship.service.catalogues.base_models import Catalogue
from tuneship.service.jobs.local_launcher import trainer_spec
from tuneship.settings import ServiceSettings
from tuneship.training.spec import SPEC_FILE, Order, ResolvedHyperparameters, TrainingSpec

INTRUSION = "tests.unit.isolation.attacks.intrusion"
SLEEPER = "import time\nprint('asleep', flush=True)\ntime.sleep(600)\n"
# Program that runs until a training process has its job and can reach no other file.
AS_TRAINER = """
import sys
from tests.unit.isolation.attacks import intrusion
from tuneship.training.__main__ import restrict_to_job_files, read_order
from tuneship.training.spec import SPEC_FILE, TrainingSpec
order = read_order(int(sys.argv[2]))
restrict_to_job_files(order, TrainingSpec.from_json((order.folder / SPEC_FILE).read_text()))
targets = (order.folder / "targets").read_text()
"""
IN_TRAINER = AS_TRAINER + "sys.exit(intrusion.main([targets]))\n"
# Program in which a library starts threads before the job comes. It starts again as the intruder of `IN_TRAINER`.
AFTER_THREADS = (
    """
import os, threading, time
begin_again = os.execv
os.execv = lambda path, command: begin_again(
    path, ["intruder_again" if one == "tuneship.training" else one for one in command]
)
threading.Thread(target=time.sleep, args=[600], daemon=True).start()
"""
    + AS_TRAINER
    + "sys.exit('it went on with its threads')\n"
)
# Program of the first process of a job, which starts the intruder on a second device.
IN_RANK = AS_TRAINER + (
    """
import json, subprocess
from tuneship.training import distributed as ranks

class Popen(subprocess.Popen):
    def __init__(self, command, **options):
        at = command.index("tuneship.training.worker_rank")
        fields = json.loads(targets) | {"descriptors": options["pass_fds"]}
        super().__init__([*command[:at], "tests.unit.isolation.attacks.intrusion", json.dumps(fields)], **options)

ranks.subprocess.Popen = Popen
with ranks.WorkerRanks(2) as started:
    sys.exit(started.workers[0]._process.wait())
"""
)


class Installation:
    """A data directory like that of a service, with files of other tenants in it."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self.work = self.data / "work"
        self.catalogue = Catalogue()
        self.secrets = [
            self.data / name
            for name in (
                *("master.key", "credentials.json", "tuneship.sqlite", "tuneship.sqlite-wal"),
                *("audit-heads.jsonl", "blobs/datasets/other/data.jsonl"),
                "base_models/other/model.safetensors",
                *("work/other/attempt-1/progress.jsonl", "work/other/checkpoints/step-1/state"),
            )
        ]
        for one in (*self.secrets, self.data / "scratch" / "staged", self.data / "logs" / "log"):
            one.parent.mkdir(parents=True, exist_ok=True)
            one.write_text("secret")

    @property
    def folders(self) -> list[str]:
        names = (".", "work", "work/other", "scratch", "logs", "blobs/datasets")
        return [str(self.data / name) for name in names]

    def serving(self, log: Path) -> WorkerSpec:
        """Return the spec of a serving worker, by asking `process_starter` what it would start."""
        adapters = worker_folder(ServiceSettings(data_dir=self.data), "models")
        (adapters / "other").mkdir(exist_ok=True)
        asked: list[WorkerSpec] = []

        class Asked(Exception):
            pass

        class Asking:
            def start(self, spec: WorkerSpec) -> Worker:
                asked.append(spec)
                raise Asked

        start_replica = local_replicas.process_starter(Asking(), adapters=adapters)
        with suppress(Asked):
            start_replica(self.catalogue.default.path, log).send(None)
        return replace(asked[0], inherited=())

    def training(self, order: Order, log: Path, line: int) -> WorkerSpec:
        """Return the spec of the training worker with this order."""
        spec = TrainingSpec.from_json((order.folder / SPEC_FILE).read_text())
        return replace(trainer_spec(order.folder, spec, line), log=log)

    def order(self) -> Order:
        """Write a job of this tenant, and return its order."""
        folder = self.work / "own" / "attempt-1"
        dataset = self.data / "blobs" / "datasets" / "own" / "data.jsonl"
        for one in (dataset.parent, folder / "output", folder.parent / "checkpoints"):
            one.mkdir(parents=True, exist_ok=True)
        dataset.write_text("own")
        spec = TrainingSpec(
            base_model=str(self.catalogue.default.path),
            training_file=dataset,
            validation_file=None,
            dataset_format="instruction",  # pyright: ignore[reportArgumentType]
            output_dir=folder / "output",
            checkpoint_dir=folder.parent / "checkpoints",
            validation_frequency=1,
            max_runtime_seconds=600,
            threads=1,
            hyperparameters=ResolvedHyperparameters(0.1, 1, 1, 0, 4, 8, 0.0, ("all-linear",), 1),
        )
        (folder / SPEC_FILE).write_text(spec.to_json())
        return Order(folder)


@dataclass
class Intrusions:
    """An installation with its neighbours, and the targets among them."""

    installation: Installation
    targets: Targets
    # Folder on the import path of workers.
    modules: Path
    # The way in which the intruders are started.
    runtime: Runtime

    def serving(self) -> dict[str, str]:
        """Run an intruder in a serving process. Return its outcome by attack."""
        log = self.modules / "serving.log"
        return self.outcomes_of(
            replace(
                self.installation.serving(log),
                module=INTRUSION,
                arguments=(self.targets.to_json(),),
            )
        )

    def training(self, program: str) -> dict[str, str]:
        """Run this program as a training process. Return the intruder's outcome by attack."""
        order = self.installation.order()
        log, (theirs, ours) = self.modules / "training.log", os.pipe()
        (order.folder / "targets").write_text(self.targets.to_json())
        (self.modules / "intruder.py").write_text(program)
        (self.modules / "intruder_again.py").write_text(IN_TRAINER)
        with os.fdopen(ours, "w") as line:
            line.write(order.to_line())
        spec = self.installation.training(order, log, theirs)
        try:
            arguments = (str(order.folder), str(theirs))
            return self.outcomes_of(replace(spec, module="intruder", arguments=arguments))
        finally:
            os.close(theirs)

    def open(self, *, descriptors: tuple[int, ...] = ()) -> dict[str, str]:
        """Run an intruder without isolation. Return its outcome by attack."""
        log = self.modules / "open.log"
        text = self.targets.to_json()
        spec = WorkerSpec(INTRUSION, (text,), log, inherited=descriptors, needs_network=True)
        return self.outcomes_of(spec)

    def outcomes_of(self, spec: WorkerSpec) -> dict[str, str]:
        """Run this worker to its end. Return its outcome by attack."""
        worker = self.runtime.start(spec)
        until(lambda: worker.exit_code() is not None)
        text = spec.log.read_text()
        assert worker.exit_code() == 0, text[-3000:]
        return json.loads(text.splitlines()[-1])


@contextmanager
def prepared_intrusions(folder: Path, modules: Path) -> Iterator[Intrusions]:
    """Prepare a service (this process), another worker of it, another process of the user, and their files."""
    installation = Installation(folder)
    (modules / "sleeper.py").write_text(SLEEPER)
    log = modules / "sleeper.log"
    runtime = LocalProcesses(isolated=True)
    sibling = runtime.start(WorkerSpec("sleeper", (), log))
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        until(lambda: log.read_text() == "asleep\n")
        with opened(
            installation.data / "work" / "other",
            processes={
                "service": os.getpid(),
                "sibling": sibling.pid,
                "bystander": bystander.pid,
            },
            secrets=list(map(str, installation.secrets)),
            folders=installation.folders,
        ) as targets:
            yield Intrusions(installation, targets, modules, runtime)
    finally:
        sibling.kill()
        bystander.kill()
        bystander.wait()
