"""Refuses uploads before the disk is full, so that stored data stays readable and jobs can write."""

import shutil

from tuneship.contract.errors import InternalError
from tuneship.settings import FileSettings


class DiskNearlyFull(InternalError):
    """The disk has no room at the moment."""

    def __init__(self) -> None:
        super().__init__("the disk is nearly full", status=503, retry_after=60)


def check_room(settings: FileSettings, more_bytes: int = 0) -> None:
    """Raise `DiskNearlyFull` (503) where `more_bytes` would leave less free disk than the settings require."""
    usage = shutil.disk_usage(settings.data_dir)
    minimum_free = max(
        settings.minimum_free_disk_bytes, int(usage.total * settings.minimum_free_disk_share)
    )
    if usage.free - more_bytes < minimum_free:
        raise DiskNearlyFull
