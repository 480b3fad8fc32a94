"""Checks of a bucket and of the rows that name its objects, which must pass after every fault."""

import hashlib
from datetime import timedelta

from tests.support.objects.files import contents_below
from tests.support.service.in_process import Service
from tuneship.store.files.blob_cache import INCOMING, OBJECTS
from tuneship.store.files.blobs import STAGED
from tuneship.store.files.stored_files import stored_objects


def check_objects(service: Service) -> bool:
    """Check that rows name whole objects, and that others stay for a day; returns whether there were others.

    The service's clock is a day ahead afterwards, and nothing may be uploaded meanwhile.
    """
    with service.database.read() as connection:
        stored = {one.id: one.files for one in stored_objects(connection)}
    _check_digests(service, {key: one for files in stored.values() for key, one in files.items()})
    others = service.parts.blobs.names() - {*stored}
    service.clock.ahead += timedelta(hours=23)
    service.run(service.supervisor.leader_work.retention.sweep_files())
    assert service.parts.blobs.names() == {*stored} | others
    service.clock.ahead += timedelta(hours=2)
    service.until(lambda: service.parts.blobs.names() == {*stored})
    return bool(others)


def _check_digests(service: Service, digests: dict[str, str]) -> None:
    """Compare the objects with their digests in the rows, and local copies with their objects."""
    assert {key: service.parts.blobs.digest_of(key) for key in digests} == digests
    folder = service.settings.data_dir / OBJECTS
    for path, content in contents_below(folder).items():
        key = str(path.relative_to(folder))
        # A copy of an upload that was not committed is none of these, and yet that of an object.
        wanted = digests[key] if key in digests else service.parts.blobs.digest_of(key)
        assert hashlib.sha256(content).hexdigest() == wanted, key
    assert not [*(service.settings.data_dir / INCOMING).glob(f"{STAGED}*")]
