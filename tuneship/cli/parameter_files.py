"""Reads mappings of parameters from YAML or JSON files, and explains their errors in plain words.

The flows' scripts and the command line read their files by this, so that one mistake has one message.
"""

import json
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

# Pydantic's error types for keys of a file, in plain words.
PROBLEMS = {
    "missing": "is needed",
    "extra_forbidden": "is not a known key",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
}
REPEATED = "a key is repeated in one mapping"
# `<<: *anchor` may stand in a mapping more than once.
MERGE_KEY = "tag:yaml.org,2002:merge"


class UnreadableParameters(Exception):
    """The text holds no mapping; the message says what is wrong and where, without quoting it."""


def mapping_in(text: str) -> dict[str, Any]:
    """The mapping in a YAML or JSON text, as plain JSON values. Raises `UnreadableParameters`."""
    try:
        content: Any = yaml.load(text, _UniqueKeys)  # noqa: S506 - a safe loader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        is_repeated = getattr(error, "context", None) == REPEATED
        wrong = REPEATED if is_repeated else "is not valid YAML or JSON"
        raise UnreadableParameters(f"{wrong}{where}") from None
    except ValueError:  # a date that the calendar does not have
        raise UnreadableParameters("is not valid YAML or JSON") from None
    if not isinstance(content, dict):
        raise UnreadableParameters("must hold a mapping of parameters")
    # By way of JSON, so that YAML's own types (dates, ...) do not leak into the parameters.
    return json.loads(json.dumps(content, default=str))


class _UniqueKeys(yaml.SafeLoader):
    """Refuses repeated keys, since YAML would silently take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for name, _ in node.value:
            if isinstance(name, yaml.ScalarNode) and name.tag != MERGE_KEY:
                if name.value in seen:
                    raise yaml.MarkedYAMLError(REPEATED, problem_mark=name.start_mark)
                seen.add(name.value)
        return super().construct_mapping(node, deep)


def problems_of(
    error: ValidationError, content: Any, model: type[BaseModel] | None = None
) -> list[str]:
    """One line for each refused field; pydantic reports a union once for each of its members.

    `model`: that of the content, whose keys are suggested for one that is misspelt.
    """
    lines: dict[str, list[str]] = {}
    for problem in error.errors(include_url=False, include_input=False):
        kind, location = problem["type"], problem["loc"]
        inner, keys = content, list[str]()
        for part in location:
            try:
                inner = inner[part]
            except (TypeError, LookupError):
                # Pydantic also names the members of unions, which are no keys of the file. A missing key is none
                # either, and yet it is what has to be named.
                if kind != "missing" or part != location[-1]:
                    continue
            keys.append(str(part))
        context = problem.get("ctx", {})
        # A check of a whole model names the field that it is about.
        if param := context.get("param"):
            keys.append(str(param))
        wrong = PROBLEMS.get(kind, "").format_map(context)
        wrong = wrong or problem["msg"].removeprefix("Value error, ")
        if kind == "extra_forbidden" and model is not None and keys:
            wrong += _suggestion(keys, model)
        if context.get("min_length") == 1:
            wrong = "must not be empty"
        place = ".".join(keys) or "parameters"
        lines.setdefault(place, []).append(wrong.replace("Input should", "should", 1))
    return [f"{place}: {', or '.join(dict.fromkeys(wrong))}" for place, wrong in lines.items()]


def _suggestion(keys: Sequence[str], model: type[BaseModel]) -> str:
    """The section that an unknown key at the top belongs to, or a key spelt almost like it; empty without either."""
    schema = model.model_json_schema()
    inner: dict[str, Any] = schema.get("$defs", {})
    homes = [name for name, part in inner.items() if keys[-1] in part.get("properties", ())]
    top: dict[str, Any] = schema.get("properties", {})
    for section, part in top.items():
        if len(keys) == 1 and any(f"'#/$defs/{home}'" in str(part) for home in homes):
            return f" here: it belongs to {section}"
    # What to write for each name: at the top, keys of sections with their section; further in, any key may be meant.
    own = [section for section in top if len(keys) == 1 or section == keys[0]]
    known = {
        name: f"{section}.{name}" if len(keys) == 1 else name
        for section in reversed(own)  # the first section that has the key wins
        for home in inner
        if len(keys) > 2 or f"'#/$defs/{home}'" in str(top[section])
        for name in inner[home].get("properties", ())
    }
    known |= {name: name for name in top} if len(keys) == 1 else {}
    near = get_close_matches(keys[-1], known.keys() - {keys[-1]}, n=1, cutoff=0.75)
    return f" (did you mean {known[near[0]]}?)" if near else ""
