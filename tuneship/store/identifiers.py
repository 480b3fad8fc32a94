"""New ids: `<prefix>_<24 characters>`, unguessable."""

import secrets

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"


def new_id(prefix: str) -> str:
    """124 random bits behind a prefix of §1, drawn at once: every request has an id."""
    number, letters = secrets.randbelow(36**24), ""
    for _ in range(24):
        number, digit = divmod(number, 36)
        letters += ALPHABET[digit]
    return f"{prefix}_{letters}"
