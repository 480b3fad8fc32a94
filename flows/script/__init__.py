"""A flow as a plain script: its parameters, its local processes, its console and exit codes."""
