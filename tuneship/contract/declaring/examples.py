"""Values that the examples of several operations share: one release, from its dataset to its canary endpoint.

Data only. Each operation names its own example where it is declared (`@operation(..., example=...)`).
"""

from typing import Any

Json = dict[str, Any]

SUFFIX = "4k2m9x7q1w8e5r3t6y0u2i4o"
DATASET, OTHER_DATASET = f"ds_{SUFFIX}", "ds_8v1n5b3c7z9l2k4j6h0g1f3d"
JOB = f"ft_{SUFFIX}"
BASE = "tuneship-tiny"
MODEL = f"ft:{BASE}:icd-chapters:{SUFFIX}"
BASELINE, CANDIDATE = "dep_2s4d6f8g0h1j3k5l7z9x4c8v", f"dep_{SUFFIX}"
ENDPOINT, CANARY = f"ep_{SUFFIX}", f"cep_{SUFFIX}"
EVALUATION, OTHER_EVALUATION = f"evl_{SUFFIX}", "evl_6b2n8m4k0j7h1g5f3d9s2a4q"
RELEASE = f"rel_{SUFFIX}"
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
    "evaluation_id": EVALUATION,
    "baseline_id": OTHER_EVALUATION,
    "release_id": RELEASE,
    "event_id": EVENT,
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
QUEUED_JOB = {
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
COMPLETED_JOB = {
    **QUEUED_JOB,
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
    "ends_learnt": 1.0,
    "devices": None,
    "security_settings": SAFEGUARDS,
    "queue_position": None,
    "tokens_per_second": 6400.0,
    "estimated_completion_at": None,
}
JOB_ITEM = {
    name: COMPLETED_JOB[name]
    for name in (
        "id", "base_model", "model_name", "fine_tuned_model", "status", "created_at", "updated_at",
        "completed_at", "fine_tuning_method", "tags",
    )
}  # fmt: skip
JOB_LOG_EVENTS = (
    f'id: MTIz\nevent: log\ndata: {{"timestamp":"{NOON_MS}","level":"info","message":"job queued"}}\n\n'
    'id: MTI0\nevent: metrics\ndata: {"step":10,"training_loss":0.9,"validation_loss":1.1,'
    '"learning_rate":0.001,"epoch":0.12}\n\nevent: done\ndata: [DONE]\n\n'
)
JOB_LOG_LINES = (
    f'{{"timestamp":"{NOON_MS}","level":"info","message":"job queued"}}\n'
    '{"step":10,"training_loss":0.9,"validation_loss":1.1,"learning_rate":0.001,"epoch":0.12}\n'
)


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

JOB_REQUESTS = {
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
}
JOB_METRICS = {
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
DEPLOYMENT_REQUESTS = {
    "full": {
        "model_name": MODEL,
        "deployment_name": "icd-candidate",
        "model_config": {"max_output_tokens": 128, "default_temperature": 0.0},
        "tags": TAGS,
    },
    "short reference": {"model_id": BASE, "deployment_name": "icd-baseline"},
}
CREATED_DEPLOYMENT = {
    **DEPLOYMENT_ITEM,
    "status": "creating",
    "updated_at": NOON,
    **SCALE,
    "region": "local",
}
RUNNING_DEPLOYMENT = {
    **DEPLOYMENT_ITEM,
    **SCALE,
    "region": "local",
    "current_replicas": 1,
    "model_config": MODEL_CONFIG,
    "security_settings": {**SAFEGUARDS, "private_endpoints": False},
    "health": "healthy",
}
DEPLOYMENT_CHANGES = {
    "replicas": {"min_replicas": 1, "max_replicas": 2},
    "tags and defaults": {
        "tags": {"stage": "canary", "team": None},
        "model_config": {"default_temperature": 0.2, "default_top_p": None},
    },
}
UPDATED_DEPLOYMENT = {
    **DEPLOYMENT_ITEM,
    **SCALE,
    "status": "updating",
    "model_config": MODEL_CONFIG,
}
DEPLOYMENT_LOGS = {
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
