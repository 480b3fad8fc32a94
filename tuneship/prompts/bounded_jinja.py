"""A jinja sandbox that bounds the work of a chat template, whose messages come from callers.

jinja's own sandbox limits what a template may reach, not what it computes: a few lines can loop for days or write more
than fits into memory. Here a template uses the filters, tests, methods and functions in the lists below, and no others.
All that it does spends steps before it is done: code by its length; operators and all that is listed by the size of
what they read and write. A step takes about 0.1 microseconds, three times as long at worst.
Next: `template.py` (what is rendered).
"""

import ast
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import chain
from string import Formatter
from types import BuiltinMethodType, CodeType, GeneratorType, MethodType, NoneType
from typing import Any, NoReturn, cast

from jinja2 import TemplateError, TemplateSyntaxError, Undefined, nodes, pass_context
from jinja2 import filters as jinja_filters
from jinja2 import tests as jinja_tests
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Cycler, Joiner, Namespace, _PassArg  # pyright: ignore[reportPrivateUsage]
from markupsafe import escape

# The longest text that a template may write or make on the way; datasets have lines of 8 MiB.
MOST_CHARACTERS = 16 * 1024 * 1024
CHARACTERS_A_STEP = 8
MOST_ITEMS = 1024 * 1024
ITEMS_A_STEP = 4
# Texts of up to this many characters cost nothing beyond the code that handles them.
SHORT_TEXT = 100
# The tags and expressions of the largest templates of the hub are 5,000 tokens; Python compiles these with its lock
# held, 30,000 of them in half a second.
MOST_TOKENS = 30_000
# Levels of lists within lists: Python's own functions go down by recursion.
MOST_DEPTH = 100
MOST_BITS = 4096
# The most steps of reading one value: Python's own functions keep all other threads waiting meanwhile.
MOST_AT_ONCE = 2_100_000
# The largest number that says how wide a text will be, or how many parts something has.
MOST_NUMBER = 100_000
# The steps of calling a macro, beside those of its code.
CALL_STEPS = 30
# The steps of a filter, a test, a call or a lookup, beside those of what it reads.
USE_STEPS = 10
LONG_NUMBER = re.compile(r"\d{6}")
# Values that cost nothing, whatever is done with them.
UNREAD = {int, float, bool, NoneType}
SETTLED = UNREAD | {str, list, dict, tuple}
# Python looks at the first ones faster.
MAPPINGS, SEQUENCES = (dict, Mapping), (list, tuple, Sequence)
OPERANDS = (int, float, Undefined)
# A width that stands in the values of a format, and one in the format of a date.
GIVEN_WIDTH = re.compile(r"%[-+ #0-9.]*\*")
WIDE_DATE = re.compile(r"%[^a-zA-Z%]*\d{3}")


class RenderingTooLong(Exception):
    """A template would compute or write more than it may. The error text quotes no message."""


class NotAllowed(TemplateError):
    """A template uses what no list allows. The error text names it and quotes no message."""


@dataclass(frozen=True)
class RenderLimits:
    """How much one rendering may compute and write."""

    steps: int
    characters: int


# One or two seconds.
ANYWHERE = RenderLimits(10_000_000, MOST_CHARACTERS)
# For a question of one word; what a template writes there is tokenized again and again.
PLAIN = RenderLimits(ANYWHERE.steps // 10, 100_000)


class _Budget(threading.local):
    """The steps that are left of the rendering in this thread."""

    steps = ANYWHERE.steps


_budget = _Budget()


def _spend(steps: int) -> None:
    _budget.steps -= steps
    if _budget.steps < 0:
        raise RenderingTooLong("it computes for too long")


def _spend_text(characters: int) -> None:
    """Spend the steps of reading or writing a text."""
    if characters > MOST_CHARACTERS:
        raise RenderingTooLong("it makes a text that is too long")
    _spend(characters // CHARACTERS_A_STEP)


def _size(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def _spend_list(value: Any, times: int = 1) -> Any:
    """Spend the steps of copying a list, whose items stay where they are; return it."""
    size = _size(value) * max(times, 0)
    if size > MOST_ITEMS:
        raise RenderingTooLong("it makes a list that is too long")
    _spend(size // ITEMS_A_STEP)
    return value


def _copied(value: Any, times: int = 1) -> Any:
    """Spend the steps of copying a text or a list; return it."""
    if not isinstance(value, str):
        return _spend_list(value, times)
    _spend_text(len(value) * max(times, 0))
    return value


def _spend_value(value: Any, indentation: int = 0) -> int:
    """Spend the steps of reading a value, counting a part once for each place where it occurs; return them.

    Its text has no more than eight characters for each of these. `indentation` is written before each part, once for
    each level.
    """
    if type(value) is str:
        if len(value) > SHORT_TEXT:
            _spend_text(len(value))
        return len(value) // CHARACTERS_A_STEP + 1
    if type(value) in UNREAD and (type(value) is not int or value.bit_length() <= 64):
        return 4
    left, steps, characters = min(_budget.steps, MOST_AT_ONCE), 0, 0
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting:
        one, depth = waiting.pop()
        inner: Sequence[Any] = ()
        size = depth * indentation
        if isinstance(one, str):
            size += len(one)
        else:
            inner = _within(one)
        characters += size
        if characters > MOST_CHARACTERS:
            raise RenderingTooLong("it makes a text that is too long")
        steps += 8 * len(inner) + 1 + size // CHARACTERS_A_STEP
        if depth > MOST_DEPTH or steps > left:
            raise RenderingTooLong("it computes for too long")
        if inner and not isinstance(inner, range):
            depth += 1
            waiting += [(part, depth) for part in inner]
    _spend(steps)
    return steps


def _within(value: Any) -> Sequence[Any]:
    """The parts of a value, which its text would show. Raises NotAllowed for one that has others out of sight."""
    if isinstance(value, int):
        if value.bit_length() > MOST_BITS:
            raise RenderingTooLong("it computes with a number that is too large")
        # A step for every sixteen bits.
        return range(value.bit_length() // 128)
    if isinstance(value, float):
        # Writing its digits takes two microseconds.
        return range(3)
    if isinstance(value, Namespace):
        value = vars(value)["_Namespace__attrs"]
    if isinstance(value, MAPPINGS):
        return list(chain.from_iterable(cast("Mapping[Any, Any]", value).items()))
    if isinstance(value, SEQUENCES):
        return value
    if isinstance(value, Set | MappingView):
        return list(cast("Iterable[Any]", value))
    if isinstance(value, LEAVES) and not isinstance(value, LoopContext):
        return ()
    raise NotAllowed(f"it reads a {type(value).__name__}, which is not for chat templates")


def _read(*values: Any, **more: Any) -> int:
    """Spend the steps of reading values; return them."""
    return sum(map(_spend_value, (*values, *more.values()) if more else values))


def _settled(value: Any) -> Any:
    """The value, as a list where its items are yet to come, since nothing else could count them."""
    is_yet_to_come = isinstance(value, Iterator) and not isinstance(value, LoopContext)
    return list(cast("Iterator[Any]", value)) if is_yet_to_come else value


def _seen(value: Any) -> Any:
    """Spend the steps of comparing a value, or of looking it up; return it."""
    kind = type(value)
    if kind not in UNREAD and (kind is not str or len(value) > SHORT_TEXT):
        value = _settled(value)
        _spend_value(value)
    return value


def _is_in(value: Any, whole: Any) -> bool:
    return _seen(value) in (whole if isinstance(whole, Mapping) else _seen(whole))


def _text(value: Any) -> str:
    """The text of a value, as jinja writes it."""
    if type(value) is str:
        return value
    _spend_value(value)
    return str(value)


def _concatenated(pieces: Iterable[str]) -> str:
    texts = pieces if isinstance(pieces, list) else list(pieces)
    _spend_text(sum(map(len, texts)))
    return "".join(texts)


def _joined(pieces: Iterable[Any]) -> str:
    return _concatenated(list(map(_text, pieces)))


def _plus(left: Any, right: Any) -> Any:
    """`left + right`, the most frequent of all operators."""
    if type(left) is not str or type(right) is not str:
        _spend_operator("+", left, right)
    elif len(left) + len(right) > SHORT_TEXT:
        _spend_text(len(left) + len(right))
    return left + right


def _spend_operator(operator: str, left: Any, right: Any) -> None:
    """Spend the steps of `left operator right`. Raises TypeError for what templates do not compute."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        bits = bits * abs(right) if operator == "**" else bits + right.bit_length()
        if bits > MOST_BITS:
            raise RenderingTooLong("it computes with a number that is too large")
    elif operator == "%" and isinstance(left, str):
        values: tuple[Any, ...] = cast("Any", right) if isinstance(right, tuple) else (right,)
        width = _number(*values) if GIVEN_WIDTH.search(left) else 0
        _spend_text(_longest_formatted(left, "%", values) + width)
    elif operator == "*":
        value, times = (left, right) if isinstance(right, int) else (right, left)
        _copied(value, times if isinstance(times, int) else 0)
    elif operator == "+":
        _copied(left)
        _copied(right)
    elif not isinstance(left, OPERANDS) or not isinstance(right, OPERANDS):
        raise TypeError


def _longest_formatted(form: str, mark: str, values: Any) -> int:
    """The most characters of a format with these values, of which each mark may write all. Raises RenderingTooLong."""
    _spend(2 * len(form))
    if LONG_NUMBER.search(form):
        raise RenderingTooLong("it writes a text that is too wide")
    longest = (_spend_value(values) + 1) * CHARACTERS_A_STEP
    widest = max((int(number[0]) for number in re.finditer(r"\d+", form)), default=0)
    return len(form) + form.count(mark) * (longest + widest)


# Each of these spends what a filter, a test, a method or a function with the same arguments reads and writes. The first
# argument of a method is its owner.


def _arguments(_value: Any, /, *arguments: Any, **more: Any) -> None:
    _read(*arguments, **more)


def _number(*values: Any, **more: Any) -> int:
    """The sum of the numbers among arguments, which say how wide a text will be. Raises RenderingTooLong."""
    found = sum(abs(one) for one in (*values, *more.values()) if isinstance(one, int))
    if found > MOST_NUMBER:
        raise RenderingTooLong("it writes a text that is too wide")
    return found


def _lookups(*arguments: Any) -> int:
    """How many lookups the paths among arguments take for each item. Raises RenderingTooLong."""
    texts = [one for one in arguments if isinstance(one, str)]
    found = 1 + sum(one.count(".") + one.count(",") for one in texts)
    if found > 3 or any(len(one) > SHORT_TEXT for one in texts):
        raise RenderingTooLong("it looks up a path that is too long")
    return found


def _one_by_one(_value: Any, /, *arguments: Any, **more: Any) -> None:
    _read(*arguments, **more)
    _lookups(*arguments[:1], more.get("attribute"))


def _slowly(*values: Any, **more: Any) -> None:
    # Four steps for each character.
    _spend(4 * CHARACTERS_A_STEP * _read(*values, **more))


def _ordered(value: Any, /, *arguments: Any, **more: Any) -> None:
    lookups, size = _lookups(*arguments, *more.values()), _size(value)
    _spend(2 * USE_STEPS * size * lookups + _read(*arguments, **more))
    _spend(_spend_value(value) * lookups * size.bit_length())


def _parts(value: Any, /, *arguments: Any, **more: Any) -> None:
    _spend_list(value)
    _spend(5 * _number(*arguments, **more) + _read(*arguments, **more))


def _widened(value: Any, /, *arguments: Any, **more: Any) -> None:
    _read(value, *arguments, **more)
    _spend_text(_number(*arguments, **more))


def _formatted(form: str, /, *values: Any, **more: Any) -> None:
    # Each field, and each lookup in it, takes Python code.
    _spend(2 * USE_STEPS * sum(map(form.count, "{[.")))
    longest = _longest_formatted(form, "{", (values, more))
    if any("{" in (spec or "") for _text, _field, spec, _kind in Formatter().parse(form)):
        raise RenderingTooLong("it writes a text that is too wide")
    _spend_text(longest)


def _indented(value: Any, width: int | str = 4, *_more: Any, **_named: Any) -> None:
    text = _copied(_text(value))
    lines = sum(map(text.count, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")) + 1
    _spend(lines)
    _spend_text(len(text) + lines * (len(width) if isinstance(width, str) else _number(width)))


def _joined_by(value: Any, d: Any = "", attribute: Any = None) -> None:
    _spend(USE_STEPS * _size(value) * _lookups(attribute) + _read(value))
    _spend_text(len(_text(d)) * _size(value))


def _replaced(value: Any, old: Any, new: Any, *_more: Any, **_named: Any) -> None:
    text, old, new = map(_text, (value, old, new))
    _read(text, old, new)
    _spend_text(len(text) + text.count(old) * len(new))


def _rounded(value: Any, precision: int = 0, method: str = "common") -> None:
    _read(value, method)
    if abs(precision) > 20:
        raise RenderingTooLong("it computes with a number that is too large")


def _summed(value: Any, attribute: Any = None, start: Any = 0) -> None:
    steps, size = _read(value, start), _size(value)
    _spend(USE_STEPS * size * _lookups(attribute))
    if not isinstance(start, int | float):
        # Each sum on the way is a list of its own.
        total = sum(map(_size, value)) if attribute is None else steps // 8
        _spend(size * total // 32)


def _searched_backwards(value: Any, /, *arguments: Any, **more: Any) -> None:
    steps = _spend_value(value)
    if arguments or more:
        _read(*arguments, **more)
        _spend(steps * sum(map(_size, (*arguments, *more.values()))) // 2)


def _split(value: str, /, *arguments: Any, **more: Any) -> None:
    _searched_backwards(value, *arguments, **more)
    separators = [one for one in (*arguments, *more.values()) if isinstance(one, str) and one]
    # At white space, or at the ends of lines, there may be nearly as many parts as characters.
    _spend(4 * value.count(separators[0]) if separators else len(value))


def _numbers(*values: Any) -> None:
    _read(*values)
    # The `%` of a text formats it.
    if not all(isinstance(one, int | float) for one in values):
        raise TypeError


def _paired(*arguments: Any, **_more: Any) -> None:
    for pairs in arguments:
        _spend(USE_STEPS * _size(pairs) + _read(pairs))
        if not isinstance(pairs, Mapping) and any(not isinstance(one, Sequence) for one in pairs):
            raise TypeError


def _dated(form: str) -> None:
    _spend(50 * USE_STEPS)
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
    width = len(indent) if isinstance(indent, str) else _number(indent)
    if width > 8 or any(_size(one) > 4 for one in separators or ()):
        raise RenderingTooLong("it writes a text that is too wide")
    steps = _spend_value(value, width)
    # C code writes only what is not indented.
    _spend(steps if indent is not None else 0)
    given: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **given)


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateError(_text(message)[:1000])


Spends = Callable[..., object]


@dataclass(frozen=True)
class _Function:
    """A function that templates may call. They see no name that begins with an underscore."""

    _made: Callable[..., Any]
    _spends: Spends


# Values without parts that their texts would show.
LEAVES = (NoneType, Undefined, Iterator, Macro, BuiltinMethodType, MethodType, _Function)
# These run code of the template, which spends by itself, or raise an error.
PASSED_ON = (Macro, LoopContext, BlockReference, Joiner, Undefined)


def _listed(*groups: tuple[str, Any]) -> dict[str, Any]:
    return {name: spends for names, spends in groups for name in names.split()}


FILTERS: dict[str, Spends] = _listed(
    ("attr count d default first items last length random", _arguments),
    ("map reject rejectattr select selectattr", _one_by_one),
    ("abs capitalize e escape forceescape lower safe string truncate upper", _read),
    ("filesizeformat float int title urlencode wordcount", _slowly),
    ("dictsort groupby max min sort unique", _ordered),
    ("batch list reverse slice", _parts),
    ("center", _widened),
    ("format", lambda value, *a, **k: _spend_operator("%", _text(value), k or a)),
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
    ("== eq equalto != ne > gt greaterthan >= ge < lt lessthan <= le", _read),
    ("filter in lower test upper", _read),
)
METHODS: dict[type, dict[str, Spends]] = {
    str: _listed(
        ("endswith startswith", _arguments),
        ("capitalize casefold count find index isalnum isalpha isascii isdecimal", _read),
        ("isdigit isidentifier islower isnumeric isprintable isspace istitle isupper", _read),
        ("lower partition removeprefix removesuffix swapcase title upper", _read),
        ("center ljust rjust zfill", _widened),
        ("expandtabs", lambda value, tabsize=8: _replaced(value, "\t", " " * _number(tabsize))),
        ("join", lambda value, pieces: _joined_by(pieces, value)),
        ("lstrip rfind rindex rpartition rstrip strip", _searched_backwards),
        ("replace", _replaced),
        ("rsplit split splitlines", _split),
    ),
    dict: _listed(("copy", _spend_list), ("get items keys values", _arguments)),
    list: _listed(("copy", _spend_list), ("count index", _read)),
    tuple: _listed(("count index", _read)),
    LoopContext: _listed(("changed cycle", _arguments)),
    Cycler: _listed(("next reset", _arguments)),
}
FUNCTIONS = {
    "range": _Function(safe_range, _read),
    "dict": _Function(dict, _paired),
    "namespace": _Function(Namespace, _paired),
    "cycler": _Function(Cycler, _read),
    "joiner": _Function(Joiner, _read),
    "raise_exception": _Function(_raise_exception, _read),
}


def _used(made: Callable[..., Any], spends: Spends, args: Any, kwargs: dict[str, Any]) -> Any:
    """Spend the steps of a filter, test, method or function, and those of its result; return it."""
    args = [one if type(one) in SETTLED else _settled(one) for one in args]
    kwargs = {name: _settled(one) for name, one in kwargs.items()} if kwargs else kwargs
    spends(*args, **kwargs)
    found = made(*args, **kwargs)
    if type(found) is list:
        _spend_list(found)
    elif isinstance(found, GeneratorType):
        return _counted(found)
    elif type(found) is str or type(found) is int:
        _spend_value(found)
    return found


def _counted(values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        _spend(2 * USE_STEPS)
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
        return _used(given, spends, args, kwargs)

    return run


BOUNDED_FILTERS = {
    name: _bounded(OWN_FILTERS.get(name) or jinja_filters.FILTERS[name], spends)
    for name, spends in FILTERS.items()
}
BOUNDED_TESTS = {name: _bounded(jinja_tests.TESTS[name], spends) for name, spends in TESTS.items()}
# Stands before the code of a template, in its first line.
IMPORTS = (
    f"from {__name__} import _copied, _is_in, _joined, _plus, _seen, _spend, _spend_list, _text; "
)
RENAMED = {"str": "_text", "str_join": "_joined"}


class _TokenLimit(Extension):
    """Refuses a template with very many tags."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Pass the tokens on."""
        for number, token in enumerate(stream):
            if number > MOST_TOKENS:
                raise TemplateSyntaxError("it has too many tags", token.lineno)
            yield token


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Renders as the environment of transformers, within limits."""

    # Those that are intercepted are not computed while a template is compiled.
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})
    concat = staticmethod(_concatenated)  # pyright: ignore[reportAssignmentType]

    def __init__(
        self, extensions: Sequence[str | type[Extension]], now: Callable[[], datetime]
    ) -> None:
        """`now` gives the time that a template with a date writes."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_TokenLimit, *extensions],
            autoescape=False,  # the output is a prompt, not a page
        )
        date = _Function(lambda form: now().strftime(form), _dated)
        self.globals = {**FUNCTIONS, "strftime_now": date}
        self.filters, self.tests = BOUNDED_FILTERS, BOUNDED_TESTS

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        if source.find(nodes.EvalContextModifier) is not None:
            raise TemplateSyntaxError("it escapes texts", 1)
        return super()._generate(source, *arguments, **options)

    def _compile(self, source: str, filename: str) -> CodeType:
        tree = ast.parse(IMPORTS + source, filename)
        tree = ast.fix_missing_locations(_SpendingCode().visit(tree))
        return compile(tree, filename, "exec")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right`."""
        _spend_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    # The names are jinja's: others could be those of keyword arguments.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a macro, a function or a method."""
        if isinstance(__obj, PASSED_ON):
            return __context.call(__obj, *args, **kwargs)
        # For functions that read the context; none of the allowed ones does.
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        if isinstance(__obj, _Function):
            return _used(__obj._made, __obj._spends, args, kwargs)  # noqa: SLF001
        name = type(__obj).__name__
        if isinstance(__obj, BuiltinMethodType | MethodType):
            owner = cast("Any", __obj.__self__)
            for kind, allowed in METHODS.items():
                if isinstance(owner, kind) and __obj.__name__ in allowed:
                    return _used(__obj, partial(allowed[__obj.__name__], owner), args, kwargs)
            name = f"{type(owner).__name__}.{__obj.__name__}"
        raise NotAllowed(f"it calls {name}, which is not for chat templates")

    def wrap_str_format(self, value: Any) -> Any:
        """The bounded `format` of a text; None for any other method."""
        found = super().wrap_str_format(value)
        return found and _Function(found, partial(_formatted, value.__self__))


class _SpendingCode(ast.NodeTransformer):
    """Lets the Python code of a template spend steps: for each block as many as it has expressions."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Put a line before each block that spends its steps."""
        costs = {
            name: sum(map(_cost, getattr(node, name)))
            for name in ("body", "orelse")
            if isinstance(getattr(node, name, None), list) and not isinstance(node, ast.Module)
        }
        super().generic_visit(node)
        for name, cost in costs.items():
            if getattr(node, name):
                call_cost = CALL_STEPS if isinstance(node, ast.FunctionDef) else 1
                spent = ast.Expr(_call("_spend", ast.Constant(cost + call_cost)))
                getattr(node, name).insert(0, ast.copy_location(spent, getattr(node, name)[0]))
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Take these functions in place of jinja's."""
        node.id = RENAMED.get(node.id, node.id)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Count what a slice copies."""
        self.generic_visit(node)
        is_copy = isinstance(node.slice, ast.Slice) and isinstance(node.ctx, ast.Load)
        return _call("_copied", node) if is_copy else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Count both sides of what is compared or searched; nothing is compared with more than a constant has."""
        self.generic_visit(node)
        sides = [node.left, *node.comparators]
        if isinstance(node.ops[0], ast.Is | ast.IsNot):
            return node
        if len(sides) == 2 and isinstance(node.ops[0], ast.In | ast.NotIn):
            if _is_constant(sides[1]):
                return node
            found = ast.copy_location(_call("_is_in", *sides), node)
            return found if isinstance(node.ops[0], ast.In) else ast.UnaryOp(ast.Not(), found)
        if len(sides) > 2 or not any(map(_is_constant, sides)):
            sides = [_call("_seen", side) for side in sides]
            node.left, node.comparators = sides[0], [*sides[1:]]
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        """Count what a key of a dictionary is made of."""
        self.generic_visit(node)
        node.keys = [
            key if key is None or _is_constant(key) else _call("_seen", key) for key in node.keys
        ]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Count what an item is looked up by, what is put together, and arguments in a list or a dictionary."""
        self.generic_visit(node)
        for part in (*node.args, *node.keywords):
            if isinstance(part, ast.Starred) or (isinstance(part, ast.keyword) and not part.arg):
                part.value = _call("_spend_list", part.value)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "getitem":
            if not _is_constant(node.args[1]):
                node.args[1] = _call("_seen", node.args[1])
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "call_binop":
            _context, operator, *sides = node.args
            if isinstance(operator, ast.Constant) and operator.value == "+":
                return ast.copy_location(_call("_plus", *sides), node)
        return node


def _cost(node: ast.AST) -> int:
    """The number of expressions in a statement, without those of the blocks within it; filters and calls count more."""
    cost = int(isinstance(node, ast.expr))
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
        cost += USE_STEPS if name == "call" or name.startswith("t_") else 0
    for name, value in ast.iter_fields(node):
        if name in {"body", "orelse"} and isinstance(value, list):
            continue
        parts = cast("list[Any]", value) if isinstance(value, list) else [value]
        cost += sum(_cost(part) for part in parts if isinstance(part, ast.AST))
    return cost


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    call = ast.Call(ast.Name(name, ast.Load()), list(arguments), [])
    return ast.copy_location(call, arguments[0])


def _is_constant(value: ast.expr) -> bool:
    parts = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
    return all(isinstance(part, ast.Constant) for part in parts)


def rendered(work: Callable[[], str], limits: RenderLimits) -> str:
    """The text that `work` renders. Raises RenderingTooLong."""
    _budget.steps = limits.steps
    text = work()
    if len(text) > limits.characters:
        raise RenderingTooLong("it writes a text that is too long")
    return text
