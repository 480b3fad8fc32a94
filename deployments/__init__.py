"""Runs the pipeline on one machine or with workers: automations, blocks, worker and service units."""
