"""Prefect flows: order, gates, decisions. Importing this package first keeps Prefect's telemetry off."""

from tuneship.settings import turn_off_telemetry

turn_off_telemetry()
