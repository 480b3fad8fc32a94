"""The verdict on answers: tests of pairs, counts, reports and words."""
