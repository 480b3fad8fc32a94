"""Handlers of models and instance types, and what may be asked of a model."""
