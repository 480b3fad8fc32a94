"""Environments of the programs we are compared with: their own, beside ours, never a dependency."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

PEERS = Path(__file__).parents[2] / ".peers"


def python_with(name: str, requirements: list[str]) -> Path:
    """The Python of the peer environment `name`, made at the first call.

    It sees our torch and transformers, so that both sides run the same versions and nothing large is fetched twice;
    `requirements` is what the peer needs beyond them.
    """
    folder = PEERS / name
    python, mark = folder / "bin" / "python", folder / "complete"
    if not mark.is_file():
        venv.create(folder, with_pip=True, clear=True)
        theirs = subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        )
        ours = sysconfig.get_path("purelib")
        Path(theirs.strip(), "shared.pth").write_text(ours + "\n", encoding="utf-8")
        subprocess.run(
            [
                python,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                *requirements,
            ],
            check=True,
            stdout=sys.stderr,
        )
        mark.touch()
    return python
