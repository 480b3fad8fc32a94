"""Virtual environments of the peers that benchmarks compare with; peers are never a dependency of tuneship."""

import subprocess
import sysconfig
import venv
from pathlib import Path

PEERS = Path(__file__).parents[2] / ".peers"
INSTALLATION_S = 900.0


class PeerMissing(Exception):
    """The peer cannot be installed or started here; the text says why, in one line."""

    def __init__(self, why: str) -> None:
        super().__init__(f"cannot run here: {' '.join(why.split())}")


def python_with(name: str, requirements: list[str], without: tuple[str, ...] = ()) -> Path:
    """The Python of the peer environment `name`, which the first call creates.

    It imports tuneship's torch and transformers, so that both sides run the same versions and nothing large is
    downloaded twice. `requirements` are installed besides; `without` names packages to uninstall again. Raises
    PeerMissing.
    """
    folder = PEERS / name
    python, mark = folder / "bin" / "python", folder / "complete"
    if not mark.is_file():
        venv.create(folder, with_pip=True, clear=True)
        _share(python)
        _pip(python, name, "install", *requirements)
        if without:
            _pip(python, name, "uninstall", "--yes", *without)
        mark.touch()
    return python


def _share(python: Path) -> None:
    """Let the peer import the packages of this environment, with its own first."""
    theirs = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    )
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    Path(theirs.strip(), "shared.pth").write_text(line, encoding="utf-8")


def _pip(python: Path, name: str, *arguments: str) -> None:
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments, "--quiet"]
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=INSTALLATION_S
        )
    except subprocess.TimeoutExpired:
        raise PeerMissing(f"{name}: pip took more than {INSTALLATION_S:.0f} s") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise PeerMissing(f"{name}: {errors[-1] if errors else 'pip failed'}")
