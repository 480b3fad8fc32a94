"""The hand-written commands, beside those that are made from the declarations."""
