"""A training process that first runs lines of a test.

Usage: `python -m tests.support.models.changed_trainer LINES WORK_DIR`.
"""

import sys

from tuneship.training.__main__ import main

if __name__ == "__main__":
    lines, work_dir = sys.argv[1:]
    exec(lines)  # noqa: S102 - a test has written them
    sys.exit(main([work_dir]))
