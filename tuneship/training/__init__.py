"""Dataset files and a spec in, adapter and progress lines out. Knows no HTTP and no database."""
