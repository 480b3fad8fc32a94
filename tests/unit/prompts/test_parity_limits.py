"""A parity file sets work for the replica that all tenants share, so it is no larger than one of ours can be."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tuneship.prompts.parity import (
    MAX_BYTES,
    MAX_CHARACTERS,
    MAX_PROBES,
    MAX_TOKENS,
    Parity,
    Probe,
    prompts,
)
from tuneship.prompts.template import PromptTemplate

PROBE = Probe([{"role": "user", "content": "17?"}], [1, 2], [1], [0.5], 1.0, [3], [0.1])
CHANGES: dict[str, Callable[[Probe], list[Probe]]] = {
    "probes": lambda probe: [probe] * (MAX_PROBES + 1),
    "prompt": lambda probe: [replace(probe, prompt=[1] * (MAX_TOKENS + 1))],
    "answer": lambda probe: [
        replace(probe, greedy=[1] * (MAX_TOKENS + 1), leads=[0.0] * (MAX_TOKENS + 1))
    ],
    "text": lambda probe: [
        replace(probe, messages=[{"role": "user", "content": "x" * (MAX_CHARACTERS + 1)}])
    ],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_parity_file_of_more_than_ours_have_is_refused(
    tmp_path: Path, change: Callable[[Probe], list[Probe]]
) -> None:
    Parity("float32", [PROBE]).save(tmp_path)
    assert Parity.load(tmp_path) == Parity("float32", [PROBE])
    Parity("float32", change(PROBE)).save(tmp_path)
    with pytest.raises(ValueError, match="is too large"):
        Parity.load(tmp_path)


@pytest.mark.parametrize(
    ("text", "why"), [(" " * MAX_BYTES + "{}", "too large"), ("[" * 9999, "not understood")]
)
def test_a_file_that_would_cost_much_to_read_is_refused(
    tmp_path: Path, text: str, why: str
) -> None:
    (tmp_path / "parity.json").write_text(text)
    with pytest.raises(ValueError, match=why):
        Parity.load(tmp_path)


def test_prompts_of_a_long_template_are_cut_to_what_a_file_may_hold() -> None:
    template = PromptTemplate("x" * (2 * MAX_TOKENS), {})
    for _, prompt in prompts(template, lambda text: [1] * len(text), 10 * MAX_TOKENS):
        assert len(prompt) == MAX_TOKENS
