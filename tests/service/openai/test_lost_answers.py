"""A connection breaks after the service has made a job: the client asks again by itself, and there is one job."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from tests.support.openai.openai_clients import blocking
from tests.support.service.in_process import Service


class LosesAnswers:
    """A server in front of the service that passes requests on, and throws the first answers to a POST away."""

    def __init__(self, url: str, lost: int) -> None:
        self._target = ("127.0.0.1", urlsplit(url).port)
        self._left = lost
        self.posts = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self._thread.join(10)

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self.listener.accept()
            except OSError:
                return
            with closing(caller):
                self._pass_on(caller)

    def _pass_on(self, caller: socket.socket) -> None:
        request = _whole_request(caller)
        with closing(socket.create_connection(self._target)) as service:
            service.sendall(request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
            answer = b""
            while block := service.recv(65536):
                answer += block
        if request.startswith(b"POST"):
            self.posts += 1
            if self._left:
                self._left -= 1
                return
        caller.sendall(answer)


def _whole_request(caller: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += caller.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
    while len(body) < length:
        block = caller.recv(65536)
        body += block
        data += block
    kept = b"\r\n".join(
        line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")
    )
    return kept + b"\r\n\r\n" + body


@pytest.fixture
def loses_two(answering: Service) -> Iterator[LosesAnswers]:
    with closing(LosesAnswers(answering.url, lost=2)) as server:
        yield server


def test_there_is_one_job_after_two_lost_answers(
    answering: Service, loses_two: LosesAnswers
) -> None:
    url = f"{loses_two.url}/openai/v1"
    file = answering.dataset().replace("ds_", "file-")
    with blocking(answering, base_url=url, max_retries=2) as client:
        job = client.fine_tuning.jobs.create(
            model="tuneship-tiny", training_file=file, suffix="lost-answers"
        )
    assert loses_two.posts == 3
    found = answering.call("GET", "/v1/fine-tuning/jobs?limit=100").json()["jobs"]
    own = [one["id"] for one in found if one["model_name"] == "lost-answers"]
    assert own == [job.id.replace("ftjob-", "ft_")]
    with blocking(answering) as client:
        client.fine_tuning.jobs.cancel(job.id)
