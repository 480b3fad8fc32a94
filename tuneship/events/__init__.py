"""Webhooks go out from here: which addresses may be called, signatures, tries and their times, a queue per receiver.

Knows the store and the contract; no HTTP framework, no handler. Reading order: `addresses.py`, `connector.py`,
`signing.py`, `attempt.py`, `delivery.py`.
"""
