"""What each operation does, one file per resource; `http/` alone knows Starlette."""
