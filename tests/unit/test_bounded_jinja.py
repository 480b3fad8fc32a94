"""A chat template computes and writes no more than it may, whatever it is and whatever the messages are."""

import json
import resource
from collections.abc import Iterator

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tuneship.bounded_jinja import ANYWHERE, RenderLimits
from tuneship.template import PromptTemplate, TemplateFailed, TemplateTooSlow

BOMBS = {
    "nested loops": "{% for a in range(9**5) %}{% for b in range(9**5) %}{% endfor %}{% endfor %}",
    "a loop over a filter's items": "{% for a in range(9**5)|map('string') %}"
    "{% for b in range(9**5)|select %}{% endfor %}{% endfor %}",
    "a filter in a loop": "{% for a in range(9**5) %}{{ range(9**5)|sum }}{% endfor %}",
    "a list in a loop": "{% for a in range(9**5) %}{% set b = range(9**5)|list %}{% endfor %}",
    "a recursive loop": "{% for a in [1, 2] recursive %}"
    "{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    "a macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a deep macro": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "a power": "{% if 9**(9**8) % 7 %}{% endif %}",
    "a large power": "{{ 9**(9**9) }}",
    "powers in a loop": "{% set n = namespace(x=9) %}"
    "{% for _ in range(99) %}{% set n.x = n.x ** 9 %}{% endfor %}",
    "products": "{% set n = namespace(x=9) %}"
    "{% for _ in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a constant text": "{{ 'a' * 10**10 }}",
    "a text": "{{ messages[0].content * 10**10 }}",
    "a list of many": "{% set a = [1] * 10**10 %}",
    "a negative power": "{{ 'a' * (2 ** 70) }}",
    "doubled by ~": "{% set n = namespace(x='a') %}"
    "{% for _ in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubled by +": "{% set n = namespace(x='a') %}"
    "{% for _ in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubled lists": "{% set n = namespace(x=[1]) %}"
    "{% for _ in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubled by a block": "{% set n = namespace(x='a') %}{% for _ in range(64) %}"
    "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "lists within lists": "{% set n = namespace(x=['a']) %}"
    "{% for _ in range(64) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "lists within lists as JSON": "{% set n = namespace(x=['a']) %}"
    "{% for _ in range(64) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
    "lists within lists joined": "{% set n = namespace(x=['a']) %}"
    "{% for _ in range(64) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | join }}",
    "lists within lists compared": "{% set n = namespace(x=['a'], y=['a']) %}{% for _ in range(64) %}"
    "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{% if n.x == n.y %}{% endif %}",
    "tuples within tuples as a key": "{% set n = namespace(x=('a', 'b')) %}{% for _ in range(64) %}"
    "{% set n.x = (n.x, n.x) %}{% endfor %}{% set d = {n.x: 1} %}",
    "tuples within tuples looked up": "{% set n = namespace(x=('a', 'b')) %}{% for _ in range(64) %}"
    "{% set n.x = (n.x, n.x) %}{% endfor %}{{ {}[n.x] }}{{ {}.get(n.x) }}",
    "tuples within tuples sorted": "{% set n = namespace(x=('a', 'b')) %}{% for _ in range(64) %}"
    "{% set n.x = (n.x, n.x) %}{% endfor %}{{ [n.x, n.x] | unique | list }}",
    "deep lists": "{% set n = namespace(x=()) %}"
    "{% for _ in range(50000) %}{% set n.x = (n.x,) %}{% endfor %}{{ {n.x: 1} }}",
    "a namespace of itself": "{% set n = namespace(x=['a']) %}"
    "{% for _ in range(64) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n }}",
    "center": "{{ 'a'.center(10**10) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "expandtabs": "{{ ('\\t' * 9999).expandtabs(99999) }}",
    "bytes": "{{ (5).to_bytes(10**10, 'big') }}",
    "the filter center": "{{ 'a' | center(10**10) }}",
    "the filter indent": "{{ ('\n' * 9999) | indent(99999) }}",
    "the filter indent with a text": "{{ ('\n' * 99999) | indent('a' * 99999) }}",
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "replace nothing": "{{ ('a' * 99999).replace('', 'b' * 99999) }}",
    "the filter replace": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "translate": "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    "join": "{{ ('a' * 99999).join(['b'] * 99999) }}",
    "join of a generator": "{{ ('a' * 99999).join(range(99999) | map('string')) }}",
    "the filter join": "{{ range(99999) | join('a' * 99999) }}",
    "the filter join of texts": "{{ (['a' * 99999] * 99999) | join }}",
    "join of a text": "{{ ('b' * 99999) | join('a' * 99999) }}",
    "a width": "{{ '%9999999999d' % 1 }}",
    "a width in the values": "{{ '%*d' % (10**10, 1) }}",
    "many values": "{{ ('%(a)s' * 99999) % {'a': 'b' * 99999} }}",
    "the filter format": "{{ '%9999999999d' | format(1) }}",
    "format": "{{ '{:>9999999999}'.format(1) }}",
    "format with a width in the values": "{{ '{:>{}}'.format(1, 10**10) }}",
    "format with a width in a value": "{{ '{0:>{1[0]}}'.format(1, [10**10]) }}",
    "format of many": "{{ ('{0}' * 99999).format('b' * 99999) }}",
    "format_map": "{{ ('{a}' * 99999).format_map({'a': 'b' * 99999}) }}",
    "format of lists": "{% set n = namespace(x=['a']) %}{% for _ in range(64) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ '{}'.format(n.x) }}",
    "a date": "{{ strftime_now('%B' * 10**8) }}",
    "indented JSON": "{{ messages | tojson(indent=10**9) }}",
    "round": "{{ 5 | round(10**9, 'ceil') }}",
    "a slice of many": "{{ [1] | slice(10**10) | list }}",
    "batches of many": "{{ [1] | batch(10**10, 'a') | list }}",
    "a sum of lists": "{{ ([[1] * 999] * 99999) | sum(start=[]) | length }}",
    "slices in a loop": "{% set t = 'a' * 10**7 %}{% for _ in range(99999) %}"
    "{% for _ in range(99) %}{% set u = t[1:] %}{% endfor %}{% endfor %}",
    "searches in a loop": "{% set t = 'a' * 10**7 %}{% for _ in range(99999) %}"
    "{% for _ in range(99) %}{% if 'b' in t %}{% endif %}{% endfor %}{% endfor %}",
    "constant texts in a loop": "{% for _ in range(99999) %}" + "a" * 99_999 + "{% endfor %}",
    "constant texts in a block": "{% set t %}{% for _ in range(99999) %}"
    + "a" * 99_999
    + "{% endfor %}{% endset %}",
    "many constants": "a" * (16 * 1024 * 1024 + 1),
    "invented words": "{{ lipsum(n=10**9) }}",
    "page filters": "{{ 'a' | wordwrap(1) }}",
    "escapes": "{% autoescape true %}{{ '<' * 999 }}{% endautoescape %}",
    "deep parentheses": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "a long sum": "{{ 1" + " + 1" * 10_000 + " }}",
    "many tags": "{{ a }}" * 100_000,
    "a long number": "{{ " + "9" * 100_000 + " }}",
}
TALK = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True, scope="module")
def _little_memory() -> Iterator[None]:
    """A bomb that is not stopped must not take the machine's memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# A hundredth of what a rendering in a thread may compute.
LIMITS = RenderLimits(ANYWHERE.steps // 100, ANYWHERE.characters)


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS.keys())
def test_a_bomb_is_refused_where_it_is_read_or_rendered(source: str) -> None:
    with pytest.raises(TemplateFailed) as failure:
        PromptTemplate(source, {}).render(TALK, add_generation_prompt=True, limits=LIMITS)
    assert "hello" not in str(failure.value)


@pytest.mark.slow
def test_a_template_that_computes_for_days_ends_within_the_largest_limits() -> None:
    for name in ("nested loops", "a recursive loop", "lists within lists", "doubled by ~"):
        with pytest.raises(TemplateTooSlow):
            PromptTemplate(BOMBS[name], {}).render(TALK, add_generation_prompt=True)


def test_a_text_is_refused_by_its_length_before_it_is_put_together() -> None:
    template = PromptTemplate("a" * 5_000 + "{{ messages[0].content }}", {})
    assert len(template.render(TALK, add_generation_prompt=True)) == 5_005
    with pytest.raises(TemplateTooSlow, match="too long"):
        template.render(TALK, add_generation_prompt=True, limits=RenderLimits(20_000, 5_000))


def test_a_caller_who_sends_many_turns_spends_more() -> None:
    template = PromptTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    small = RenderLimits(2_000, 10_000)
    assert template.render(TALK * 10, add_generation_prompt=True, limits=small) == "hello" * 10
    with pytest.raises(TemplateTooSlow, match="computes"):
        template.render(TALK * 1_000, add_generation_prompt=True, limits=small)


# What templates write, and what the unbounded sandbox makes of it.
ORDINARY = (
    "{{ messages }}", "{{ messages | tojson(indent=2) }}", "{{ [1, 'a', none, 2.5] ~ {'a': 1} }}",
    "{{ '%s and %5d' % ('a', 7) }} {{ '%s-%s' | format('a', 'b') }}", "{{ 'a' * 3 + 'b' }}{{ [1] * 2 + [2] }}",
    "{{ 2 ** 10 - 3 * 4 // 5 % 3 / 2 }}", "{{ '{:>5}|{0!r}'.format('a') if false else '{0:>5}|{0!r}'.format('a') }}",
    "{{ '{a}'.format_map({'a': 1}) }}", "{{ messages | map(attribute='role') | join(', ') }}",
    "{{ 'a b c'.split(' ') | batch(2) | list }}{{ [1, 2, 3] | slice(2, 0) | list }}",
    "{% for m in messages recursive %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ m.role | capitalize | indent(2, true) }}{% else %}none{% endfor %}",
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ m('a') }}",
    "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}x{% endcall %}",
    "{% set ns = namespace(n=0) %}{% for c in 'abc' %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{{ [3, 1, 2] | sort | reverse | list }}{{ [1, 2] | sum }}{{ {'b': 1, 'a': 2} | dictsort }}",
    "{{ [{'a': 1, 'b': 2}, {'a': 1, 'b': 3}] | groupby('a') | list | length }}", "{{ range(5) | list }}",
    "{{ 'a\nb' | indent(4) }}{{ 'abc'[1:] }}{{ messages[::-1][0].role }}", "{{ 'ab'.join(['x', 'y']) }}",
    "{{ 'é' | upper }}{{ ' a ' | trim }}{{ 'a' | default('b') }}{{ nobody | default('b') }}",
    "{{ 'aXb'.replace('X', 'é') }}{{ '12' | int + 1 }}",
    "{{ 1 if 'use' in messages[0].role and 'a' not in ['b'] and 1 < 2 <= 2 }}", "{{ 3.7 | round(1) }}",
    "{% set x %}a{{ 1 }}b{% endset %}{{ x | length }}{% filter upper %}{{ x }}{% endfilter %}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | count }}{{ {'a': 1}.items() | list }}",
    "{{ 'tab\there'.expandtabs(4) }}{{ '7'.zfill(3) }}{{ 'a'.center(5) }}|{{ 'b'.encode() }}",
)  # fmt: skip


@pytest.mark.parametrize("source", ORDINARY)
def test_an_ordinary_template_renders_as_in_an_unbounded_sandbox(source: str) -> None:
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    sandbox.filters["tojson"] = lambda value, **more: json.dumps(value, ensure_ascii=False, **more)
    expected = sandbox.from_string(source).render(messages=TALK)
    assert PromptTemplate(source, {}).render(TALK, add_generation_prompt=True) == expected
