"""Attacks from inside a worker: `python -m tests.unit.isolation.attacks.intrusion TARGETS` attempts all of them.

They are listed in `escapes.py` and `process_attacks.py`. The tests attempt them from workers of every kind, and without
isolation, where they must succeed. Each attempt runs in a child process of its own. A successful one does no harm: it
changes a decoy or sets a value to what it was, and calls that only root may make get arguments that are refused for
another reason.

Prints one JSON object: `refused`, `succeeded` or the failure of each attack.
"""

import json
import os
import signal
import sys
from collections.abc import Callable

from tests.unit.isolation.attacks.escapes import ON_TARGETS
from tests.unit.isolation.attacks.intrusion_targets import Targets
from tests.unit.isolation.attacks.process_attacks import ON_PROCESSES

# Time limit of one attempt.
PATIENCE_S = 20
WAYS = len(ON_TARGETS) + len(ON_PROCESSES)


def attempts(targets: Targets) -> dict[str, Callable[[], object]]:
    """All attacks by name; those on processes once for each process."""
    attacks: dict[str, Callable[[], object]] = {
        name: lambda attack=attack: attack(targets) for name, attack in ON_TARGETS.items()
    }
    for label, process in targets.processes.items():
        for name, on_process in ON_PROCESSES.items():
            attacks[f"{label}: {name}"] = lambda attack=on_process, pid=process: attack(pid)
    return attacks


def _outcome(attempt: Callable[[], object]) -> str:
    """Make an attempt in a child process, so that its changes to itself end with it."""
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE_S)
        code = 2
        try:
            attempt()
            code = 0
        except OSError:
            code = 1
        except BaseException as error:  # noqa: BLE001 - the child must never go on as the parent
            sys.stderr.write(f"{error!r}\n")
        finally:
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {0: "succeeded", 1: "refused"}.get(code, f"ended with {code}")


def main(arguments: list[str]) -> int:
    """Attempt all attacks on the targets described by the only argument."""
    (text,) = arguments
    all_attempts = attempts(Targets.from_json(text))
    outcomes = {name: _outcome(attempt) for name, attempt in all_attempts.items()}
    sys.stdout.write(json.dumps(outcomes) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
