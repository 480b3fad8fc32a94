"""What each operation does, one file per resource; http.py alone knows FastAPI."""
