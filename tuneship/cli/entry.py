"""The console script `tuneship`. The client installs it too, without the libraries of the command line."""

import sys


def main() -> None:
    """Run the command, or name the package to install for it."""
    try:
        from tuneship.cli.main import main as run  # noqa: PLC0415 - what may be missing
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "tuneship":
            raise  # a fault of ours, and no installation would mend it
        need = "the command needs `pip install 'tuneship-client[cli]'`"
        sys.exit(f"tuneship: {need} (missing: {error.name})")
    except KeyboardInterrupt:  # later ones are the command's
        sys.exit(130)
    run()
