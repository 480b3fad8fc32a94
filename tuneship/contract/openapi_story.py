"""What the OpenAPI document's examples are about: one release, with ids, moments and records as they are answered.

Data only; `openapi_examples.py` tells which operation shows what.
"""

import json
from typing import Any

Json = dict[str, Any]

SUFFIX = "4k2m9x7q1w8e5r3t6y0u2i4o"
DATASET, OTHER_DATASET = f"ds_{SUFFIX}", "ds_8v1n5b3c7z9l2k4j6h0g1f3d"
JOB = f"ft_{SUFFIX}"
BASE = "tuneship-tiny"
MODEL = f"ft:{BASE}:icd-chapters:{SUFFIX}"
BASELINE, CANDIDATE = "dep_2s4d6f8g0h1j3k5l7z9x4c8v", f"dep_{SUFFIX}"
ENDPOINT, CANARY = f"ep_{SUFFIX}", f"cep_{SUFFIX}"
WEBHOOK, EVENT = f"wh_{SUFFIX}", f"evt_{SUFFIX}"
REQUEST = f"req_{SUFFIX}"
NOON, LATER = "2026-03-01T12:00:00Z", "2026-03-01T12:10:00Z"
NOON_MS = "2026-03-01T12:00:00.250Z"
SERVICE = "http://127.0.0.1:8700"
PAGE = {"total": 1, "limit": 20, "offset": 0, "next_offset": None}
TAGS = {"team": "coding"}

# An example of every id that stands in a path.
PATH_VALUES = {
    "dataset_id": DATASET,
    "job_id": JOB,
    "model_id": BASE,
    "deployment_id": CANDIDATE,
    "endpoint_id": CANARY,
    "webhook_id": WEBHOOK,
    "event_id": EVENT,
}

LINES = (
    '{"instruction": "Chronic eczema of both hands", "response": "Diseases of the skin"}\n'
    '{"instruction": "Senile cataract", "response": "Diseases of the eye"}\n'
)
TOKENS = {"prompt_tokens": 48_210, "response_tokens": 9_120}
SUMMARY = {
    "id": DATASET,
    "name": "icd chapters",
    "format": "instruction",
    "num_examples": 1500,
    "total_tokens": 57_330,
    "created_at": NOON,
    "status": "processed",
    "tags": TAGS,
}
UPLOADED = {
    **SUMMARY,
    "description": "Diagnosis texts with their chapter titles.",
    "tokenizer": BASE,
}

HYPERPARAMETERS = {
    "learning_rate": 0.001,
    "batch_size": 16,
    "epochs": 2,
    "warmup_steps": 20,
    "lora_rank": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "target_modules": ["all-linear"],
    "seed": 42,
}
COMPUTE = {"instance_type": "local", "instance_count": 1, "max_runtime_hours": 2}
SAFEGUARDS = {
    "network_isolation": False,
    "encryption_level": "standard",
    "audit_logging": False,
    "compliance_mode": "none",
}
QUEUED = {
    "id": JOB,
    "base_model": BASE,
    "dataset_id": DATASET,
    "validation_dataset_id": None,
    "fine_tuning_method": "lora",
    "model_name": "icd-chapters",
    "status": "queued",
    "created_at": NOON,
    "updated_at": NOON,
    "validation_frequency": 0.1,
    "hyperparameters": HYPERPARAMETERS,
    "compute_config": COMPUTE,
    "tags": TAGS,
}
COMPLETED = {
    **QUEUED,
    "status": "completed",
    "updated_at": LATER,
    "fine_tuned_model": MODEL,
    "started_at": NOON,
    "completed_at": LATER,
    "current_epoch": 2,
    "total_epochs": 2,
    "current_step": 170,
    "total_steps": 170,
    "training_loss": 0.24,
    "validation_loss": 0.281,
    "security_settings": SAFEGUARDS,
    "queue_position": None,
    "tokens_per_second": 6400.0,
    "estimated_completion_at": None,
}
JOB_ITEM = {
    name: COMPLETED[name]
    for name in (
        "id", "base_model", "model_name", "fine_tuned_model", "status", "created_at", "updated_at",
        "completed_at", "fine_tuning_method", "tags",
    )
}  # fmt: skip
LOG_STREAM = (
    f'id: MTIz\nevent: log\ndata: {{"timestamp":"{NOON_MS}","level":"info","message":"job queued"}}\n\n'
    'id: MTI0\nevent: metrics\ndata: {"step":10,"training_loss":0.9,"validation_loss":1.1,'
    '"learning_rate":0.001,"epoch":0.12}\n\nevent: done\ndata: [DONE]\n\n'
)
LOG_LINES = (
    f'{{"timestamp":"{NOON_MS}","level":"info","message":"job queued"}}\n'
    '{"step":10,"training_loss":0.9,"validation_loss":1.1,"learning_rate":0.001,"epoch":0.12}\n'
)

BASE_MODEL: Json = {
    "id": BASE,
    "name": "tuneship tiny",
    "version": "1",
    "description": "A small model that trains on a laptop.",
    "parameters": 1_016_000,
    "context_length": 512,
    "supported_fine_tuning": True,
    "base_model": None,
    "fine_tuning_job_id": None,
    "created_at": None,
    "fine_tuning_method": None,
    "tags": {},
}
TUNED_MODEL = {
    **BASE_MODEL,
    "id": MODEL,
    "name": "icd-chapters",
    "description": "",
    "supported_fine_tuning": False,
    "base_model": BASE,
    "fine_tuning_job_id": JOB,
    "created_at": LATER,
    "fine_tuning_method": "lora",
    "tags": TAGS,
}

DEPLOYMENT_ITEM = {
    "id": CANDIDATE,
    "deployment_id": CANDIDATE,
    "model_name": MODEL,
    "model_id": MODEL,
    "deployment_name": "icd-candidate",
    "status": "running",
    "endpoint": f"{SERVICE}/v1/deployments/{CANDIDATE}/generate",
    "created_at": NOON,
    "updated_at": LATER,
    "compute_type": "cpu",
    "instance_type": "local",
    "tags": TAGS,
}
SCALE = {"min_replicas": 1, "max_replicas": 1, "auto_scaling": False}
MODEL_CONFIG = {
    "context_length": 512,
    "max_output_tokens": 128,
    "default_temperature": 0.0,
    "default_top_p": 1.0,
}

SPLIT = [
    {"id": BASELINE, "traffic_percentage": 90},
    {"id": CANDIDATE, "traffic_percentage": 10},
]
BACK = [
    {"id": BASELINE, "traffic_percentage": 100},
    {"id": CANDIDATE, "traffic_percentage": 0},
]
PLAIN_ENDPOINT = {
    "id": ENDPOINT,
    "name": "icd",
    "deployment_id": CANDIDATE,
    "url": f"{SERVICE}/v1/endpoints/{ENDPOINT}/generate",
    "created_at": NOON,
    "updated_at": NOON,
    "status": "active",
    "version": 1,
}
CANARY_ENDPOINT = {
    "id": CANARY,
    "name": "icd-release",
    "deployments": SPLIT,
    "url": f"{SERVICE}/v1/endpoints/{CANARY}/generate",
    "created_at": NOON,
    "updated_at": LATER,
    "status": "active",
    "version": 3,
    "lease": {"seconds": 120, "expires_at": "2026-03-01T12:12:00Z", "fallback": BACK},
}
REMOVED_ENDPOINT = {"deleted": True, "status": "deleted"}

PROMPT = "Which chapter does chronic eczema of both hands belong to?"
COMPLETION = {
    "id": f"gen_{SUFFIX}",
    "deployment_id": CANDIDATE,
    "prompt": PROMPT,
    "completion": "Diseases of the skin and subcutaneous tissue",
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 21, "completion_tokens": 9, "total_tokens": 30},
}
TEXT_LINES = (
    '{"text":"Diseases of the skin"}\n{"text":" and subcutaneous tissue"}\n'
    f"{json.dumps(COMPLETION)}\n"
)
TEXT_STREAM = (
    'event: token\ndata: {"text":"Diseases of the skin"}\n\n'
    'event: token\ndata: {"text":" and subcutaneous tissue"}\n\n'
    f"event: done\ndata: {json.dumps(COMPLETION)}\n\n"
)
STARTS = {"timestamps": [NOON], "complete": [True]}
METRICS = {
    "deployment_id": CANDIDATE,
    "start_time": NOON,
    "end_time": LATER,
    "interval": "10m",
    "metrics": {
        "latency": {
            **STARTS,
            "average": [41.5],
            "p50": [38.0],
            "p95": [77.0],
            "p99": [91.0],
            "histogram": {"le": [32.0, 64.0, 128.0, None], "counts": [[120, 540, 600, 600]]},
        },
        "throughput": {**STARTS, "requests_per_second": [1.0]},
        "error_rate": {
            **STARTS,
            "percentage": [0.0],
            "request_count": [600],
            "error_count": [0],
            "cancelled_count": [2],
            "refused_count": [1],
            "error_callers": [0],
        },
        "token_usage": {
            **STARTS,
            "total": [18_000],
            "input": [12_600],
            "output": [5_400],
            "empty_count": [0],
        },
    },
    "summary": {
        "latency": {"average": 41.5, "p50": 38.0, "p95": 77.0, "p99": 91.0},
        "throughput": {"average_requests_per_second": 1.0},
        "error_rate": {"average_percentage": 0.0, "request_count": 600, "error_count": 0},
        "token_usage": {"total": 18_000, "input": 12_600, "output": 5_400},
    },
    "summary_start_time": NOON,
    "summary_end_time": LATER,
    "in_flight": {
        "requests": 3,
        "ages_ms": {"le": [100.0, 1000.0, 10_000.0, None], "counts": [2, 3, 3, 3]},
    },
    "generate_timeout_seconds": 120.0,
}

RECEIVER = {
    "id": WEBHOOK,
    "url": "https://hooks.example.com/tuneship",
    "events": ["fine_tuning.job.*", "deployment.error"],
    "description": "Pages the one on duty.",
    "active": True,
    "created_at": NOON,
    "updated_at": NOON,
}
SECRET = {"secret": "whsec_" + "A" * 43 + "="}
DELIVERY = {
    "event_id": EVENT,
    "type": "fine_tuning.job.succeeded",
    "status": "delivered",
    "attempts": 1,
    "response_status": 204,
    "failure": None,
    "next_attempt_at": None,
    "created_at": NOON_MS,
    "updated_at": NOON_MS,
}
HAPPENED = {
    "id": EVENT,
    "type": "fine_tuning.job.succeeded",
    "timestamp": NOON_MS,
    "created_at": NOON_MS,
    "data": {"object": "fine_tuning.job", "id": JOB, "status": "completed", "sequence": 5},
}
