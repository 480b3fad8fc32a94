"""New ids: `<prefix>_<24 characters>`, unguessable."""

import secrets

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"


def new_id(prefix: str) -> str:
    """124 random bits behind a prefix of §1."""
    return prefix + "_" + "".join(secrets.choice(ALPHABET) for _ in range(24))
