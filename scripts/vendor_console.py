"""Fetches what others have made for the console from npm, and writes its digests beside it.

Run it to take new versions: it changes the files below `tuneship/service/console/static/vendor`.
"""

import hashlib
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "tuneship/service/console/static/vendor"
NEXT, MONO = (f"@fontsource-variable/atkinson-hyperlegible-{name}" for name in ("next", "mono"))
# The package with its version and licence, and where each file lies in it.
TAKEN = (
    ("uplot@1.6.32", "MIT", {
        "uplot.js": "dist/uPlot.iife.min.js",
        "uplot.css": "dist/uPlot.min.css",
        "uplot.LICENSE": "LICENSE",
    }),
    ("idiomorph@0.8.0", "0BSD", {
        "idiomorph.js": "dist/idiomorph.min.js",
        "idiomorph.LICENSE": "LICENSE",
    }),
    (f"{NEXT}@5.3.0", "OFL-1.1", {
        "next.woff2": "files/atkinson-hyperlegible-next-latin-wght-normal.woff2",
        "atkinson.LICENSE": "LICENSE",
    }),
    (f"{MONO}@5.3.0", "OFL-1.1", {
        "mono.woff2": "files/atkinson-hyperlegible-mono-latin-wght-normal.woff2",
    }),
)  # fmt: skip


def main() -> None:
    """Fetch everything that is listed above."""
    listed = []
    for package, licence, files in TAKEN:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True)
            [archive] = Path(folder).glob("*.tgz")
            with tarfile.open(archive) as opened:
                for name, place in files.items():
                    member = opened.extractfile(f"package/{place}")
                    if member is None:
                        raise SystemExit(f"{package} has no file {place}")
                    (FOLDER / name).write_bytes(member.read())
        digests = {name: hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() for name in files}
        listed.append({"package": package, "licence": licence, "files": digests})
    (FOLDER / "vendor.json").write_text(json.dumps(listed, indent=2) + "\n")


if __name__ == "__main__":
    main()
