"""What an agent writes into the coordination store.

    agents/AGENT_ID    AgentRecord, with the agent's lease: the key exists while the agent lives

Details (models, queues, memory) are not in the store: orchestrators ask the agent for them (`POST /heartbeat`).
"""

from __future__ import annotations

import re

import msgspec

from pipeline.config.schema import AgentConfig
from pipeline.errors import ConfigError
from shm.decoding import DECODE_ERRORS

AGENTS = "agents/"  # prefix of the keys
VERSION = 1  # of the records and of the bodies; both sides use only their own
_AGENT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class AgentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A living agent."""

    agent_id: str
    url: str  # of its HTTP API, as http://HOST:PORT
    incarnation: str  # changes with each start of the agent: engines of an earlier one have ended
    version: int = VERSION
    tls_url: str = ""  # the same API with TLS, as https://HOST:PORT; "": the agent has no certificate


def agent_key(agent_id: str) -> str:
    """Key of an agent's record."""
    return AGENTS + agent_id


def agent_url(agent: AgentConfig, port: int = 0, *, is_tls: bool = False) -> str:
    """The URL under which orchestrators reach the agent. `port`: that it listens on, where `fleet.agent.port` is 0."""
    return f"{'https' if is_tls else 'http'}://{advertised_host(agent)}:{port or agent.port}"


def advertised_host(agent: AgentConfig) -> str:
    """The host in URLs of the agent and of its engines."""
    host = agent.advertise or agent.host
    return f"[{host}]" if ":" in host else host


def check_agent_id(agent_id: str) -> str:
    """Why it is not an agent's id; "" when it is."""
    if _AGENT_ID.fullmatch(agent_id):
        return ""
    return "expected up to 63 letters, digits, dots, dashes and underscores, the first a letter or digit"


def encode(record: AgentRecord) -> bytes:
    """The value of the key."""
    return msgspec.json.encode(record)


def decode(key: str, value: bytes) -> AgentRecord:
    """The record. Raises `ConfigError` for one of another version, or whose key is another agent's."""
    try:
        record = msgspec.json.decode(value, type=AgentRecord)
    except DECODE_ERRORS as error:
        raise ConfigError(f"{key} is not a record of an agent: {error}") from None
    if record.version != VERSION:
        raise ConfigError(f"{key} has version {record.version}, expected {VERSION}: run the same release everywhere")
    if key != agent_key(record.agent_id) or check_agent_id(record.agent_id):
        raise ConfigError(f"{key} is the record of {record.agent_id[:80]!r}; each agent writes its own")
    return record
