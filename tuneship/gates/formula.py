"""The version of how a rollout is judged, which every record names.

It grows when the same counts may give another number or verdict. Next: `canary.py`.
"""

from typing import Final

FORMULA_VERSION: Final = "3"


def check_formula(version: str) -> None:
    """Raise ValueError for a formula that this release does not know: it could not judge the rollout to its end."""
    if version != FORMULA_VERSION:
        raise ValueError(f"this release cannot judge by formula version {version!r}")
