"""A jinja sandbox that bounds the work of a chat template, whose messages come from callers.

jinja's own sandbox limits what a template may reach, not what it computes: a few lines can loop for days or write more
than fits into memory. Here each part of a template spends steps when it runs: its code by its length, and operators,
filters and calls by the size of what they read and write, before they do it. A step takes 0.1 microseconds at most.
Next: `template.py` (what is rendered).
"""

import ast
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import BuiltinMethodType, CodeType, GeneratorType
from typing import Any, cast

from jinja2 import TemplateSyntaxError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace, _PassArg  # pyright: ignore[reportPrivateUsage]

# The longest text that a template may write or make on the way; datasets have lines of 8 MiB.
MOST_CHARACTERS = 16 * 1024 * 1024
CHARACTERS_A_STEP = 8
MOST_ITEMS = 1024 * 1024
ITEMS_A_STEP = 4
SHORT_TEXT = 100
"""Characters that are not counted where the code that writes them is."""
# The tags and expressions of the largest templates of the hub are 5,000 tokens; Python compiles these with its lock
# held, 30,000 of them in half a second.
MOST_TOKENS = 30_000
MOST_DEPTH = 100
"""Levels of lists within lists: Python's own functions go down by recursion."""
MOST_BITS = 4096
CALL_STEPS = 30
"""The steps of calling a macro, beside those of its code."""
MOST_NUMBER = 100_000
"""The largest number that a filter or a method of texts may be given: most are widths."""
LONG_NUMBER = re.compile(r"\d{6}")
# Whose arguments or pieces say how long the text will be.
WIDENING = {"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes", "indent", "round"}
WIDENING |= {"batch", "slice"}
# They look at the outermost list only, or pass its items on one by one.
SHALLOW = (
    {"attr", "count", "d", "default", "first", "items", "last", "length", "list", "map"}
    | {"random", "reject", "rejectattr", "reverse", "select", "selectattr"}
)  # fmt: skip
UNREAD = {"count", "d", "default", "first", "last", "length"}
# For pages, not for prompts; some of them are slow, or grow with the square of a text.
LEFT_OUT = {"pprint", "striptags", "urlize", "wordwrap", "xmlattr"}


class RenderingTooLong(Exception):
    """A template would compute or write more than it may. The error text quotes no message."""


@dataclass(frozen=True)
class RenderLimits:
    """How much one rendering may compute and write."""

    steps: int
    characters: int


# One or two seconds.
ANYWHERE = RenderLimits(10_000_000, MOST_CHARACTERS)


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


def _spend_list(value: Any, times: int = 1) -> None:
    """Spend the steps of copying a list, whose items stay where they are; anything else costs nothing."""
    if hasattr(value, "__len__"):
        size = len(value) * max(times, 0)
        if size > MOST_ITEMS:
            raise RenderingTooLong("it makes a list that is too long")
        _spend(size // ITEMS_A_STEP)


def _spend_value(value: Any) -> Any:
    """Spend the steps of reading a value with all that is in it, as often as it is in there; return it."""
    kind = type(value)
    if kind is str:
        if len(value) > SHORT_TEXT:
            _spend_text(len(value))
        return value
    if kind is int or kind is bool or value is None:
        return value
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting:
        one, depth = waiting.pop()
        if isinstance(one, str | bytes):
            _spend_text(len(one))
            continue
        if depth > MOST_DEPTH:
            raise RenderingTooLong("it makes lists within lists, too deep")
        inner = _within(one)
        _spend(8 * len(inner) + 1)
        if not isinstance(inner, range):
            waiting += [(part, depth + 1) for part in inner]
    return value


def _within(value: Any) -> Sequence[Any]:
    """The parts of a value, which its text would show."""
    if isinstance(value, Namespace):
        value = vars(value)["_Namespace__attrs"]
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return [part for item in items for part in item]
    if isinstance(value, Sequence):
        return cast("Sequence[Any]", value)
    return list(cast("Set[Any]", value)) if isinstance(value, Set) else ()


def _text(value: Any) -> str:
    """The text of a value, as jinja writes it."""
    if type(value) is str:
        return value
    return str(_spend_value(value))


def _concatenated(pieces: Iterable[str]) -> str:
    texts = pieces if isinstance(pieces, list) else list(pieces)
    _spend_text(sum(map(len, texts)))
    return "".join(texts)


def _plus(left: Any, right: Any) -> Any:
    """`left + right`, the most frequent of all operators."""
    for side in (left, right):
        if type(side) is not str:
            _spend_list(side)
        elif len(side) > SHORT_TEXT:
            _spend_text(len(side))
    return left + right


def _joined(pieces: Iterable[Any]) -> str:
    return _concatenated(list(map(_text, pieces)))


def _counted(values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        _spend(1)
        yield value


class _TokenLimit(Extension):
    """Refuses a template with very many tags."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Pass the tokens on."""
        for number, token in enumerate(stream):
            if number > MOST_TOKENS:
                raise TemplateSyntaxError("it has too many tags", token.lineno)
            yield token


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Renders as `ImmutableSandboxedEnvironment` with the settings of transformers, within limits."""

    # Those that are intercepted are not computed while a template is compiled.
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})
    concat = staticmethod(_concatenated)  # pyright: ignore[reportAssignmentType]
    # Read by compiled templates.
    bounded_names = {  # noqa: RUF012
        "spend": _spend,
        "spend_value": _spend_value,
        "plus": _plus,
        "text": _text,
        "str_join": _joined,
    }

    def __init__(self, extensions: Sequence[str | type[Extension]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_TokenLimit, *extensions],
            autoescape=False,  # the output is a prompt, not a page
        )
        del self.globals["lipsum"]
        for name, made in list(self.filters.items()):
            self.filters[name] = _bounded_filter(name, made)
        for name in LEFT_OUT:
            del self.filters[name]

    def add_filter(self, name: str, made: Callable[..., Any]) -> None:
        """Add a filter, or put another one in the place of jinja's."""
        self.filters[name] = _bounded_filter(name, made)

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        if source.find(nodes.EvalContextModifier) is not None:
            raise TemplateSyntaxError("it escapes texts", 1)
        return super()._generate(source, *arguments, **options)

    def _compile(self, source: str, filename: str) -> CodeType:
        tree = ast.parse(source, filename)
        tree = ast.fix_missing_locations(_SpendingCode().visit(tree))
        return compile(tree, filename, "exec")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right`."""
        if type(left) is int and type(right) is int:
            _check_numbers(operator, left, right)
        elif operator == "%" and isinstance(left, str | bytes):
            _spend_text(_longest_formatted(left, right))
        elif operator == "*":
            for texts, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(texts, str | bytes):
                    _spend_text(len(texts) * max(times, 0))
                elif isinstance(times, int):
                    _spend_list(texts, times)
        return super().call_binop(context, operator, left, right)

    # The names are jinja's: others could be those of keyword arguments.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a macro, a function or a method."""
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str | bytes | int | Mapping | Sequence):
            if name == "join" and args and not isinstance(args[0], str | bytes):
                args = (list(args[0]), *args[1:])
            _spend_call(name, owner, (*args, *kwargs.values()))
        found = super().call(__context, __obj, *args, **kwargs)
        return _spend_result(found)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The bounded `format` of a text; None for any other method."""
        if not isinstance(value, BuiltinMethodType) or not isinstance(value.__self__, str):
            return None
        name, owner = value.__name__, value.__self__
        if name not in {"format", "format_map"}:
            return None
        formatter = _BoundedFormatter(self)

        def formatted(*args: Any, **kwargs: Any) -> str:
            if name == "format_map":
                (kwargs,) = args
                args = ()
            return formatter.vformat(str(owner), args, kwargs)

        return formatted


class _BoundedFormatter(SandboxedFormatter):
    """Formats as `str.format`."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """Convert for `!r` and the like."""
        return super().convert_field(_spend_value(value), conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        """Format one value."""
        if LONG_NUMBER.search(format_spec):
            raise RenderingTooLong("it writes a text that is too wide")
        _spend_value(format_spec)
        found = super().format_field(value, format_spec)
        _spend_text(len(found))
        return found


def _bounded_filter(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that spends steps. It is not computed while a template is compiled, since it takes the context."""
    kind, is_shallow = _PassArg.from_obj(made), name in SHALLOW

    @pass_context
    def run(context: Context, value: Any = None, *args: Any, **kwargs: Any) -> Any:
        if is_shallow:
            if name not in UNREAD and isinstance(value, Sequence | Mapping):
                _spend(len(value))
        elif type(value) is not str or len(value) > SHORT_TEXT or args or kwargs:
            if name in {"join", "sum"} and isinstance(value, Iterator):
                value = list(cast("Iterator[Any]", value))
            _spend_call(name, value, (*args, *kwargs.values()))
        if kind is None:
            return _spend_result(made(value, *args, **kwargs))
        passed: Any = context
        if kind is not _PassArg.context:
            is_about_escapes = kind is _PassArg.eval_context
            passed = context.eval_ctx if is_about_escapes else context.environment
        return _spend_result(made(passed, value, *args, **kwargs))

    return run


def _spend_result(found: Any) -> Any:
    if isinstance(found, str):
        _spend_value(found)
    elif isinstance(found, bytes):
        _spend_text(len(found))
    elif isinstance(found, list):
        _spend_list(found)
    elif isinstance(found, GeneratorType):
        return _counted(found)
    return found


def _spend_call(name: str, value: Any, arguments: Sequence[Any]) -> None:
    """Spend the steps of a filter, or of a method of a value, that makes a text. Raises RenderingTooLong."""
    _spend_value(value if not isinstance(value, Mapping) or name != "get" else ())
    numbers = [abs(one) for one in arguments if isinstance(one, int)]
    for argument in arguments:
        _spend_value(argument)
    if name in WIDENING and max(numbers, default=0) > MOST_NUMBER:
        raise RenderingTooLong("it writes a text that is too wide")
    if name in LENGTHS:
        _spend_text(LENGTHS[name](value, arguments))
    elif name in {"batch", "slice"}:
        _spend(max(numbers, default=0))
    elif name == "tojson":
        # Each level of indentation may be written before each value.
        widths = numbers + [len(one) for one in arguments if isinstance(one, str)]
        if max(widths, default=0) > MOST_DEPTH:
            raise RenderingTooLong("it writes a text that is too wide")
    elif name == "sum" and any(not isinstance(one, int | float | str) for one in arguments):
        raise RenderingTooLong("it adds up lists")


def _longest_of(values: Iterable[Any], otherwise: int) -> int:
    return max((len(one) for one in values if isinstance(one, str | bytes)), default=otherwise)


def _length_of_replaced(value: Any, arguments: Sequence[Any]) -> int:
    text = value if isinstance(value, bytes) else _text(value)
    if len(arguments) < 2 or not all(isinstance(one, type(text)) for one in arguments[:2]):
        return 0
    return len(text) + text.count(arguments[0]) * len(arguments[1])


def _length_of_joined(value: Any, arguments: Sequence[Any]) -> int:
    # A method of what stands between the pieces, or a filter of these.
    is_method = isinstance(value, str | bytes) and bool(arguments)
    sides: Any = (arguments[0], [value, *arguments]) if is_method else (value, arguments)
    pieces, between = sides
    number = len(pieces) if hasattr(pieces, "__len__") else 1
    return _longest_of(between, 0) * max(number, len(value) if is_method else 0)


def _length_of_indented(value: Any, arguments: Sequence[Any]) -> int:
    widths = [one for one in arguments[:1] if isinstance(one, int)]
    return len(_text(value)) * max([8, _longest_of(arguments[:1], 0), *widths])


def _length_of_translated(value: Any, arguments: Sequence[Any]) -> int:
    table: Any = arguments[0] if arguments and isinstance(arguments[0], Mapping) else {}
    return len(value) * _longest_of(table.values(), 1)


# The most characters that a filter or a method may write, by its name.
LENGTHS: dict[str, Callable[[Any, Sequence[Any]], int]] = {
    "replace": _length_of_replaced,
    "join": _length_of_joined,
    "indent": _length_of_indented,
    "expandtabs": _length_of_indented,
    "translate": _length_of_translated,
    "format": lambda value, arguments: _longest_formatted(_text(value), tuple(arguments)),
}


def _longest_formatted(template: str | bytes, values: Any) -> int:
    """The most characters that `template % values` may have. Raises RenderingTooLong."""
    form = template if isinstance(template, str) else template.decode("latin-1")
    if LONG_NUMBER.search(form):
        raise RenderingTooLong("it writes a text that is too wide")
    before = _budget.steps
    _spend_value(values)
    longest = (before - _budget.steps + 1) * CHARACTERS_A_STEP
    if "*" in form and isinstance(values, tuple):
        numbers = [one for one in cast("tuple[Any, ...]", values) if isinstance(one, int)]
        longest += max([0, *map(abs, numbers)])
    widest = max(map(int, re.findall(r"\d+", form)), default=0)
    return len(form) + form.count("%") * (longest + widest)


def _check_numbers(operator: str, left: int, right: int) -> None:
    """Refuse numbers that get very large. Raises RenderingTooLong."""
    bits = 0
    if operator == "**":
        bits = left.bit_length() * abs(right)
    elif operator == "*":
        bits = left.bit_length() + right.bit_length()
    if bits > MOST_BITS:
        raise RenderingTooLong("it computes with a number that is too large")


class _SpendingCode(ast.NodeTransformer):
    """Lets the Python code of a template spend steps: for each block as many as it has expressions."""

    def visit_Module(self, node: ast.Module) -> ast.AST:
        """Name the functions that the code calls, behind its imports."""
        self.generic_visit(node)
        names = ast.parse(
            "\n".join(
                f"{name} = environment.bounded_names[{name!r}]"
                for name in BoundedEnvironment.bounded_names
            )
        )
        place = next(i for i, one in enumerate(node.body) if not isinstance(one, ast.ImportFrom))
        node.body[place:place] = names.body
        return node

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
                spent = ast.Expr(_call("spend", ast.Constant(cost + call_cost)))
                getattr(node, name).insert(0, ast.copy_location(spent, getattr(node, name)[0]))
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Turn values into texts within the limits."""
        return ast.copy_location(ast.Name("text", node.ctx), node) if node.id == "str" else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Count what a slice copies."""
        self.generic_visit(node)
        is_copy = isinstance(node.slice, ast.Slice) and isinstance(node.ctx, ast.Load)
        return _call("spend_value", node) if is_copy else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Count what is compared, or searched."""
        self.generic_visit(node)
        if not all(isinstance(one, ast.Is | ast.IsNot) for one in node.ops):
            node.comparators = [_spent(one) for one in node.comparators]
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        """Count what a key of a dictionary is made of."""
        self.generic_visit(node)
        node.keys = [None if key is None else _spent(key) for key in node.keys]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Count what an item is looked up by, and what is put together."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "getitem":
            node.args[1:] = map(_spent, node.args[1:])
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "call_binop":
            _context, operator, *sides = node.args
            if isinstance(operator, ast.Constant) and operator.value == "+":
                return ast.copy_location(ast.Call(ast.Name("plus", ast.Load()), sides, []), node)
        return node


def _cost(node: ast.AST) -> int:
    """The number of expressions in a statement, without those of the blocks within it."""
    cost = isinstance(node, ast.expr)
    for name, value in ast.iter_fields(node):
        if name in {"body", "orelse"} and isinstance(value, list):
            continue
        parts = cast("list[Any]", value) if isinstance(value, list) else [value]
        cost += sum(_cost(part) for part in parts if isinstance(part, ast.AST))
    return cost


def _call(name: str, argument: ast.expr) -> ast.Call:
    return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), [argument], []), argument)


def _spent(value: ast.expr) -> ast.expr:
    """The value, counted; a constant, or a list of them, is short."""
    parts = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
    is_constant = all(isinstance(part, ast.Constant) for part in parts)
    return value if is_constant else _call("spend_value", value)


def rendered(work: Callable[[], str], limits: RenderLimits) -> str:
    """The text that `work` renders. Raises RenderingTooLong."""
    _budget.steps = limits.steps
    text = work()
    if len(text) > limits.characters:
        raise RenderingTooLong("it writes a text that is too long")
    return text
