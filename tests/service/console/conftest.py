"""A service on a socket of this machine: from elsewhere the console is answered over TLS only."""

from collections.abc import Callable

import pytest

from tests.support.service.in_process import Service


@pytest.fixture
def service(start: Callable[..., Service]) -> Service:
    started = start()
    started.listen()
    return started
