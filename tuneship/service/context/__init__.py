"""The context that handlers get, and the decorator that binds them to the declared operations."""
