"""Names a fault of the Python that runs this program, where one is known that matters to a service."""

import sys

# For each minor version, the first release whose tarfile parses headers in linear time.
TARFILE_IS_SLOW = {(3, 11): (3, 11, 10), (3, 12): (3, 12, 6)}


def known_fault(version: tuple[int, int, int] = sys.version_info[:3]) -> str | None:
    """The fault as a sentence; None where none is known."""
    mended = TARFILE_IS_SLOW.get(version[:2])
    if mended is None or version >= mended:
        return None
    present, better = (".".join(map(str, one)) for one in (version, mended))
    return (
        f"Python {present} has a fault by which archives can keep a program busy (CVE-2024-6232): the service bounds "
        f"what it reads of them, but update Python to {better} or later"
    )
