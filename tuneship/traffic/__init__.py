"""A split and a draw in, a deployment out. Pure."""
