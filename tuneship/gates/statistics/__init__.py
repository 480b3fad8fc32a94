"""Tests of counts: evidence that accumulates, limits, and sums over buckets."""
