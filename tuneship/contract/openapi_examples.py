"""Examples of the OpenAPI document: one release, told from its dataset to its canary endpoint.

Data only. `tests/unit/contract/test_openapi.py` sends every request through the contract's models and reads every reply
back, so an example cannot drift from what it shows. Next: `openapi.py`.
"""

from dataclasses import dataclass, field
from typing import Any

from tuneship.contract.errors import ApiError, ErrorDetail
from tuneship.contract.openapi_story import (
    BACK,
    BASE,
    BASE_MODEL,
    BASELINE,
    CANARY,
    CANARY_ENDPOINT,
    CANDIDATE,
    COMPLETED,
    COMPLETION,
    COMPUTE,
    DATASET,
    DELIVERY,
    DEPLOYMENT_ITEM,
    ENDPOINT,
    HAPPENED,
    HYPERPARAMETERS,
    JOB,
    JOB_ITEM,
    LATER,
    LINES,
    LOG_LINES,
    LOG_STREAM,
    METRICS,
    MODEL,
    MODEL_CONFIG,
    NOON,
    NOON_MS,
    OTHER_DATASET,
    PAGE,
    PLAIN_ENDPOINT,
    PROMPT,
    QUEUED,
    RECEIVER,
    REMOVED_ENDPOINT,
    REQUEST,
    SAFEGUARDS,
    SCALE,
    SECRET,
    SPLIT,
    SUFFIX,
    SUMMARY,
    TAGS,
    TEXT_LINES,
    TEXT_STREAM,
    TOKENS,
    TUNED_MODEL,
    UPLOADED,
    WEBHOOK,
    Json,
)


@dataclass(frozen=True)
class Example:
    """What may be sent, by name, and what then comes; `streams` by media type."""

    requests: dict[str, Json] = field(default_factory=dict[str, Json])
    reply: Any = None
    streams: dict[str, str] = field(default_factory=dict[str, str])


def refusal_example(kind: type[ApiError], status: int) -> Json:
    """A refusal of a kind as it is answered."""
    message, param = REFUSAL_TEXTS.get((kind.code, status), (_first_line(kind), None))
    details = [ErrorDetail(param, "out_of_range", message.partition(" ")[2])] if param else []
    return kind(message, param=param, details=details, status=status).as_json(REQUEST)


def _first_line(kind: type[ApiError]) -> str:
    return (kind.__doc__ or "").partition("\n")[0].removesuffix(".").lower()


REFUSAL_TEXTS = {
    ("validation_error", 422): ("limit must be between 1 and 100", "limit"),
    ("invalid_request_error", 408): ("the body did not come in time", None),
    ("invalid_request_error", 409): ("the state of the resource does not allow this", None),
    ("invalid_request_error", 412): ("the record has changed since it was read", None),
    ("invalid_request_error", 413): ("the body is larger than 1 MiB", None),
    ("invalid_request_error", 414): ("the address is longer than 8 KiB", None),
    ("invalid_request_error", 415): ("the body must be application/json in UTF-8", None),
    ("invalid_request_error", 431): ("the headers are larger than 16 KiB", None),
    ("internal_error", 503): ("the database or the disk is not available", None),
}

GENERATIONS = Example(
    {
        "prompt": {"prompt": PROMPT, "max_tokens": 64, "temperature": 0.0, "stop": ["\n"]},
        "messages": {"messages": [{"role": "user", "content": PROMPT}]},
        "stream": {"prompt": PROMPT, "stream": True},
    },
    COMPLETION,
    streams={"text/event-stream": TEXT_STREAM, "application/x-ndjson": TEXT_LINES},
)

# By operation name.
EXAMPLES: dict[str, Example] = {
    "validate_dataset": Example(
        {"instruction": {"format": "instruction", "file": LINES}},
        {
            "is_valid": False,
            "num_examples": 2,
            "total_tokens": 57,
            "token_distribution": {"prompt_tokens": 40, "response_tokens": 17},
            "format_details": {
                "format": "instruction",
                "has_instructions": True,
                "has_responses": True,
            },
            "suggestions": ["Give every line a non-empty response."],
            "errors": [
                {
                    "line": 3,
                    "field": "response",
                    "code": "empty_value",
                    "message": "must not be empty",
                }
            ],
            "warnings": [],
            "error_count": 1,
            "errors_truncated": False,
            "warning_count": 0,
            "tokenizer": BASE,
        },
    ),
    "upload_dataset": Example(
        {
            "instruction": {
                "name": "icd chapters",
                "format": "instruction",
                "tags": TAGS,
                "file": LINES,
            }
        },
        UPLOADED,
    ),
    "get_dataset": Example(reply={**UPLOADED, "token_distribution": TOKENS}),
    "list_datasets": Example(reply={"datasets": [SUMMARY], "pagination": PAGE}),
    "delete_dataset": Example(reply={"id": DATASET, "deleted": True}),
    "merge_datasets": Example(
        {"two": {"dataset_ids": [DATASET, OTHER_DATASET], "name": "both years"}},
        {
            **UPLOADED,
            "id": "ds_1q3w5e7r9t2y4u6i8o0p1a3s",
            "name": "both years",
            "description": "",
            "tags": {},
            "source_datasets": [DATASET, OTHER_DATASET],
            "duplicate_examples": 12,
        },
    ),
    "create_job": Example(
        {
            "short": {"base_model": BASE, "dataset_id": DATASET, "model_name": "icd-chapters"},
            "full": {
                "base_model": BASE,
                "dataset_id": DATASET,
                "model_name": "icd-chapters",
                "fine_tuning_method": "lora",
                "hyperparameters": HYPERPARAMETERS,
                "validation_frequency": 0.1,
                "compute_config": COMPUTE,
                "tags": TAGS,
            },
        },
        QUEUED,
    ),
    "get_job": Example(reply=COMPLETED),
    "list_jobs": Example(reply={"jobs": [JOB_ITEM], "pagination": PAGE}),
    "cancel_job": Example(reply={"id": JOB, "status": "cancelling", "updated_at": LATER}),
    "get_job_metrics": Example(
        reply={
            "job_id": JOB,
            "steps": [1, 2],
            "training_loss": [2.31, 2.02],
            "validation_loss": [2.4, 2.4],
            "learning_rate": [0.0005, 0.001],
            "epochs": [0.01, 0.02],
            "accuracy": [0.31, 0.31],
            "perplexity": [11.02, 11.02],
            "created_at": NOON,
        }
    ),
    "get_job_logs": Example(
        reply={
            "logs": [{"timestamp": NOON_MS, "level": "info", "message": "job queued"}],
            "pagination": {"after": "MTIz"},
        },
        streams={"text/event-stream": LOG_STREAM, "application/x-ndjson": LOG_LINES},
    ),
    "list_models": Example(
        reply={"models": [BASE_MODEL, TUNED_MODEL], "pagination": {**PAGE, "total": 2}}
    ),
    "get_model": Example(reply=TUNED_MODEL),
    "delete_model": Example(reply={"id": MODEL, "deleted": True}),
    "create_deployment": Example(
        {
            "full": {
                "model_name": MODEL,
                "deployment_name": "icd-candidate",
                "model_config": {"max_output_tokens": 128, "default_temperature": 0.0},
                "tags": TAGS,
            },
            "short reference": {"model_id": BASE, "deployment_name": "icd-baseline"},
        },
        {
            **DEPLOYMENT_ITEM,
            "status": "creating",
            "updated_at": NOON,
            **SCALE,
            "region": "local",
        },
    ),
    "get_deployment": Example(
        reply={
            **DEPLOYMENT_ITEM,
            **SCALE,
            "region": "local",
            "current_replicas": 1,
            "model_config": MODEL_CONFIG,
            "security_settings": {**SAFEGUARDS, "private_endpoints": False},
            "health": "healthy",
        }
    ),
    "list_deployments": Example(reply={"deployments": [DEPLOYMENT_ITEM], "pagination": PAGE}),
    "update_deployment": Example(
        {
            "replicas": {"min_replicas": 1, "max_replicas": 2},
            "tags and defaults": {
                "tags": {"stage": "canary", "team": None},
                "model_config": {"default_temperature": 0.2, "default_top_p": None},
            },
        },
        {**DEPLOYMENT_ITEM, **SCALE, "status": "updating", "model_config": MODEL_CONFIG},
    ),
    "delete_deployment": Example(
        reply={"id": CANDIDATE, "deployment_id": CANDIDATE, "status": "deleting"}
    ),
    "get_deployment_logs": Example(
        reply={
            "logs": [
                {
                    "timestamp": NOON_MS,
                    "level": "error",
                    "message": "a generation failed",
                    "component": "gateway",
                    "request_id": REQUEST,
                }
            ],
            "pagination": {"next_token": None},
        }
    ),
    "get_deployment_metrics": Example(reply=METRICS),
    "create_endpoint": Example(
        {"one deployment": {"name": "icd", "deployment_id": CANDIDATE}}, PLAIN_ENDPOINT
    ),
    "get_endpoint": Example(reply=PLAIN_ENDPOINT),
    "list_endpoints": Example(reply={"endpoints": [PLAIN_ENDPOINT], "pagination": PAGE}),
    "update_endpoint": Example(
        {"cut over": {"deployment_id": BASELINE}},
        {**PLAIN_ENDPOINT, "deployment_id": BASELINE, "updated_at": LATER, "version": 2},
    ),
    "delete_endpoint": Example(reply={"id": ENDPOINT, **REMOVED_ENDPOINT}),
    "create_canary_endpoint": Example(
        {
            "split": {"name": "icd-release", "deployments": BACK},
            "with a way back": {
                "name": "icd-release",
                "deployments": SPLIT,
                "lease": {"seconds": 120, "fallback": BACK},
            },
        },
        CANARY_ENDPOINT,
    ),
    "get_canary_endpoint": Example(reply=CANARY_ENDPOINT),
    "list_canary_endpoints": Example(
        reply={"canary_endpoints": [CANARY_ENDPOINT], "pagination": PAGE}
    ),
    "update_canary_endpoint": Example(
        {"shift": {"deployments": SPLIT, "lease": {"seconds": 120, "fallback": BACK}}},
        CANARY_ENDPOINT,
    ),
    "delete_canary_endpoint": Example(reply={"id": CANARY, **REMOVED_ENDPOINT}),
    "renew_canary_lease": Example({"two minutes": {"seconds": 120}}, CANARY_ENDPOINT),
    "generate": GENERATIONS,
    "generate_by_endpoint": GENERATIONS,
    "create_webhook": Example(
        {"jobs": {"url": RECEIVER["url"], "events": RECEIVER["events"]}}, {**RECEIVER, **SECRET}
    ),
    "list_webhooks": Example(reply={"webhooks": [RECEIVER], "pagination": PAGE}),
    "get_webhook": Example(reply=RECEIVER),
    "update_webhook": Example({"switch off": {"active": False}}, {**RECEIVER, "active": False}),
    "delete_webhook": Example(reply={"id": WEBHOOK, "deleted": True}),
    "rotate_webhook_secret": Example({"a day": {"overlap_hours": 24}}, {**RECEIVER, **SECRET}),
    "send_test_event": Example({"a job": {"type": "fine_tuning.job.succeeded"}}, DELIVERY),
    "list_webhook_deliveries": Example(reply={"deliveries": [DELIVERY], "pagination": PAGE}),
    "retry_webhook_delivery": Example(
        reply={**DELIVERY, "status": "pending", "response_status": None}
    ),
    "replay_webhook": Example(
        {"what died": {"since": NOON, "until": LATER, "status": "dead"}},
        {"id": WEBHOOK, "replayed": 3},
    ),
    "list_events": Example(reply={"events": [HAPPENED], "pagination": {"after": "MTI4"}}),
    "list_audit": Example(
        reply={
            "entries": [
                {
                    "seq": 4711,
                    "at": NOON_MS,
                    "key_id": "9f2c41d7",
                    "action": "generate",
                    "resource_id": f"dep_{SUFFIX}",
                    "status": 200,
                    "address": "10.1.4.20",
                    "request_id": REQUEST,
                    "prompt_tokens": 57,
                    "completion_tokens": 12,
                }
            ],
            "pagination": {"after": "NDcxMQ"},
        }
    ),
    "list_instance_types": Example(
        reply={
            "instance_types": [
                {
                    "name": "local",
                    "compute_type": "cpu",
                    "available": True,
                    "cpus": 2,
                    "memory_gb": 7.6,
                    "gpus": 0,
                }
            ]
        }
    ),
    "get_model_limits": Example(
        reply={
            "id": BASE,
            "fine_tuning_methods": ["lora"],
            "hyperparameters": {
                "learning_rate": {
                    "type": "number",
                    "min": 0.0,
                    "max": 1.0,
                    "exclusive_min": True,
                    "exclusive_max": False,
                    "default": 0.0002,
                    "auto": True,
                    "description": "",
                }
            },
            "target_modules": ["q_proj", "v_proj"],
            "context_length": 512,
            "max_output_tokens": 512,
        }
    ),
}
