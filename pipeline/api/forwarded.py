"""The address of a client behind trusted proxies, from `X-Forwarded-For` or `Forwarded` (RFC 7239). Pure.

Each proxy appends the address that it has accepted the request from, so the list is believed from its end: the client
is the last address that is not itself a trusted proxy.  What stands before it was sent by the client, and is ignored.
So is everything from a peer that is no trusted proxy.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import NamedTuple

MAX_HOPS = 32  # of a list, from its end
UNIX_PROXY = "unix"  # in `server.trusted_proxies`: whatever connects to the Unix socket

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# One element of Forwarded: pairs of a token and a token or quoted string.
_PAIR = re.compile(
    r"""\s*([!#$%&'*+.^_`|~0-9A-Za-z-]+)=(?:"((?:[^"\\]|\\.)*)"|([!#$%&'*+.^_`|~0-9A-Za-z-]*))\s*(?:;|$)"""
)
_ELEMENT = re.compile(r"""(?:[^",]|"(?:[^"\\]|\\.)*")+""")


class Client(NamedTuple):
    """Who sent a request, as far as it can be believed."""

    address: str  # an IP address, or what the connection is known by
    scheme: str = ""  # http or https, as the nearest proxy says; "": it does not


def parse_networks(texts: Sequence[str]) -> tuple[_Network, ...]:
    """The networks of `server.trusted_proxies`. Raises `ValueError`."""
    return tuple(ipaddress.ip_network(text) for text in texts if text != UNIX_PROXY)


class TrustedProxies:
    """The proxies whose headers are believed."""

    def __init__(self, texts: Sequence[str]) -> None:
        """`texts`: addresses and networks, and `unix`. Raises `ValueError`."""
        self._networks = parse_networks(texts)
        self._has_unix = UNIX_PROXY in texts

    def __bool__(self) -> bool:
        return bool(self._networks) or self._has_unix

    def trusts(self, peer: str) -> bool:
        """Whether the peer of a connection is a trusted proxy. `peer`: an address, or uid:N on the Unix socket."""
        if peer.startswith("uid:"):
            return self._has_unix
        address = _parse(peer)
        return address is not None and self._contains(address)

    def client(
        self, peer: str, forwarded_for: Sequence[str], forwarded: Sequence[str], proto: Sequence[str] = ()
    ) -> Client:
        """Who sent a request that came from `peer`.

        The sequences are the values of X-Forwarded-For, Forwarded and X-Forwarded-Proto, a header for each.  If the
        first two name different clients, a proxy has let one of them through as the client sent it: then `peer` counts.
        """
        if not self.trusts(peer):
            return Client(peer)
        found = []
        if forwarded_for:
            found.append(self._last(peer, ",".join(forwarded_for).split(",")))
        scheme = proto[-1].rpartition(",")[2].strip().lower() if proto else ""
        if forwarded:
            elements = [_pairs(element) for element in _ELEMENT.findall(",".join(forwarded))]
            found.append(self._last(peer, [pairs.get("for", "") for pairs in elements]))
            scheme = scheme or (elements[-1].get("proto", "").lower() if elements else "")
        address = found[0] if found and len(set(found)) == 1 else peer
        return Client(address, scheme if scheme in ("http", "https") else "")

    def _last(self, peer: str, hops: Sequence[str]) -> str:
        """The last address of the list that is no trusted proxy; `peer` or the proxy after it, where it has none."""
        nearest = peer
        for hop in reversed(hops[-MAX_HOPS:]):
            address = _parse(hop)
            if address is None:  # unknown, hidden or forged: the proxy that has sent it is the last that is known
                return nearest
            nearest = str(address)
            if not self._contains(address):
                return nearest
        return nearest

    def _contains(self, address: _Address) -> bool:
        return any(address.version == network.version and address in network for network in self._networks)


def _parse(text: str) -> _Address | None:
    """An address, also with a port and in brackets; None for anything else."""
    text = text.strip()
    if text.startswith("["):
        text, closed, _ = text[1:].partition("]")
        if not closed:
            return None
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _pairs(element: str) -> dict[str, str]:
    """The pairs of an element of Forwarded; none if it is malformed."""
    found: dict[str, str] = {}
    at = 0
    element = element.strip()
    while at < len(element):
        pair = _PAIR.match(element, at)
        if pair is None:
            return {}
        value = re.sub(r"\\(.)", r"\1", pair[2]) if pair[2] is not None else pair[3]
        found.setdefault(pair[1].lower(), value)
        at = pair.end()
    return found
