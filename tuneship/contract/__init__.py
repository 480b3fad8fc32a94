"""The wire: models, operations, errors. Pydantic and the standard library only."""
