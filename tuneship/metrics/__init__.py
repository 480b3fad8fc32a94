"""Observations in; windows, percentiles and rates out. Pure, plus the recorder."""
