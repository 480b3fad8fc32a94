"""Turns observations of requests into windows, percentiles and rates. Pure functions, plus the recorder."""
