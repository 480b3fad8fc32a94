"""Which cells of the zoo run when, and its tables.

The diagonal is one cell for each kind of tokenizer and each template; the other cells are all pairs of them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.zoo import template_kinds, tokenizer_kinds
from tests.support.zoo.checkpoints import CHECKPOINTS, Checkpoint, End
from tests.support.zoo.lives import COLUMNS, Life
from tests.support.zoo.template_kinds import TemplateKind
from tests.support.zoo.texts import Texts
from tests.support.zoo.tokenizer_kinds import TokenizerKind

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- The zoo, by `make zoo`: begin -->", "<!-- The zoo: end -->"
Cell = tuple[TokenizerKind, TemplateKind]

_TOKENIZERS, _TEMPLATES = tokenizer_kinds.KINDS, template_kinds.KINDS
DIAGONAL: tuple[Cell, ...] = tuple(
    (_TOKENIZERS[number % len(_TOKENIZERS)], _TEMPLATES[number % len(_TEMPLATES)])
    for number in range(max(len(_TOKENIZERS), len(_TEMPLATES)))
)
# What a commit leads through all columns, what `make test-all` adds, and what only `make zoo` does.
FIRST = CHECKPOINTS[:4]
OTHERS = CHECKPOINTS[4:]


def _variants() -> list[Checkpoint]:
    """Every tokenizer with one template, and every template with one tokenizer that has its tokens.

    What of them is refused, and whether rightly, the other table says.
    """
    ends: tuple[End, ...] = ("template", "list", "generation", "config", "tokenizer")
    may_be_refused = dict.fromkeys(("added", "loss", "GGUF"), "")
    found: list[Checkpoint] = []
    for number, tokenizer in enumerate(_TOKENIZERS):
        # A template whose marks are no tokens ends an answer by a text, at which no other program stops.
        has_marks = tokenizer.marks is not None and not tokenizer.marks.get("normalized")
        template = template_kinds.BY_NAME["ChatML" if has_marks else "Zephyr"]
        name, family = f"tokenizer {tokenizer.name}", tokenizer.model_type
        end = ends[number % len(ends)]
        found.append(Checkpoint(name, family, tokenizer, template, end, refused=may_be_refused))
    llama3 = tokenizer_kinds.BY_NAME["llama3"]
    for number, template in enumerate(_TEMPLATES):
        name, end = f"template {template.name}", ends[number % len(ends)]
        found.append(Checkpoint(name, "llama", llama3, template, end, refused=may_be_refused))
    return found


VARIANTS = tuple(_variants())


def texts_table(results: Mapping[tuple[str, str], Texts]) -> str:
    """The cells of tokenizers and templates, a line for each template."""
    lines = ["| template | right | refused | with, and why |", "|---|---|---|---|"]
    served = [kind.name for kind in _TOKENIZERS if kind.refused is None]
    for template in dict.fromkeys(template for _, template in results):
        cells = {name: results[name, template] for name in served}
        refused = [name for name, cell in cells.items() if cell.is_refused]
        right = [name for name, cell in cells.items() if not (cell.is_refused or cell.faults)]
        shown = ", ".join(refused)
        if len(refused) > len(right):
            shown = f"all but {', '.join(right)}" if right else "all"
        whys = {
            f"{', '.join([shown] * cell.is_refused) or 'some rows'}: {reason}": None
            for cell in cells.values()
            for reason in cell.refusals
        }
        lines.append(f"| {template} | {len(right)} | {len(refused)} | {_cell('; '.join(whys))} |")
    lines.append("")
    for kind in _TOKENIZERS:
        if kind.refused is not None:
            reasons = {
                reason: None
                for (name, _), cell in results.items()
                if name == kind.name
                for reason in cell.refusals
            }
            lines.append(
                f"Refused with every template is the tokenizer {kind.name}: {'; '.join(reasons)}."
            )
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def lives_table(results: Mapping[str, Life]) -> str:
    """The checkpoints and what was done with them, and below the reasons of what was refused."""
    lines = [f"| checkpoint | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    reasons: dict[str, int] = {}

    def shown(text: str | None) -> str:
        if text is None:
            return "-"
        kind, _, reason = text.partition(": ")
        if kind == "refused":
            return f"refused ({reasons.setdefault(reason, len(reasons) + 1)})"
        return kind

    for name, life in results.items():
        cells = (shown(life.results.get(column)) for column in COLUMNS)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {reason}" for reason, number in reasons.items())]
    return "\n".join(lines)


def section(document: Path = DOCUMENT) -> str:
    """The text that the document shows between the two marks."""
    return document.read_text().partition(BEGIN)[2].partition(END)[0].strip()


def write_section(tables: Sequence[str], document: Path = DOCUMENT) -> None:
    """Replace what the document shows between the two marks."""
    before, begin, rest = document.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"{document.name} has no place for the tables"
    assert end, f"{document.name} has no place for the tables"
    document.write_text("".join([before, begin, "\n\n", "\n\n".join(tables), "\n\n", end, after]))
