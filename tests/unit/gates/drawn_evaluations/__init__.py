"""Evaluations drawn from seeds, and how often their verdict is pass, reject or hold."""
