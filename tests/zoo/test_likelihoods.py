"""The graders `loss` and `choice` give what transformers computes, and what a training reports of the same rows."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.models.real_workers import RealWorkers, convert_here
from tests.support.service.evaluations import ENDS
from tests.support.service.in_process import CATALOGUE, RealParts, Service, jsonl
from tests.support.zoo.cells import FIRST, OTHERS
from tests.support.zoo.checkpoints import Checkpoint
from tests.support.zoo.conversations import ROWS, turn
from tests.support.zoo.lives import World, added, expected_rows
from tuneship.contract.jobs import ENDED

pytestmark = [
    pytest.mark.slow,
    # peft asks a model of transformers for a property by its old name.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
]

# The engine computes the same sums in another order.
TOLERANCE = 1e-4
GRADERS = [{"name": "c", "type": "choice"}, {"name": "l", "type": "loss"}]
EXAMPLES = ROWS[:8]
COLOURS = ("red", "green", "dark blue", "white")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World.begin(tmp_path_factory.mktemp("world")) as made:
        yield made


def evaluated(service: Service, dataset: str, **pair: str) -> dict[int, dict[str, Any]]:
    """The results of an evaluation by line."""
    body = {"name": "l", "dataset_id": dataset, "graders": GRADERS, "stop_early": False, **pair}
    answer = service.call("POST", "/v1/evaluations", json=body)
    assert answer.status_code == 201, answer.text
    path = f"/v1/evaluations/{answer.json()['id']}"
    service.until(lambda: service.call("GET", path).json()["status"] in ENDS)
    found = service.call("GET", f"{path}/results", params={"limit": 1000}).json()["results"]
    return {one["line"]: one for one in found}


def log_probabilities(model: Any, ids: Sequence[int], start: int) -> list[float]:
    """The log probability of each token from `start` on, by one forward pass of transformers."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
    scores = logits.log_softmax(-1)
    return [float(scores[place - 1, ids[place]]) for place in range(start, len(ids))]


@pytest.mark.parametrize(
    "checkpoint",
    [
        pytest.param(FIRST[0], id=FIRST[0].name),
        *(pytest.param(one, id=one.name, marks=pytest.mark.soak) for one in (*FIRST[1:], *OTHERS)),
    ],
)
def test_a_base_of_the_zoo_is_scored_as_by_transformers(
    world: World, checkpoint: Checkpoint
) -> None:
    name = checkpoint.name.replace(" ", "-").replace(",", "")
    source = checkpoint.build(world.folder / name)
    added(world, source, name)
    answers = list(dict.fromkeys(row[1]["content"] for row in EXAMPLES))
    # Each example has its own answer and two others.
    choices = [
        [row[1]["content"], *[one for one in answers if one != row[1]["content"]][:2]]
        for row in EXAMPLES
    ]
    lines = [
        {"messages": row, "metadata": {"choices": of_row}}
        for row, of_row in zip(EXAMPLES, choices, strict=True)
    ]
    service = world.service
    dataset = service.dataset(content=jsonl(*lines), format="conversation")
    deployment = service.deployment(name.lower(), model_name=name)

    found = evaluated(service, dataset, candidate=deployment)

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    for line, (row, of_row) in enumerate(zip(EXAMPLES, choices, strict=True), 1):
        rows = [[row[0], turn("assistant", one)] for one in of_row]
        expected = [
            log_probabilities(model, one.ids, one.start)
            for one in expected_rows(checkpoint, source, rows)
        ]
        sums = [math.fsum(one) for one in expected]
        scores = found[line]["candidate"]
        loss = -sums[0] / len(expected[0])
        assert scores["l"] == pytest.approx(loss, abs=TOLERANCE)
        if min(abs(sums[0] - other) for other in sums[1:]) > TOLERANCE:
            assert scores["c"] == float(all(sums[0] > other for other in sums[1:]))
    assert {one["outcome"] for one in found.values()} == {"scored"}


def test_losses_are_those_of_the_rows_of_a_training(tmp_path: Path) -> None:
    """The shipped model and a tuned one: the training reports both for its validation rows."""
    rows = [
        {
            "instruction": f"What is case {number}?",
            "response": COLOURS[number % 4],
            "metadata": {"choices": list(COLOURS)},
        }
        for number in range(104)
    ]
    parts = RealParts(CATALOGUE, RealWorkers(), convert_here)
    with Service(tmp_path / "data", real=parts) as service:
        training, held_out = (
            service.dataset(content=jsonl(*part)) for part in (rows[24:], rows[:24])
        )
        body = {
            "base_model": "tuneship-tiny", "model_name": "m", "dataset_id": training,
            "validation_dataset_id": held_out, "comparison": {}, "validation_frequency": 1.0,
            "hyperparameters": {"epochs": 2, "batch_size": 8, "learning_rate": 0.003},
        }  # fmt: skip
        job = service.call("POST", "/v1/fine-tuning/jobs", json=body).json()["id"]
        service.until(lambda: service.job_status(job) in ENDED)
        ended = service.call("GET", f"/v1/fine-tuning/jobs/{job}").json()
        assert ended["status"] == "completed", ended["error"]
        model = ended["fine_tuned_model"]
        metrics = service.call("GET", f"/v1/fine-tuning/jobs/{job}/metrics").json()
        tuned = service.deployment("tuned", model_name=model)
        found = evaluated(service, held_out, candidate=tuned, baseline=service.deployment("base"))

    losses = metrics["row_losses"]
    assert losses["rows"] == [*range(1, 25)]
    for line, start, served in zip(losses["rows"], losses["start"], losses["served"], strict=True):
        assert found[line]["baseline"]["l"] == pytest.approx(start, abs=TOLERANCE)
        assert found[line]["candidate"]["l"] == pytest.approx(served, abs=TOLERANCE)
    # The shipped model once more by transformers, with each choice.
    base = CATALOGUE.default
    model = AutoModelForCausalLM.from_pretrained(base.path, dtype=torch.float32).eval()
    tokenizer: Any = base.tokenizer
    for line, row in enumerate(rows[:24], 1):
        asked = f"<|user|>{row['instruction']}<|assistant|>"
        start = len(tokenizer.encode(asked, add_special_tokens=False).ids)
        sums = {
            one: math.fsum(
                log_probabilities(
                    model,
                    tokenizer.encode(f"{asked}{one}<|end|>", add_special_tokens=False).ids,
                    start,
                )
            )
            for one in COLOURS
        }
        right = max(sums, key=sums.__getitem__) == row["response"]
        assert found[line]["baseline"]["c"] == float(right)
