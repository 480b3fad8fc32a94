"""A jinja sandbox that bounds the work of a chat template, whose messages come from callers.

jinja's own sandbox limits what a template may reach, not what it computes: a few lines can loop for days or write more
than fits into memory. Here a template uses the filters, tests, methods and functions that are listed, and no others.
All that it does spends steps before it is done (`template_budget.py`): code by its length; operators and all that is
listed (`bounded_functions.py`) by the size of what they read and write. Next: `template.py` (what is rendered).
"""

import ast
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from types import BuiltinMethodType, CodeType, MethodType
from typing import Any, cast

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tuneship.prompts import template_budget
from tuneship.prompts.bounded_functions import (
    BOUNDED_FILTERS,
    BOUNDED_TESTS,
    FUNCTIONS,
    METHODS,
    PASSED_ON,
    spend_date,
    spend_format,
    used,
)
from tuneship.prompts.template_budget import (
    USE_STEPS,
    BoundedFunction,
    NotAllowed,
    concatenated,
    spend_operator,
)

# The tags and expressions of the largest templates of the hub are 5,000 tokens; Python compiles these with its lock
# held, 30,000 of them in half a second.
MOST_TOKENS = 30_000
# The steps of calling a macro, beside those of its code.
CALL_STEPS = 30
# Stands before the code of a template, in its first line.
IMPORTS = (
    f"from {template_budget.__name__} import copied as _copied, is_in as _is_in, joined as _joined, "
    "plus as _plus, seen as _seen, spend as _spend, spend_list as _spend_list, text_of as _text; "
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
    concat = staticmethod(concatenated)  # pyright: ignore[reportAssignmentType]

    def __init__(
        self, extensions: Sequence[str | type[Extension]], now: Callable[[], datetime]
    ) -> None:
        """`now` gives the time for templates that write a date."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_TokenLimit, *extensions],
            autoescape=False,  # the output is a prompt, not a page
        )
        date = BoundedFunction(lambda form: now().strftime(form), spend_date)
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
        spend_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    # The names are jinja's: others could be those of keyword arguments.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a macro, a function or a method."""
        if isinstance(__obj, PASSED_ON):
            return __context.call(__obj, *args, **kwargs)
        # For functions that read the context; none of the allowed ones does.
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        if isinstance(__obj, BoundedFunction):
            return used(__obj._made, __obj._spends, args, kwargs)  # noqa: SLF001
        name = type(__obj).__name__
        if isinstance(__obj, BuiltinMethodType | MethodType):
            owner = cast("Any", __obj.__self__)
            for kind, allowed in METHODS.items():
                if isinstance(owner, kind) and __obj.__name__ in allowed:
                    return used(__obj, partial(allowed[__obj.__name__], owner), args, kwargs)
            name = f"{type(owner).__name__}.{__obj.__name__}"
        raise NotAllowed(f"it calls {name}, which is not for chat templates")

    def wrap_str_format(self, value: Any) -> Any:
        """The bounded `format` of a text; None for any other method."""
        found = super().wrap_str_format(value)
        return found and BoundedFunction(found, partial(spend_format, value.__self__))


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
        """Count the copied items of a slice."""
        self.generic_visit(node)
        is_copy = isinstance(node.slice, ast.Slice) and isinstance(node.ctx, ast.Load)
        return _call("_copied", node) if is_copy else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Count both sides of a comparison or search, each at most as long as a constant on the other side."""
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
        """Count the parts of a dictionary's keys."""
        self.generic_visit(node)
        node.keys = [
            key if key is None or _is_constant(key) else _call("_seen", key) for key in node.keys
        ]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Count the keys of look-ups, joined texts, and arguments that are lists or dictionaries."""
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
    """The number of expressions in a statement, without its inner blocks; filters and calls count more."""
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
