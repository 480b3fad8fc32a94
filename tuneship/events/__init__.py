"""Delivers webhooks: which addresses may be called, signatures, attempts and the retry schedule, a queue per receiver.

It knows the store and the contract, but no HTTP framework and no handlers. Reading order: `addresses.py`,
`connector.py`, `signing.py`, `attempt.py`, `delivery.py`.
"""
