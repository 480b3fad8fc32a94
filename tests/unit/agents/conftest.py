"""Agents answer for the same played engines as replicas of this machine."""

from tests.unit.replicas.conftest import engines

__all__ = ["engines"]
