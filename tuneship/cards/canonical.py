"""The one form in which a card is written as JSON, so that equal cards have one digest."""

import hashlib
import json

from tuneship.contract.model_card import ModelCard


def canonical(card: ModelCard) -> bytes:
    """The card as JSON in UTF-8: names sorted, no white space, no line break at the end."""
    fields = card.model_dump(mode="json")
    text = json.dumps(
        fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def card_sha256(card: ModelCard) -> str:
    """SHA-256 of the canonical JSON, which is that of the file `model_card.json`."""
    return hashlib.sha256(canonical(card)).hexdigest()
