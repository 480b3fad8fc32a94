"""Streams on a terminal: the log and the steps of a job, the text of a generation."""

from collections.abc import Iterable

from tuneship.cli.output import is_terminal, note, one_line, readable, show_json, write
from tuneship.contract.common import count, render_time_ms
from tuneship.contract.generation import GeneratedText, Generation
from tuneship.contract.reports.job_reports import JobLogEntry, JobStep
from tuneship.contract.schemas.tools import WrittenCall


def show_entries(entries: Iterable[JobLogEntry | JobStep], as_json: bool) -> None:
    """A job's log as it is written, a line for each entry."""
    for entry in entries:
        if as_json:
            show_json(entry.model_dump(mode="json"), is_stream=True)
        else:
            write(entry_line(entry))


def entry_line(entry: JobLogEntry | JobStep) -> str:
    """A log line with its time, or the measures of a step."""
    if isinstance(entry, JobLogEntry):
        fields = (render_time_ms(entry.timestamp), entry.level, entry.message)
        return ("  " if is_terminal() else "\t").join(map(one_line, fields))
    measures = entry.model_dump(mode="json")
    separator = "  " if is_terminal() else "\t"
    return separator.join(f"{name}={value}" for name, value in measures.items())


def show_generation(pieces: Iterable[GeneratedText | Generation], as_json: bool) -> str:
    """Show a text while it is generated; return the whole text."""
    whole, last = "", None
    for piece in pieces:
        if as_json:
            show_json(piece.model_dump(mode="json"), is_stream=True)
        if not isinstance(piece, GeneratedText):
            last = piece
        elif not piece.index:  # the other answers follow at the end
            whole += piece.text
            if not as_json:
                write(_shown(piece.text), end="")
    if last is not None and not whole:
        # A server that does not stream sends the whole reply as the only piece.
        whole = last.completion
        if not as_json:
            write(_shown(whole), end="")
    if not as_json and not whole.endswith("\n") and (whole or not (last and last.tool_calls)):
        write("")
    if last is not None and not as_json:
        _show_end(last)
    return whole


def _show_end(generation: Generation) -> None:
    """Show the calls, further answers if there are any, and the number of tokens."""
    _show_calls(generation.tool_calls)
    for other in (generation.choices or ())[1:]:
        write("\n" + _shown(other.completion))
        _show_calls(other.tool_calls)
    tokens = count(generation.usage.completion_tokens, "token")
    note(f"({tokens}, {one_line(generation.finish_reason)})")


def _show_calls(calls: Iterable[WrittenCall] | None) -> None:
    for call in calls or ():
        write(_shown(f"{call.function.name} {call.function.arguments}"))


def _shown(text: str) -> str:
    # A file or another program gets the text as it is.
    return readable(text) if is_terminal() else text
