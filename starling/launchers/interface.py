"""What every launcher does: start agents, stop them, list them, show their logs.

A launcher starts the command `starling agent` on machines and starts it again when it ends.  Orchestrators find the
agents in the coordination store and talk to them directly: a launcher that is gone disturbs no request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol

import msgspec

State = Literal["starting", "running", "failed"]


class LaunchedAgent(msgspec.Struct, frozen=True, kw_only=True):
    """An agent as its launcher knows it. Whether it serves is in the store: `starling fleet agents`."""

    agent_id: str
    host: str  # of the launcher's words: an address, a node; "": not yet placed
    state: State
    restarts: int = 0


class Launcher(Protocol):
    """Puts agents on machines."""

    def start(self, agents: int | None) -> None:
        """Have this many agents run, more or fewer than before; None: as many as is configured where they run.

        Raises `StarlingError`.
        """

    def stop(self) -> None:
        """End every agent that this launcher runs; streams in flight finish first. Raises `StarlingError`."""

    def list(self) -> tuple[LaunchedAgent, ...]:
        """The agents that it runs, in order of their ids. Raises `StarlingError`."""

    def logs(self, agent_id: str, lines: int, *, follow: bool) -> Iterator[str]:
        """The last lines of an agent's log, as they were written; with `follow` what comes, too.

        Raises `NotFound`, `StarlingError`.
        """


def log_lines(text: str) -> list[str]:
    """The lines of a log. Only a newline ends one: JSON may contain U+2028 and other ends of lines of Unicode."""
    return text.removesuffix("\n").split("\n") if text else []
