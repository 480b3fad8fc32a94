"""A suite of attacks from inside workers of every kind: none succeeds, and without isolation they do."""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.runtime.intruders import AFTER_THREADS, IN_RANK, IN_TRAINER, Stage, staged
from tuneship.runtime.escapes import ON_TARGETS
from tuneship.runtime.intrusion import WAYS
from tuneship.runtime.process_attacks import ON_PROCESSES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing isolates")

ROOT = Path(__file__).parents[3]
AT_LEAST = 100
NOT_EVERYWHERE = {
    # These need root, a device, a kernel's option or a terminal: where a host has none, nobody can do them anyway.
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
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    modules = tmp_path_factory.mktemp("modules")
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("PYTHONPATH", f"{ROOT}:{modules}")
        with staged(tmp_path_factory.mktemp("installation"), modules) as made:
            yield made


@pytest.fixture(scope="module")
def without(stage: Stage) -> dict[str, str]:
    """What succeeds where nothing isolates."""
    return stage.open()


def test_there_are_many_ways() -> None:
    assert len(ON_TARGETS) + len(ON_PROCESSES) == WAYS >= AT_LEAST


def test_every_way_succeeds_without_isolation_where_the_host_allows_it_at_all(
    without: dict[str, str],
) -> None:
    """So each of them would be seen if it were open; the rest of them this host allows to nobody."""
    impossible = {name for name, outcome in without.items() if outcome != "succeeded"}
    for name in ("service", "sibling", "bystander"):
        needs_root = {f"{name}: {way}" for way in ON_PROCESSES} if os.getuid() else set[str]()
        impossible -= needs_root  # the sibling is hidden from whoever is not root
    assert impossible <= NOT_EVERYWHERE, impossible - NOT_EVERYWHERE
    assert set(without.values()) <= {"succeeded", "refused"}


def test_nothing_succeeds_in_a_serving_process(stage: Stage, without: dict[str, str]) -> None:
    found = stage.serving()
    assert found.keys() == without.keys()
    assert set(found.values()) == {"refused"}, opened_ways(found)


def test_nothing_succeeds_in_a_training_process(stage: Stage, without: dict[str, str]) -> None:
    found = stage.training(IN_TRAINER)
    assert found.keys() == without.keys()
    assert set(found.values()) == {"refused"}, opened_ways(found)


def test_nothing_succeeds_in_a_training_process_that_had_threads(
    stage: Stage, without: dict[str, str]
) -> None:
    """The kernel takes files from one thread at a time, so it begins again as a program with one."""
    found = stage.training(AFTER_THREADS)
    assert found.keys() == without.keys()
    assert set(found.values()) == {"refused"}, opened_ways(found)


def test_nothing_succeeds_in_a_further_process_of_a_job(
    stage: Stage, without: dict[str, str]
) -> None:
    found = stage.training(IN_RANK)
    assert found.keys() == without.keys()
    assert set(found.values()) == {"refused"}, opened_ways(found)


def test_a_descriptor_that_a_worker_should_not_have_is_found(stage: Stage) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        found = stage.open(descriptors=(theirs.fileno(),))
    assert found["inherited descriptors"] == "succeeded"


def opened_ways(found: dict[str, str]) -> list[str]:
    return [f"{name}: {outcome}" for name, outcome in found.items() if outcome != "refused"]
