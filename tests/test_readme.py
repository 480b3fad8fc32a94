"""The commands, files and settings that the README names exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_every_make_target_of_the_readme_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make (\w+)", README, flags=re.MULTILINE)) <= targets


def test_every_file_that_a_command_of_the_readme_names_exists() -> None:
    commands = re.findall(r"python ((?:flows|scripts|examples)/\S+\.py)", README)
    assert commands
    assert [file for file in commands if not (ROOT / file).is_file()] == []


def test_every_setting_of_the_readme_is_read() -> None:
    settings = (ROOT / "tuneship" / "settings.py").read_text()
    names = set(re.findall(r"`TUNESHIP_([A-Z_]+)`", README))
    assert names
    assert [name for name in names if not re.search(rf"\b{name.lower()}: ", settings)] == []
