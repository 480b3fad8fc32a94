"""`make quick` runs the tests of what was changed, and the guards."""

import pytest

from scripts.touched_tests import GUARDS, ROOT, touched


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("tuneship/service/jobs/training_keeper.py", {"tests/service/jobs"}),
        ("tuneship/cli/main.py", {"tests/unit/cli", "tests/service/cli"}),
        ("tuneship/gates/rules.py", {"tests/unit/gates"}),
        ("flows/rollout/page.py", {"tests/flows/rollout"}),
        ("tasks/jobs.py", {"tests/unit/tasks"}),
        ("tests/unit/test_docs.py", set[str]()),
        ("tests/unit/gates/test_rules_of_old.py", set[str]()),
        ("docs/gates.md", set[str]()),
    ],
)
def test_a_change_is_tested_by_the_folders_of_its_package(file: str, expected: set[str]) -> None:
    assert set(touched([file])) == expected | set(GUARDS)


def test_the_guards_are_files() -> None:
    assert all((ROOT / one).is_file() for one in GUARDS)
