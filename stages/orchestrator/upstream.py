"""What the orchestrator needs of an HTTP client. stage.py implements it; everything else is without sockets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

Take = Callable[[bytes], bool]  # takes the next bytes of a body; whether it may be given more at once. Raises nothing
# Is given an answer as soon as its head is there; what takes its body from there on, or None. Raises nothing.
Begins = Callable[["Answer"], Take | None]
MAX_WHOLE_BYTES = 64 << 20  # of an answer that is not streamed


class Unreachable(Exception):
    """The engine or agent does not answer, or stopped in the middle of its answer. The message says how."""


class Answer(Protocol):
    """An HTTP response whose head has arrived."""

    status: int
    headers: Mapping[str, str]

    async def read(self) -> bytes:
        """The next bytes; b"" at the end. Raises `Unreachable`."""

    async def pass_to(self, take: Take) -> bool:
        """Give the next bytes to `take` as they come, until it returns False: then True. False at the end.

        What `Begins` has returned goes on with them, if it is there. Raises `Unreachable`.
        """

    def abort(self, reason: str) -> None:
        """Close the connection. A `read` under way raises `Unreachable` with the reason."""

    def close(self) -> None:
        """Release the connection: for another request if the answer was read to its end. Idempotent."""


class Client(Protocol):
    """Sends requests to engines and agents."""

    async def open(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
        timeout_s: float = 0.0,
        *,
        agent_id: str,
        begins: Begins | None = None,
    ) -> Answer:
        """The response to a request to an agent or its engine. `timeout_s`: until its head, 0: no bound.

        Raises `Unreachable`, also if the host that answers is not the agent's.
        """


async def read_whole(answer: Answer, hold: Callable[[int], object] = lambda size: None) -> bytes:
    """The rest of an answer. Raises `Unreachable`, also for more than `MAX_WHOLE_BYTES`.

    `hold` is called with its size so far, and may raise.
    """
    parts, size = [], 0
    while part := await answer.read():
        size += len(part)
        if size > MAX_WHOLE_BYTES:
            raise Unreachable(f"the answer has more than {MAX_WHOLE_BYTES} bytes")
        hold(size)
        parts.append(part)
    return b"".join(parts)
