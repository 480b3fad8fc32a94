"""The table from groups of a provider to tenants and scopes: a fault in it is named with its place."""

from pathlib import Path

import pytest

from tuneship.service.access.people_groups import GroupsFault, PeopleGroups


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("groups: [\n", "line 2"),
        ("", "the file"),
        ("groups: []", "groups:"),
        ("groups: [{group: a, tenant: t, scopes: [viewer], more: 1}]", "groups[0].more"),
        ("groups: [{group: a, tenant: t, scopes: [planted]}]", "groups[0].scopes[0]"),
        ("groups: [{group: a, tenant: t, scopes: ['models:content']}]", "groups[0].scopes[0]"),
        ("groups: [{group: a, tenant: 'planted!', scopes: [viewer]}]", "groups[0].tenant"),
        ("groups: [{tenant: t, scopes: [viewer]}]", "groups[0].group"),
    ],
)
def test_a_fault_of_the_groups_names_file_and_place(tmp_path: Path, text: str, place: str) -> None:
    file = tmp_path / "groups.yaml"
    file.write_text(text)
    with pytest.raises(GroupsFault) as raised:
        PeopleGroups(file)
    assert str(file) in str(raised.value)
    assert place in str(raised.value)
    assert "planted" not in str(raised.value)
