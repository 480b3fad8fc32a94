"""The searches for plain text find it when a service leaves one kind of data unencrypted; or they prove nothing.

Each search is imported from the test that uses it: `system/test_encryption.py` or `system/test_planted_text.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.support.service.processes import Serve, ended_job, start
from tests.support.waiting import until
from tests.system.test_encryption import CANARY, TELLTALE, leaks, train, upload
from tests.system.test_planted_text import Receiver, Way, hits, places_of

pytestmark = pytest.mark.slow
TEXT, *OF_A_MODEL = TELLTALE


@contextmanager
def lacking(kind: str, folder: Path) -> Iterator[Serve]:
    """Start a service that does not encrypt this kind of data."""
    starter = partial(start, "tests.support.objects.unsealed", kind)
    serve = Serve(folder / "data", starter=starter, inline_dataset_bytes="8192")
    try:
        yield serve
    finally:
        serve.stop()


def found(serve: Serve, word: bytes) -> set[str]:
    """The patterns of the files in which the search finds the word."""
    files = [file.relative_to(serve.data_dir) for file, one in leaks(serve) if one == word]
    return {next((one for one in PLACES if file.match(one)), str(file)) for file in files}


CHECKPOINTS = "work/*/checkpoints/*/*"
OUTPUT, STAGED, MODELS = "work/*/attempt-1/output/*/*", "scratch/.staged-*", "blobs/models/*/*"
DATASETS = "blobs/datasets/*/*"
PLACES = (CHECKPOINTS, OUTPUT, STAGED, MODELS, DATASETS)


def test_a_dataset_in_plain_is_found(tmp_path: Path) -> None:
    (tmp_path / "temp").mkdir()
    with lacking("datasets", tmp_path) as serve, Receiver() as receiver:
        upload(serve.client(), 32)
        assert found(serve, TEXT) == {DATASETS}
        way = Way(serve, tmp_path, receiver)
        line = f'{{"instruction": "{way.marks["instruction"]}", "response": "a"}}\n' * 4
        way.upload(line.encode(), "instruction", "name")
        way.http.close()
        assert hits(way.marks["instruction"], places_of(way)) == {"files"}


@pytest.mark.parametrize(
    ("kind", "place", "epochs"),
    [
        pytest.param("checkpoints", CHECKPOINTS, 1000, marks=pytest.mark.soak),
        pytest.param("adapters", MODELS, 1, marks=pytest.mark.soak),
    ],
)
def test_plain_text_written_by_a_trainer_is_found(
    tmp_path: Path, kind: str, place: str, epochs: int
) -> None:
    with lacking(kind, tmp_path) as serve:
        client = serve.client()
        job_id = train(client, upload(client, 32), epochs=epochs)
        seen: dict[bytes, set[str]] = {word: set() for word in TELLTALE}

        def is_seen() -> bool:
            for word in seen:
                seen[word] |= found(serve, word)
            return place in seen[b"lora_A"]

        until(is_seen, 600)
        if kind == "adapters":
            assert ended_job(client, job_id).status == "completed"
            assert MODELS in found(serve, b"Which of these comes first")
        assert seen[b"lora_A"] <= {place, OUTPUT, STAGED}
        assert seen[CANARY.encode()] == set(), "that seal is still there"
