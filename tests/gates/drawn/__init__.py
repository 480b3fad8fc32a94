"""Roll-outs on requests drawn one by one, decided by our gates and by others' rules.

`python -m tests.gates.drawn --runs 60` prints the table of `docs/gates.md`; `--row NAME` one row of it. All draws come
from the seeds that are named.
"""
