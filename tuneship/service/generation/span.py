"""Notes about a generation for its span, by OpenTelemetry's names for generative models (`gen_ai.*`). Never a text.

The name of a tuned model was chosen by somebody, so the span has its base model and the id of its job.
"""

from collections.abc import Mapping

from tuneship.contract.generation import Generate
from tuneship.service.generation.accounting import WrittenAnswers
from tuneship.service.generation.routing import RoutingTarget
from tuneship.service.models.served_models import ServedModel
from tuneship.service.telemetry.tracing import AttributeValue, SpanNotes

FIRST_TOKEN = "gen_ai.first_token"  # noqa: S105 - the name of an event


def note_request(
    notes: SpanNotes, target: RoutingTarget, served: ServedModel, request: Generate
) -> None:
    """Note the request's settings and its model."""
    kind = "text_completion" if request.messages is None else "chat"
    is_json = request.response_format is not None and request.response_format.type != "text"
    asked = {
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_p": request.top_p,
        "gen_ai.request.stream": request.stream,
        "gen_ai.output.type": "json" if is_json else "text",
    }
    _note(notes, kind, target, served, asked)


def note_embedding(
    notes: SpanNotes, target: RoutingTarget, served: ServedModel, dimensions: int | None
) -> None:
    """Note that texts are embedded, and with which model."""
    asked = {"gen_ai.embeddings.dimension.count": dimensions}
    _note(notes, "embeddings", target, served, asked)


def _note(
    notes: SpanNotes,
    kind: str,
    target: RoutingTarget,
    served: ServedModel,
    asked: Mapping[str, AttributeValue | None],
) -> None:
    notes.name = f"{kind} {served.base.id}"
    # The files of a tuned model are named by its job and the attempt.
    job = "" if served.files is None else served.files.prefix.rpartition("/")[2].partition("-")[0]
    noted: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": kind,
        "gen_ai.provider.name": "tuneship",
        "gen_ai.request.model": served.base.id,
        **asked,
        "tuneship.deployment_id": target.deployment_id,
        "tuneship.endpoint_id": target.endpoint_id or None,
        "tuneship.job_id": job or None,
    }
    notes.attributes |= {name: value for name, value in noted.items() if value is not None}


def note_answer(
    notes: SpanNotes, written: WrittenAnswers, started: float, first_token: float | None
) -> None:
    """Note how a generation ended; the times are by `time.perf_counter`."""
    notes.attributes |= {
        "gen_ai.usage.input_tokens": written.prompt_tokens,
        "gen_ai.usage.output_tokens": written.completion_tokens,
        "gen_ai.response.finish_reasons": [answer.finish_reason for answer in written.answers],
    }
    if first_token is not None:
        notes.attributes["gen_ai.response.time_to_first_chunk"] = first_token - started
        notes.events.append((FIRST_TOKEN, first_token))
