"""Measures the console: pages beside 10,000 jobs and 8 generations, live pages, and how soon a click on Roll back acts.

    python benchmarks/console.py [--rounds 30]

A real `tuneship serve` on SQLite has 10,000 jobs, two deployments of a tuned model, and a release with 1,000 looks.
Each page is opened again and again: once alone, for the CPU time of the service process, and once beside 8 clients that
generate, for the clock. Then lines are sent while a page is open, traffic is rolled back by the form, and 20 pages
follow a release whose pipeline looks every 15 s. What a page or a stream must show is checked before a figure
is printed.
"""

import argparse
import random
import re
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
from measuring.prepared import own_cpu_ms
from measuring.running import Running, deploy, example_rows, job_on, running, tune, upload

from tests.support.service.releases import NOON, OWN, ROLLOUT, begun, line_of, look
from tuneship.client import Client
from tuneship.contract.endpoints import (
    CanaryEndpointCreate,
    CanaryEndpointUpdate,
    LeaseRequest,
    Member,
)
from tuneship.contract.generation import Generate
from tuneship.contract.releases import ReleaseCreate, ReleaseLines
from tuneship.gates.record import SplitConfirmed
from tuneship.store.database.database import SQLITE_FILE

JOBS, LOOKS, PAGES, GENERATIONS = 10_000, 1_000, 20, 8
# A quarter of the default time between two looks.
LOOK_EVERY_S = 15.0
PROMPT = Generate(prompt="Which ICD-10-CM chapter has J45.909?", max_tokens=16, temperature=0)
FOLLOWED_S = 60.0
FROM_PAGE = {"Sec-Fetch-Site": "same-origin"}


class Scene:
    """A running service with an endpoint and a release, and a browser that has signed in."""

    def __init__(self, live: Running, client: Client, pair: tuple[str, str]) -> None:
        self.live, self.client = live, client
        self.old, self.new = pair
        self.back = [
            Member(id=self.old, traffic_percentage=100),
            Member(id=self.new, traffic_percentage=0),
        ]
        self.split = [Member(id=one, traffic_percentage=50) for one in pair]
        self.lease = LeaseRequest(seconds=3600, fallback=self.back, pausable=True)
        made = client.canary_endpoints.create(
            CanaryEndpointCreate(name="bench", deployments=self.split, lease=self.lease)
        )
        self.endpoint = made.id
        self.release = client.releases.create(
            ReleaseCreate(run_key="bench", kind="release", model_name="m", endpoint_id=made.id)
        ).id
        self.next = {OWN: 1, ROLLOUT: 1}
        lines = [line_of(begun(*pair, made.id)), line_of(SplitConfirmed(50, NOON))]
        self.tell(ROLLOUT, *lines, *(line_of(look(one, LOOKS, 50)) for one in range(1, LOOKS + 1)))
        self.browser = httpx.Client(
            base_url=str(live.settings.url), headers=FROM_PAGE, timeout=60, trust_env=False
        )
        code = client.sign_in_links.create().url.partition("#")[2]
        answer = self.browser.post("/console/sign-in", data={"code": code})
        if answer.status_code != 303:
            raise SystemExit(f"the sign-in answered {answer.status_code}")
        found = re.search(r'name="form_token" value="([0-9a-f]{64})"', self.page("/console", ""))
        if found is None:
            raise SystemExit("the page has no form")
        self.token = found[1]

    def tell(self, record: str, *lines: dict[str, Any]) -> None:
        """Send the next lines of a record, as a pipeline does."""
        for start in range(0, len(lines), 100):
            sent = ReleaseLines(
                record=record, first_line=self.next[record], lines=[*lines[start : start + 100]]
            )
            self.next[record] = self.client.releases.add_lines(self.release, sent).next_line

    def page(self, path: str, wanted: str) -> str:
        """Open a page, which has to show this text."""
        answer = self.browser.get(path)
        if answer.status_code != 200 or wanted not in answer.text:
            raise SystemExit(f"{path} answered {answer.status_code} without {wanted!r}")
        return answer.text

    def follow(self, path: str) -> Iterator[str]:
        """The contents of a page while it is open, the first one at once."""
        with self.browser.stream("GET", f"/console/live?page={path}") as answer:
            kind, texts = "", list[str]()
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    texts.append(line.removeprefix("data: "))
                elif not line and kind:
                    if kind != "main":
                        raise SystemExit(f"the stream of {path} ended with {kind}")
                    yield "\n".join(texts)
                    kind, texts = "", []


def main() -> None:
    """Prepare the data, start the service, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    # A session has 300 pages a minute.
    rounds = min(rounds, 50)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        with running(data) as live, Client(live.settings) as client:
            training = upload(client, "training", example_rows("hospital_a.jsonl", 32))
            job = job_on(
                training, upload(client, "validation", example_rows("validation.jsonl", 8))
            )
            model = str(tune(client, job).fine_tuned_model)
        _copy_jobs(data)
        with running(data) as live, Client(live.settings) as client:
            scene = Scene(
                live, client, (deploy(client, model, "old"), deploy(client, model, "new"))
            )
            _pages(scene, rounds)
            _commits(scene, rounds)
            _clicks(scene, rounds)
            _many(scene)


def _copy_jobs(data: Path) -> None:
    """Make `JOBS` of the one job that has ended."""
    with sqlite3.connect(data / SQLITE_FILE) as connection:
        names = [row[1] for row in connection.execute("pragma table_info(jobs)")]
        (job,) = connection.execute(f"select {', '.join(names)} from jobs").fetchall()  # noqa: S608
        at = names.index("id")
        rows = ((*job[:at], f"ft_{number:024d}", *job[at + 1 :]) for number in range(1, JOBS))
        marks = ", ".join("?" * len(names))
        connection.executemany(f"insert into jobs ({', '.join(names)}) values ({marks})", rows)  # noqa: S608
    connection.close()


def _pages(scene: Scene, rounds: int) -> None:
    """Print how long pages take."""
    pages = {
        "overview": ("/console", "bench"),
        f"jobs, first of {JOBS:,}": ("/console/jobs", f"{JOBS:,}"),
        "jobs, in the middle": (f"/console/jobs?offset={JOBS // 2}", f"{JOBS:,}"),
        "endpoint": (f"/console/endpoints/{scene.endpoint}", "bench"),
        f"release with {LOOKS:,} looks": (
            f"/console/releases/{scene.release}",
            f"{LOOKS:,} so far",
        ),
    }
    for name, (path, wanted) in pages.items():
        scene.page(path, wanted)
        busy, before = own_cpu_ms(scene.live.pid), time.perf_counter()
        for _ in range(rounds):
            scene.page(path, wanted)
        spent = (own_cpu_ms(scene.live.pid) - busy) / rounds
        alone = (time.perf_counter() - before) * 1000 / rounds
        spans = list[float]()
        with _generating(scene):
            for _ in range(rounds):
                before = time.perf_counter()
                scene.page(path, wanted)
                spans.append((time.perf_counter() - before) * 1000)
        # The rate of a session's pages counts by the minute.
        time.sleep(2 * rounds * 60 / 300)
        _print(f"{name}, beside {GENERATIONS} generations", spans)
        print(f"{name:50} {spent:8.1f} ms CPU, alone {alone:.1f} ms by the clock")


@contextmanager
def _generating(scene: Scene) -> Iterator[None]:
    """Let clients ask the endpoint until the end of a `with` block."""
    ended, counted = threading.Event(), list[int]()

    def ask() -> None:
        with Client(scene.live.settings) as client:
            while not ended.is_set():
                counted.append(len(client.endpoints.generate(scene.endpoint, PROMPT).completion))

    threads = [threading.Thread(target=ask) for _ in range(GENERATIONS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    if not counted:
        raise SystemExit("nothing was generated meanwhile")


def _commits(scene: Scene, rounds: int) -> None:
    """Print how long it takes from the answer to a line until an open page has it."""
    contents = scene.follow(f"/console/releases/{scene.release}")
    next(contents)
    spans = list[float]()
    for number in range(rounds):
        time.sleep(random.Random(number).uniform(0.2, 2.0))
        name = f"Reviewer {number}"
        scene.tell(OWN, {"kind": "held_gates", "approver": name, "decision": "promote"})
        before = time.perf_counter()
        while f"{name} decided" not in next(contents):
            pass
        spans.append((time.perf_counter() - before) * 1000)
    _print("commit to an open page (budget 1,000)", spans)


def _clicks(scene: Scene, rounds: int) -> None:
    """Print how long it takes from the form of Roll back to the split that is back."""
    spans, busy = list[float](), list[float]()
    fields = {"form_token": scene.token, "endpoint_id": scene.endpoint, "name": "A. Reviewer"}
    for _ in range(rounds):
        wanted = CanaryEndpointUpdate(deployments=scene.split, lease=scene.lease)
        scene.client.canary_endpoints.update(scene.endpoint, wanted)
        cpu, before = own_cpu_ms(scene.live.pid), time.perf_counter()
        answer = scene.browser.post("/console/do/revert_canary_endpoint", data=fields)
        by = scene.client.endpoints.generate(scene.endpoint, PROMPT).deployment_id
        spans.append((time.perf_counter() - before) * 1000)
        busy.append(own_cpu_ms(scene.live.pid) - cpu)
        found = scene.client.canary_endpoints.get(scene.endpoint)
        shares = {one.id: one.traffic_percentage for one in found.deployments}
        if answer.status_code != 303 or by != scene.old or shares[scene.new] or found.lease:
            raise SystemExit(f"the split is not back: {answer.status_code} {shares}")
    _print("Roll back to the next answer (budget 300)", spans)
    print(f"{'':50} {median(busy):8.1f} ms CPU")


def _many(scene: Scene) -> None:
    """Print what open pages cost while a pipeline looks."""
    spent = dict[int, float]()
    number = LOOKS
    for pages in (0, PAGES):
        seen = [0] * pages

        def read(place: int, seen: list[int] = seen) -> None:
            for text in scene.follow(f"/console/releases/{scene.release}"):
                seen[place] = int(re.findall(r"([\d,]+) so far", text)[0].replace(",", ""))

        threads = [
            threading.Thread(target=read, args=(place,), daemon=True) for place in range(pages)
        ]
        for thread in threads:
            thread.start()
        while not all(seen):
            time.sleep(0.1)
        busy, before = own_cpu_ms(scene.live.pid), time.perf_counter()
        while time.perf_counter() < before + FOLLOWED_S:
            number += 1
            scene.tell(ROLLOUT, line_of(look(number, LOOKS, 50)))
            time.sleep(LOOK_EVERY_S)
        whole = (time.perf_counter() - before) * 1000
        spent[pages] = (own_cpu_ms(scene.live.pid) - busy) / whole * 100
        # Every page has come to the newest look.
        until = time.perf_counter() + 60
        while any(one < number for one in seen):
            if time.perf_counter() > until:
                raise SystemExit(f"open pages are behind: {seen}, of {number}")
            time.sleep(0.1)
    more = spent[PAGES] - spent[0]
    print(
        f"{f'{PAGES} open pages of a release (budget 10)':50} {more:8.1f} % of a core beyond {spent[0]:.1f} % without"
    )


def _print(name: str, spans: list[float]) -> None:
    p95 = quantiles(spans, n=20)[18]
    print(f"{name:50} {median(spans):8.1f} ms median, {p95:.1f} ms p95 ({len(spans)})")


if __name__ == "__main__":
    main()
