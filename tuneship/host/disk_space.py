"""Uploads stop before the disk is full, so that what is stored stays readable and jobs can write."""

import shutil

from tuneship.contract.errors import InternalError
from tuneship.settings import ServiceSettings


def check_room(settings: ServiceSettings, more_bytes: int = 0) -> None:
    """Refuse (503) what would leave less free than the settings ask for."""
    usage = shutil.disk_usage(settings.data_dir)
    least = max(
        settings.minimum_free_disk_bytes, int(usage.total * settings.minimum_free_disk_share)
    )
    if usage.free - more_bytes < least:
        raise InternalError("the disk is nearly full", status=503, retry_after=60)
