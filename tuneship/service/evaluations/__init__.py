"""Evaluations: deployments answer held-out examples in the background, and graders score the answers."""
