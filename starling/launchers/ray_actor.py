"""The actor that holds an agent on a node of a Ray cluster.

The agent is a child process that ends with the actor.  When the agent ends, the actor starts it again with a backoff;
when the actor or its node dies, Ray makes another actor, perhaps on another node.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from pipeline.config.load import load
from pipeline.config.schema import AgentConfig
from pipeline.errors import ConfigError
from starling.launchers.child import Child
from starling.launchers.local import log_file

CHECK_S = 0.2
RETRY_S = 5.0  # after an exit that says that a restart is of no use
END_S = 60.0  # for streams in flight, from SIGTERM to SIGKILL
MAX_READ_BYTES = 4 << 20  # of a log in one call


def environment_of(host: str, settings: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """That of an agent on a node with the address `host`, from that of its actor, and `settings`.

    The agent listens on that address unless the configuration of the node names another one.
    """
    found = {**env, **settings}
    try:
        is_named = load(env=found).fleet.agent.host != AgentConfig().host
    except ConfigError:  # the agent says what is wrong with it
        is_named = False
    return found if is_named else {**found, "STARLING_FLEET__AGENT__HOST": host}


class AgentHolder:
    """One agent. Ray calls the methods from threads of its own; the child belongs to one thread."""

    def __init__(self, agent_id: str, settings: dict[str, str]) -> None:
        """`settings`: environment variables."""
        import ray

        self._agent_id = agent_id
        self._host = host = ray.util.get_node_ip_address()
        environment = environment_of(host, settings, os.environ)
        self._child = Child(agent_id, ["agent", "--id", agent_id, "--port", "0"], environment)
        self._ending = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._hold, daemon=True)
        self._thread.start()

    def _hold(self) -> None:
        pause_s = CHECK_S
        while not self._ending.wait(pause_s):
            # An agent that cannot start is tried again as well: what is in its way may be its predecessor, whose actor
            # has died, and which has not ended yet.
            self._has_failed = self._child.tick(time.monotonic()) is not None
            pause_s = RETRY_S if self._has_failed else CHECK_S
        self._child.end(time.monotonic() + END_S)

    def state(self) -> tuple[str, str, int]:
        """Host, state and restarts of the agent."""
        state = "failed" if self._has_failed else "running" if self._child.pid else "starting"
        return self._host, state, max(0, self._child.starts - 1)

    def stop(self) -> None:
        """End the agent, and wait for its end."""
        self._ending.set()
        self._thread.join()

    def log(self, lines: int) -> tuple[bytes, int]:
        """The last lines of the agent's log file as they are (JSON), and the position after them."""
        data, position = self._read(-MAX_READ_BYTES)
        kept = data.splitlines(keepends=True)[-lines:] if lines else []
        return b"".join(kept), position

    def log_after(self, position: int) -> tuple[bytes, int]:
        """The lines after the position, or all of the file if it has become shorter, and the next position."""
        return self._read(position)

    def _read(self, position: int) -> tuple[bytes, int]:
        """Whole lines from a position on, a negative one from the end."""
        path: Path = log_file(self._agent_id)
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                begin = max(0, size + position) if position < 0 else position if position <= size else 0
                file.seek(begin)
                data = file.read(MAX_READ_BYTES)
        except OSError:
            return b"", 0
        whole = data[: data.rfind(b"\n") + 1]
        return whole, begin + len(whole)
