"""The self-hosted REST service: one package per resource, with its handlers; only `http/` knows Starlette."""
