"""Chooses the deployment that answers a request of an endpoint. Pure."""
