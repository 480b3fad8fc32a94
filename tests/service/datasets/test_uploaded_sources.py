"""CSV, Parquet, frames and rows arrive as datasets at the real service, and its reports count their rows from 1."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pydantic import SecretStr

from tests.support.service.in_process import Service
from tuneship.client import Client, SourceError
from tuneship.contract.datasets import DatasetUpload, DatasetValidate
from tuneship.contract.errors import DatasetError
from tuneship.settings import ClientSettings

FRAME = pd.DataFrame(
    {
        "question": ["Fracture of rib", 'Cataract, "senile"\nof both eyes', "Zöliakie"],
        "answer": ["Injury", "Eye", "K90"],
    }
)
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    service.listen()
    key = service.headers["alice"]["Authorization"].removeprefix("Bearer ")
    settings = ClientSettings(url=service.url, api_key=SecretStr(key), client_id="alice")
    with Client(settings) as opened:
        yield opened


def as_csv(folder: Path, frame: pd.DataFrame) -> Path:
    frame.to_csv(folder / "rows.csv", index=False)
    return folder / "rows.csv"


def as_parquet(folder: Path, frame: pd.DataFrame) -> Path:
    frame.to_parquet(folder / "rows.parquet")
    return folder / "rows.parquet"


def as_rows(_: Path, frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    return (row._asdict() for row in frame.itertuples(index=False))


SOURCES = [as_csv, as_parquet, as_rows, lambda _, frame: frame]


@pytest.mark.parametrize("make", SOURCES, ids=["csv", "parquet", "rows", "frame"])
def test_a_source_is_validated_and_becomes_a_dataset(
    make: Callable[..., Any], client: Client, tmp_path: Path
) -> None:
    report = client.datasets.validate(DatasetValidate(format="instruction"), make(tmp_path, FRAME))
    assert (report.is_valid, report.num_examples) == (True, 3)
    form = DatasetUpload(name="rows", format="instruction")
    made = client.datasets.upload(form, make(tmp_path, FRAME))
    columns = {"instruction": "question", "response": "answer"}
    more = FRAME.assign(patient="x")
    same = client.datasets.upload(form, make(tmp_path, more), columns)
    assert made.num_examples == same.num_examples == 3
    assert made.total_tokens == same.total_tokens == report.total_tokens


@pytest.mark.parametrize("make", SOURCES, ids=["csv", "parquet", "rows", "frame"])
def test_a_missing_cell_is_reported_by_its_row(
    make: Callable[..., Any], client: Client, tmp_path: Path
) -> None:
    holed = FRAME.assign(answer=["Injury", "Eye", None])
    report = client.datasets.validate(DatasetValidate(format="instruction"), make(tmp_path, holed))
    assert [(one.line, one.field, one.code) for one in report.errors] == [
        (3, "response", "missing_field")
    ]
    with pytest.raises(DatasetError) as refused:
        client.datasets.upload(
            DatasetUpload(name="rows", format="instruction"), make(tmp_path, holed)
        )
    assert [one.line for one in refused.value.details] == [3]


@pytest.mark.parametrize("make", SOURCES, ids=["csv", "parquet", "rows", "frame"])
def test_conversations_are_lists_or_their_json(
    make: Callable[..., Any], client: Client, tmp_path: Path
) -> None:
    turns: Any = json.dumps(TURNS) if make is as_csv else TURNS
    frame = pd.DataFrame({"chat": [turns, turns]})
    form = DatasetUpload(name="chat", format="conversation")
    made = client.datasets.upload(form, make(tmp_path, frame), {"messages": "chat"})
    assert made.num_examples == 2


def test_an_unreadable_source_reaches_no_service(client: Client, tmp_path: Path) -> None:
    form = DatasetUpload(name="rows", format="instruction")
    with pytest.raises(SourceError, match=r"column 3 is no field"):
        client.datasets.upload(form, as_csv(tmp_path, FRAME.assign(patient="x")))
    assert list(client.datasets.iterate()) == []
