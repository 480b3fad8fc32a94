"""Sentences, tables and curves about decisions, for reports and pages."""
