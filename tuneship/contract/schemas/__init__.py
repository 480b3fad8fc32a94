"""JSON Schemas that answers follow."""
