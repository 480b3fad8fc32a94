"""Prefect flows: order, gates, decisions. One file per Prefect deployment."""
