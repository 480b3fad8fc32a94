"""The one room that knows Starlette: it binds declared operations to handlers and keeps the border strict."""

from tuneship.service.http.app import build_app
from tuneship.service.http.boundary import Boundary

__all__ = ["Boundary", "build_app"]
