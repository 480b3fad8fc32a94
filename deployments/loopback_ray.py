"""`ray`, with nodes that listen on the loopback interface alone.

`ray start` replaces a loopback address by the machine's own one, with which its parts listen on all interfaces. By
RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 it does not, but then it refuses to start a second node.
"""

import sys

# The tests' own environment has no Ray.
from ray._private import ray_constants, services  # pyright: ignore[reportMissingImports]
from ray.scripts.scripts import main  # pyright: ignore[reportMissingImports]

if __name__ == "__main__":
    ray_constants.ENABLE_RAY_CLUSTER = True
    services.resolve_ip_for_localhost = lambda host: host
    sys.exit(main())
