"""Opens the store of files that the settings name."""

from pathlib import Path

from tuneship.settings import FileSettings
from tuneship.store.files.blob_cache import OBJECTS, BlobCache
from tuneship.store.files.blobs import Blobs, StoreRefused
from tuneship.store.files.local_blobs import FOLDER, LocalBlobs


def blobs_of(settings: FileSettings) -> Blobs:
    """The store in the data directory, or in the bucket that `blob_url` names. Raises `StoreRefused`."""
    if not settings.blob_url:
        return LocalBlobs(settings.data_dir)
    try:
        # Only who keeps files in a bucket needs the library.
        from tuneship.store.files.object_blobs import ObjectBlobs  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise StoreRefused(
            f"blob_url needs `pip install 'tuneship[objects]'` (missing: {error.name})"
        ) from None
    cache = BlobCache(settings.data_dir, settings.blob_cache_bytes)
    return ObjectBlobs(settings.blob_url, cache)


def readable_root(settings: FileSettings) -> Path:
    """The folder below which workers find the files of datasets and models."""
    return settings.data_dir / (OBJECTS if settings.blob_url else FOLDER)
