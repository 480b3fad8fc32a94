"""Both ways to start real workers, for tests of their isolation."""

from tests.unit.processes.conftest import runtime

__all__ = ["runtime"]
