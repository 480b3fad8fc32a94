"""Addresses of operations as the router reads them, so that each belongs to one path of the contract only.

Without this `GET /v1/datasets/merge`, a wrong method, would be about a dataset `merge`, and `DELETE
/v1/models/x/limits` about a model `x/limits` (a model id holds slashes, so its parameter takes the rest).
"""

import re
from collections.abc import Sequence

from starlette.convertors import Convertor, register_url_convertor

LAST = re.compile(r"(?P<before>.*/){(?P<name>\w+)(?P<rest>:path)?}")


def _pattern(pattern: str) -> Convertor[str]:
    """Takes text of a pattern as it is."""

    class Text(Convertor[str]):
        regex = pattern

        def convert(self, value: str) -> str:
            return value

        def to_string(self, value: str) -> str:
            return value

    return Text()


def route_path(path: str, declared: Sequence[str]) -> str:
    """`path` with a last parameter that does not take the words of other paths in `declared`."""
    last = LAST.fullmatch(path)
    if last is None:
        return path
    taken, start = r"[^/]+", last["before"]
    words = [_after(start, one) for one in declared]
    if last["rest"]:
        taken, start = ".+", path + "/"
        words += [".*/" + word for one in declared if (word := _after(start, one))]
    others = "|".join(sorted({word for word in words if word}))
    convertor = "last_of_" + re.sub(r"\W", "_", path)
    register_url_convertor(convertor, _pattern(rf"(?!(?:{others})$){taken}" if others else taken))
    return f"{last['before']}{{{last['name']}:{convertor}}}"


def _after(start: str, path: str) -> str:
    """The one plain word that a path has behind `start`, escaped; empty when it has none or more."""
    word = path.removeprefix(start)
    return re.escape(word) if word != path and "/" not in word and "{" not in word else ""
