"""The HTTP boundary: binds declared operations to handlers. No other package knows Starlette."""

from tuneship.service.http.app import build_app
from tuneship.service.http.boundary import Boundary

__all__ = ["Boundary", "build_app"]
