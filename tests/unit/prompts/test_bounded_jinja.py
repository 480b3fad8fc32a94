"""A chat template computes and writes no more than it may, whatever it is and whatever the messages are."""

import json
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tuneship.prompts import template_budget
from tuneship.prompts.template import PromptTemplate, TemplateFailed, TemplateTooSlow
from tuneship.prompts.template_budget import ANYWHERE, RenderLimits

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


def _nested(use: str, levels: int = 18) -> str:
    """A template with small values in which each level doubles what is within: tuples n.x and n.y, a list n.l."""
    return (
        "{% set n = namespace(x=('a', 'b'), y=('a', 'b'), l=['a', 'b']) %}"
        f"{{% for _ in range({levels}) %}}{{% set n.x = (n.x, n.x) %}}{{% set n.y = (n.y, n.y) %}}"
        "{% set n.l = [n.l, n.l] %}{% endfor %}" + use
    )


# Each reads or writes much more than its code shows. None is refused for what it makes, only for what that costs.
HOSTILE = {
    "a test that writes its value": _nested("{% if n.l is lower %}{% endif %}"),
    "a test that compares": _nested("{% if n.x is eq(n.y) %}{% endif %}"),
    "a test that searches": _nested("{% if n.x is in([n.y]) %}{% endif %}"),
    "a test for a filter": _nested("{% if n.x is filter %}{% endif %}"),
    "a test for a test": _nested("{% if n.x is test %}{% endif %}"),
    "a test by select": _nested("{{ [n.l] | select('lower') | list | length }}"),
    "a test by reject": _nested("{{ [n.x] | reject('eq', n.y) | list | length }}"),
    "a test by selectattr": _nested("{{ [{'a': n.x}] | selectattr('a', 'eq', n.y) | list | length }}"),
    "a test by rejectattr": _nested("{{ [{'a': n.l}] | rejectattr('a', 'upper') | list | length }}"),
    "what is looked for": _nested("{% if n.x in {'a': 1} %}{% endif %}"),
    "what is not found": _nested("{% if n.x not in {'a': 1} %}{% endif %}"),
    "what is looked for in a list": _nested("{% if n.x in [n.y] %}{% endif %}"),
    "what is looked for in a filter's items": _nested("{% if n.x in [n.y] | map('default') %}{% endif %}"),
    "what is looked for in values": _nested("{% if n.x in {'a': n.y}.values() %}{% endif %}"),
    "a comparison of the left side": _nested("{% if n.x < n.y %}{% endif %}"),
    "a chain of comparisons": _nested("{% if 1 < 2 in [n.x] | map('default') in [n.y] %}{% endif %}"),
    "a dict of pairs": _nested("{% set d = dict([(n.x, 1)]) %}"),
    "a dict of a filter's pairs": _nested("{% set d = dict([[n.x, 1] | map('default')]) %}"),
    "a namespace of pairs": _nested("{% set d = namespace([(n.x, 1)]) %}"),
    "keys of a dict's method": _nested("{% set d = {}.fromkeys([n.x]) %}"),
    "keys of dict": _nested("{% set d = dict.fromkeys([n.x]) %}"),
    "loop.changed": _nested(
        "{% for one in [n.x, n.y] %}{% if loop.changed(one) %}{% endif %}{% endfor %}"
    ),
    "keys without others": _nested("{% set d = {}.keys() - [n.x] %}"),
    "keys without a filter's items": _nested("{% set d = {}.keys() - ([n.x] | map('default')) %}"),
    "values as a text": _nested("{{ {'a': n.l}.values() | string | length }}"),
    "items as a text": _nested("{{ {'a': n.l}.items() | string | length }}"),
    "a joiner's text": _nested("{{ [joiner(n.x), joiner(n.y)] | sort(attribute='sep') | length }}"),
    "a loop's item": _nested(
        "{% for _ in [n.x, n.y, n.x] %}{{ [loop] | groupby('nextitem') | length }}{% endfor %}"
    ),
    "a cycle's item": _nested("{{ [cycler(n.x)] | unique(attribute='current') | list | length }}"),
    "unique of a filter's items": _nested("{{ [n.x] | select | unique | list | length }}"),
    "sort of a filter's items": _nested("{{ [n.x, n.y] | select | sort | length }}"),
    "min of a filter's items": _nested("{{ [n.x, n.y] | select | min | length }}"),
    "max of a filter's items": _nested("{{ [n.x, n.y] | select | max | length }}"),
    "groupby of a filter's items": _nested("{{ [{'a': n.x}] | select | groupby('a') | length }}"),
    "the text of a refusal": _nested("{{ raise_exception(n.l) }}"),
    "a list's search": _nested("{{ [n.x].index(n.y) }}"),
    "a tuple's count": _nested("{{ (n.x, n.x).count(n.y) }}"),
    "a dict's key": _nested("{{ {}.get(n.x) }}"),
    "an attribute's name": _nested("{{ 'a' | attr(n.l) }}"),
    "a format's name": _nested("{{ '{0[0]!r}'.format([n.l]) | length }}"),
    "arguments in a loop": "{% macro m() %}{% endmacro %}{% set b = range(90000) | list %}"
    "{% for _ in range(40) %}{{ m(*b) }}{% endfor %}",
    "named arguments in a loop": "{% macro m() %}{{ kwargs | length }}{% endmacro %}{% set n = namespace(d=[]) %}"
    "{% for i in range(900) %}{% set n.d = n.d + [('k' ~ i, 1)] %}{% endfor %}{% set d = dict(n.d) %}"
    "{% for _ in range(2000) %}{% set x = m(**d) %}{% endfor %}",
    "arguments of a text": "{% macro m() %}{% endmacro %}{{ m(*('a' * 600000)) }}",
    "a wide date": "{{ strftime_now('%9999999d') | length }}",
    "a long date": "{{ strftime_now('%d' ~ 'a' * 20000) | length }}",
    "replace with named texts": "{{ ('a' * 4000) | replace(new='b' * 40000, old='a') | length }}",
    "replace of a number": "{{ ('1' * 4000) | replace(1, 'b' * 40000) | length }}",
    "indent with named texts": "{{ ('a\n' * 4000) | indent(blank=true, first=true, width='a' * 40000) | length }}",
    "indent at other line breaks": "{{ ('a\u2028' * 4000) | indent(40000) | length }}",
    "join with a list": "{{ range(4000) | join([0] * 10000) | length }}",
    "join with a named text": "{{ range(4000) | join(d='a' * 40000) | length }}",
    "center with a named width": "{{ 'a' | center(width=9000000) | length }}",
    "separators of JSON": "{{ (range(1000) | list) | tojson(separators=('a' * 40000, ':')) | length }}",
    "indented JSON of many levels": "{% set n = namespace(x=range(9000) | list) %}"
    "{% for _ in range(90) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x | tojson(indent=99) | length }}",
    "JSON of many levels": "{% set n = namespace(x=range(4000) | list) %}"
    "{% for _ in range(90) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x | tojson(indent=8) | length }}",
    "other settings of JSON": "{{ 'a' | tojson(default=cycler) }}",
    "a large number of a text": "{{ (('f' * 40000) | int(0, 16)) % 7 }}",
    "a large number divided": "{{ (('f' * 4000) | int(0, 16)) // 7 }}",
    "a large number added": "{{ (('f' * 4000) | int(0, 16)) + 7 }}",
    "a text of digits": "{{ ('1' * 400000) | float }}",
    "round to many digits": "{{ 5 | round(99999, 'ceil') }}",
    "round to many places before": "{{ 5 | round(-99999) }}",
    "round with a named number": "{{ 5 | round(precision=99999, method='floor') }}",
    "fields without a length": "{{ ('{0}' * 40000).format('') }}",
    "a field of many parts": "{{ ('{0' ~ '[0]' * 40000 ~ '}').format('a') }}",
    "a search from the end": "{{ ('a' * 20000).rfind('ab' ~ 'a' * 10000) }}",
    "an index from the end": "{{ ('a' * 20000 ~ 'ab' ~ 'a' * 10000).rindex('ab' ~ 'a' * 10000) }}",
    "a split from the end": "{{ ('a' * 20000).rsplit('ab' ~ 'a' * 10000, 1) | length }}",
    "a split from the end by a name": "{{ ('a' * 20000).rsplit(sep='ab' ~ 'a' * 10000) | length }}",
    "a partition from the end": "{{ ('a' * 20000).rpartition('ab' ~ 'a' * 10000) | length }}",
    "strip": "{{ ('b' * 20000).strip('a' * 20000 ~ 'b') }}",
    "the filter trim": "{{ ('b' * 20000) | trim('a' * 20000 ~ 'b') }}",
    "the filter trim with a name": "{{ ('b' * 20000) | trim(chars='a' * 20000 ~ 'b') }}",
    "punycode": "{{ ('a' * 999).encode('punycode') }}",
    "a long path": "{{ ['a'] | map(attribute='0.' * 40000 ~ '0') | list }}",
    "a long path of selectattr": "{{ ['a'] | selectattr('0.' * 40000 ~ '0') | list }}",
    "a long path of sort": "{{ ['a'] | sort(attribute='0,' * 40000 ~ '0') | list }}",
    "a long path of sum": "{{ ['a'] | sum(attribute='0.' * 40000 ~ '0') }}",
    "a long path of join": "{{ ['a'] | join('', '0.' * 40000 ~ '0') }}",
    "titles": "{{ ('a-' * 200000) | title | length }}",
    "words": "{{ ('a ' * 200000) | wordcount }}",
    "addresses": "{{ ('é' * 200000) | urlencode | length }}",
    "pieces": "{{ ('a ' * 200000).split() | length }}",
    "lines": "{{ ('a\n' * 200000).splitlines() | length }}",
    "digits in a format": "{{ ('1a' * 200000) % () }}",
    "a list of a text": "{{ ('a' * 500000) | list | length }}",
    "a list of a text, sorted": "{{ ('ba' * 20000) | sort | length }}",
    "a sum of lists by an attribute": "{{ ([{'a': [1] * 100}] * 2000) | sum('a', []) | length }}",
    "a sum of named lists": "{{ ([[1] * 100] * 2000) | sum(start=[]) | length }}",
}  # fmt: skip
ESCAPES = (
    "{{ ('{0.__class__.__mro__}' | e).format(1) }}",
    "{{ ('{0.__class__.__mro__}' | safe).format(1) }}",
    "{{ ('{0.__init__.__globals__}' | safe).format(cycler) }}",
    "{{ ('{0.__init__.__globals__}' | forceescape).format(cycler) }}",
    "{{ ('{a.__class__}' | e).format_map({'a': 1}) }}",
    "{{ (('{0.__class__}' | escape) | attr('format'))(1) }}",
    "{{ (['{0.__class__}' | e] | map(attribute='format') | first)(1) }}",
)
NOT_ALLOWED = {
    "{{ 'a'.encode() }}": "str.encode",
    "{{ (5).to_bytes(2, 'big') }}": "int.to_bytes",
    "{{ 'a' | wordwrap(1) }}": "wordwrap",
    "{{ 'a' | pprint }}": "pprint",
    "{% if messages %}{{ ['a'] | map('xmlattr') | list }}{% endif %}": "xmlattr",
    "{{ (messages | urlize) if messages else '' }}": "urlize",
    "{{ lipsum() }}": "lipsum",
    "{% if 'a' is strange %}{% endif %}": "strange",
    "{{ 'a'() }}": "it calls str,",
    "{{ namespace(**{'__self__': 'a', '__name__': messages[0].content})() }}": "it calls Namespace,",
    "{{ {}.fromkeys(['a']) }}": "type.fromkeys",
    "{{ self | string }}": "TemplateReference",
}
# A hundredth of what a rendering in a thread may compute.
LIMITS = RenderLimits(ANYWHERE.steps // 100, ANYWHERE.characters)
TALK = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True, scope="module")
def _little_memory() -> Iterator[None]:
    """A bomb that is not stopped must not take the machine's memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    # The process may have libraries of gigabytes in its address space already.
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (4 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


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


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_text_that_costs_more_than_it_shows_is_refused(source: str) -> None:
    with pytest.raises(TemplateFailed):
        PromptTemplate(source, {}).render(TALK, add_generation_prompt=True, limits=LIMITS)


@pytest.mark.parametrize("source", ESCAPES)
def test_the_format_of_an_escaped_text_reaches_no_more_than_that_of_any_text(source: str) -> None:
    template = PromptTemplate(source, {})
    try:
        text = template.render(TALK, add_generation_prompt=True)
    except TemplateFailed as failure:
        text = str(failure)
    assert "class '" not in text
    assert "__" not in text


def test_the_format_of_an_escaped_text_writes_no_wider_text() -> None:
    with pytest.raises(TemplateTooSlow, match="too wide"):
        PromptTemplate("{{ ('{:>1000000}' | safe).format(1.5) }}", {}).render(
            TALK, add_generation_prompt=True
        )


@pytest.mark.parametrize(("source", "name"), NOT_ALLOWED.items())
def test_a_name_that_no_list_allows_is_refused_and_quoted(source: str, name: str) -> None:
    with pytest.raises(TemplateFailed, match=re.escape(name)):
        PromptTemplate(source, {}).render(TALK, add_generation_prompt=True)


def test_the_name_of_a_filter_that_a_message_gives_is_not_quoted() -> None:
    with pytest.raises(TemplateFailed) as failure:
        PromptTemplate("{{ ['a'] | map(messages[0].content) | list }}", {}).render(
            TALK, add_generation_prompt=True
        )
    assert "hello" not in str(failure.value)


def test_a_failed_assertion_of_a_filter_is_a_refusal_too() -> None:
    with pytest.raises(TemplateFailed, match="AssertionError in its line 1"):
        PromptTemplate("{{ ('a' * 300) | truncate(1) }}", {}).render(
            TALK, add_generation_prompt=True
        )


# The least that each spends: about a step for each 0.1 microseconds that it takes.
COSTS = {
    "{{ ('{0}' * 1000).format('') }}": 20_000,
    "{{ ('a-' * 1000) | title }}": 2_000,
    "{{ ('a ' * 1000).split() | length }}": 2_000,
    "{{ ('1a' * 1000) % {} }}": 2_000,
    "{{ ('a' * 1000).rfind('ab' ~ 'a' * 500) }}": 10_000,
    "{{ range(1000) | map('string') | list | length }}": 10_000,
    "{{ range(1000) | sort | length }}": 10_000,
    "{{ range(1000) | join(',') }}": 5_000,
    "{{ range(1000) | list | tojson }}": 5_000,
    "{% for _ in range(1000) %}{% if 'a' is lower %}{% endif %}{% endfor %}": 10_000,
    "{% for _ in range(1000) %}{{ 5 | round(2) }}{% endfor %}": 10_000,
    "{% for _ in range(1000) %}{{ strftime_now('%d') }}{% endfor %}": 20_000,
}


@pytest.mark.parametrize(("source", "least"), COSTS.items())
def test_work_is_counted(source: str, least: int) -> None:
    PromptTemplate(source, {}).render(TALK, add_generation_prompt=True)
    spent = ANYWHERE.steps - template_budget.budget.steps
    assert least <= spent <= 100 * least


def test_one_value_is_read_by_one_call_up_to_a_size_only() -> None:
    numbers = "{{ (range(90000) | list * TIMES) | tojson | length }}"
    template = PromptTemplate(numbers.replace("TIMES", "2"), {})
    assert template.render(TALK, add_generation_prompt=True)
    with pytest.raises(TemplateTooSlow, match="too long"):
        PromptTemplate(numbers.replace("TIMES", "3"), {}).render(TALK, add_generation_prompt=True)


LEGITIMATE = {
    "{% for m in messages %}{% set rest = messages[loop.index:] %}{% set n = rest | length %}{% endfor %}": (
        [{"role": "user", "content": "a" * 200}] * 1_500, ANYWHERE
    ),
    "{{ messages | map(attribute='content') | sum(start=[]) | length }}": (
        [{"role": "user", "content": [{"type": "text"}] * 3}] * 1_500, ANYWHERE
    ),
    "{{ messages[0].content | indent(4) }}": ([{"content": "a" * 4_000_000}], ANYWHERE),
    "{{ messages[0].content.split('</think>')[-1].lstrip('\n') }}": (
        [{"content": "a" * 8_000_000}], ANYWHERE
    ),
    "{% for m in messages %}{% if 'tool_calls' in m and m['role'] == 'user' %}{% endif %}{% endfor %}": (
        [{"role": "user", "content": "a" * 5_000}] * 100, LIMITS
    ),
    "{{ messages[0].content.rsplit('</think>', 1)[-1] }}": ([{"content": "a" * 8_000_000}], ANYWHERE),
}  # fmt: skip


@pytest.mark.parametrize(("source", "given"), LEGITIMATE.items())
def test_long_conversations_render(source: str, given: tuple[list[Any], RenderLimits]) -> None:
    messages, limits = given
    PromptTemplate(source, {}).render(messages, add_generation_prompt=True, limits=limits)


# What templates write, and what the unbounded sandbox makes of it.
ORDINARY = (
    "{{ messages }}", "{{ messages | tojson(indent=2) }}", "{{ [1, 'a', none, 2.5] ~ {'a': 1} }}",
    "{{ '%s and %5d' % ('a', 7) }} {{ '%s-%s' | format('a', 'b') }}", "{{ 'a' * 3 + 'b' }}{{ [1] * 2 + [2] }}",
    "{{ 2 ** 10 - 3 * 4 // 5 % 3 / 2 }}", "{{ '{:>5}|{0!r}'.format('a') if false else '{0:>5}|{0!r}'.format('a') }}",
    "{{ '{a}'.format_map({'a': 1}) }}", "{{ messages | map(attribute='role') | join(', ') }}",
    "{{ 'a b c'.split(' ') | batch(2) | list }}{{ [1, 2, 3] | slice(2, 0) | list }}",
    "{% for m in messages recursive %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}",
    ("{% for m in messages if m.role == 'user' %}{{ m.role | capitalize | indent(2, true) }}{% else %}"
    "none{% endfor %}"),
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
    "{{ '**%s** %d' % ('a', 1234567) }}{{ 12345678 | center(12) }}{{ messages | tojson(separators=(',', ':')) }}",
    "{{ dict(a=1, **{'b': 2}) }}{{ dict(messages[0].items()) }}{{ dict([('a', 1)]) }}{{ namespace({'a': 1}).a }}",
    ("{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.current }}{% set j = joiner('|') %}"
    "{{ j() }}{{ j() }}"),
    "{% for m in [1, 1, 2] %}{{ loop.cycle('a', 'b') }}{{ loop.changed(m) }}{{ loop.nextitem }}{% endfor %}",
    "{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(*[1, 2], **{'a': 3}) }}",
    "{% for m in messages %}{{ m.role.upper() if 'role' in m and 'x' not in m.content else '' }}{% endfor %}",
    ("{% if messages | selectattr('role', 'equalto', 'nobody') %}yes{% endif %}"
    "{{ [1, 2] | map('string') | join('-') }}"),
    ("{{ [[1], [2, 3]] | sum(start=[]) }}{{ [{'a': [1]}, {'a': [2]}] | sum(attribute='a', start=[]) }}"
    "{{ [1.5, 2] | sum }}"),
    "{{ 'a<b' | e }}{{ 'a<b' | safe }}{{ 'one two' | title }}{{ 'one two' | wordcount }}{{ 'a b' | urlencode }}",
    "{{ [{'a': 2}, {'a': 1}] | sort(attribute='a') }}{{ [1, 3, 2] | max }}{{ ['b', 'B', 'a'] | unique | list }}",
    ("{{ 'a.b.c'.rsplit('.', 1) }}{{ 'a\nb'.splitlines() }}{{ ' a '.strip() }}{{ 'xax'.strip('x') }}"
    "{{ 'xax' | trim('x') }}"),
    ("{{ 'abcdef' | truncate(5) }}{{ '3.7' | float }}{{ 'x' | int(7) }}{{ 'ff' | int(0, 16) }}"
    "{{ 1000000 | filesizeformat }}"),
    ("{{ 3 is odd }}{{ 4 is divisibleby(2) }}{{ 'a' is in('abc') }}{{ 'A' is upper }}{{ 1 is eq 1 }}"
    "{{ 'map' is filter }}"),
    ("{{ [1, 2, 3][1:] }}{{ (1, 2).index(2) }}{{ [1, 1].count(1) }}{{ {'a': 1}.get('a') }}"
    "{{ {'a': 1}.keys() | list }}"),
    ("{{ (messages | first).role }}{{ messages | last | attr('role') }}{{ {'a': 1} | items | list }}"
    "{{ [1, 2] | reverse | list }}"),
    ("{% set d = {'a': 1} %}{{ 'a' in d }}{{ 'a' in d.values() }}{{ 1 in d.values() }}"
    "{{ 2 not in [1, 3] }}{{ 'a' in ['a'] }}"),
    ("{% for x in [1, 2, 3, 4] %}{% if x == 2 %}{% continue %}{% elif x == 4 %}{% break %}{% endif %}"
    "{{ x }}{% endfor %}"),
    ("{{ {'b': [1, {'c': none}], 'a': true} | tojson(indent=4, sort_keys=true) }}"
    "{{ 'é' | tojson(ensure_ascii=true) }}"),
    ("{% block b %}x{% endblock %}{{ self.b() }}{{ '%s' | format('a') }}{{ '%(a)s' | format(a=1) }}"
    "{{ 'a{{b}}{}'.format(1) }}"),
    "{{ 1 - 2 }}{{ 2.5 * 2 }}{{ 7 % 4 }}{{ -3 // 2 }}{{ 2 ** -1 }}{{ (1, 2) + (3,) }}{{ 1 / 4 }}{{ 3 * 'a' }}",
    "{{ 'tab\there'.expandtabs(4) }}{{ '7'.zfill(3) }}{{ 'a'.center(5) }}",
)  # fmt: skip


@pytest.mark.parametrize("source", ORDINARY)
def test_an_ordinary_template_renders_as_in_an_unbounded_sandbox(source: str) -> None:
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = lambda value, **more: json.dumps(
        value, **{"ensure_ascii": False, **more}
    )
    expected = sandbox.from_string(source).render(messages=TALK)
    assert PromptTemplate(source, {}).render(TALK, add_generation_prompt=True) == expected
