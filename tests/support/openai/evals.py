"""Evals and runs of them, as programs of the `openai` package send them: good ones and those that are refused."""

from typing import Any

import openai

from tests.support.service.evaluations import right
from tests.support.service.in_process import Service

SECRET = "zq planted text 7731"
ENDS = ("completed", "failed", "canceled")
SCHEMA = {
    "type": "object",
    "properties": {
        "question": {"type": "string"},
        "chapter": {"type": "string"},
        "turns": {"type": "array"},
        "patient": {"type": "object"},
    },
    "required": ["question"],
}
SAME: dict[str, Any] = {
    "type": "string_check",
    "name": "Same chapter (exact)",
    "input": "{{ sample.output_text }}",
    "reference": "{{item.chapter}}",
    "operation": "eq",
}
NEAR: dict[str, Any] = {
    "type": "text_similarity",
    "name": "near it",
    "input": "{{sample.output_text}}",
    "reference": "the {{item.chapter}}",
    "evaluation_metric": "fuzzy_match",
    "pass_threshold": 0.85,
}
CONFIG: dict[str, Any] = {
    "type": "custom",
    "item_schema": SCHEMA,
    "include_sample_schema": True,
}
PROMPT: dict[str, Any] = {
    "type": "template",
    "template": [
        {
            "type": "message",
            "role": "user",
            "content": {"type": "input_text", "text": f"{SECRET}: {{{{ item.question }}}}"},
        },
        {"role": "assistant", "content": ["Which case", "?"]},
        {"role": "user", "content": "{{item.question}}"},
    ],
}


def items(count: int) -> list[dict[str, Any]]:
    return [
        {"item": {"question": f"{SECRET}: case {number}?", "chapter": right(number)}}
        for number in range(count)
    ]


def defined(client: openai.OpenAI, *criteria: dict[str, Any]) -> Any:
    return client.evals.create(
        name="Chapters, November",
        data_source_config=CONFIG,  # pyright: ignore[reportArgumentType]
        testing_criteria=criteria or (SAME,),  # pyright: ignore[reportArgumentType]
        metadata={"site": "A"},
    )


def source_of(model: str, rows: Any, **more: Any) -> Any:
    return {
        "type": "completions",
        "model": model,
        "source": rows if isinstance(rows, dict) else {"type": "file_content", "content": rows},
        "input_messages": PROMPT,
        **more,
    }


def ended(client: openai.OpenAI, service: Service, run: Any) -> Any:
    def shown() -> Any:
        return client.evals.runs.retrieve(run.id, eval_id=run.eval_id)

    service.until(lambda: shown().status in ENDS)
    return shown()


def with_criterion(**fields: Any) -> dict[str, Any]:
    return {"data_source_config": CONFIG, "testing_criteria": [SAME | fields]}


def with_config(**fields: Any) -> dict[str, Any]:
    return {"data_source_config": CONFIG | fields, "testing_criteria": [SAME]}


CRITERION = "testing_criteria[0]"
BAD_EVALS: list[tuple[dict[str, Any], str, str]] = [
    *[
        (with_criterion(type=kind), "unsupported_value", f"{CRITERION}.type")
        for kind in ("label_model", "score_model", "python", "multi")
    ],
    *[
        (with_config(type=kind), "unsupported_value", "data_source_config.type")
        for kind in ("logs", "stored_completions")
    ],
    *[
        ({"data_source_config": CONFIG, "testing_criteria": [NEAR | {"evaluation_metric": one}]},
         "unsupported_value", f"{CRITERION}.evaluation_metric")
        for one in ("bleu", "gleu", "meteor", "cosine", "rouge_1", "rouge_5")
    ],
    (with_criterion(type=SECRET), "invalid_value", f"{CRITERION}.type"),
    (with_criterion(operation="gt"), "invalid_value", f"{CRITERION}.operation"),
    (with_criterion(pass_threshold=0.5), "invalid_value", f"{CRITERION}.pass_threshold"),
    (with_criterion(input="{{sample.output_json}}"), "invalid_value", f"{CRITERION}.input"),
    (with_criterion(reference="{{item.secret"), "invalid_value", f"{CRITERION}.reference"),
    (with_criterion(reference="{{item.secret}}"), "invalid_value", f"{CRITERION}.reference"),
    (
        with_criterion(reference=f"{{{{item.{'a' * 40}.{'b' * 40}}}}}")
        | {"data_source_config": CONFIG | {"item_schema": {}}},
        "invalid_value",
        f"{CRITERION}.reference",
    ),
    (with_criterion(name=f"{SECRET}\n"), "invalid_value", f"{CRITERION}.name"),
    (with_config(item_schema={"type": SECRET}), "invalid_value", "data_source_config.item_schema"),
    (with_config(metadata={}), "unknown_parameter", "data_source_config.metadata"),
    (
        {"data_source_config": CONFIG, "testing_criteria": [SAME, SAME]},
        "invalid_value",
        "testing_criteria[1].name",
    ),
    ({"data_source_config": CONFIG, "testing_criteria": []}, "invalid_value", "testing_criteria"),
]  # fmt: skip


ROW: dict[str, Any] = {"item": {"question": SECRET, "chapter": SECRET}}
SOURCE, SAMPLING = "data_source.source", "data_source.sampling_params"
BAD_RUNS: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "jsonl"}, "unsupported_value", "data_source.type"),
    ({"source": {"type": "stored_completions", "limit": 5}}, "unsupported_value", f"{SOURCE}.type"),
    ({"source": {"type": "responses", "model": SECRET}}, "unsupported_value", f"{SOURCE}.type"),
    ({"source": {"type": "file_content"}}, "invalid_value", f"{SOURCE}.content"),
    ({"source": {"type": "file_id", "content": [ROW]}}, "invalid_value", f"{SOURCE}.content"),
    (
        {"source": {"type": "file_id", "id": "file-" + "0" * 24}},
        "not_found",
        f"{SOURCE}.id",
    ),
    (
        {"source": {"type": "file_content", "content": [ROW | {"sample": {"output_text": SECRET}}]}},
        "unsupported_value",
        f"{SOURCE}.content[0].sample",
    ),
    (
        {"source": {"type": "file_content", "content": [ROW, {"item": {"chapter": SECRET}}]}},
        "invalid_value",
        f"{SOURCE}.content[1].item",
    ),
    (
        {"input_messages": {"type": "template", "template": [{"role": "user", "content": "{{item.patient.age}}"}]}},
        "missing_required_parameter",
        f"{SOURCE}.content[0].item",
    ),
    (
        {"input_messages": {"type": "template", "template": [{"role": "user", "content": "{{sample.output_text}}"}]}},
        "invalid_value",
        "data_source.input_messages.template[0]",
    ),
    (
        {"input_messages": {"type": "template", "template": [{"role": "assistant", "content": SECRET}]}},
        "invalid_value",
        f"{SOURCE}.content[0].item",
    ),
    (
        {"input_messages": {"type": "item_reference", "item_reference": SECRET}},
        "invalid_value",
        "data_source.input_messages.item_reference",
    ),
    *[
        (
            {"input_messages": {"type": "item_reference", "item_reference": reference}},
            "invalid_value",
            "data_source.input_messages.item_reference",
        )
        for reference in ("", " ", "{{}}", "{{item.turns}}", "item.", "item. turns", "sample.output_text")
    ],
    (
        {
            "source": {"type": "file_content", "content": [{"item": {"question": "x" * 500_000}}]},
            "input_messages": {"type": "template", "template": [{"role": "user", "content": "{{item.question}}" * 99}]},
        },
        "invalid_value",
        f"{SOURCE}.content[0].item",
    ),
    (
        {"input_messages": {"type": "item_reference", "item_reference": "item.question"}},
        "invalid_type",
        f"{SOURCE}.content[0].item",
    ),
    ({"sampling_params": {"tools": [{"type": "function"}]}}, "unsupported_value", f"{SAMPLING}.tools"),
    ({"sampling_params": {"reasoning_effort": "high"}}, "unsupported_value", f"{SAMPLING}.reasoning_effort"),
    (
        {"sampling_params": {"max_completion_tokens": 4000}},
        "invalid_value",
        f"{SAMPLING}.max_completion_tokens",
    ),
    ({"model": SECRET}, "model_not_found", "data_source.model"),
]  # fmt: skip
