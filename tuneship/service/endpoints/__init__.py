"""Handlers of endpoints and their traffic split, and the expiry of rollout leases."""
