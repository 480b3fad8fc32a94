"""Embeddings of the main API: who answers, what is counted and recorded, and what is refused."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.service.generation.test_generation import counts, lines
from tests.support.service.in_process import Service
from tests.support.waiting import until_async
from tuneship.replicas.engine_kinds import VLLM_ENGINE
from tuneship.service.catalogues.base_models import CataloguedModel

SECRET = "zq planted text 7731"


def path_of(deployment_id: str) -> str:
    return f"/v1/deployments/{deployment_id}/embeddings"


def embed(service: Service, deployment_id: str, **body: Any) -> Any:
    answer = service.call("POST", path_of(deployment_id), json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def deployed(shared: Service) -> str:
    return shared.deployment("embeds")


def test_each_text_has_a_vector_in_its_place(shared: Service, deployed: str) -> None:
    texts = ["senile cataract", "asthma"]
    reply = embed(shared, deployed, input=texts, pooling="last", dimensions=3)
    assert reply["embeddings"] == [[0.5, -0.5, 0.25], [0.0, 0.0, 0.0]]
    assert reply["deployment_id"] == deployed
    (asked,) = shared.engines.embedded[-1:]
    assert (asked["pooling"], asked["dimensions"], asked["adapter"]) == ("last", 3, None)
    tokenizer: Any = shared.parts.catalogue.default.tokenizer
    assert [tokenizer.decode(one, skip_special_tokens=False) for one in asked["texts"]] == texts
    tokens = sum(map(len, asked["texts"]))
    assert reply["usage"] == {
        "prompt_tokens": tokens,
        "completion_tokens": 0,
        "total_tokens": tokens,
    }


def test_token_ids_are_taken_as_they_are_and_one_text_needs_no_list(
    shared: Service, deployed: str
) -> None:
    for sent, read in (
        ([7, 8, 9], [[7, 8, 9]]),
        ([[7], [8, 9]], [[7], [8, 9]]),
        ([[7], "a"], [[7], None]),
    ):
        reply = embed(shared, deployed, input=sent)
        asked = shared.engines.embedded[-1]
        assert len(reply["embeddings"]) == len(read)
        for text, wanted in zip(asked["texts"], read, strict=True):
            assert wanted is None or text == wanted
        assert asked["pooling"] == "mean"


def test_a_tuned_model_embeds_with_its_adapter(service: Service) -> None:
    model = service.model()
    deployment = service.deployment("tuned", model_name=model)
    embed(service, deployment, input="a")
    assert service.engines.embedded[-1]["adapter"] == model


def test_an_endpoint_draws_who_answers_and_counts_the_request_as_no_empty_answer(
    service: Service,
) -> None:
    one, other = service.deployment("one"), service.deployment("other")
    canary = service.canary("shop", {one: 0, other: 100})
    path = f"/v1/endpoints/{canary}/embeddings"
    answer = service.call("POST", path, json={"input": ["a", "b"]})
    assert answer.headers["X-Deployment-ID"] == answer.json()["deployment_id"] == other
    assert (counts(service, one), counts(service, other)) == ((0, 0), (1, 0))
    metrics = service.call("GET", f"/v1/deployments/{other}/metrics").json()
    usage = metrics["metrics"]["token_usage"]
    assert sum(usage["input"]) == answer.json()["usage"]["prompt_tokens"]
    assert (sum(usage["output"]), sum(usage["empty_count"])) == (0, 0)


def test_a_deployments_faults_and_a_failing_replica_are_its_errors(
    start: Callable[..., Service],
) -> None:
    service = start(allow_fault_injection=True)
    faulty = service.deployment("faulty", tags={"fault.error_rate": "1"})
    well = service.deployment("well")
    for deployment, error in ((faulty, None), (well, {"error": "output not finite"})):
        service.engines.error = error
        answer = service.call("POST", path_of(deployment), json={"input": SECRET})
        assert answer.status_code == 500
        assert SECRET not in answer.text
        assert counts(service, deployment) == (1, 1)
    assert lines(service, well) == [
        ("error", "500 internal_error: the model failed during the embedding")
    ]


def test_a_lost_replica_is_asked_again_and_too_large_a_text_is_the_callers(
    service: Service,
) -> None:
    deployment = service.deployment("one")
    service.engines.error = {"error": "the engine failed: RuntimeError", "lost": True}
    answer = service.call("POST", path_of(deployment), json={"input": "a"})
    assert (answer.status_code, len(service.engines.embedded)) == (503, 2)
    service.engines.error = {"error": "9 tokens of a text", "too_large": True}
    answer = service.call("POST", path_of(deployment), json={"input": "a"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "input")


LONG = "senile cataract of the eye " * 400


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        ({}, 400, "input", "is required"),
        ({"input": 7}, 422, "input", "none of them empty"),
        ({"input": ""}, 422, "input", "none of them empty"),
        ({"input": []}, 422, "input", "none of them empty"),
        ({"input": [[]]}, 422, "input", "none of them empty"),
        ({"input": ["a", ""]}, 422, "input", "none of them empty"),
        ({"input": [1, "a"]}, 422, "input", "none of them empty"),
        ({"input": [True]}, 422, "input", "none of them empty"),
        ({"input": [-1]}, 422, "input", "none of them empty"),
        ({"input": {"text": SECRET}}, 422, "input", "none of them empty"),
        ({"input": ["a"] * 2049}, 422, "input", "at most 2048 texts"),
        ({"input": ["a " * 400] * 1000}, 422, "input", "tokens in all"),
        ({"input": LONG}, 422, "input", "the context holds 512"),
        ({"input": ["a", "b", [9] * 513]}, 422, "input[2]", "has 513 tokens"),
        ({"input": ["a", [1 << 30]]}, 422, "input[1]", "does not know"),
        ({"input": "a", "dimensions": 0}, 422, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "dimensions": 129}, 422, "dimensions", "at most 128, the hidden size"),
        ({"input": "a", "dimensions": "4"}, 422, "dimensions", "must be an integer"),
        ({"input": "a", "pooling": SECRET}, 422, "pooling", "'mean' or 'last'"),
        ({"input": "a", "prompt": "a"}, 400, "prompt", "is not a field"),
    ],
)
def test_a_bad_request_is_refused_by_name_without_what_was_sent(
    shared: Service, deployed: str, body: dict[str, Any], status: int, param: str, message: str
) -> None:
    before = len(shared.engines.embedded)
    answer = shared.call("POST", path_of(deployed), json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), answer.text
    assert message in error["message"], error
    assert "planted" not in answer.text
    assert len(shared.engines.embedded) == before


def test_an_engine_that_cannot_is_named(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = service.deployment("one")
    monkeypatch.setattr(CataloguedModel, "engine", VLLM_ENGINE)
    answer = service.call("POST", path_of(deployment), json={"input": "a"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"] == "the engine of this base model, vllm, computes no embeddings"
    assert error["details"][0]["code"] == "unsupported_operation"


def test_embeddings_count_in_the_rate_limit_of_generations(start: Callable[..., Service]) -> None:
    service = start(generate_requests_per_minute=2)
    deployment = service.deployment("one")
    for _ in range(2):
        embed(service, deployment, input="a")
    answer = service.call("POST", path_of(deployment), json={"input": "a"})
    assert answer.status_code == 429


def test_a_caller_who_leaves_cancels_the_request(service: Service) -> None:
    deployment = service.deployment("one")
    service.engines.may_answer.clear()

    async def leave() -> None:
        asked = asyncio.ensure_future(
            service.ask("POST", path_of(deployment), "alice", json={"input": "a"})
        )
        await until_async(lambda: service.engines.embedded)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    service.run(leave())
    service.until(lambda: ("info", "the caller disconnected") in lines(service, deployment))
    service.engines.may_answer.set()
    assert service.parts.in_flight.total() == 0
