"""Signatures agree with another implementation, secrets are sealed, and retries come when they should."""

import base64
import json
from datetime import UTC, datetime, timedelta

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from tuneship.events.retry_schedule import JITTER, WAITS, next_try, retry_after
from tuneship.events.signing import new_secret, signed_headers
from tuneship.security.vault import SealBroken, Vault

NOW = datetime(2026, 3, 1, tzinfo=UTC)
BODY = json.dumps({"id": "evt_1", "text": "Grüße"}, ensure_ascii=False).encode()


def now_s() -> int:
    return int(datetime.now(UTC).timestamp())


def test_a_secret_is_32_random_bytes() -> None:
    secrets = {new_secret() for _ in range(100)}
    assert len(secrets) == 100
    assert {
        len(base64.b64decode(one.removeprefix("whsec_"), validate=True)) for one in secrets
    } == {32}


def test_another_implementation_takes_a_thousand_signatures() -> None:
    for number in range(1000):
        secret, body = new_secret(), BODY + b" " * (number % 7)
        Webhook(secret).verify(body, signed_headers([secret], f"evt_{number}", now_s(), body))


def test_during_a_rotation_both_secrets_verify_and_no_other() -> None:
    old, new = new_secret(), new_secret()
    headers = signed_headers([new, old], "evt_1", now_s(), BODY)
    for secret in (old, new):
        Webhook(secret).verify(BODY, headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(new_secret()).verify(BODY, headers)


def test_every_flipped_bit_of_body_id_and_time_is_found() -> None:
    secret = new_secret()
    headers = signed_headers([secret], "evt_1", now_s(), BODY)
    for place in range(len(BODY)):
        changed = bytearray(BODY)
        changed[place] ^= 1
        with pytest.raises((WebhookVerificationError, UnicodeDecodeError)):
            Webhook(secret).verify(bytes(changed), headers)
    earlier = str(int(headers["webhook-timestamp"]) - 9)
    for name, value in (("webhook-id", "evt_2"), ("webhook-timestamp", earlier)):
        with pytest.raises(WebhookVerificationError):
            Webhook(secret).verify(BODY, headers | {name: value})


def test_a_sealed_secret_opens_only_with_its_key_and_for_its_row() -> None:
    vault, secret = Vault(b"k" * 32), new_secret()
    sealed = vault.seal(secret.encode(), "wh_1")
    assert vault.open(sealed, "wh_1") == secret.encode()
    assert secret.encode() not in sealed
    assert vault.seal(secret.encode(), "wh_1") != sealed
    broken = bytes([*sealed[:-1], sealed[-1] ^ 1])
    for other, about in ((sealed, "wh_2"), (broken, "wh_1"), (b"", "wh_1"), (sealed[:20], "wh_1")):
        with pytest.raises(SealBroken):
            vault.open(other, about)
    with pytest.raises(SealBroken):
        Vault(b"l" * 32).open(sealed, "wh_1")


def test_ten_tries_end_after_three_days_and_a_quarter() -> None:
    moment, times = NOW, list[timedelta]()
    for attempts in range(1, 10):
        following = next_try(attempts, moment, 0.5, None, WAITS)
        assert following is not None
        moment = following
        times.append(moment - NOW)
    assert next_try(10, moment, 0.5, None, WAITS) is None
    assert times[0] == timedelta(seconds=5)
    assert times[-1] == timedelta(hours=75, minutes=35, seconds=5)


@pytest.mark.parametrize("attempts", range(1, 10))
def test_jitter_moves_a_try_by_a_tenth_at_most(attempts: int) -> None:
    waits = [next_try(attempts, NOW, draw, None, WAITS) for draw in (0.0, 0.999999)]
    assert [round((one - NOW) / WAITS[attempts], 3) for one in waits if one] == [
        1 - JITTER,
        1 + JITTER,
    ]


def test_a_receiver_may_ask_for_more_time_but_not_for_less() -> None:
    assert next_try(1, NOW, 0.5, timedelta(hours=1), WAITS) == NOW + timedelta(hours=1)
    assert next_try(5, NOW, 0.5, timedelta(seconds=1), WAITS) == NOW + WAITS[5]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120),
        ("86400", 86_400),
        ("999999999", 86_400),
        ("9" * 30, 86_400),
        ("Sun, 01 Mar 2026 00:10:00 GMT", 600),
        ("Sun, 01 Mar 2099 00:10:00 GMT", 86_400),
        ("Sun, 01 Mar 2020 00:10:00 GMT", None),
        ("Sun, 01 Mar 2026 00:10:00", None),
        ("0", None),
        ("-5", None),
        ("٣", None),  # This is a digit, but not one that HTTP allows.
        ("soon", None),
        ("", None),
        (None, None),
    ],
)
def test_retry_after_is_read_in_both_forms(value: str | None, seconds: int | None) -> None:
    found = retry_after(value, NOW)
    assert found == (None if seconds is None else timedelta(seconds=seconds))
