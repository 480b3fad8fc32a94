"""Prefect's deployments of the flows, not the resource `deployment` of the API, which serves a model.

Runs the pipeline on one machine or with workers: automations, blocks, worker and service units.
"""
