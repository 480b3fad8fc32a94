"""The filters, tests, methods and functions that chat templates may use, with the steps that each of them spends.

Next: `bounded_jinja.py` (the environment that has these and no others).
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from string import Formatter
from types import GeneratorType
from typing import Any, NoReturn

from jinja2 import TemplateError, Undefined, pass_context
from jinja2 import filters as jinja_filters
from jinja2 import tests as jinja_tests
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import safe_range
from jinja2.utils import Cycler, Joiner, Namespace, _PassArg  # pyright: ignore[reportPrivateUsage]
from markupsafe import escape

from tuneship.prompts.template_budget import (
    CHARACTERS_A_STEP,
    SETTLED,
    SHORT_TEXT,
    USE_STEPS,
    BoundedFunction,
    RenderingTooLong,
    Spends,
    copied,
    longest_formatted,
    settled,
    size_of,
    spend,
    spend_list,
    spend_operator,
    spend_text,
    spend_value,
    spend_values,
    sum_of_numbers,
    text_of,
)

# A width in the format of a date.
WIDE_DATE = re.compile(r"%[^a-zA-Z%]*\d{3}")
# These run code of the template, which spends by itself, or raise an error.
PASSED_ON = (Macro, LoopContext, BlockReference, Joiner, Undefined)

# Each of these spends what a filter, a test, a method or a function with the same arguments reads and writes. The first
# argument of a method is its owner.


def _arguments(_value: Any, /, *arguments: Any, **more: Any) -> None:
    spend_values(*arguments, **more)


def _lookups(*arguments: Any) -> int:
    """How many lookups the paths among arguments take for each item. Raises RenderingTooLong."""
    texts = [one for one in arguments if isinstance(one, str)]
    found = 1 + sum(one.count(".") + one.count(",") for one in texts)
    if found > 3 or any(len(one) > SHORT_TEXT for one in texts):
        raise RenderingTooLong("it looks up a path that is too long")
    return found


def _one_by_one(_value: Any, /, *arguments: Any, **more: Any) -> None:
    spend_values(*arguments, **more)
    _lookups(*arguments[:1], more.get("attribute"))


def _slowly(*values: Any, **more: Any) -> None:
    # Four steps for each character.
    spend(4 * CHARACTERS_A_STEP * spend_values(*values, **more))


def _ordered(value: Any, /, *arguments: Any, **more: Any) -> None:
    lookups, size = _lookups(*arguments, *more.values()), size_of(value)
    spend(2 * USE_STEPS * size * lookups + spend_values(*arguments, **more))
    spend(spend_value(value) * lookups * size.bit_length())


def _parts(value: Any, /, *arguments: Any, **more: Any) -> None:
    spend_list(value)
    spend(5 * sum_of_numbers(*arguments, **more) + spend_values(*arguments, **more))


def _widened(value: Any, /, *arguments: Any, **more: Any) -> None:
    spend_values(value, *arguments, **more)
    spend_text(sum_of_numbers(*arguments, **more))


def spend_format(form: str, /, *values: Any, **more: Any) -> None:
    # Each field, and each lookup in it, takes Python code.
    spend(2 * USE_STEPS * sum(map(form.count, "{[.")))
    longest = longest_formatted(form, "{", (values, more))
    if any("{" in (spec or "") for text_of, _field, spec, _kind in Formatter().parse(form)):
        raise RenderingTooLong("it writes a text that is too wide")
    spend_text(longest)


def _indented(value: Any, width: int | str = 4, *_more: Any, **_named: Any) -> None:
    text = copied(text_of(value))
    lines = sum(map(text.count, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")) + 1
    spend(lines)
    spend_text(
        len(text) + lines * (len(width) if isinstance(width, str) else sum_of_numbers(width))
    )


def _joined_by(value: Any, d: Any = "", attribute: Any = None) -> None:
    spend(USE_STEPS * size_of(value) * _lookups(attribute) + spend_values(value))
    spend_text(len(text_of(d)) * size_of(value))


def _replaced(value: Any, old: Any, new: Any, *_more: Any, **_named: Any) -> None:
    text, old, new = map(text_of, (value, old, new))
    spend_values(text, old, new)
    spend_text(len(text) + text.count(old) * len(new))


def _rounded(value: Any, precision: int = 0, method: str = "common") -> None:
    spend_values(value, method)
    if abs(precision) > 20:
        raise RenderingTooLong("it computes with a number that is too large")


def _summed(value: Any, attribute: Any = None, start: Any = 0) -> None:
    steps, size = spend_values(value, start), size_of(value)
    spend(USE_STEPS * size * _lookups(attribute))
    if not isinstance(start, int | float):
        # Each sum on the way is a list of its own.
        total = sum(map(size_of, value)) if attribute is None else steps // 8
        spend(size * total // 32)


def _searched_backwards(value: Any, /, *arguments: Any, **more: Any) -> None:
    steps = spend_value(value)
    if arguments or more:
        spend_values(*arguments, **more)
        spend(steps * sum(map(size_of, (*arguments, *more.values()))) // 2)


def _split(value: str, /, *arguments: Any, **more: Any) -> None:
    _searched_backwards(value, *arguments, **more)
    separators = [one for one in (*arguments, *more.values()) if isinstance(one, str) and one]
    # At white space, or at the ends of lines, there may be nearly as many parts as characters.
    spend(4 * value.count(separators[0]) if separators else len(value))


def _numbers(*values: Any) -> None:
    spend_values(*values)
    # The `%` of a text formats it.
    if not all(isinstance(one, int | float) for one in values):
        raise TypeError


def _paired(*arguments: Any, **_more: Any) -> None:
    for pairs in arguments:
        spend(USE_STEPS * size_of(pairs) + spend_values(pairs))
        if not isinstance(pairs, Mapping) and any(not isinstance(one, Sequence) for one in pairs):
            raise TypeError


def spend_date(form: str) -> None:
    spend(50 * USE_STEPS)
    if len(form) > 200 or WIDE_DATE.search(form):
        raise RenderingTooLong("it writes a text that is too wide")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` filter of transformers; jinja2's own escapes `<` for HTML and so changes prompts."""
    width = len(indent) if isinstance(indent, str) else sum_of_numbers(indent)
    if width > 8 or any(size_of(one) > 4 for one in separators or ()):
        raise RenderingTooLong("it writes a text that is too wide")
    steps = spend_value(value, width)
    # C code writes only what is not indented.
    spend(steps if indent is not None else 0)
    given: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **given)


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateError(text_of(message)[:1000])


def _listed(*groups: tuple[str, Any]) -> dict[str, Any]:
    return {name: spends for names, spends in groups for name in names.split()}


FILTERS: dict[str, Spends] = _listed(
    ("attr count d default first items last length random", _arguments),
    ("map reject rejectattr select selectattr", _one_by_one),
    ("abs capitalize e escape forceescape lower safe string truncate upper", spend_values),
    ("filesizeformat float int title urlencode wordcount", _slowly),
    ("dictsort groupby max min sort unique", _ordered),
    ("batch list reverse slice", _parts),
    ("center", _widened),
    ("format", lambda value, *a, **k: spend_operator("%", text_of(value), k or a)),
    ("indent", _indented),
    ("join", _joined_by),
    ("replace", _replaced),
    ("round", _rounded),
    ("sum", _summed),
    # Spends by itself.
    ("tojson", lambda *_, **__: None),
    ("trim", _searched_backwards),
)
# In place of jinja's. Nothing here escapes a text unasked, so none is marked as escaped.
OWN_FILTERS = _listed(
    ("e escape forceescape", lambda value: str(escape(value))), ("safe", str), ("tojson", _to_json)
)
TESTS: dict[str, Spends | None] = _listed(
    # These look at the kind of a value only, and read nothing.
    ("boolean callable defined escaped false float integer iterable mapping none", None),
    ("number sameas sequence string true undefined", None),
    ("odd even divisibleby", _numbers),
    ("== eq equalto != ne > gt greaterthan >= ge < lt lessthan <= le", spend_values),
    ("filter in lower test upper", spend_values),
)
METHODS: dict[type, dict[str, Spends]] = {
    str: _listed(
        ("endswith startswith", _arguments),
        ("capitalize casefold count find index isalnum isalpha isascii isdecimal", spend_values),
        (
            "isdigit isidentifier islower isnumeric isprintable isspace istitle isupper",
            spend_values,
        ),
        ("lower partition removeprefix removesuffix swapcase title upper", spend_values),
        ("center ljust rjust zfill", _widened),
        (
            "expandtabs",
            lambda value, tabsize=8: _replaced(value, "\t", " " * sum_of_numbers(tabsize)),
        ),
        ("join", lambda value, pieces: _joined_by(pieces, value)),
        ("lstrip rfind rindex rpartition rstrip strip", _searched_backwards),
        ("replace", _replaced),
        ("rsplit split splitlines", _split),
    ),
    dict: _listed(("copy", spend_list), ("get items keys values", _arguments)),
    list: _listed(("copy", spend_list), ("count index", spend_values)),
    tuple: _listed(("count index", spend_values)),
    LoopContext: _listed(("changed cycle", _arguments)),
    Cycler: _listed(("next reset", _arguments)),
}
FUNCTIONS = {
    "range": BoundedFunction(safe_range, spend_values),
    "dict": BoundedFunction(dict, _paired),
    "namespace": BoundedFunction(Namespace, _paired),
    "cycler": BoundedFunction(Cycler, spend_values),
    "joiner": BoundedFunction(Joiner, spend_values),
    "raise_exception": BoundedFunction(_raise_exception, spend_values),
}


def used(made: Callable[..., Any], spends: Spends, args: Any, kwargs: dict[str, Any]) -> Any:
    """Charge the steps of a filter, test, method or function, and of its result; return the result."""
    args = [one if type(one) in SETTLED else settled(one) for one in args]
    kwargs = {name: settled(one) for name, one in kwargs.items()} if kwargs else kwargs
    spends(*args, **kwargs)
    found = made(*args, **kwargs)
    if type(found) is list:
        spend_list(found)
    elif isinstance(found, GeneratorType):
        return _counted(found)
    elif type(found) is str or type(found) is int:
        spend_value(found)
    return found


def _counted(values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        spend(2 * USE_STEPS)
        yield value


# What jinja passes to a filter before the value.
PASS_OF: dict[Any, Callable[[Context], Any]] = {
    _PassArg.context: lambda context: context,
    _PassArg.eval_context: lambda context: context.eval_ctx,
    _PassArg.environment: lambda context: context.environment,
}


def _bounded(made: Callable[..., Any], spends: Spends | None) -> Callable[..., Any]:
    """A filter or test that spends steps. It is not computed while a template is compiled: it takes the context."""
    if spends is None:
        return made
    pass_of = PASS_OF.get(_PassArg.from_obj(made))

    @pass_context
    def run(context: Context, *args: Any, **kwargs: Any) -> Any:
        given = made if pass_of is None else partial(made, pass_of(context))
        return used(given, spends, args, kwargs)

    return run


BOUNDED_FILTERS = {
    name: _bounded(OWN_FILTERS.get(name) or jinja_filters.FILTERS[name], spends)
    for name, spends in FILTERS.items()
}
BOUNDED_TESTS = {name: _bounded(jinja_tests.TESTS[name], spends) for name, spends in TESTS.items()}
