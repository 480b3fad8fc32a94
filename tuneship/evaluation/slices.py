"""The slices and clusters that the metadata of examples name."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tuneship.evaluation.items import MetadataRefused

MAXIMUM_SLICE_FIELDS = 4
# Of all fields together.
MAXIMUM_SLICES = 50
# Examples without the field; no value can be this.
NO_VALUE = "(none)"
_VALUE = re.compile(r"[A-Za-z0-9 ._/-]{1,64}\Z")


def read_slices(
    metadata: Sequence[Mapping[str, Any]], fields: Sequence[str]
) -> list[dict[str, str]]:
    """The value of each field in each example. Raises `MetadataRefused`.

    Values appear in reports, so they have a form that no sentence and few identifiers of people have.
    """
    found: list[dict[str, str]] = [{} for _ in metadata]
    slices: set[tuple[int, str]] = set()
    for number, name in enumerate(fields):
        place = f"slice_by[{number}]"
        _check_there(metadata, name, place)
        for example, (one, of_example) in enumerate(zip(metadata, found, strict=True)):
            value = _label(one.get(name))
            if value is None:
                text = "has a value that is no label: 1 to 64 of A-Z, a-z, 0-9, space and ._/-"
                raise MetadataRefused("invalid_slice", place, text, example)
            of_example[name] = value
            slices.add((number, value))
            if len(slices) > MAXIMUM_SLICES:
                text = f"brings the slices of all fields above {MAXIMUM_SLICES}"
                raise MetadataRefused("too_many_slices", place, text, example)
    return found


def _label(value: object) -> str | None:
    if value is None:
        return NO_VALUE
    text = str(value).lower() if isinstance(value, bool) else value
    text = str(text) if isinstance(text, int) else text
    return text if isinstance(text, str) and _VALUE.match(text) else None


def read_clusters(metadata: Sequence[Mapping[str, Any]], field: str) -> list[int]:
    """The number of each example's cluster; one without the field is a cluster by itself. Raises `MetadataRefused`."""
    _check_there(metadata, field, "cluster_by")
    numbers: dict[object, int] = {}
    found: list[int] = []
    for example, one in enumerate(metadata):
        value = one.get(field)
        if not isinstance(value, str | int | None):
            text = "has a value that is neither text nor a whole number"
            raise MetadataRefused("invalid_slice", "cluster_by", text, example)
        # A number is another key than its digits, and the key of an example alone is no value.
        key = (example,) if value is None else (type(value), value)
        found.append(numbers.setdefault(key, len(numbers)))
    return found


def _check_there(metadata: Sequence[Mapping[str, Any]], name: str, place: str) -> None:
    if all(one.get(name) is None for one in metadata):
        raise MetadataRefused("missing_field", place, "is a field of metadata that no line has")
