"""The fake service with datasets, jobs and any number of deployments in addition, so that whole releases can run.

A job ends when it is polled; its status and losses are functions of its hyperparameters.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any

from tests.support.fakes.canary_service import Answer, Arm, FakeService, Refusal, as_text

# Seconds until a generation is answered; much more than a busy machine adds, because the smoke test compares times.
ANSWER_TIMEOUT_S = 0.1
TOKENS = {"prompt_tokens": 1, "response_tokens": 1}
JOB: dict[str, Any] = {
    "hyperparameters": {},
    "compute_config": {},
    "validation_dataset_id": None,
    "fine_tuning_method": "lora",
    "validation_frequency": 0.1,
}


class WholeService(FakeService):
    """The fake service; `datasets` and `jobs` by id as they are answered, `models` by id of the deployment."""

    def __init__(self, *, extensions: bool = True) -> None:
        """Use buckets of a twentieth of a second, so that a rollout takes only seconds."""
        super().__init__(seconds_per_bucket=0.05, extensions=extensions)
        self.arms.clear()
        self.datasets: dict[str, dict[str, Any]] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.models: dict[str, str] = {}
        # Tags of each deployment.
        self.tags: dict[str, dict[str, str]] = {}
        self.deleted_models: set[str] = set()
        # The base model of each file that was validated.
        self.validated_for: list[str] = []
        self.losses: Callable[[Mapping[str, Any]], list[float]] = lambda _: [2.0, 1.5, 1.2, 1.0]
        self.status: Callable[[Mapping[str, Any]], str] = lambda _: "completed"
        # The losses by row of a job; None: this server publishes none.
        self.row_losses: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
        # The number of polls after which a job has ended.
        self.polls_to_end = 1

    def other(self, method: str, parts: list[str], query: dict[str, str], body: Any) -> Answer:
        """Answer requests that the base class does not know."""
        if parts[0] == "datasets":
            return self._datasets(method, parts[1:], query, body)
        if parts[0] == "fine-tuning":
            return self._jobs(method, parts[2:], query, body)
        if parts[0] == "deployments" and method == "POST":
            return self._deploy(parts[1:], body)
        return super().other(method, parts, query, body)

    # -- datasets --

    def _datasets(self, method: str, rest: list[str], query: dict[str, str], body: Any) -> Answer:
        if rest == ["validate"]:
            form = _form(body)
            self.validated_for.append(form.get("base_model", b"").decode())
            count = len(form["file"].splitlines())
            details = {"format": "instruction", "has_instructions": True, "has_responses": True}
            return 200, {
                "is_valid": True,
                "num_examples": count,
                "total_tokens": count,
                "token_distribution": TOKENS,
                "format_details": details,
                "suggestions": [],
            }
        if rest == ["merge"]:
            parts = [self.datasets[one] for one in body["dataset_ids"]]
            examples = sum(part["num_examples"] for part in parts)
            return 201, self.add_dataset(body["name"], examples, source=body["dataset_ids"])
        if method == "POST":
            form = _form(body)
            tags = json.loads(form.get("tags", b"{}"))
            count = len(form["file"].splitlines())
            return 201, self.add_dataset(form["name"].decode(), count, **tags)
        if method == "GET" and rest:
            return 200, self.datasets[rest[0]]
        return _listed("datasets", self.datasets.values(), query)

    def add_dataset(
        self, name: str, examples: int, *, source: list[str] | None = None, **tags: str
    ) -> dict[str, Any]:
        """Add a processed dataset and return it."""
        dataset_id = f"ds_{len(self.datasets):010d}"
        self.datasets[dataset_id] = {
            "id": dataset_id,
            "name": name,
            "format": "instruction",
            "num_examples": examples,
            "total_tokens": examples,
            "created_at": as_text(self.now),
            "updated_at": as_text(self.now),
            "status": "processed",
            "description": "",
            "tags": tags,
            "token_distribution": TOKENS,
            "format_details": {
                "format": "instruction",
                "has_instructions": True,
                "has_responses": True,
            },
            **({"source_datasets": source} if source else {}),
        }
        return self.datasets[dataset_id]

    # -- jobs --

    def _jobs(self, method: str, rest: list[str], query: dict[str, str], body: Any) -> Answer:
        if method == "POST" and not rest:
            return 201, self._create_job(body)
        if not rest:
            return _listed("jobs", self.jobs.values(), query)
        job = self.jobs.get(rest[0])
        if job is None:
            raise Refusal(404, "resource_not_found", "no such job")
        if rest[1:] == ["cancel"]:
            if job["status"] != "running":
                raise Refusal(409, "invalid_request_error", "it has ended")
            job["status"] = "cancelled"
            return 200, {"id": job["id"], "status": "cancelling", "updated_at": as_text(self.now)}
        if rest[1:] == ["metrics"]:
            return 200, self._job_metrics(job)
        self._look_at(job)
        return 200, job

    def _look_at(self, job: dict[str, Any]) -> None:
        job["polls"] += 1
        if job["polls"] >= self.polls_to_end and job["status"] == "running":
            job["status"] = self.status(job["hyperparameters"])
            if job["status"] == "completed":
                suffix = job["id"].removeprefix("ft_")
                job["fine_tuned_model"] = f"ft:tuneship-tiny:{job['model_name']}:{suffix}"
                job["current_step"] = job["total_steps"]
                last = self.losses(job["hyperparameters"])[-1]
                job["training_loss"] = job["validation_loss"] = last

    def _create_job(self, body: Any) -> dict[str, Any]:
        if "comparison" in body and not self.extensions:
            raise Refusal(422, "validation_error", "unknown field: comparison")
        named = (body.get("comparison") or {}).get("model")
        if named in self.deleted_models:
            raise Refusal(
                404, "model_not_found", "comparison.model names a model that does not exist"
            )
        job_id = f"ft_{len(self.jobs):010d}"
        self.jobs[job_id] = {
            **JOB,
            **body,
            "id": job_id,
            "status": "running",
            "created_at": as_text(self.now),
            "updated_at": as_text(self.now),
            "fine_tuned_model": None,
            "current_step": 0,
            "total_steps": 400,
            "polls": 0,
        }
        return self.jobs[job_id]

    def _job_metrics(self, job: Mapping[str, Any]) -> dict[str, Any]:
        validation = self.losses(job["hyperparameters"])
        steps = [100 * (place + 1) for place in range(len(validation))]
        return {
            "job_id": job["id"],
            "steps": steps,
            "training_loss": validation,
            "validation_loss": validation,
            "learning_rate": [0.001] * len(steps),
            "epochs": [step / 400 for step in steps],
            "accuracy": [0.5] * len(steps),
            "perplexity": [2.718281828459045**loss for loss in validation],
            "created_at": as_text(self.now),
            **({"row_losses": self.row_losses(job)} if self.row_losses else {}),
        }

    # -- deployments --

    def _deployments(self, method: str, rest: list[str], query: dict[str, str]) -> Answer:
        if rest:
            return super()._deployments(method, rest, query)
        kept = [self.shown(*one) for one in self.arms.items() if one[0] not in self.deleted]
        return _listed("deployments", kept, query)

    def _deploy(self, rest: list[str], body: Any) -> Answer:
        if rest[1:] == ["generate"]:
            time.sleep(ANSWER_TIMEOUT_S)
            return 200, {
                "id": "gen_0",
                "deployment_id": rest[0],
                "prompt": body["prompt"],
                "completion": "text",
                "finish_reason": "stop",
                "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
            }
        deployment_id = f"dep_{len(self.arms):010d}"
        self.arms[deployment_id] = Arm()
        self.models[deployment_id] = body["model_name"]
        self.tags[deployment_id] = body.get("tags", {})
        return 201, self.shown(deployment_id, self.arms[deployment_id])

    def shown(self, name: str, arm: Arm) -> dict[str, Any]:
        """Describe a deployment, with its model and tags."""
        own = {"model_name": self.models[name], "tags": self.tags[name]}
        return super().shown(name, arm) | own

    def serving(self) -> str | None:
        """Return the model that gets all traffic, if there is one."""
        return next((self.models[one] for one, share in self.weights.items() if share == 100), None)


def _form(body: bytes) -> dict[str, bytes]:
    """Parse a multipart form, whose content type stands before it."""
    message = BytesParser(policy=HTTP).parsebytes(body)
    return {
        str(part.get_param("name", header="content-disposition")): part.get_payload(decode=True)
        for part in message.iter_parts()
    }


def _listed(name: str, every: Iterable[dict[str, Any]], query: dict[str, str]) -> Answer:
    """Answer with one page of the objects that have the requested tags, newest first."""
    wanted = {key[5:-1]: value for key, value in query.items() if key.startswith("tags[")}
    found = [one for one in every if wanted.items() <= one.get("tags", {}).items()]
    return 200, {name: found[::-1], "pagination": _page(len(found))}


def _page(total: int) -> dict[str, Any]:
    return {"total": total, "limit": 100, "offset": 0, "next_offset": None}
