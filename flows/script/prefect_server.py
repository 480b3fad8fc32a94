"""A Prefect server that ends when its standard input closes, so it never outlives the script that started it.

Started by `flows/script/local_processes.py` with a listening socket; Prefect's own `prefect server start` is for
servers that stay.
"""

import os
import signal
import sys
import threading

import uvicorn

# Clients keep their connections open for events; the server does not wait for them to disconnect.
GRACE_SECONDS = 3


def main() -> None:
    """Serve on the socket whose number is the one argument."""
    threading.Thread(target=_stop_with_the_script, daemon=True).start()
    uvicorn.run(
        "prefect.server.api.server:create_app",
        factory=True,
        fd=int(sys.argv[1]),
        log_level="warning",
        timeout_graceful_shutdown=GRACE_SECONDS,
    )


def _stop_with_the_script() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
