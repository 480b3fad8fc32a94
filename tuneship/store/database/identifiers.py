"""Generates ids: `<prefix>_<24 characters>`, unguessable."""

import secrets

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"


def new_id(prefix: str) -> str:
    """Generate an id with 124 random bits behind one of the prefixes of §1."""
    # Each request gets an id, so the random number is drawn once and not once for each letter.
    number, letters = secrets.randbelow(36**24), ""
    for _ in range(24):
        number, digit = divmod(number, 36)
        letters += ALPHABET[digit]
    return f"{prefix}_{letters}"
