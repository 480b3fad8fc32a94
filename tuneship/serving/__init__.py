"""Token ids in, token ids out. Knows no HTTP and no database."""
