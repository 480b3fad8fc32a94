"""Whether workers on this host really have no network: tried at every start, in a process like theirs."""

import json
import logging
import subprocess
import sys

from tuneship.settings import worker_environment

logger = logging.getLogger(__name__)

PATIENCE_S = 30.0


def can_isolate() -> bool:
    """Start a worker that isolates itself and tries to get out; True when nothing that it tries succeeds."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tuneship.runtime.intrusion"],
            env=worker_environment({}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
        )
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        logger.warning("workers are not isolated: the test failed with %s", type(error).__name__)
        return False
    if done.returncode != 0:
        logger.warning("workers are not isolated: %s", found["cannot"])
        return False
    open_ways = [name for name, succeeded in found.items() if succeeded]
    if open_ways:
        logger.warning("workers are not isolated: they reach %s", ", ".join(open_ways))
    return not open_ways
