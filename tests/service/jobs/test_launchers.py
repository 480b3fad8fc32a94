"""The keeper of trainings needs only the protocol of a launcher, and the local launcher reads progress files."""

import asyncio
import json
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.service.in_process import Service
from tuneship.host.thread_pools import Threads
from tuneship.service import composition
from tuneship.service.jobs.launcher import (
    StoredCheckpoint,
    Training,
    TrainingNews,
    TrainingOrder,
    TrainingProgress,
)
from tuneship.service.jobs.work_folders import FolderProgress
from tuneship.training.spec import PROGRESS_FILE

Start = Callable[..., Service]
STARTED = {
    "kind": "started", "total_steps": 2, "total_epochs": 1, "training_examples": 4, "resumed_from_step": None,
}  # fmt: skip
COMPLETED = {
    "kind": "completed", "best_step": 2, "validation_loss": 0.5, "ends_learnt": None, "appended_end": None,
}  # fmt: skip


class TrainingInMemory:
    """Implements `Training` without a process, a folder or a file."""

    def __init__(self, order: TrainingOrder) -> None:
        self.order = order
        self.lines: list[dict[str, Any]] = []
        self.exit_code: int | None = None
        self.kept = 0
        self.is_cancelled = self.is_ended = False

    async def news(self, offset: int, most_lines: int) -> TrainingNews:
        exit_code, lines = self.exit_code, self.lines[offset : offset + most_lines]
        return TrainingNews(lines, offset + len(lines), exit_code)

    async def cancel(self) -> None:
        self.is_cancelled = True
        self.exit_code = 0

    @property
    def is_running(self) -> bool:
        return self.exit_code is None

    async def kept_step(self) -> int:
        return self.kept

    def keep_only(self, checkpoint: StoredCheckpoint) -> None:
        pass

    async def store_result(self, key: str) -> Mapping[str, str]:
        return {"adapter_model.safetensors": f"digest below {key}"}

    async def end(self) -> None:
        self.is_ended = True


class NoProgress:
    """Implements `TrainingProgress` for an attempt that has written nothing."""

    async def news(self, offset: int, most_lines: int) -> TrainingNews:
        return TrainingNews([], offset)


class LauncherInMemory:
    """Implements `TrainingLauncher` in memory."""

    def __init__(self) -> None:
        self.trainings: list[TrainingInMemory] = []
        self.cleared: list[str] = []

    async def start(self, order: TrainingOrder) -> Training:
        self.trainings.append(TrainingInMemory(order))
        return self.trainings[-1]

    def earlier(self, job_id: str, attempt: int) -> TrainingProgress:
        known = [one for one in self.trainings if one.order.job["id"] == job_id]
        return known[attempt - 1] if attempt <= len(known) else NoProgress()

    def preload(self, now: datetime) -> None:
        pass

    async def clear(self, job_id: str) -> None:
        self.cleared.append(job_id)

    async def stop(self) -> None:
        pass


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> LauncherInMemory:
    launcher = LauncherInMemory()
    monkeypatch.setattr(composition, "LocalTrainingLauncher", lambda **_: launcher)
    return launcher


def training_of(service: Service, launcher: LauncherInMemory, number: int) -> TrainingInMemory:
    service.until(lambda: len(launcher.trainings) > number)
    return launcher.trainings[number]


def test_a_job_is_trained_by_any_launcher(launcher: LauncherInMemory, start: Start) -> None:
    service = start()
    job_id = service.job()
    first = training_of(service, launcher, 0)
    first.lines.append(STARTED)
    first.kept = 1
    first.exit_code = -9  # a lost node
    second = training_of(service, launcher, 1)
    assert second.order.job["attempt"] == 2
    assert second.order.job["attempts_without_progress"] == 0
    assert first.is_ended
    second.lines += [
        {**STARTED, "resumed_from_step": 1},
        COMPLETED,
    ]
    service.until(lambda: service.job_status(job_id) == "completed")
    service.until(lambda: launcher.cleared == [job_id])
    assert second.is_ended


def test_a_cancellation_reaches_any_launcher(launcher: LauncherInMemory, start: Start) -> None:
    service = start()
    job_id = service.job()
    training = training_of(service, launcher, 0)
    service.call("POST", f"/v1/fine-tuning/jobs/{job_id}/cancel")
    service.until(lambda: service.job_status(job_id) == "cancelled")
    assert training.is_cancelled
    service.until(lambda: launcher.cleared == [job_id])


def test_progress_is_read_by_whole_lines_up_to_one_that_cannot_be_read(tmp_path: Path) -> None:
    progress = FolderProgress(tmp_path, Threads("test", 1))
    good = [json.dumps({"kind": "log", "number": number}) + "\n" for number in range(3)]

    async def read() -> None:
        assert await progress.news(0, 10) == TrainingNews([], 0)
        (tmp_path / PROGRESS_FILE).write_text(good[0] + good[1] + good[2][:-1])
        news = await progress.news(0, 1)
        assert news == TrainingNews([{"kind": "log", "number": 0}], len(good[0]))
        news = await progress.news(news.offset, 10)
        assert [line["number"] for line in news.lines] == [1]
        (tmp_path / PROGRESS_FILE).write_text(good[0] + "no JSON\n" + good[1])
        news = await progress.news(0, 10)
        assert [line["number"] for line in news.lines] == [0]
        with pytest.raises(ValueError, match="Expecting value"):
            await progress.news(news.offset, 10)

    asyncio.run(read())
