"""The token of one agent, from which neither the fleet's token nor another agent's can be computed.

    host.AGENT_ID.NUMBER.MAC    MAC: HMAC-SHA256 of the agent's id and the number, by the fleet's token

An agent whose file `fleet.token` has such a token serves under that id only, and cannot operate the fleet.  Machines
with the fleet's token (orchestrators, operators) compute it; the coordination store has the number that is valid:

    tokens/AGENT_ID    IssuedToken

A new number makes the old token useless: orchestrators refuse the agent that presents it.
"""

from __future__ import annotations

import hmac
import re
from typing import NamedTuple

import msgspec

from pipeline.errors import ConfigError
from pipeline.fleet.records import check_agent_id

TOKENS = "tokens/"  # prefix of the keys
MAX_NUMBER = 1 << 31
_TOKEN = re.compile(r"host\.([A-Za-z0-9][A-Za-z0-9._-]{0,62})\.([1-9][0-9]{0,9})\.([0-9a-f]{64})")


class IssuedToken(msgspec.Struct, frozen=True):
    """The value of `tokens/AGENT_ID`: which of the agent's tokens is valid."""

    number: int


class HostToken(NamedTuple):
    """What a token says of itself."""

    agent_id: str
    number: int


def make(secret: str, agent_id: str, number: int) -> str:
    """An agent's token. `secret`: the fleet's. Raises `ConfigError` if `secret` is an agent's or the id is none."""
    check_fleet(secret)
    if reason := check_agent_id(agent_id):
        raise ConfigError(f"agent {agent_id[:80]!r}: {reason}")
    mac = hmac.digest(secret.encode(), f"starling agent\0{agent_id}\0{number}".encode(), "sha256")
    return f"host.{agent_id}.{number}.{mac.hex()}"


def check_fleet(secret: str) -> None:
    """Raise `ConfigError` unless it is the fleet's own token."""
    if (owner := read(secret)) is not None:
        raise ConfigError(
            f"fleet.token has the token of agent {owner.agent_id}; this needs the fleet's own, which is secret",
            "fleet.token",
        )


def read(token: str) -> HostToken | None:
    """Whose token it is; None for the fleet's own."""
    match = _TOKEN.fullmatch(token)
    return HostToken(match[1], int(match[2])) if match is not None else None
