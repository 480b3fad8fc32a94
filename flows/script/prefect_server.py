"""A Prefect server that ends when its standard input closes, so it never outlives the script that started it.

Started by `flows/script/local_processes.py` with a listening socket. `make up` serves the same application for longer.
"""

import os
import signal
import sys
import threading

import uvicorn
from prefect.server.api.server import create_app
from starlette.middleware.trustedhost import TrustedHostMiddleware

# Clients keep their connections open for events; the server does not wait for them to disconnect.
GRACE_SECONDS = 3


def for_this_machine() -> TrustedHostMiddleware:
    """Make the server, which answers a browser of this machine only under the machine's own names.

    Another site can make its own name resolve to this machine; the browser would then treat its pages as the server's.
    """
    return TrustedHostMiddleware(create_app(), allowed_hosts=["127.0.0.1", "localhost"])


def main() -> None:
    """Serve on the socket with the number of the only argument."""
    threading.Thread(target=_stop_with_the_script, daemon=True).start()
    uvicorn.run(
        for_this_machine,
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
