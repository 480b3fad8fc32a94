"""The log lines that anybody can cause are limited, and those left out are counted."""

import logging
from collections.abc import Callable

from tests.support.service.in_process import Lines, Service
from tuneship.service.http.sockets import server as http_server
from tuneship.service.http.sockets.log_budget import LogBudget


def test_lines_of_one_kind_are_held_back_and_counted() -> None:
    log, lines, budget = logging.getLogger("test of a budget"), Lines(), LogBudget(2)
    log.addHandler(lines)
    log.addFilter(budget)
    for number in range(2000):
        text = f"cannot accept\n<socket at {number}>"  # as asyncio writes it
        log.error(text)
    log.error("something else")
    log.removeFilter(budget)
    budget.report(log)
    budget.report(log)
    log.removeHandler(lines)
    assert len(lines.texts) == 4
    assert lines.texts[2] == "ERROR test of a budget something else"
    assert "left out 1,998 more lines of this kind: cannot accept" in lines.texts[3]


def test_requests_without_a_key_fill_no_log(start: Callable[..., Service]) -> None:
    """Requests with a key are all logged."""
    service = start()
    timing = http_server.ServerTiming(report_every_s=3600.0)
    service.listen(budgets=http_server.BUDGETS, timing=timing)
    for path in ("/healthz", "/v1/models"):
        for _ in range(30):
            service.call("GET", path, None)
    for _ in range(30):
        assert service.call("GET", "/v1/datasets").status_code == 200
    text = "\n".join(service.log.texts)
    assert text.count("GET /v1/datasets 200") == 30
    keyless = text.count("GET /healthz 200") + text.count("GET /v1/models 401")
    assert (
        10 <= keyless <= 2 * http_server.BUDGETS[http_server.KEYLESS]
    )  # a report may come in between
