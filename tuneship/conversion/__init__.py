"""Reads a base model that an operator adds: converts a GGUF file, and compares our engine with transformers.

A process of its own, since a foreign file may need much memory or crash its reader. Knows neither HTTP nor database.
"""
