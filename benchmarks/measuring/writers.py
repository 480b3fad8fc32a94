"""Deploys models that write long answers, so that generations reach their token limit."""

import json
from collections.abc import Iterator

from measuring.running import deploy, example_rows, job_on, tune, upload

from tuneship.client import Client


def writers(
    client: Client, count: int, base_model: str = "tuneship-tiny", rows: int = 320
) -> Iterator[tuple[str, str]]:
    """Tune and deploy `count` models on the same rows, each with its own seed; yields deployment and model."""
    training = upload(client, "training", _long_answers("hospital_a.jsonl", rows))
    validation = upload(client, "validation", _long_answers("validation.jsonl", 32))
    request = job_on(training, validation, base_model)
    for seed in range(count):
        hyperparameters = request.hyperparameters.model_copy(update={"seed": seed})
        job = tune(client, request.model_copy(update={"hyperparameters": hyperparameters}))
        model = str(job.fine_tuned_model)
        yield deploy(client, model, f"writer {seed} on {base_model}"), model


def _long_answers(source: str, rows: int) -> list[bytes]:
    """Examples whose answer lists several diagnoses."""
    questions = [json.loads(line)["instruction"] for line in example_rows(source, rows + 5)]
    names = [question.partition("? ")[2] for question in questions]
    return [
        json.dumps({"instruction": questions[n], "response": "; ".join(names[n : n + 5])}).encode()
        + b"\n"
        for n in range(rows)
    ]
