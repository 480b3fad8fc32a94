"""Names a fault of the Python that runs this program, where one is known that matters to a service."""

import sys
import tarfile

# For each minor version, the first release whose tarfile parses headers in linear time.
TARFILE_IS_SLOW = {(3, 11): (3, 11, 10), (3, 12): (3, 12, 6)}
# Debian and others correct an older release and keep its number: the correction brought this name.
IS_CORRECTED = hasattr(tarfile, "_header_length_prefix_re")


def known_fault(
    version: tuple[int, int, int] = sys.version_info[:3], *, is_corrected: bool = IS_CORRECTED
) -> str | None:
    """The fault as a sentence; None where none is known, or where whoever distributes this Python has corrected it."""
    mended = TARFILE_IS_SLOW.get(version[:2])
    if mended is None or version >= mended or is_corrected:
        return None
    present, better = (".".join(map(str, one)) for one in (version, mended))
    return (
        f"Python {present} has a fault by which archives can keep a program busy (CVE-2024-6232): the service bounds "
        f"what it reads of them, but update Python to {better} or later"
    )
