"""Suggestions on how to improve a dataset, in plain sentences, from what its reading found."""

from collections.abc import Iterator

from tuneship.service.datasets.reading import DatasetReading

SMALLEST_DATASET = 2
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
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


def suggestions(reading: DatasetReading) -> list[str]:
    """Say how to repair the file and improve its examples; an empty list when there is nothing to say."""
    return [*_on_the_file(reading), *_on_examples(reading)]


def _on_the_file(reading: DatasetReading) -> Iterator[str]:
    codes, head = reading.codes, reading.head
    has_no_example = reading.num_examples == 0
    if reading.had_byte_order_mark:
        yield "A byte order mark at the start was removed."
    if reading.blank_lines:
        yield f"Blank lines were skipped: {reading.blank_lines}."

    if codes["compressed_file"]:
        yield "The file is compressed: unpack it first."
    elif head.startswith(UTF_16):
        yield "The file looks like UTF-16: save it as UTF-8."
    elif codes["invalid_json"] and has_no_example:
        start = head.lstrip()[:1]
        if start == b"[":
            yield "The file looks like one JSON array: write each element on a line of its own."
        elif start == b"{":
            yield "The file looks like one JSON document over many lines: write each example on one line."
        else:
            yield f"The file is not JSON Lines: each line must look like {SHAPES[reading.plan.format]}"
    if codes["mixed_format"] and has_no_example:
        other = "conversation" if reading.plan.format == "instruction" else "instruction"
        yield f"The lines look like the format {other}: send format={other}."
    if codes["line_too_long"] or codes["too_many_lines"]:
        yield "Split the file and merge the datasets."


def _on_examples(reading: DatasetReading) -> Iterator[str]:
    codes = reading.codes
    for name in sorted(reading.other_names & READ_AS.keys()):
        yield f"The field {name} is read as {READ_AS[name]}."
    if "conversations" in reading.other_names:
        yield "The field conversations (with from and value) is read as messages (with role and content)."
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
