"""What an intruder in a worker would try: `python -m tuneship.runtime.intrusion TARGETS` tries all of it.

Two lists of ways: `escapes.py` and `process_attacks.py`. The service has a worker try them at every start
(`service/isolation.py`); the tests try them from workers of every kind, and without isolation, where they must succeed.
Each attempt runs in a child process of its own. Nothing is harmed where one succeeds: what could be changed is a decoy
or is set to what it was, and calls that only root may make get arguments that are refused for another reason.

Prints one JSON object: for each way `refused`, `succeeded`, or what went wrong.
"""

import json
import os
import signal
import sys
from collections.abc import Callable

from tuneship.runtime.escapes import ON_TARGETS
from tuneship.runtime.intrusion_targets import Targets
from tuneship.runtime.process_attacks import ON_PROCESSES

# For one attempt.
PATIENCE_S = 20
WAYS = len(ON_TARGETS) + len(ON_PROCESSES)


def attempts(targets: Targets) -> dict[str, Callable[[], object]]:
    """All of them by their names; those on processes once for each."""
    found: dict[str, Callable[[], object]] = {
        name: lambda way=way: way(targets) for name, way in ON_TARGETS.items()
    }
    for label, process in targets.processes.items():
        for name, on_process in ON_PROCESSES.items():
            found[f"{label}: {name}"] = lambda way=on_process, pid=process: way(pid)
    return found


def _tried(attempt: Callable[[], object]) -> str:
    """How it went, in a child process: what it changes about itself ends with it."""
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE_S)
        code = 2
        try:
            attempt()
            code = 0
        except OSError:
            code = 1
        except BaseException as error:  # noqa: BLE001 - whatever it is, it must not go on as the parent
            sys.stderr.write(f"{error!r}\n")
        finally:
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {0: "succeeded", 1: "refused"}.get(code, f"ended with {code}")


def main(arguments: list[str]) -> int:
    """Try everything on the targets that the only argument describes."""
    (text,) = arguments
    found = {name: _tried(attempt) for name, attempt in attempts(Targets.from_json(text)).items()}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
