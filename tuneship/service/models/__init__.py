"""Handlers of models and instance types, and the limits and safeguards of a model."""
