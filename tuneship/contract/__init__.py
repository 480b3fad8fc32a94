"""The API on the wire: models, operations, errors. It uses pydantic and the standard library only."""
