"""The scripts, styles and fonts of the pages, below an address with the digest of all of them.

One digest for the folder: scripts name each other by relative addresses, and no browser mixes two versions.
"""

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

MEDIA = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
FOREVER = "public, max-age=31536000, immutable"


@dataclass(frozen=True)
class Asset:
    """One file, as it is and compressed; fonts are compressed already."""

    media: str
    body: bytes
    packed: bytes | None


@dataclass(frozen=True)
class Assets:
    """All files by their addresses, and the address of their folder."""

    folder: str
    by_path: Mapping[str, Asset]


@cache
def assets() -> Assets:
    """Read the files, once."""
    found: dict[str, bytes] = {}
    root = files("tuneship.service.console") / "static"
    for folder in (root, root / "vendor"):
        for file in folder.iterdir():
            if file.is_file() and f".{file.name.rpartition('.')[2]}" in MEDIA:
                name = file.name if folder is root else f"vendor/{file.name}"
                found[name] = file.read_bytes()
    digest = hashlib.sha256(b"".join(name.encode() + found[name] for name in sorted(found)))
    place = f"/console/static/{digest.hexdigest()[:16]}"
    return Assets(
        place,
        {f"{place}/{name}": _asset(name, body) for name, body in found.items()},
    )


def _asset(name: str, body: bytes) -> Asset:
    ending = f".{name.rpartition('.')[2]}"
    packed = None if ending == ".woff2" else gzip.compress(body, 9, mtime=0)
    return Asset(MEDIA[ending], body, packed)


async def answer_asset(request: Request) -> Response:
    """Answer one file. Its address is one of `assets()`: others have no route."""
    asset = assets().by_path[request.scope["path"]]
    headers = {"Cache-Control": FOREVER, "Vary": "Accept-Encoding"}
    body = asset.body
    if asset.packed is not None and "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"], body = "gzip", asset.packed
    return Response(body, media_type=asset.media, headers=headers)
