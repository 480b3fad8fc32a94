"""Suggestions on how to improve a dataset, in plain sentences, from the facts found while reading it."""

from collections.abc import Iterator

from tuneship.contract.common import count
from tuneship.contract.lines import strict_json
from tuneship.contract.lines.line_fields import CALL_ROLES, ROLE_NAMES
from tuneship.contract.lines.reading_lines import BYTE_ORDER_MARK
from tuneship.service.datasets.reading import DatasetReading

SMALLEST_DATASET = 2
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
PARQUET = b"PAR1"
SHAPES = {
    "instruction": '{"instruction": "...", "response": "..."}',
    "conversation": '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}',
}
READ_AS = {
    "prompt": "instruction",
    "question": "instruction",
    "completion": "response",
    "output": "response",
    "answer": "response",
}
PREFERENCES = "which cannot be trained on."
REFUSED_SHAPES = {
    "text": "Lines with text alone do not say what the answer is, so that they cannot be trained on.",
    "chosen": f"Lines with chosen and rejected are preferences, {PREFERENCES}",
    "preferred_output": f"Lines with preferred_output are preferences, {PREFERENCES}",
    "input_ids": "Lines with input_ids are tokenised; send their texts.",
}
CONVERTED = {
    "history": "The field history is read as earlier turns, whose answers are learnt, too.",
    "conversations": "The field conversations (with from and value) is read as messages (with role and content).",
    "system": "The field system is read as the first turn.",
    "functions": "The field functions is read as tools.",
    "function_call": "The field function_call is read as tool_calls.",
    "prompt[]": "The turns of prompt and completion are read as messages; only those of completion are learnt.",
}


def suggestions(reading: DatasetReading) -> list[str]:
    """Say how to repair the file and improve its examples; an empty list when there is nothing to say."""
    return [*_on_the_file(reading), *_on_fields(reading), *_on_examples(reading)]


def _on_the_file(reading: DatasetReading) -> Iterator[str]:
    codes, head = reading.codes, reading.head
    has_no_example = reading.num_examples == 0
    if reading.had_byte_order_mark:
        yield "A byte order mark at the start was removed."
    if reading.blank_lines:
        yield f"Blank lines were skipped: {reading.blank_lines}."

    if codes["compressed_file"]:
        yield "The file is compressed: unpack it first."
    elif head.startswith(UTF_16) or b"\x00" in head:  # which JSON never holds
        yield "The file looks like UTF-16: save it as UTF-8."
    elif head.startswith(PARQUET):
        yield "The file is Parquet: the Python client and the command line convert it."
    elif reading.has_lone_returns and reading.error_count:
        yield "Lines end in carriage returns alone: end them with a line feed, or with both."
    elif has_no_example and (codes["invalid_json"] or codes["not_object"]):
        yield from _on_the_form(reading)
    if codes["mixed_format"] and has_no_example:
        other = "conversation" if reading.plan.format == "instruction" else "instruction"
        yield f"The lines look like the format {other}: send format={other}."
    if (codes["line_too_long"] and not reading.has_lone_returns) or codes["too_many_lines"]:
        yield "Split the file and combine the datasets."


def _on_the_form(reading: DatasetReading) -> Iterator[str]:
    """Suggest a format for a file without an example, by its first line."""
    head, tail = reading.head.removeprefix(BYTE_ORDER_MARK).lstrip(), reading.tail.rstrip()
    if head.startswith(b"["):
        yield "The file looks like one JSON array: write each element on a line of its own."
    elif head.startswith(b"{") and not tail.endswith(b"}"):
        yield "The file looks like one JSON document over many lines: write each example on one line."
    elif any(
        one.message == strict_json.NOT_JSON or one.code == "not_object" for one in reading.errors
    ):
        # Other lines are JSON, and their errors say what is wrong with them.
        yield (
            f"The file is not JSON Lines: each line must look like {SHAPES[reading.plan.format]}. "
            "The Python client and the command line convert CSV and Parquet."
        )


def _on_fields(reading: DatasetReading) -> Iterator[str]:
    """Say which fields were read under other names or in other forms, and which were ignored."""
    if any(one.message == strict_json.NO_JSON_NUMBER for one in reading.errors):
        yield "NaN and Infinity are no JSON: write null or a text, or leave the field out."
    yield from (text for name, text in REFUSED_SHAPES.items() if name in reading.other_shapes)
    for name in sorted(reading.other_names & READ_AS.keys()):
        yield f"The field {name} is read as {READ_AS[name]}."
    yield from (text for name, text in CONVERTED.items() if name in reading.other_names)
    for role in (*CALL_ROLES, *ROLE_NAMES):
        if f"role {role}" in reading.other_names:
            other = ROLE_NAMES.get(role, "assistant, and its text as calls")
            yield f"The role {role} is read as {other}."
    for name, number in sorted(reading.unused_fields.items()):
        if name:
            yield f"`{name}` in {count(number, 'line')} is ignored."
    if number := reading.unused_fields.get(""):
        yield f"Fields of other names in {count(number, 'line')} are ignored."


def _on_examples(reading: DatasetReading) -> Iterator[str]:
    codes = reading.codes
    if reading.empty_answers:
        yield (
            f"Examples in which the assistant says nothing, and learns it: {reading.empty_answers}. "
            '"weight": 0 keeps a turn from being learnt.'
        )
    if codes["template_refuses"] and reading.plan.base is not None:
        yield f"The chat template of {reading.plan.base.id} refuses {count(codes['template_refuses'], 'line')}."
    if 0 < reading.num_examples < SMALLEST_DATASET and reading.error_count == 0:
        yield f"A fine-tuning job needs at least {SMALLEST_DATASET} examples."
    if codes["duplicate_example"]:
        yield f"Examples that repeat an earlier one: {codes['duplicate_example']}. Are they intended?"
    if codes["too_long"] and reading.plan.base is not None:
        length = reading.plan.base.context_length
        yield f"Examples over {length} tokens, which will be cut: {codes['too_long']}. Shorten or split them."
    if codes["special_token"]:
        yield f"Texts with special tokens, which the model may read as marks: {codes['special_token']}."
    if codes["suspected_phi"]:
        yield (
            f"Places that may hold personal data: {codes['suspected_phi']}. A few patterns found them; "
            "they prove nothing about the rest."
        )
