"""`tuneship evaluations watch`, `inspect` and `import`: verdicts as exit codes, answers, and evals of OpenAI's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.support.service.evaluations import PLANTED, PlayedAnswers, right, rows
from tests.support.service.in_process import Service, jsonl
from tuneship.cli.main import app


class Terminal:
    """The command line of a user of a service with played answers."""

    def __init__(self, service: Service, folder: Path) -> None:
        self.played = PlayedAnswers(service).set_up()
        self.file = folder / "held-out.jsonl"
        self.file.write_bytes(jsonl(*rows(400)))
        service.listen()
        key = service.headers["alice"]["Authorization"].removeprefix("Bearer ")
        self.environment = {
            "TUNESHIP_URL": service.url,
            "TUNESHIP_API_KEY": key,
            "TUNESHIP_CLIENT_ID": "alice",
            "XDG_CONFIG_HOME": str(folder / "config"),
        }

    def run(self, *words: str) -> Result:
        return CliRunner().invoke(app, ["evaluations", *words], env=self.environment)


@pytest.fixture
def terminal(start: Callable[..., Service], tmp_path: Path) -> Terminal:
    return Terminal(start(), tmp_path)


def test_watching_ends_with_a_code_for_each_verdict(terminal: Terminal) -> None:
    played = terminal.played
    passed = terminal.run("watch", played.create(margin=0.08))
    assert passed.exit_code == 0, passed.output
    assert "pass: not worse on 400 examples" in passed.output
    few = terminal.run("watch", played.create(max_examples=50))
    assert few.exit_code == 5, few.output
    as_json = terminal.run("watch", played.create(margin=0.08), "--json")
    assert json.loads(as_json.stdout)["verdict"] == "pass"
    played.tuned_fails = range(400)
    worse = terminal.run("watch", played.create())
    assert worse.exit_code == 3, worse.output
    assert PLANTED not in passed.output + few.output + worse.output
    played.service.engines.may_answer.clear()
    made = played.create()
    played.service.call("POST", f"/v1/evaluations/{made}/cancel")
    played.service.engines.may_answer.set()
    assert terminal.run("watch", made).exit_code == 1


def test_inspecting_asks_again_for_the_lost_lines_of_the_evaluated_file(
    terminal: Terminal,
) -> None:
    played = terminal.played
    played.tuned_fails = {4, 7}
    found = played.ended(played.create(stop_early=False))

    done = terminal.run("inspect", found["id"], str(terminal.file), "--losses")

    assert done.exit_code == 0, done.output
    assert [line for line in done.output.splitlines() if line.startswith("==")] == [
        "== line 5: loss",
        "== line 8: loss",
    ]
    assert f"user: {PLANTED}: case 4?" in done.output
    assert f"reference: {PLANTED}, chapter 0" in done.output
    assert f"candidate: {PLANTED}, no idea" in done.output
    assert f"baseline: {PLANTED}, chapter 0" in done.output
    terminal.file.write_bytes(jsonl(*rows(399)))
    other = terminal.run("inspect", found["id"], str(terminal.file))
    assert other.exit_code == 1
    assert "is not the file that was evaluated" in other.output
    choices = {"metadata": {"choices": [right(0), right(1)]}}
    lines = jsonl({"instruction": "case 0?", "response": right(0), **choices})
    alone = played.create(
        dataset_id=played.service.dataset(content=lines),
        graders=[{"name": "c", "type": "choice"}],
    )
    likelihood = terminal.run("inspect", alone, str(terminal.file))
    assert likelihood.exit_code == 1
    assert "no answer was written" in likelihood.output


EXPORTED = {
    "id": "eval_68",
    "object": "eval",
    "name": "Chapters (v2)",
    "created_at": 1_772_366_400,
    "data_source_config": {
        "type": "custom",
        "schema": {
            "type": "object",
            "properties": {
                "item": {
                    "type": "object",
                    "properties": {"question": {"type": "string"}, "chapter": {}},
                },
                "sample": {"type": "object"},
            },
        },
    },
    "testing_criteria": [
        {
            "id": "Same chapter-37c7",
            "type": "string_check",
            "name": "Same chapter",
            "input": "{{sample.output_text}}",
            "reference": "{{item.chapter}}",
            "operation": "eq",
        }
    ],
    "metadata": {},
}
RUN = {
    "object": "eval.run",
    "data_source": {
        "type": "completions",
        "source": {"type": "file_id", "id": "file-1"},
        "input_messages": {
            "type": "template",
            "template": [{"role": "user", "content": "{{item.question}}"}],
        },
    },
}


def exported(folder: Path, **files: Any) -> list[str]:
    """Write an eval and a run as OpenAI's API returns them, and return the words that import them with rows."""
    items = [
        {"item": {"question": f"{PLANTED}: case {n}?", "chapter": right(n)}} for n in range(30)
    ]
    contents = {"eval": EXPORTED, "run": RUN, "rows": items} | files
    for name in ("eval", "run"):
        (folder / f"{name}.json").write_text(json.dumps(contents[name]))
    (folder / "rows.jsonl").write_bytes(jsonl(*contents["rows"]))
    paths = [str(folder / name) for name in ("eval.json", "rows.jsonl", "run.json")]
    return ["import", *paths[:2], "--run", paths[2]]


def test_an_exported_eval_becomes_a_dataset_and_an_evaluation(
    terminal: Terminal, tmp_path: Path
) -> None:
    played = terminal.played
    played.tuned_fails = {4, 7}
    both = ["--candidate", played.candidate, "--baseline", played.baseline]
    run = sampled(max_completion_tokens=32, temperature=0, seed=None)
    done = terminal.run(*exported(tmp_path, run=run), *both, "--json")
    assert done.exit_code == 0, done.output
    found = played.ended(json.loads(done.stdout)["id"])
    assert found["settings"]["max_tokens"] == 32
    assert (found["name"], found["examples"]["scored"]) == ("Chapters _v2_", 30)
    (grader,) = found["graders"]
    assert (grader["wins"], grader["losses"]) == (0, 2)

    printed = terminal.run(*exported(tmp_path))
    assert printed.exit_code == 0, printed.output
    (tmp_path / "order.json").write_text(printed.stdout)
    order = ["--params", str(tmp_path / "order.json"), "--candidate", played.candidate, "--json"]
    made = terminal.run("create", *order)
    assert made.exit_code == 0, made.output
    assert (
        played.ended(json.loads(made.stdout)["id"])["graders"][0]["candidate"]["score"] == 28 / 30
    )
    # The items of a run's exported output, and a prompt instead of a run.
    items = [{"datasource_item": {"question": "case 1?", "chapter": right(1)}, "results": []}]
    words = exported(tmp_path, rows=items)
    own = terminal.run(*words[:3], "--prompt", "{{item.question}}", *both[:2], "--json")
    assert played.ended(json.loads(own.stdout)["id"])["examples"]["scored"] == 1


def sampled(**fields: Any) -> dict[str, Any]:
    return {"data_source": RUN["data_source"] | {"sampling_params": fields}}  # type: ignore[operator]


CRITERION = EXPORTED["testing_criteria"][0]  # type: ignore[index]
LOGS = {"type": "logs", "schema": {}}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"eval": EXPORTED | {"testing_criteria": [CRITERION | {"type": "label_model"}]}},
            "testing_criteria.0: cannot be label_model",
        ),
        (
            {"eval": EXPORTED | {"data_source_config": LOGS}},
            "data_source_config: cannot be logs",
        ),
        ({"rows": [{"item": {"chapter": PLANTED}}]}, "line 1: item lacks a field"),
        ({"rows": [{"question": PLANTED}]}, "line 1: item: must be an object"),
        ({"rows": [{"item": {"question": 5, "chapter": PLANTED}}]}, "does not fit item_schema"),
        ({"run": sampled(temperature=1.0)}, "sampling_params.temperature: must be 0"),
        ({"run": sampled(max_completion_tokens=257)}, "max_tokens must be at most 256"),
        ({"run": {"data_source": {"type": "jsonl"}}}, "data_source.input_messages: is needed"),
    ],
)
def test_an_eval_that_cannot_be_imported_is_refused_and_nothing_is_uploaded(
    terminal: Terminal, tmp_path: Path, files: dict[str, Any], said: str
) -> None:
    service = terminal.played.service
    before = service.call("GET", "/v1/datasets").json()["pagination"]["total"]
    words = [*exported(tmp_path, **files), "--candidate", terminal.played.candidate]
    done = terminal.run(*words)
    assert done.exit_code == 1
    assert said in done.output
    assert PLANTED not in done.output
    assert service.call("GET", "/v1/datasets").json()["pagination"]["total"] == before
    missing = terminal.run(*exported(tmp_path), "--candidate", "dep_" + "0" * 24)
    assert missing.exit_code == 1
    assert service.call("GET", "/v1/datasets").json()["pagination"]["total"] == before
