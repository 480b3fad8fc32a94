"""What a handler is given, and how handlers are bound to the declared operations."""
