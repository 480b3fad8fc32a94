"""Settings of the environment: what is wrong is named with its rule, and a name that is none is found."""

import pytest
from pydantic import ValidationError

from tuneship.settings import ServiceSettings, faults_in, unknown_variables


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("PORT", "many", "TUNESHIP_PORT must be a valid integer"),
        ("PORT", "70000", "TUNESHIP_PORT must be less than or equal to 65535"),
        ("API_PROFILE", "short", "TUNESHIP_API_PROFILE must be 'full', 'simplified' or 'auto'"),
        ("TLS_KEY", "key.pem", "tls_certificate and tls_key belong together"),
    ],
)
def test_a_wrong_setting_is_named_with_its_rule_and_without_its_value(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, text: str
) -> None:
    monkeypatch.setenv(f"TUNESHIP_{name}", value)
    with pytest.raises(ValidationError) as raised:
        ServiceSettings()
    assert faults_in(raised.value) == text


def test_variables_that_are_no_settings_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    before = unknown_variables()
    for name in ("PROT", "NEARLY_NOTHING", "PORT", "SERVICE_HOST", "PORT_8700_TCP_ADDR", "RECORDS"):
        monkeypatch.setenv(f"TUNESHIP_{name}", "1")
    found = [name for name in unknown_variables() if name not in before]
    assert found == ["TUNESHIP_NEARLY_NOTHING", "TUNESHIP_PROT (did you mean TUNESHIP_PORT?)"]
