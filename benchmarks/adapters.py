"""Measures how soon a tuned model answers: its adapter loaded into a live replica, and a merged model loaded from disk.

    python benchmarks/adapters.py [--rounds 5]

Trains on the shipped base through the API, then measures the time from the last training step to the first answer, and
from the finished adapter to the first answer. Beside that: merging (peft), saving and loading again, in a process that
has its libraries imported, and in a fresh one, which is how a server of a single model takes a new model. Prints only
after all of them have answered with the same greedy text. `serving_engine.py` measures the memory of an adapter.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from measuring.running import deploy, example_rows, exported, job_on, running, tune, upload

from tuneship.client import Client
from tuneship.contract.generation import Generate
from tuneship.contract.lines.dataset_lines import instruction_messages
from tuneship.prompts.template import PromptTemplate
from tuneship.training.spec import PROGRESS_FILE

BASE = Path(__file__).parents[1] / "tuneship" / "base_models" / "tuneship-tiny"
NEW_TOKENS = 16
TARGET_S, TARGET_RATIO = 2.0, 5.0
POLL_INTERVAL_S = 0.005


def main() -> None:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--merge", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    # The program starts itself with this option, as the fresh process.
    if options.merge is not None:
        print(json.dumps(merged(*options.merge)))
        return
    with tempfile.TemporaryDirectory() as folder:
        _compare(Path(folder), options.rounds)


def _compare(folder: Path, rounds: int) -> None:
    rows = example_rows("hospital_a.jsonl", 80)
    prompt = json.loads(rows[0])["instruction"]
    with running(folder / "data") as service, Client(service.settings) as client:
        ready = deploy(client, "tuneship-tiny", "keeps the base loaded")
        training = upload(client, "rows", rows[:64])
        request = job_on(training, upload(client, "validation", rows[64:]))
        whole, hot, adapter, texts = [], [], folder, set[str]()
        for number in range(rounds):
            with _LastStep(service.data_dir) as last_step:
                job = tune(client, request)
            finished = time.perf_counter()
            deployment = deploy(client, job.fine_tuned_model or "", f"d{number}")
            answer = Generate(prompt=prompt, max_tokens=NEW_TOKENS, temperature=0)
            texts = {client.deployments.generate(deployment, answer).completion}
            whole.append(time.perf_counter() - last_step.seen)
            hot.append(time.perf_counter() - finished)
            adapter = exported(service, job.fine_tuned_model or "", folder / job.id)
        client.deployments.delete(ready)
        fresh, warm = [], []
        for _ in range(rounds):
            begun = time.perf_counter()
            texts.add(_in_a_fresh_process(adapter, folder / "prompt", prompt))
            fresh.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            texts.add(merged(adapter, folder / "prompt"))
            warm.append(time.perf_counter() - begun)
    if len(texts) != 1:
        raise SystemExit(f"{len(texts)} different answers: the times mean nothing")
    _print(whole, hot, fresh, warm[1:])


class _LastStep:
    """The moment at which the next job's process reports its last step.

    Read from its progress file: the service reports it up to a fifth of a second later, which would flatter.
    """

    seen = 0.0

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._known = self._files()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "_LastStep":
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        """Stop watching once the job has ended, when the file has its last step."""
        self._has_ended.set()
        self._thread.join()
        if not self.seen:
            raise SystemExit("the last step was not seen")

    def _files(self) -> set[Path]:
        return set(self._data_dir.rglob(PROGRESS_FILE))

    def _watch(self) -> None:
        while not (new := self._files() - self._known):
            if self._has_ended.wait(POLL_INTERVAL_S):
                return
        total = 0
        with new.pop().open(encoding="utf-8") as lines:
            while not self.seen:
                line = json.loads(lines.readline() or "{}")
                total = line.get("total_steps", total)
                if line.get("kind") == "step" and line["step"] == total:
                    self.seen = time.perf_counter()
                elif not line and self._has_ended.wait(POLL_INTERVAL_S):
                    return


def _in_a_fresh_process(adapter: Path, prompt_file: Path, prompt: str) -> str:
    prompt_file.write_text(prompt)
    command = [sys.executable, __file__, "--merge", str(adapter), str(prompt_file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def merged(adapter: Path, prompt_file: Path) -> str:
    """Merge, save, load again and answer, as one would do by hand."""
    import torch  # noqa: PLC0415 - a fresh process spends time on this import too
    from peft import PeftModel  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    libraries: Any = (PeftModel, AutoModelForCausalLM, AutoTokenizer)
    peft_model, causal, tokenizers = libraries
    with tempfile.TemporaryDirectory() as folder:
        tuned = peft_model.from_pretrained(causal.from_pretrained(BASE), adapter)
        tuned.merge_and_unload().save_pretrained(folder)
        model, tokenizer = causal.from_pretrained(folder), tokenizers.from_pretrained(BASE)
        messages = list(instruction_messages(prompt_file.read_text()))
        text = PromptTemplate.load(adapter).render(messages, add_generation_prompt=True)
        tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        with torch.inference_mode():
            made = model.generate(**tokens, max_new_tokens=NEW_TOKENS, do_sample=False)
    return tokenizer.decode(made[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)


def _print(whole: list[float], hot: list[float], fresh: list[float], warm: list[float]) -> None:
    middle = {
        name: statistics.median(spans)
        for name, spans in (("whole", whole), ("hot", hot), ("fresh", fresh), ("warm", warm))
    }
    print(f"same greedy text by all; medians of {len(whole)} rounds")
    print(
        f"  last training step to first answer: {middle['whole']:.2f} s (target below {TARGET_S})"
    )
    print(f"  finished adapter to first answer, through the API: {middle['hot']:.2f} s")
    for name, text in (("fresh", "in a fresh process"), ("warm", "with everything imported")):
        ratio = middle[name] / middle["hot"]
        print(f"  merged, saved, loaded again {text}: {middle[name]:.2f} s, {ratio:.1f}x as long")
    print(f"  target: {TARGET_RATIO:.0f}x")


if __name__ == "__main__":
    main()
