"""The expensive checks of a cell: a checkpoint is added, tuned, asked, exported and imported, beside other programs.

All of it goes through the service's operations, as a user does it; only that its processes are threads here.
"""

import asyncio
import io
import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.models.real_workers import RealWorkers, convert_here
from tests.support.objects.files import tar_of
from tests.support.service.in_process import RealParts, Service, jsonl
from tests.support.zoo.checkpoints import Checkpoint
from tests.support.zoo.conversations import ROWS, Conversation
from tests.support.zoo.texts import Judge, turns_of
from tuneship.contract.jobs import ENDED
from tuneship.conversion.order import GGUF_FILE
from tuneship.service.catalogues import adding
from tuneship.service.catalogues.base_models import Catalogue
from tuneship.service.catalogues.origins import added_folder
from tuneship.service.catalogues.sources import AddingRefused, find_source

# A tiny model knows twenty rows by heart after so many steps of this size over all of them.
STEPS = 70
RATE = 0.015
RANK = 16
MAX_TOKENS = 48
# The training and transformers compute the same sums in another order.
ALLOWED_LOSS = 1e-5
EXPORTED_ROWS = (0, 10, 16)
COLUMNS = ("added", "loss", "answers", "peft", "merged", "GGUF", "import")
RIGHT = "right"


@dataclass(frozen=True)
class Life:
    """The result of a cell: `right`, `refused: ...` or `wrong: ...` by column; a column that was not reached lacks."""

    results: dict[str, str] = field(default_factory=dict[str, str])


def faults_of(checkpoint: Checkpoint, life: Life) -> list[str]:
    """List what is wrong, or refused although its row does not say so, or refused for another reason."""
    found: list[str] = []
    for column, text in life.results.items():
        reason, expected = text.removeprefix("refused: "), checkpoint.refused.get(column)
        if text.startswith("wrong") or (reason != text and expected is None):
            found.append(f"{column}: {text}")
        # An empty text is for rows of which some are refused.
        elif expected and expected not in reason:
            found.append(f"{column}: {text}, not refused for {expected}")
    return found


class Refused(Exception):
    """The product refuses; the text is what its user reads."""


@dataclass(frozen=True)
class World:
    """A service that trains, serves and converts in this process, and a folder for checkpoints."""

    service: Service
    folder: Path

    @classmethod
    @contextmanager
    def begin(cls, folder: Path) -> Iterator["World"]:
        """Start the service on a folder."""
        transformers.logging.set_verbosity_error()
        data = folder / "data"
        data.mkdir()
        catalogue = Catalogue(None, added_folder(data))
        with Service(data, real=RealParts(catalogue, RealWorkers(), convert_here)) as service:
            yield cls(service, folder)


@dataclass(frozen=True)
class Expected:
    """A row as transformers reads it."""

    ids: list[int]
    # The first token that is learnt.
    start: int
    prompt: Conversation
    # The text of the learnt tokens but the last, which ends the answer.
    answer: str
    # The answer as the row has it, which transformers may clean up while it decodes.
    content: str

    def agrees(self, text: str) -> bool:
        """Whether an answer is this one; white space that the template writes around answers may be missing."""
        bare = self.answer.strip()
        return text in (self.answer, self.content) or (bare != self.answer and text.strip() == bare)


def expected_rows(
    checkpoint: Checkpoint, folder: Path, rows: Sequence[Conversation] = ROWS
) -> list[Expected]:
    """The rows as transformers reads them, with an end token where the template writes none.

    None at all where a prompt does not begin its conversation: such a base cannot be tuned as it is asked.
    """
    judge = Judge(AutoTokenizer.from_pretrained(folder), checkpoint.template.for_transformers)
    found: list[Expected] = []
    for row in rows:
        (turn,) = turns_of(judge, row)
        ids = judge.ids(row, asks=False)[: turn.end]
        if ids[: turn.start] != turn.prompt:
            return []
        if not turn.has_end:
            ids.append(judge.tokenizer.eos_token_id)
        decode = partial(judge.tokenizer.decode, skip_special_tokens=True)
        # As a continuation: a decoder may drop a space where a text begins.
        before, whole = decode(ids[: turn.start]), decode(ids[:-1])
        assert whole.startswith(before)
        answer = whole[len(before) :]
        found.append(Expected(ids, turn.start, row[:1], answer, row[1]["content"]))
    return found


def live(world: World, checkpoint: Checkpoint) -> Life:
    """Lead a checkpoint through all columns; a refusal or a fault ends what needs it."""
    name = checkpoint.name.replace(" ", "-").replace(",", "")
    source = checkpoint.build(world.folder / name)
    results: dict[str, str] = {}

    def note(column: str, check: Callable[[], object]) -> Any:
        try:
            made = check()
        except Refused as refusal:
            results[column] = f"refused: {refusal}"
        except AssertionError as fault:
            results[column] = f"wrong: {str(fault).splitlines()[0]}"
        else:
            results[column] = RIGHT
            return made
        return None

    base = note("added", partial(added, world, source, name))
    if base is None:
        return Life(results)
    rows = expected_rows(checkpoint, source)
    tuned = note("loss", partial(_tuned, world, name, rows, source))
    if not rows:
        return Life(results)
    if tuned is not None:
        note("answers", partial(_check_answers, world, tuned, name, rows))
        for column, check in (
            ("peft", _check_peft),
            ("merged", _check_merged),
            ("GGUF", _check_gguf),
        ):
            note(column, partial(check, world, tuned, source, rows))
    note("import", partial(_check_import, world, source, name, rows, tuned))
    return Life(results)


def added(world: World, source: Path, name: str) -> Path:
    with _in_this_process():
        try:
            adding.add(
                world.service.settings,
                find_source(str(source)),
                name,
                datetime.now(UTC),
                lambda _: None,
            )
        except AddingRefused as refusal:
            raise Refused(str(refusal)) from None
    return added_folder(world.service.settings.data_dir) / name


@contextmanager
def _in_this_process() -> Iterator[None]:
    """Have `models add` read the model here: a process of its own would load torch again."""
    kept, adding.convert_in_process = adding.convert_in_process, convert_here
    try:
        yield
    finally:
        adding.convert_in_process = kept


def _accepted(answer: httpx.Response) -> Any:
    """The content of an answer. Raises `Refused`."""
    if answer.is_client_error:
        raise Refused(answer.json()["error"]["message"])
    assert answer.is_success, f"status {answer.status_code}: {answer.text[:200]}"
    return answer.json()


def _tuned(world: World, base: str, rows: list[Expected], source: Path) -> str:
    """Tune on the rows until they are known by heart; returns the tuned model."""
    service = world.service
    content = jsonl(*({"messages": row} for row in ROWS))
    dataset = service.dataset(content=content, format="conversation")
    settings = {
        "learning_rate": RATE, "batch_size": len(ROWS), "epochs": STEPS, "warmup_steps": 5,
        "lora_rank": RANK, "lora_dropout": 0.0,
    }  # fmt: skip
    body = {
        "base_model": base, "model_name": "zoo", "dataset_id": dataset,
        "validation_dataset_id": dataset, "hyperparameters": settings,
        "validation_frequency": STEPS // 2,
    }  # fmt: skip
    path = "/v1/fine-tuning/jobs"
    job = _accepted(service.call("POST", path, json=body))["id"]
    service.until(lambda: service.job_status(job) in ENDED)
    ended = service.call("GET", f"{path}/{job}").json()
    if ended.get("error"):
        raise Refused(ended["error"]["message"])
    assert rows, "it is tuned although its prompts do not begin what is learnt"
    # The first entry is measured before the first step, when the adapter changes nothing yet.
    first = service.call("GET", f"{path}/{job}/metrics").json()["validation_loss"][0]
    loss = _loss(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), rows).item()
    assert abs(first - loss) <= ALLOWED_LOSS * loss, (
        f"the loss is {first:.6f} instead of {loss:.6f}"
    )
    return ended["fine_tuned_model"]


def _loss(model: Any, rows: list[Expected]) -> torch.Tensor:
    """The mean loss of the learnt tokens, as transformers computes it row by row: padding changes nothing."""
    sums, count = torch.zeros(()), 0
    for row in rows:
        ids = torch.tensor([row.ids])
        labels = ids.clone()
        labels[0, : row.start] = -100
        learnt = len(row.ids) - row.start
        sums = sums + model(input_ids=ids, labels=labels, use_cache=False).loss * learnt
        count += learnt
    return sums / count


# Answers


def _check_answers(world: World, model: str, name: str, rows: list[Expected]) -> None:
    """Ask all rows at once and some alone, whole and streamed, by both APIs."""
    service = world.service
    body = {"model_name": model, "deployment_name": f"{name}-{model[-8:]}".lower()}
    deployment = _accepted(service.call("POST", "/v1/deployments", json=body))["id"]
    service.until(lambda: service.deployment_status(deployment) != "creating")
    shown = service.call("GET", f"/v1/deployments/{deployment}").json()
    if shown["status"] != "running":
        raise Refused(str(shown.get("error") or shown["status"]))
    asks = (_ask_main, _stream_main, _ask_openai, _stream_openai)

    async def together() -> list[tuple[str, str]]:
        questions = (
            asks[number % len(asks)](service, deployment, row.prompt)
            for number, row in enumerate(rows)
        )
        return await asyncio.gather(*questions)

    found = service.run(together())
    found += [service.run(ask(service, deployment, rows[0].prompt)) for ask in asks]
    service.call("DELETE", f"/v1/deployments/{deployment}")
    for (text, reason), row in zip(found, [*rows, *rows[:1] * len(asks)], strict=True):
        assert row.agrees(text), f"answered {text!r} instead of {row.answer!r}"
        assert reason == "stop", f"ended by {reason} after {text!r}"


async def _ask_main(service: Service, deployment: str, prompt: Conversation) -> tuple[str, str]:
    reply = await _asked(service, f"/v1/deployments/{deployment}/generate", {"messages": prompt})
    return reply.json()["completion"], reply.json()["finish_reason"]


async def _stream_main(service: Service, deployment: str, prompt: Conversation) -> tuple[str, str]:
    body = {"messages": prompt, "stream": True}
    reply = await _asked(service, f"/v1/deployments/{deployment}/generate", body)
    lines = [json.loads(line) for line in reply.text.splitlines()]
    return "".join(line.get("text", "") for line in lines), lines[-1]["finish_reason"]


async def _ask_openai(service: Service, deployment: str, prompt: Conversation) -> tuple[str, str]:
    body = {"messages": prompt, "model": deployment}
    (choice,) = (await _asked(service, "/openai/v1/chat/completions", body)).json()["choices"]
    return choice["message"]["content"], choice["finish_reason"]


async def _stream_openai(
    service: Service, deployment: str, prompt: Conversation
) -> tuple[str, str]:
    body = {"messages": prompt, "model": deployment, "stream": True}
    reply = await _asked(service, "/openai/v1/chat/completions", body)
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    choices = [json.loads(line)["choices"][0] for line in lines if line != "[DONE]"]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, choices[-1]["finish_reason"]


async def _asked(service: Service, path: str, body: dict[str, Any]) -> httpx.Response:
    body |= {"max_tokens": MAX_TOKENS, "temperature": 0}
    headers = {"Accept": "application/x-ndjson, application/json"}
    reply = await service.ask("POST", path, json=body, headers=headers)
    assert reply.status_code == 200, f"status {reply.status_code}: {reply.text[:200]}"
    return reply


# Exports


def _exported(world: World, model: str, kind: str) -> Path:
    answer = world.service.call("GET", f"/v1/models/{model}/content", params={"format": kind})
    if answer.is_client_error:
        raise Refused(answer.json()["error"]["message"])
    assert answer.is_success, f"status {answer.status_code}: {answer.text[:200]}"
    target = world.folder / f"{model[-8:]}-{kind}"
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        archive.extractall(target, filter="data")
    return next(file.parent for file in target.rglob("README.md"))


def _check_generated(model: Any, rows: list[Expected], *, stops: bool) -> None:
    """Compare the greedy answers of transformers; `stops`: by what the checkpoint says itself."""
    for number in EXPORTED_ROWS:
        row = rows[number]
        prompt = torch.tensor([row.ids[: row.start]])
        ends = {} if stops else {"eos_token_id": row.ids[-1]}
        whole = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            **ends,
        )
        found = whole[0].tolist()
        assert found == row.ids, (
            f"transformers writes {found[row.start :]}, not {row.ids[row.start :]}"
        )


def _check_peft(world: World, model: str, source: Path, rows: list[Expected]) -> None:
    folder = _exported(world, model, "peft")
    base: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    _check_generated(PeftModel.from_pretrained(base, str(folder)).eval(), rows, stops=False)


def _check_merged(world: World, model: str, source: Path, rows: list[Expected]) -> None:
    folder = _exported(world, model, "merged")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    for number in EXPORTED_ROWS:
        row = rows[number]
        asked = tokenizer.apply_chat_template(
            row.prompt, add_generation_prompt=True, return_dict=False
        )
        assert asked == row.ids[: row.start], "the exported tokenizer makes another prompt"
    merged: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    _check_generated(merged.eval(), rows, stops=True)


def _check_gguf(world: World, model: str, source: Path, rows: list[Expected]) -> None:
    folder = _exported(world, model, "gguf")
    xllamacpp: Any = import_module("xllamacpp")  # it has no types
    params = xllamacpp.CommonParams()
    params.model.path = str(folder / GGUF_FILE)
    params.n_ctx, params.n_parallel, params.warmup, params.port = 256, 1, False, 0
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    for number in EXPORTED_ROWS:
        row = rows[number]
        request = {"messages": row.prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
        answer = server.handle_chat_completions(request)
        assert answer["usage"]["prompt_tokens"] == row.start, "llama.cpp reads another prompt"
        choice = answer["choices"][0]
        text = choice["message"]["content"]
        assert text.strip() == row.answer.strip(), f"llama.cpp answers {text!r}"
        assert choice["finish_reason"] == "stop", f"llama.cpp ends by {choice['finish_reason']}"


# In again


def tuned_by_peft(source: Path, rows: list[Expected], folder: Path) -> Path:
    """Tune the base with peft alone, on the tokens that transformers makes."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        base: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        options: dict[str, Any] = {
            "r": RANK,
            "lora_alpha": 2 * RANK,
            "target_modules": "all-linear",
        }
        model: Any = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options))
        width = max(len(row.ids) for row in rows)
        ids, labels, seen = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
        labels -= 100
        for number, row in enumerate(rows):
            size = len(row.ids)
            ids[number, :size] = torch.tensor(row.ids)
            labels[number, row.start : size] = ids[number, row.start : size]
            seen[number, :size] = 1
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=RATE, weight_decay=0.0)
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / 5) * (1 - step / STEPS)
            logits = model(input_ids=ids, attention_mask=seen, use_cache=False).logits
            functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            ).backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def _check_import(
    world: World, source: Path, name: str, rows: list[Expected], tuned: str | None
) -> None:
    """Bring in an adapter of peft's, and the export of the model that was tuned here."""
    adapters = [tuned_by_peft(source, rows, world.folder / f"{name}-by-peft")]
    adapters += [] if tuned is None else [world.folder / f"{tuned[-8:]}-peft"]
    for adapter in adapters:
        files = {
            file.relative_to(adapter).as_posix(): file.read_bytes()
            for file in adapter.rglob("*")
            if file.is_file()
        }
        answer = world.service.call(
            "POST",
            "/v1/models",
            data={"name": "zoo", "base_model": name},
            files={"file": ("adapter.tar", tar_of(files), "application/x-tar")},
        )
        _check_answers(world, _accepted(answer)["id"], name, rows)
