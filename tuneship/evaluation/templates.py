"""Templates of graders: text with names in double braces, without expressions of any kind."""

import json
from collections.abc import Mapping
from typing import Any

from tuneship.contract.graders import metadata_field, template_parts

Part = tuple[str, str | None]


class TextTemplate:
    """A template that was read once and is filled for each answer."""

    def __init__(self, template: str) -> None:
        """Raise ValueError for an unknown name."""
        self._parts: list[Part] = list(template_parts(template))
        names = (metadata_field(name) for _, name in self._parts if name)
        # The fields of metadata that it names.
        self.fields = frozenset(name for name in names if name)

    def fill(self, answer: str, reference: str, metadata: Mapping[str, Any]) -> str | None:
        """The text; None where the metadata lack a field."""
        pieces: list[str] = []
        for text, name in self._parts:
            pieces.append(text)
            if name == "sample.output_text":
                pieces.append(answer)
            elif name == "item.reference":
                pieces.append(reference)
            elif name is not None:
                value = metadata.get(metadata_field(name) or "")
                if value is None:
                    return None
                pieces.append(value if isinstance(value, str) else _written(value))
        return "".join(pieces)


def _written(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
