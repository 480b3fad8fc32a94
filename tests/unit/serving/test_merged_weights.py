"""An adapter that runs alone is merged into a copy of the weights, and no answer shows it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.serving.test_engine import PROMPT, all_packed, build, expected, run
from tuneship.serving.engine import Engine, EngineLimits
from tuneship.serving.merged_weights import STEADY_STEPS
from tuneship.serving.models.linear import AS_MEASURED, Product
from tuneship.serving.replica import load_model
from tuneship.serving.sequence import GenerateRequest

# Tokens of an answer, long enough that the last product is merged in the middle of it.
LONG = 60


@pytest.fixture(params=["as they are", "laid out"])
def engine(base: Path, adapters: Mapping[str, Path], request: pytest.FixtureRequest) -> Engine:
    """Build an engine with plain weights, then one whose weights exist only in oneDNN's own layout."""
    packing = all_packed() if request.param == "laid out" else AS_MEASURED
    return build(base, adapters, rows=6, packing=packing)


def ask(*adapters: str | None, tokens: int = LONG, first: int = 10) -> list[GenerateRequest]:
    """Make one request for each adapter. No two prompts begin alike."""
    return [
        GenerateRequest((first + number, *PROMPT), tokens, adapter=adapter)
        for number, adapter in enumerate(adapters)
    ]


def check(
    engine: Engine, references: Mapping[str | None, Any], requests: list[GenerateRequest]
) -> None:
    wanted = [expected(references[request.adapter], request) for request in requests]
    assert run(engine, requests, joining=1) == wanted


@torch.inference_mode()
def merged(engine: Engine, adapter: str) -> list[Product]:
    """Return the merged products that a step of this adapter alone would use."""
    engine._lora.acquire(adapter)
    products = list(engine._lora.route([adapter], []).merged)
    engine._lora.release(adapter)
    return products


def test_an_adapter_that_runs_alone_is_merged_in_the_middle_of_an_answer(
    engine: Engine, references: Mapping[str | None, Any]
) -> None:
    for adapter in ("wide", "narrow", "wide"):
        assert not merged(engine, adapter)
        check(engine, references, ask(adapter, adapter, adapter))
        assert len(merged(engine, adapter)) == len(engine._model.sites)


def test_others_that_join_and_leave_get_their_own_weights(
    engine: Engine, references: Mapping[str | None, Any]
) -> None:
    check(engine, references, ask("wide"))
    check(engine, references, ask("wide", None, "narrow", "wide", tokens=20, first=20))
    check(engine, references, ask(None, None, first=30))
    assert merged(engine, "wide"), "the copy of a while ago was made for nothing"
    check(engine, references, ask("wide", "wide", tokens=5, first=40))


def test_weights_an_adapter_leaves_alone_are_the_bases_own(
    engine: Engine, references: Mapping[str | None, Any]
) -> None:
    check(engine, references, ask("narrow"))
    own = [site.product for site in engine._model.sites]
    shared = [one is other for one, other in zip(merged(engine, "narrow"), own, strict=True)]
    is_left = [site.modules[0].endswith(("o_proj", "gate_proj")) for site in engine._model.sites]
    assert shared == is_left


def test_another_adapter_of_the_same_name_is_another_one(
    engine: Engine, adapters: Mapping[str, Path], references: Mapping[str | None, Any]
) -> None:
    engine.load("tuned", adapters["wide"])
    run(engine, ask("tuned"))
    assert merged(engine, "tuned")
    engine.load("tuned", adapters["narrow"])
    assert not merged(engine, "tuned")
    request = ask("tuned")[0]
    assert run(engine, [request]) == [expected(references["narrow"], request)]
    engine.unload("tuned")
    assert not engine._lora._merged._products, "the matrices of an adapter that has gone"


def test_adapters_that_take_turns_are_not_merged(engine: Engine) -> None:
    for number in range(6):
        run(engine, ask(("wide", "narrow")[number % 2], tokens=STEADY_STEPS, first=number + 10))
    assert not merged(engine, "wide")
    assert not merged(engine, "narrow")


def test_nothing_is_merged_in_half_precision_nor_into_large_weights(
    base: Path, adapters: Mapping[str, Path]
) -> None:
    rounded = Engine(load_model(base, "bfloat16"), EngineLimits())
    large = Engine(load_model(base), EngineLimits(merged_bytes=1000))
    for engine in (rounded, large):
        engine.load("wide", adapters["wide"])
        run(engine, ask("wide"))
        assert not merged(engine, "wide")
