"""The console: pages for people, each a small program against the typed client. Knows no HTTP framework.

A page is a module in `pages/` and a template of its name. Operations are its only way to data, so that it shows and
does nothing that the API would refuse to the key of its session.
"""
