"""Prefect flows: order, gates, decisions. Importing this package first keeps Prefect's telemetry off."""

from tuneship.settings import refuse_telemetry

refuse_telemetry()
