"""The console on the network: sessions, pages, forms, live streams and the files of the pages."""

from tuneship.service.http.console.dialect import console

__all__ = ["console"]
