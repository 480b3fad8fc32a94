"""The commands of the API call a real service over sockets, and say in one line what is wrong."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.support.models.conversion import ADAPTER
from tests.support.service.evaluations import cancelled, evaluated
from tests.support.service.in_process import ANSWER, LINES, Service, jsonl
from tests.support.service.releases import asked, ended
from tests.support.service.whole_api import BODIES, Own
from tests.support.waiting import PATIENCE_S, until
from tuneship.cli.declared import DeclaredVerb, resources, verbs_of
from tuneship.cli.examples import command_line
from tuneship.cli.main import app
from tuneship.contract.declaring.operation import DECLARED, JSON_LINES

VERBS = {
    verb.operation.name: verb for group in resources() for verb in verbs_of(group).values()
}  # fmt: skip
# What is removed is removed at last.
ORDER = sorted(DECLARED, key=lambda one: one.method == "DELETE")


class Place:
    """A service with one resource of each kind, and the command line of a user of it."""

    def __init__(self, service: Service, folder: Path) -> None:
        self.service = service
        self.file = folder / "train.jsonl"
        self.file.write_bytes(jsonl(*LINES))
        self.adapter = folder / "adapter"
        self.adapter.mkdir()
        for name, content in ADAPTER.items():
            (self.adapter / name).write_bytes(content)
        service.names["receiver.test"] = ["9.9.9.9"]
        self.model = service.model()
        self.deployment = service.deployment("serving", model_name=service.model())
        hook = {"url": "https://receiver.test/hook", "events": ["*"]}
        webhook = service.call("POST", "/v1/webhooks", json=hook).json()["id"]
        event = service.call("POST", f"/v1/webhooks/{webhook}/test", json={}).json()["event_id"]
        self.own = Own(
            service.dataset(), service.dataset(), self.deployment, "tuneship-tiny", "made"
        )
        self.ids = {
            "dataset_id": service.dataset(),
            "job_id": service.job(),
            "model_id": self.model,
            "deployment_id": self.deployment,
            "webhook_id": webhook,
            "event_id": event,
            **dict.fromkeys(
                ("evaluation_id", "baseline_id"),
                evaluated(service, service.dataset(), self.deployment),
            ),
            "endpoint_id": service.endpoint("plain", self.deployment),
            "release_id": asked(service, "asked").id,
        }
        self.ended = ended(service, "ended").id
        self.cancelled = cancelled(service, service.dataset(), self.deployment)
        self.canary = service.canary("split", {self.deployment: 100})
        service.listen()
        key = service.headers["alice"]["Authorization"].removeprefix("Bearer ")
        self.environment = {
            "TUNESHIP_URL": service.url,
            "TUNESHIP_API_KEY": key,
            "TUNESHIP_CLIENT_ID": "alice",
            "XDG_CONFIG_HOME": str(folder / "config"),
        }

    def run(self, *words: str, stdin: str | None = None, **environment: str) -> Result:
        return CliRunner().invoke(
            app, list(words), input=stdin, env={**self.environment, **environment}
        )

    def json(self, *words: str, stdin: str | None = None) -> Any:
        done = self.run(*words, "--json", stdin=stdin)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def words(self, verb: DeclaredVerb, body: Mapping[str, Any] | None = None) -> list[str]:
        ids = self.ids | ({"endpoint_id": self.canary} if verb.group == "canary" else {})
        if verb.operation.name == "cancel_evaluation":
            ids |= {"evaluation_id": self.cancelled}
        elif verb.operation.name == "delete_release":
            ids |= {"release_id": self.ended}
        made = BODIES[verb.operation.name](self.own) if verb.operation.body_parameter else {}
        operation, file = verb.operation, self.file
        if operation.is_download:
            file = self.file.with_name("downloaded")
        elif operation.file_media is not JSON_LINES:
            file = self.adapter
        return command_line(verb, ids, made if body is None else body, str(file))

    def process(self, *words: str, **options: Any) -> "subprocess.Popen[str]":
        """Start the command as a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "tuneship.cli.main", *words],
            env={**os.environ, **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("cli")
    with Service(folder / "data") as service:
        yield Place(service, folder)


@pytest.mark.parametrize("operation", ORDER, ids=lambda one: one.name)
def test_every_declared_operation_is_called(place: Place, operation: Any) -> None:
    words = place.words(VERBS[operation.name])
    if operation.name == "delete_deployment":
        words.append("--force")
    reply = place.json(*words)
    if operation.is_download:
        assert set(reply["files"]) == {"README.md", "model_card.json", "weights"}
        return
    operation.reply_type.validate_python(reply)


@pytest.fixture
def fresh(start: Callable[..., Service], tmp_path: Path) -> Place:
    return Place(start(), tmp_path)


def test_a_list_in_a_pipe_is_a_line_of_names_and_one_for_each_entry(place: Place) -> None:
    name = "tab.and.more"
    made = place.service.dataset(name=name, tags='{"a b": "c"}')
    lines = place.run("datasets", "list").stdout.splitlines()
    columns = lines[0].split("\t")
    rows = [dict(zip(columns, line.split("\t"), strict=True)) for line in lines[1:]]
    row = next(one for one in rows if one["id"] == made)
    assert (row["name"], row["status"], row["tags"]) == (name, "processed", "a b=c")
    assert row["num_examples"] == str(len(LINES))
    one = dict(line.split("\t") for line in place.run("datasets", "get", made).stdout.splitlines())
    assert one["id"] == made
    assert int(one["token_distribution.response_tokens"]) > 0


def test_every_page_is_fetched_and_json_is_then_one_entry_a_line(place: Place) -> None:
    for _ in range(3):
        place.service.dataset()
    page = place.json("datasets", "list", "--limit", "2")
    assert (len(page["datasets"]), page["pagination"]["limit"]) == (2, 2)
    done = place.run("datasets", "list", "--limit", "2", "--all", "--json")
    ids = [json.loads(line)["id"] for line in done.stdout.splitlines()]
    assert len(ids) == len(set(ids)) == page["pagination"]["total"]
    table = place.run("datasets", "list", "--limit", "2", "--all").stdout.splitlines()
    assert [line.split("\t")[0] for line in table[1:]] == ids


def test_filters_and_fields_are_options(place: Place) -> None:
    tagged = place.service.dataset(tags='{"team": "cli"}')
    found = place.json("datasets", "list", "--tags", "team=cli")["datasets"]
    assert [one["id"] for one in found] == [tagged]
    job = place.json(
        *("jobs", "create", "--params", "-", "--model-name", "seven"),
        *("--set", "hyperparameters.epochs=2"),
        stdin=f"base_model: tuneship-tiny\ndataset_id: {tagged}\nmodel_name: six\n"
        "hyperparameters: {epochs: 9, batch_size: 4}\n",
    )
    assert job["model_name"] == "seven"
    chosen = job["hyperparameters"]
    assert (chosen["epochs"], chosen["batch_size"]) == (2, 4)
    key = ("--idempotency-key", "once", "--json")
    words = place.words(VERBS["create_job"])
    assert place.run(*words, *key).stdout == place.run(*words, *key).stdout


def test_the_steps_of_a_job_are_a_table(fresh: Place) -> None:
    job = fresh.service.job()
    trainer = fresh.service.trainer_of(job)
    trainer.start_of(2)
    trainer.step(1, loss=2.0, evaluated=True)
    trainer.step(2, loss=1.5, evaluated=True)
    trainer.complete()
    fresh.service.until(lambda: fresh.service.job_status(job) == "completed")
    lines = fresh.run("jobs", "metrics", job).stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("steps\t"))
    assert lines[at].split("\t")[:3] == ["steps", "training_loss", "validation_loss"]
    assert [line.split("\t")[:2] for line in lines[at + 1 :]] == [["1", "2.0"], ["2", "1.5"]]


# Streams


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_log_is_followed_to_the_end_of_the_job(fresh: Place, form: tuple[str, ...]) -> None:
    job = fresh.service.job()
    trainer = fresh.service.trainer_of(job)
    trainer.start_of(2)
    with fresh.process("jobs", "logs", job, "-f", *form) as following:
        assert following.stdout is not None
        first = following.stdout.readline()
        trainer.step(1)
        trainer.step(2)
        trainer.complete()
        rest, wrong = following.communicate(timeout=PATIENCE_S)
    assert (following.returncode, wrong) == (0, "")
    lines = [first, *rest.splitlines()]
    if form:
        steps = [entry["step"] for entry in map(json.loads, lines) if "step" in entry]
        assert steps == [1, 2]
    else:
        assert [line.split("\t")[0] for line in lines if "step=" in line] == ["step=1", "step=2"]


def test_ctrl_c_ends_a_stream_quietly(fresh: Place) -> None:
    job = fresh.service.job()
    fresh.service.trainer_of(job).start_of(2)
    with fresh.process("jobs", "logs", job, "--follow") as following:
        assert following.stdout is not None
        assert following.stdout.readline()
        following.send_signal(signal.SIGINT)
        rest, wrong = following.communicate(timeout=PATIENCE_S)
    assert (following.returncode, wrong) == (130, ""), rest


@pytest.mark.parametrize("words", [("jobs", "watch"), ("jobs", "logs", "-f")])
def test_a_reader_of_only_the_head_of_a_stream_sees_no_fault(
    fresh: Place, words: tuple[str, ...]
) -> None:
    job = fresh.service.job()
    trainer = fresh.service.trainer_of(job)
    trainer.start_of(1000)
    with fresh.process(*words, job) as following:
        assert following.stdout is not None
        assert following.stdout.readline()
        following.stdout.close()
        steps = count(1)

        def has_noticed() -> bool:
            trainer.step(next(steps))
            return following.poll() is not None

        fresh.service.until(has_noticed)
        assert following.stderr is not None
        assert (following.returncode, following.stderr.read()) == (141, "")


def test_a_short_answer_nobody_reads_is_no_fault(place: Place) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f"{sys.executable} -m tuneship.cli.main instance-types list | true"],
        env={**os.environ, **place.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("end", "code"), [("completed", 0), ("cancelled", 1)])
def test_a_watched_job_ends_with_its_own_success(fresh: Place, end: str, code: int) -> None:
    job = fresh.service.job()
    trainer = fresh.service.trainer_of(job)
    trainer.start_of(2)
    trainer.step(1)
    if end == "completed":
        trainer.complete()
    else:
        assert fresh.run("jobs", "cancel", job).exit_code == 0
    done = fresh.run("jobs", "watch", job)
    assert done.exit_code == code, done.output
    assert f"{job} is {end}" in done.stdout.splitlines()[-1]
    last = fresh.run("jobs", "watch", job, "--json").stdout.splitlines()[-1]
    assert json.loads(last)["status"] == end


def test_text_is_generated_by_deployment_and_by_endpoint(fresh: Place) -> None:
    for target in (fresh.deployment, fresh.ids["endpoint_id"], fresh.canary, "split", "serving"):
        assert fresh.run("generate", target, "a").stdout == f"{ANSWER}\n"
    assert fresh.run("generate", "split", stdin="a").stdout == f"{ANSWER}\n"
    lines = fresh.run("generate", "plain", "a", "--json", "--max-tokens", "2").stdout.splitlines()
    last = json.loads(lines[-1])
    assert "".join(json.loads(line)["text"] for line in lines[:-1]) == last["completion"]
    assert last["usage"]["completion_tokens"] == 2
    whole = fresh.json("deployments", "generate", fresh.deployment, "--prompt", "a")
    assert whole["completion"] == ANSWER
    streamed = fresh.run("deployments", "generate", fresh.deployment, "--prompt", "a", "--stream")
    assert streamed.stdout == f"{ANSWER}\n"


def test_calls_of_functions_are_shown(fresh: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    call = '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'
    tokenizer: Any = fresh.service.parts.catalogue.default.tokenizer
    tool = json.dumps([{"type": "function", "function": {"name": "look_up"}}])
    deployment = fresh.service.deployment("calling")
    for answer, shown in ((call, "look_up {}\n"), (f"text\n{call}", "text\nlook_up {}\n")):
        tokens = tokenizer.encode(answer, add_special_tokens=False).ids
        monkeypatch.setattr(fresh.service.engines, "answer", tokens)
        done = fresh.run("generate", deployment, "a", "--set", f"tools={tool}")
        assert done.stdout == shown, done.output


def test_texts_are_embedded_by_deployment_and_by_endpoint(fresh: Place) -> None:
    texts = ("--set", "input.0=senile cataract", "--set", "input.1=asthma", "--pooling", "last")
    for group, target in (
        ("deployments", fresh.deployment),
        ("endpoints", fresh.ids["endpoint_id"]),
        ("canary", fresh.canary),
    ):
        assert len(fresh.json(group, "embed", target, *texts)["embeddings"]) == 2
        assert fresh.service.engines.embedded[-1]["pooling"] == "last"


def test_a_chat_in_a_pipe_answers_line_by_line(fresh: Place) -> None:
    deployment = fresh.service.deployment("base")
    asked = len(fresh.service.engines.prompts)
    done = fresh.run("chat", deployment, "--system", "s", stdin="one\n\ntwo\n")
    assert (done.exit_code, done.stdout) == (0, f"{ANSWER}\n" * 2)
    first, second = fresh.service.engines.prompts[asked:]
    assert len(second) > len(first)


def test_the_status_of_a_canary_shows_share_health_and_requests(fresh: Place) -> None:
    fresh.run("generate", "split", "a")
    report = fresh.json("canary", "status", fresh.canary)
    (member,) = report["deployments"]
    assert (report["name"], report["lease_ends_at"]) == ("split", None)
    assert (member["share"], member["name"], member["requests"], member["errors"]) == (
        (100, "serving", 1, 0)
    )
    assert [one["id"] for one in fresh.json("canary", "status")] == [fresh.canary]
    names, row = fresh.run("canary", "status").stdout.splitlines()
    shown = dict(zip(names.split("\t"), row.split("\t"), strict=True))
    assert (shown["endpoint"], shown["share"], shown["lease_ends_at"]) == (fresh.canary, "100", "")
    assert re.fullmatch(r"\d+\.\d", shown["p95_ms"])


# Files of rows

UPLOAD = ("--name", "n", "--format", "instruction")
TABLE = 'question,answer,patient\n"Pain, acute",R52,secret\nCough,R05,secret\n'


def test_the_columns_of_a_table_are_uploaded_as_fields(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "notes.csv"
    file.write_text(TABLE)
    lines = tmp_path / "notes.jsonl"
    lines.write_bytes(
        jsonl(
            {"instruction": "Pain, acute", "response": "R52"},
            {"instruction": "Cough", "response": "R05"},
        )
    )
    words = ("datasets", "validate", "--format", "instruction")
    checked = place.json(*words, str(file), "--columns", "instruction=question,response=answer")
    assert (checked["is_valid"], checked["num_examples"]) == (True, 2)
    assert checked == place.json(*words, str(lines))
    made = place.json(
        "datasets",
        "upload",
        str(file),
        *UPLOAD,
        "--columns",
        "instruction=question,response=answer",
    )
    assert made["total_tokens"] == checked["total_tokens"]


def test_input_through_a_pipe_is_uploaded(place: Place) -> None:
    words = ("datasets", "upload", "/dev/stdin", *UPLOAD, "--json")
    with place.process(*words, stdin=subprocess.PIPE) as sending:
        shown, errors = sending.communicate(jsonl(*LINES).decode(), PATIENCE_S)
    assert (sending.returncode, errors) == (0, "")
    assert json.loads(shown)["num_examples"] == len(LINES)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ("instruction", "--columns: part 1 must be of the form field=column"),
        ("instruction=question,secret=answer", "--columns: part 2 names no field; the fields are"),
        ("instruction=question,response=code", "there is no column code"),
        (None, "column 3 is no field of a dataset; say with columns which ones to take"),
    ],
)
def test_a_mistake_in_the_columns_is_one_line(
    place: Place, tmp_path: Path, columns: str | None, says: str
) -> None:
    file = tmp_path / "notes.csv"
    file.write_text(TABLE)
    chosen = () if columns is None else ("--columns", columns)
    done = place.run("datasets", "upload", str(file), *UPLOAD, *chosen)
    assert (done.exit_code, done.stdout) == (1, ""), done.output
    assert says in done.stderr
    assert done.stderr.startswith("tuneship: ")
    assert done.stderr.count("\n") == 1
    assert "secret" not in done.stderr


# Words for the shell


def test_the_shell_completes_ids_and_nothing_where_no_service_answers(fresh: Place) -> None:
    def words(*typed: str, **environment: str) -> list[str]:
        asked = {"_TUNESHIP_COMPLETE": "complete_bash", "COMP_CWORD": str(len(typed))}
        line = " ".join(("tuneship", *typed))
        done = subprocess.run(
            [Path(sys.executable).with_name("tuneship")],
            env={**os.environ, **fresh.environment, **asked, "COMP_WORDS": line, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split()

    # A service that does not answer at once completes nothing, and this machine may be busy.
    until(lambda: words("deployments", "get", fresh.deployment[:-3]) == [fresh.deployment])
    until(lambda: fresh.model in words("models", "get", "f"))
    # Bash splits the id at its colons, and keeps what stands before the last one.
    name, last = fresh.model.rsplit(":", 1)
    parts = name.replace(":", " : ").split()
    until(lambda: words("models", "get", *parts, ":", last[:3]) == [last])
    assert words("jobs", "get", "ft_", TUNESHIP_URL="http://127.0.0.1:9") == []


# What is wrong


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("jobs", "get", "ft_00000000000000000000"), "refused (404 resource_not_found)"),
        (("jobs", "get", ""), "JOB_ID: must be an id"),
        (("models", "delete", ".."), "MODEL_ID: must be an id"),
        (("jobs", "get", "a\nb"), "JOB_ID: must be an id"),
        (("jobs", "list", "--limit", "secret"), "limit: should be a valid integer"),
        (("jobs", "list", "--limit", "0"), "limit: should be greater than or equal to 1"),
        (("jobs", "list", "--status", "secret"), "status: should be 'queued'"),
        (("jobs", "list", "--tags", "secret"), "--tags: write it as key=value"),
        (("jobs", "create", "--model-name", "secret"), "base_model: is needed; dataset_id: is"),
        (("jobs", "create", "--params", "/no/such/file"), "--params: /no/such/file cannot be read"),
        (("jobs", "create", "--params", "."), "--params: . cannot be read"),
        (("jobs", "logs", "ft_1", "-f", "--limit", "3"), "--limit: does not bound a stream"),
        (("datasets", "upload", "/no/file", *UPLOAD), "FILE: /no/file: no such file"),
        (("datasets", "upload", "/", *UPLOAD), "FILE: /: cannot be read (Is a directory)"),
        (("datasets", "upload", "{file}", "--name", "n", "--format", "preference"), "format: must be"),
        (("generate", "secret", "a"), "TARGET: no endpoint or deployment has this id or name"),
        (("generate", "{deployment}", ""), "prompt: "),
        (("generate", "{deployment}", "a", "--temperature", "hot"), "temperature: should be"),
        (("deployments", "update", "{deployment}", "--set", "model_name=secret"), "can be set only on create"),
        (("deployments", "delete", "dep_1", "--if-match", "\xe4"), "--if-match: must be printable ASCII"),
        (("canary", "update", "c", "--set", 'deployments=[{"id": "a", "traffic_percentage": 7}]'), "must sum to 100"),
        (("webhooks", "create", "--url", "https://receiver.test", "--events", "secret"), "events.0: must be *"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_its_place(
    place: Place, words: tuple[str, ...], says: str
) -> None:
    named = {"file": place.file, "deployment": place.deployment, "canary": place.canary}
    done = place.run(*(word.format(**named) if word.startswith("{") else word for word in words))
    assert (done.exit_code, done.stdout) == (1, ""), done.output
    assert says in done.stderr
    assert done.stderr.startswith("tuneship: ")
    assert "secret" not in done.stderr


def test_a_text_without_quotes_is_refused_and_not_repeated(place: Place) -> None:
    done = place.run("generate", place.deployment, "Senile", "secret")
    assert done.exit_code == 2
    assert "a text of several words stands in quotes" in " ".join(done.stderr.split())
    assert "secret" not in done.stderr


def test_an_option_adds_to_what_set_names_in_the_same_mapping(fresh: Place) -> None:
    words = ("update", fresh.deployment, "--set", "tags.b=2", "--tags", "a=1", "--json")
    done = fresh.run("deployments", *words)
    assert done.exit_code == 0, done.output
    assert {"a": "1", "b": "2"}.items() <= json.loads(done.stdout)["tags"].items()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[1]", "must hold a mapping"),
        ("a: [", "is not valid YAML or JSON (line 1"),
        ("a: 2026-02-30", "is not valid YAML or JSON"),
        ("model_name: a\nmodel_name: secret", "a key is repeated"),
    ],
)
def test_a_file_of_parameters_that_cannot_be_read_is_reported(
    place: Place, content: str, says: str
) -> None:
    done = place.run("jobs", "create", "--params", "-", stdin=content)
    assert (done.exit_code, says in done.stderr) == (1, True), done.stderr
    assert "standard input" in done.stderr
    assert "secret" not in done.stderr


def test_the_lines_of_a_refused_file_are_named(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"instruction": "a", "response": "secret"}\n{"instruction": 3}\n')
    words = ("--name", "n", "--format", "instruction")
    done = place.run("datasets", "upload", str(file), *words)
    assert done.exit_code == 1
    assert "refused (422 dataset_error)" in done.stderr
    assert "line 2" in done.stderr
    checked = place.run("datasets", "validate", str(file), *words[2:], "--json")
    report = json.loads(checked.stdout)
    assert (report["is_valid"], report["errors"][0]["line"]) == (False, 2)
    assert checked.exit_code == 1
    assert "secret" not in place.run("datasets", "validate", str(file), *words[2:]).output


def test_each_suggestion_stands_on_a_line_of_its_own(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "alpaca.jsonl"
    file.write_text('{"instruction": "a", "output": "b", "text": "c"}\n' * 2)
    for words in (("validate",), ("upload", "--name", "n")):
        done = place.run("datasets", words[0], str(file), "--format", "instruction", *words[1:])
        assert "suggestions.0\tThe field output is read as response.\n" in done.output
        assert "suggestions.1\t`text` in 2 lines is ignored.\n" in done.output
