"""The one room that knows Starlette: it binds declared operations to handlers and keeps the boundary strict."""

from tuneship.service.http.app import build_app
from tuneship.service.http.boundary import Boundary

__all__ = ["Boundary", "build_app"]
