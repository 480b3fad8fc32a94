"""A suite of attacks from inside workers of every kind: all of them fail, and without isolation they succeed."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.isolation.attacks.escapes import ON_TARGETS
from tests.unit.isolation.attacks.intrusion import WAYS
from tests.unit.isolation.attacks.process_attacks import ON_PROCESSES
from tests.unit.isolation.intruders import (
    AFTER_THREADS,
    IN_RANK,
    IN_TRAINER,
    INTRUSION,
    Intrusions,
    prepared_intrusions,
)
from tuneship.processes.forked_workers import LIBRARIES, ForkedProcesses

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing isolates")

ROOT = Path(__file__).parents[3]
AT_LEAST = 100
NOT_EVERYWHERE = {
    # These need root, a device, a kernel's option or a terminal. Where a host has none, nobody can do them.
    "TCP over IPv6", "netlink", "packet socket", "raw socket", "VM socket", "kernel crypto socket",
    "32-bit system calls", "x32 system calls", "io_uring", "io_uring, entering", "session keyring",
    "adding a key", "asking for a key", "new POSIX shared memory", "BPF", "performance events", "userfaultfd",
    "fanotify", "kernel log", "kernel module", "kernel module by memory", "another kernel", "reboot",
    "accounting", "swap", "clock", "name of the host", "ports of the processor", "new user namespace",
    "new network namespace", "new user namespace by clone", "new user namespace by clone3",
    "joining a namespace", "mount", "mount by fsopen", "mount by open_tree", "attributes of a mount",
    "pivot_root", "chroot", "changing another's file's attributes", "changing a file that may be read",
    "opening by handle", "writing to /var/tmp", "writing to the home folder", "a job for cron",
    "writing into this program", "writing into Python", "password hashes", "terminal", "new terminal",
    "memory of the machine", "disk", "the host's core handler", "the host's emergency keys",
    "the host's resource groups", "capabilities", "inherited descriptors",
}  # fmt: skip


@pytest.fixture(scope="module")
def intrusions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Intrusions]:
    modules = tmp_path_factory.mktemp("modules")
    with pytest.MonkeyPatch.context() as changed:
        # An isolated worker may list the folder around the product, but read no more than what is named here.
        changed.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}:{modules}")
        with prepared_intrusions(tmp_path_factory.mktemp("installation"), modules) as prepared:
            yield prepared


@pytest.fixture(scope="module", params=["started", "forked"])
def intruded(
    request: pytest.FixtureRequest, intrusions: Intrusions, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Intrusions]:
    """The installation, with intruders that are started or forked as the workers whose place they take."""
    if request.param == "started":
        yield intrusions
        return
    libraries = {
        INTRUSION: LIBRARIES["tuneship.serving"],
        "intruder": LIBRARIES["tuneship.training"],
    }
    log = tmp_path_factory.mktemp("server") / "log"
    with closing(ForkedProcesses(isolated=True, log=log, libraries=libraries)) as runtime:
        yield replace(intrusions, runtime=runtime)
    assert log.read_text() == ""


@pytest.fixture(scope="module")
def unisolated(intrusions: Intrusions) -> dict[str, str]:
    """Outcome of every attack from a worker without isolation."""
    return intrusions.open()


def test_there_are_many_ways() -> None:
    assert len(ON_TARGETS) + len(ON_PROCESSES) == WAYS >= AT_LEAST


def test_every_way_succeeds_without_isolation_where_the_host_allows_it_at_all(
    unisolated: dict[str, str],
) -> None:
    """An attack that succeeds here would be noticed in an isolated worker. This host allows nobody the others."""
    impossible = {name for name, outcome in unisolated.items() if outcome != "succeeded"}
    for name in ("service", "sibling", "bystander"):
        needs_root = {f"{name}: {attack}" for attack in ON_PROCESSES} if os.getuid() else set[str]()
        # The sibling is hidden from every user but root.
        impossible -= needs_root
    assert impossible <= NOT_EVERYWHERE, impossible - NOT_EVERYWHERE
    assert set(unisolated.values()) <= {"succeeded", "refused"}


def test_nothing_succeeds_in_a_serving_process(
    intruded: Intrusions, unisolated: dict[str, str]
) -> None:
    found = intruded.serving()
    assert found.keys() == unisolated.keys()
    assert set(found.values()) == {"refused"}, opened_ways(found)


def test_nothing_succeeds_in_a_training_process(
    intruded: Intrusions, unisolated: dict[str, str]
) -> None:
    found = intruded.training(IN_TRAINER)
    assert found.keys() == unisolated.keys()
    assert set(found.values()) == {"refused"}, opened_ways(found)


def test_nothing_succeeds_in_a_training_process_that_had_threads(
    intrusions: Intrusions, unisolated: dict[str, str]
) -> None:
    """The kernel restricts files for one thread at a time, so the process starts again as a program with one thread."""
    found = intrusions.training(AFTER_THREADS)
    assert found.keys() == unisolated.keys()
    assert set(found.values()) == {"refused"}, opened_ways(found)


def test_nothing_succeeds_in_a_further_process_of_a_job(
    intrusions: Intrusions, unisolated: dict[str, str]
) -> None:
    found = intrusions.training(IN_RANK)
    assert found.keys() == unisolated.keys()
    assert set(found.values()) == {"refused"}, opened_ways(found)


def test_a_descriptor_that_a_worker_should_not_have_is_found(intrusions: Intrusions) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        found = intrusions.open(descriptors=(theirs.fileno(),))
    assert found["inherited descriptors"] == "succeeded"


def opened_ways(found: dict[str, str]) -> list[str]:
    return [f"{name}: {outcome}" for name, outcome in found.items() if outcome != "refused"]
