"""Pure decisions: measurements and limits in, verdicts out."""
