"""Makes routes for the router such that each address belongs to one path of the contract only.

Otherwise `GET /v1/datasets/merge`, a wrong method, would be taken for a dataset `merge`, and `DELETE
/v1/models/x/limits` for a model `x/limits`: a model id holds slashes, so its parameter takes the rest of the path.
"""

import re
from collections.abc import Awaitable, Callable, Sequence

from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

LAST = re.compile(r"(?P<before>.*/){(?P<name>\w+)(?P<rest>:path)?}")


def route(method: str, path: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
    """A route of one method."""
    made = Route(path, endpoint, methods=[method])
    # The framework adds HEAD to GET, which the contract does not declare.
    made.methods = {method}
    return made


def route_path(path: str, declared: Sequence[str]) -> str:
    """`path` with a last parameter that excludes the words of the other `declared` paths."""
    last = LAST.fullmatch(path)
    if last is None:
        return path
    matched, start = r"[^/]+", last["before"]
    words = [_word_after(start, other) for other in declared]
    if last["rest"]:
        matched, start = ".+", path + "/"
        words += [".*/" + word for other in declared if (word := _word_after(start, other))]
    others = "|".join(sorted({word for word in words if word}))

    class Text(Convertor[str]):
        regex = rf"(?!(?:{others})$){matched}" if others else matched

        def convert(self, value: str) -> str:
            return value

        def to_string(self, value: str) -> str:
            return value

    # The framework knows the types of parameters by name.
    convertor = "last_of_" + re.sub(r"\W", "_", path)
    register_url_convertor(convertor, Text())
    return f"{last['before']}{{{last['name']}:{convertor}}}"


def _word_after(start: str, path: str) -> str:
    """The single plain word that follows `start` in a path, escaped for a pattern; empty if it is not one word."""
    word = path.removeprefix(start)
    return re.escape(word) if word != path and "/" not in word and "{" not in word else ""
