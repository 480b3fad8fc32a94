"""A Ray dashboard whose jobs a test plays: it answers the calls of the Jobs REST API that `RayJobs` makes."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "the-token"


@dataclass
class PlayedDashboard:
    """The jobs by name, each with `status`, `logs` and what it was submitted with."""

    jobs: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    lets_everybody_in: bool = False
    is_another_program: bool = False
    url: str = ""

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Return status and answer of a call."""
        name, _, verb = path.removeprefix("/api/jobs/").partition("/")
        if method == "GET" and not name:
            return 200, [{"submission_id": one, **job} for one, job in self.jobs.items()]
        if method == "POST" and not name:
            if body["submission_id"] in self.jobs:
                return 500, {}
            self.jobs[body["submission_id"]] = {"status": "PENDING", "logs": "", "body": body}
            return 200, {"submission_id": body["submission_id"]}
        if name not in self.jobs:
            return 404, {}
        job = self.jobs[name]
        if verb == "stop" and job["status"] in ("PENDING", "RUNNING"):
            job["status"] = "STOPPED"
        if method == "DELETE":
            if job["status"] in ("PENDING", "RUNNING"):
                return 500, {}
            del self.jobs[name]
        return 200, job


@contextmanager
def ray_dashboard() -> Iterator[PlayedDashboard]:
    """Listen on a free port."""
    dashboard = PlayedDashboard()

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            is_known = self.headers["Authorization"] == f"Bearer {TOKEN}"
            if is_known or dashboard.lets_everybody_in:
                status, answer = dashboard.answer(self.command, self.path, body)
            else:
                status, answer = 401, {}
            content = b"<html>" if dashboard.is_another_program else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = _serve  # noqa: N815 - the base class's names

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        dashboard.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield dashboard
        server.shutdown()
        thread.join()
