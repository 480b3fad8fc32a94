"""`make zoo`: lead every tokenizer, template and checkpoint through all checks, and print the tables.

`python -m tests.zoo [texts|lives|variants ...]`; without arguments all of them run, and when nothing is wrong and the
real templates are at hand, the tables in `docs/models.md` are written again. Exit code 1 when something is wrong.
"""

import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.support.zoo import cells
from tests.support.zoo.checkpoints import CHECKPOINTS, Checkpoint
from tests.support.zoo.lives import Life, World, faults_of, live
from tests.support.zoo.product import write_rows
from tests.support.zoo.template_kinds import KINDS as TEMPLATES
from tests.support.zoo.template_kinds import OWN
from tests.support.zoo.texts import Texts, check_texts
from tests.support.zoo.tokenizer_kinds import KINDS as TOKENIZERS

PARTS = ("texts", "lives", "variants")


def main(parts: Sequence[str]) -> int:
    """Run the parts; returns the exit code."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wrong: list[str] = []
    tables: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tuneship-zoo-") as folder:
        if "texts" in parts:
            tables.append(_texts(Path(folder, "texts"), wrong))
        for part, rows in (("lives", CHECKPOINTS), ("variants", cells.VARIANTS)):
            if part in parts:
                tables.append(_lives(Path(folder, part), rows, wrong))
    sys.stdout.write("\n".join(["\n\n".join(tables), "", f"{len(wrong)} faults", *wrong, ""]))
    if not wrong and set(parts) >= {"texts", "lives"} and len(TEMPLATES) > len(OWN):
        cells.write_section(tables[1::-1])
    return 1 if wrong else 0


def _texts(folder: Path, wrong: list[str]) -> str:
    folder.mkdir()
    rows, results = write_rows(folder), dict[tuple[str, str], Texts]()
    for tokenizer in TOKENIZERS:
        for template in TEMPLATES:
            place = folder / f"{len(results)}"
            result = check_texts(place, rows, tokenizer, template)
            results[tokenizer.name, template.name] = result
            wrong += [f"{tokenizer.name}, {template.name}: {fault}" for fault in result.faults]
    return cells.texts_table(results)


def _lives(folder: Path, rows: Sequence[Checkpoint], wrong: list[str]) -> str:
    folder.mkdir()
    results: dict[str, Life] = {}
    with World.begin(folder) as world:
        for checkpoint in rows:
            results[checkpoint.name] = life = live(world, checkpoint)
            faults = faults_of(checkpoint, life)
            said = "; ".join(faults) or "right, or refused as its row says"
            sys.stderr.write(f"{checkpoint.name}: {said}\n")
            wrong += [f"{checkpoint.name}, {fault}" for fault in faults]
    return cells.lives_table(results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or PARTS))
