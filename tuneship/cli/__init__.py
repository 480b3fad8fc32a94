"""The command `tuneship`. Each file is one group of subcommands; `main.py` joins them."""
