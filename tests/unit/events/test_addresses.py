"""No webhook reaches a dangerous address, in whatever form it is written and whatever the resolver answers later."""

import asyncio
import ipaddress
from datetime import UTC, datetime

import pytest

from tests.support.fakes.webhook_receiver import (
    RecordingNetwork,
    answer,
    listening,
    opened,
    receivers,
)
from tuneship.events.addresses import NEVER, OPENABLE, AddressRules, TargetRefused
from tuneship.events.attempt import DeliveryOutcome, Sender, default_trust
from tuneship.events.connector import Receivers


def listed(text: str) -> list[str]:
    return text.split()


DANGEROUS = listed(
    "0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 100.64.0.1 100.100.100.200 100.127.255.255 127.0.0.1 127.8.8.8"
    " 168.63.129.16 169.254.0.1 169.254.169.254 172.16.0.1 172.31.255.255 192.0.0.1 192.0.0.192 192.0.2.1"
    " 192.88.99.1 192.168.0.1 192.168.255.255 198.18.0.1 198.19.255.255 198.51.100.1 203.0.113.1 224.0.0.1"
    " 239.255.255.255 240.0.0.1 255.255.255.255"
    " :: ::1 ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254 ::ffff:0:127.0.0.1"
    " 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b:1::1 100::1 2001::1 2001:2::1 2001:10::1 2001:db8::1"
    " 2002:7f00:1:: 2002:a9fe:a9fe::1 3fff::1 4000::1 5f00::1 fc00::1 fd00:ec2::254 fd20:ce::254 fdff::1"
    " fe80::1 fec0::1 ff02::1 ff0e::1"
)
PUBLIC = listed(
    "1.1.1.1 8.8.8.8 9.255.255.255 11.0.0.1 100.63.255.255 100.128.0.1 126.255.255.255 172.15.255.255 172.32.0.1"
    " 192.167.1.1 223.255.255.255 2001:200::1 2003::1 2606:4700::1111 2a00:1450::1 3ffe::1"
)
EVERYTHING = (ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0"))
LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"),)
TRUST = default_trust()
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def literal(address: str) -> str:
    return f"https://[{address}]/" if ":" in address else f"https://{address}/"


def sent(known: Receivers, url: str, network: RecordingNetwork) -> DeliveryOutcome:
    return asyncio.run(Sender(known, network, TRUST).send(url, {}, b"{}", NOW))


@pytest.mark.parametrize("address", DANGEROUS)
class TestADangerousAddress:
    def test_is_refused_as_a_literal(self, address: str) -> None:
        network, known = RecordingNetwork(), Receivers(AddressRules())
        with pytest.raises(TargetRefused):
            known.check(literal(address))
        assert sent(known, literal(address), network) == DeliveryOutcome("address_refused")
        assert network.connected == []

    def test_is_refused_as_the_only_answer_of_a_name(self, address: str) -> None:
        network, known = RecordingNetwork(), receivers(AddressRules(), name=[[address]])
        with pytest.raises(TargetRefused):
            known.check("https://name.test/")
        assert sent(known, "https://name.test/", network) == DeliveryOutcome("address_refused")
        assert network.connected == []

    def test_is_refused_among_good_answers(self, address: str) -> None:
        network = RecordingNetwork()
        known = receivers(AddressRules(), name=[["8.8.8.8", "2606:4700::1111", address]])
        with pytest.raises(TargetRefused):
            known.check("https://name.test/")
        assert sent(known, "https://name.test/", network) == DeliveryOutcome("address_refused")
        assert network.connected == []

    def test_is_refused_when_the_name_changes_its_answer(self, address: str) -> None:
        network = RecordingNetwork()
        known = receivers(AddressRules(), name=[["8.8.8.8"], [address]])
        known.check("https://name.test/")
        assert sent(known, "https://name.test/", network) == DeliveryOutcome("address_refused")
        assert network.connected == []

    def test_is_not_reached_by_a_redirect(self, address: str) -> None:
        network = RecordingNetwork()

        async def redirected() -> DeliveryOutcome:
            async with listening() as receiver:
                receiver.answers["/"] = answer(307, f"Location: {literal(address)}")
                known = Receivers(opened("127.0.0.1", cidrs=LOOPBACK))
                return await Sender(known, network, TRUST).send(receiver.url(), {}, b"{}", NOW)

        assert asyncio.run(redirected()) == DeliveryOutcome("redirected", 307)
        assert network.connected == ["127.0.0.1"]


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_good(address: str) -> None:
    receivers(AddressRules(), name=[[address]]).check("https://name.test/")


@pytest.mark.parametrize(
    "host",
    ["2130706433", "0x7f000001", "0177.0.0.1", "127.1", "localhost", "LOCALHOST", "127.0.0.1."],
)
def test_another_spelling_of_this_machine_is_refused(host: str) -> None:
    with pytest.raises(TargetRefused):
        Receivers(AddressRules()).check(f"https://{host}/")


@pytest.mark.parametrize("address", DANGEROUS)
def test_an_open_network_opens_private_addresses_and_nothing_else(address: str) -> None:
    known = receivers(AddressRules(EVERYTHING), name=[[address]])
    parsed = ipaddress.ip_address(address)
    if any(parsed in one for one in OPENABLE) and not any(parsed in one for one in NEVER):
        known.check("https://name.test/")
    else:
        with pytest.raises(TargetRefused):
            known.check("https://name.test/")


def test_only_the_named_network_is_open() -> None:
    rules = AddressRules((ipaddress.ip_network("10.1.0.0/16"),))
    receivers(rules, name=[["10.1.2.3"]]).check("https://name.test/")
    with pytest.raises(TargetRefused):
        receivers(rules, name=[["10.2.2.3"]]).check("https://name.test/")


@pytest.mark.parametrize("scheme", ["https", "http"])
def test_the_services_own_ports_stay_closed_in_an_open_network(scheme: str) -> None:
    rules = opened("name.test", cidrs=EVERYTHING, closed_ports=frozenset({8700, 5432}))
    known = receivers(rules, name=[["127.0.0.1"]])
    known.check(f"{scheme}://name.test:8701/")
    for port in (8700, 5432):
        with pytest.raises(TargetRefused):
            known.check(f"{scheme}://name.test:{port}/")


def test_plain_http_is_for_named_hosts_only_and_opens_no_address() -> None:
    rules = opened("name.test")
    receivers(rules, name=[["8.8.8.8"]]).check("http://name.test/hook")
    with pytest.raises(TargetRefused):
        receivers(rules, other=[["8.8.8.8"]]).check("http://other.test/hook")
    with pytest.raises(TargetRefused):
        receivers(rules, name=[["10.0.0.1"]]).check("http://name.test/hook")


@pytest.mark.parametrize(
    ("named", "good", "others"),
    [
        (
            "127.0.0.1:8701",
            "http://127.0.0.1:8701/hook",
            "http://127.0.0.1:4200/ http://127.0.0.1/ https://127.0.0.1:8701/ http://127.0.0.2:8701/ http://localhost:8701/",
        ),
        ("[::1]:8701", "http://[::1]:8701/", "http://[::1]:4200/ http://127.0.0.1:8701/"),
        ("hooks.test:80", "http://hooks.test/", "http://hooks.test:8080/ https://hooks.test/"),
    ],
)
def test_a_host_with_a_port_opens_one_receiver_and_nothing_else(
    named: str, good: str, others: str
) -> None:
    known = receivers(opened(named), hooks=[["10.0.0.1"]])
    known.check(good)
    for url in listed(others):
        with pytest.raises(TargetRefused):
            known.check(url)


def test_a_receiver_that_was_opened_by_its_port_opens_no_dangerous_address() -> None:
    for address in ("169.254.169.254", "224.0.0.1"):
        with pytest.raises(TargetRefused):
            receivers(opened("hooks.test:80"), hooks=[[address]]).check("http://hooks.test/")
    closed = opened("127.0.0.1:8700", closed_ports=frozenset({8700}))
    with pytest.raises(TargetRefused):
        Receivers(closed).check("http://127.0.0.1:8700/")


@pytest.mark.parametrize(
    "url",
    [
        "ftp://name.test/",
        "javascript:alert(1)",
        "https://user:pw@name.test/",
        "https://user@name.test/",
        "https://name.test/#part",
        "https://name.test\\@other.test/",
        "https://name.test/a b",
        "https://name.test/\r\nX: y",
        "https://name.test/\x00",
        "https://①②⑦.⓪.⓪.①/",
        "https://bücher.test/",
        "https://name.test/ä",
        "https:///path",
        "https://",
        "//name.test/",
        "name.test",
        "https://name.test:0/",
        "https://name.test:80/",
        "https://name.test:22/",
        "https://name.test:1023/",
        "https://name.test:65536/",
        "https://name.test:+443/",
        "https://[::1/",
        "https://[name.test]/",
        "https://[fe80::1%25eth0]/",
        f"https://{'a' * 64}.test/",
        f"https://{'a' * 254}/",
        "https://missing.invalid/",
        "https://name.test?x",
    ],
)
def test_a_url_of_another_form_is_refused(url: str) -> None:
    with pytest.raises(TargetRefused):
        receivers(AddressRules(), name=[["8.8.8.8"]]).check(url)


@pytest.mark.parametrize(
    ("url", "authority", "path"),
    [
        ("https://Name.Test", "name.test", "/"),
        ("https://name.test:443/a?b=c&d=%20", "name.test", "/a?b=c&d=%20"),
        ("https://name.test:8443/@x", "name.test:8443", "/@x"),
        ("https://[2606:4700::1111]:8443/", "[2606:4700::1111]:8443", "/"),
    ],
)
def test_a_good_url_keeps_its_host_and_path(url: str, authority: str, path: str) -> None:
    target = AddressRules().target(url)
    assert (target.authority, target.path) == (authority, path)
