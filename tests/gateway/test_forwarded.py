"""Clients behind proxies: what is believed, and from whom."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.api.forwarded import MAX_HOPS, Client, TrustedProxies

PROXIES = TrustedProxies(["10.0.0.0/8", "fd00::/8", "192.0.2.7"])
PROXY, OTHER = "10.1.2.3", "203.0.113.9"

outside = st.ip_addresses().filter(
    lambda address: not PROXIES.trusts(str(address)) and getattr(address, "ipv4_mapped", None) is None
)
inside = st.one_of(
    st.integers(0, 2**24 - 1).map(lambda n: str(ipaddress.IPv4Address((10 << 24) + n))),
    st.integers(0, 2**120 - 1).map(lambda n: str(ipaddress.IPv6Address((0xFD << 120) + n))),
)
header = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=60)


def written(address: str, port: int | None, is_quoted: bool) -> str:
    """An address as proxies write it."""
    is_six = ":" in address
    text = f"[{address}]" if is_six and (is_quoted or port is not None) else address
    return text if port is None else f"{text}:{port}"


@given(outside, header, header, header)
def test_headers_of_others_are_ignored(peer: ipaddress.IPv4Address, one: str, two: str, three: str) -> None:
    assert PROXIES.client(str(peer), [one], [two], [three]) == Client(str(peer))


@given(inside, header, outside, st.lists(inside, max_size=4), st.one_of(st.none(), st.integers(0, 65535)))
def test_the_last_address_that_is_no_proxy_is_the_client(
    peer: str, forged: str, client: ipaddress.IPv4Address, proxies: list[str], port: int | None
) -> None:
    """Whatever the client itself has put before."""
    shown = written(str(client), port, False)
    assert PROXIES.client(peer, [", ".join([forged, shown, *proxies])], []).address == str(client)
    assert PROXIES.client(peer, [forged, shown, *proxies], []).address == str(client)


@given(inside, outside, st.lists(inside, max_size=4), st.one_of(st.none(), st.integers(0, 65535)), st.booleans())
def test_forwarded_says_the_same(
    peer: str, client: ipaddress.IPv4Address, proxies: list[str], port: int | None, by: bool
) -> None:
    hops = [
        f'for="{written(hop, port, True)}"' + (";by=10.0.0.1;proto=https" if by else "")
        for hop in (str(client), *proxies)
    ]
    found = PROXIES.client(peer, [], [", ".join(["for=_hidden", *hops])])
    assert found == Client(str(client), "https" if by else "")


@given(header, outside, st.lists(inside, max_size=3), st.booleans())
def test_nothing_that_a_client_puts_before_makes_it_another_one(
    forged: str, client: ipaddress.IPv4Address, proxies: list[str], has_quotes: bool
) -> None:
    """Quotation marks that it does not close included: at worst it counts as one of the proxies."""
    hops = [written(hop, None, True) for hop in (str(client), *proxies)]
    forged = f"for=198.51.100.1;a{forged}" if has_quotes else forged
    shown = ", ".join(f'for="{hop}"' if has_quotes or ":" in hop else f"for={hop}" for hop in hops)
    for headers in ([f"{forged}, {shown}"], [forged, shown], [f'for=198.51.100.1;a="{forged}, {shown}']):
        assert PROXIES.client(PROXY, [], headers).address in {str(client), PROXY, *proxies}


@given(st.lists(header, max_size=4), st.lists(header, max_size=4), st.lists(header, max_size=2))
def test_any_headers_give_an_address_and_a_scheme(one: list[str], two: list[str], three: list[str]) -> None:
    found = PROXIES.client(PROXY, one, two, three)
    ipaddress.ip_address(found.address)
    assert found.scheme in ("", "http", "https")


@pytest.mark.parametrize(
    ("hops", "client"),
    [
        ("", PROXY),
        ("unknown", PROXY),
        (f"{OTHER}, unknown", PROXY),
        (f"{OTHER}, unknown, 10.0.0.9", "10.0.0.9"),
        ("10.0.0.9, 10.0.0.8", "10.0.0.9"),
        (f"::ffff:{OTHER}", OTHER),
        (f"{OTHER}:70000", OTHER),
        ("[2001:db8::1]:443", "2001:db8::1"),
        ("fe80::1%eth0", "fe80::1"),
        ("[::1", PROXY),
        ("1.2.3.4.5", PROXY),
        (",".join([OTHER] + ["10.0.0.1"] * MAX_HOPS), "10.0.0.1"),
    ],
)
def test_lists_of_hops(hops: str, client: str) -> None:
    assert PROXIES.client(PROXY, [hops], []).address == client


def test_two_headers_that_disagree_are_not_believed() -> None:
    assert PROXIES.client(PROXY, [OTHER], [f"for={OTHER}"]).address == OTHER
    assert PROXIES.client(PROXY, [OTHER], ["for=198.51.100.1"]).address == PROXY


@pytest.mark.parametrize("text", ['for="1.2.3.4', "for", ";;", "for=1.2.3.4 for=2.2.2.2", 'for="a\\'])
def test_a_malformed_element_names_no_client(text: str) -> None:
    assert PROXIES.client(PROXY, [], [text]).address == PROXY


def test_the_unix_socket_is_trusted_by_name() -> None:
    assert TrustedProxies(["unix"]).client("uid:33", [OTHER], []).address == OTHER
    assert PROXIES.client("uid:33", [OTHER], []).address == "uid:33"
    assert not TrustedProxies([])


@pytest.mark.parametrize("text", ["10.0.0.1/8", "host", "", "10.0.0.0/99"])
def test_other_texts_are_no_networks(text: str) -> None:
    with pytest.raises(ValueError):
        TrustedProxies([text])
