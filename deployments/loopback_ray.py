"""`ray`, with nodes that listen on the loopback interface alone.

`ray start` replaces 127.0.0.1 with the machine's own address, and Ray then listens on all interfaces.
RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 prevents that, but also refuses a second node; this program allows one.
"""

import sys

# The tests' own environment has no Ray.
from ray._private import ray_constants, services  # pyright: ignore[reportMissingImports]
from ray.scripts.scripts import main  # pyright: ignore[reportMissingImports]

if __name__ == "__main__":
    ray_constants.ENABLE_RAY_CLUSTER = True
    services.resolve_ip_for_localhost = lambda host: host
    sys.exit(main())
