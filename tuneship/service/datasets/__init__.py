"""Handlers of datasets, and how a dataset is read, checked, merged and explained."""
