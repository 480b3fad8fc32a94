"""The document shows the tables of the zoo as it is now: `make zoo` writes them."""

import re

from tests.support.zoo.cells import section
from tests.support.zoo.checkpoints import CHECKPOINTS
from tests.support.zoo.lives import COLUMNS
from tests.support.zoo.template_kinds import OWN, REAL
from tests.support.zoo.tokenizer_kinds import KINDS


def table(first: str) -> dict[str, list[str]]:
    """The cells of a table by the first of each line."""
    lines = section().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    cut = [
        re.split(r" *(?<!\\)\| *", line.removeprefix("| ").removesuffix(" |"))
        for line in lines[begin:]
        if line.startswith("| ")
    ]
    width = len(cut[0])
    return {line[0]: line[1:] for line in cut if len(line) == width}


def test_every_checkpoint_is_shown_and_right_or_refused_with_a_reason() -> None:
    shown = table("checkpoint")
    assert shown.pop("checkpoint") == [*COLUMNS]
    assert [*shown] == [one.name for one in CHECKPOINTS]
    cells = [cell for line in shown.values() for cell in line]
    assert all(re.fullmatch(r"right|refused \(\d+\)|-", cell) for cell in cells)
    reasons = {cell[9:-1] for cell in cells if cell.startswith("refused")}
    assert reasons == set(re.findall(r"^(\d+)\. ", section(), re.MULTILINE))


def test_every_template_is_shown_with_the_tokenizers_that_it_is_right_or_refused_with() -> None:
    shown = table("template")
    names = [one.name for one in OWN] + [*REAL]
    assert [*shown][1:] == names
    served = sum(kind.refused is None for kind in KINDS)
    for right, refused, why in [*shown.values()][1:]:
        assert int(right) + int(refused) == served
        assert why or refused == "0"
