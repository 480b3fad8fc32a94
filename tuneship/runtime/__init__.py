"""Starts, watches and stops workers behind one small Protocol."""
