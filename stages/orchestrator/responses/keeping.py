"""The answer to a request for /v1/responses on its way to the client: it is stored before its last event is sent.

The engine names what is stored with it in a comment before that event (pipeline/api/response_context.py), so that any
orchestrator that forwards the end of the stream can store it, also one that has not seen its beginning.  A response
that cannot be stored fails, as in a server.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from pipeline.api import response_context, sse
from pipeline.api.json_body import to_json
from pipeline.api.response_context import KeptResponse
from pipeline.api.response_object import failed_response, refused_events
from pipeline.errors import InternalError, StarlingError
from shm.decoding import DECODE_ERRORS
from stages.orchestrator.forward import Out

END = b"\n\n"
_RESPONSE = b'data: {"type":"response.'
_CREATED = b'data: {"type":"response.created"'
_LAST = (b'data: {"type":"response.completed"', b'data: {"type":"response.incomplete"')
_FAILED = b'data: {"type":"response.failed"'
_ERROR = b'data: {"type":"error"'
_NUMBER = re.compile(rb'"sequence_number":([0-9]{1,12})')

Keep = Callable[[bytes, KeptResponse], Awaitable[None]]  # the response's JSON, and what is stored with it


class KeepingOut:
    """An `Out` that stores a response before its last event. `keep` raises `StarlingError`."""

    def __init__(
        self,
        out: Out,
        keep: Keep,
        *,
        is_response: bool = True,
        before_end: Callable[[], Awaitable[None]] | None = None,
        queued: bytes = b"",
    ) -> None:
        """`is_response`: false if the stream, which is read again, may be another endpoint's.

        `before_end`: is called before the last event is sent, after which the client may send its next request.
        `queued`: JSON of the response of a request that has not begun; b"": the client may have had its first event.
        """
        self.usage: dict[str, Any] = {}  # of the response, when it is complete
        self.failed = b""  # JSON of the response, if the engine says that it has failed
        self.error: StarlingError | None = None  # with which the stream has ended here
        self._out = out
        self._keep = keep
        self._is_response = is_response
        self._before_end = before_end
        self._queued = queued
        self._kept: KeptResponse | None = None
        self._created = b""  # data of the first event
        self._number = -1  # of the last event

    @property
    def is_begun(self) -> bool:
        """See `Out`."""
        return self._out.is_begun

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """See `Out`."""
        self._out.begin(status, headers)

    async def write(self, data: bytes) -> None:
        """Pass whole events on."""
        passed: list[bytes] = []
        for piece in sse.pieces(data):
            if piece.startswith(response_context.KEPT):
                self._kept = response_context.read_kept(piece[:-1])
                continue
            if piece.startswith(b":"):
                passed.append(piece)
                continue
            block = piece.removesuffix(END)
            event = block[max(0, block.find(b"data: {")) :]
            if event.startswith(_LAST):
                await self._pass(passed)
                passed = []
                block = await self._last(block, event[6:])
            elif event.startswith(_CREATED):
                self._created = event[6:]
            elif event.startswith(_FAILED):
                self.failed = bytes(msgspec.json.decode(event[6:], type=dict[str, msgspec.Raw])["response"])
                await self._ends()
            elif event.startswith(_ERROR):
                await self._ends()
            if event.startswith(_RESPONSE) and (found := _NUMBER.search(block)):
                self._number, self._is_response = int(found[1]), True
            passed.append(block + END)
        await self._pass(passed)

    def write_now(self, data: bytes) -> bool:
        """See `Out`. Never: the last event waits for the store."""
        return False

    async def _ends(self) -> None:
        if self._before_end is not None:
            await self._before_end()

    async def _pass(self, pieces: list[bytes]) -> None:
        if pieces:
            await self._out.write(b"".join(pieces))

    async def _last(self, block: bytes, data: bytes) -> bytes:
        """Store the response; the event to send."""
        try:
            event = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
            body = bytes(event["response"])
            response = msgspec.json.decode(body, type=dict[str, Any])
            self.usage = response.get("usage") or {}
        except (*DECODE_ERRORS, KeyError):
            raise InternalError("the engine's last event is no event of a response") from None
        try:
            if self._kept is not None:
                await self._keep(body, self._kept)
            elif response.get("conversation"):
                raise without_record()
        except StarlingError as error:
            self.error = error
            found = _NUMBER.search(block)
            return _failed_event(response, error, int(found[1]) if found else self._number + 1)
        finally:
            await self._ends()
        return block

    async def fail(self, error: StarlingError, open_choices: Sequence[int]) -> None:
        """End the stream with an error."""
        self.error = error
        await self._ends()
        if not self._is_response:
            await self._out.fail(error, open_choices)
            return
        if self._created:
            response = msgspec.json.decode(self._created)["response"]
            event = _failed_event(response, error, self._number + 1) + END
        elif self._queued:
            event = b"".join(refused_events(msgspec.json.decode(self._queued), error))
        else:
            shown = {"type": "error", "code": error.code, "message": error.message, "param": error.param or None}
            event = sse.event(to_json({**shown, "sequence_number": self._number + 1}), name=b"error")
        await self._out.write(event)


def without_record() -> InternalError:
    """The error for an answer that has nothing to be stored, although it is to be."""
    return InternalError("the engine's answer has no record to be stored: run the same release everywhere")


def _failed_event(response: dict[str, Any], error: StarlingError, number: int) -> bytes:
    data = {"type": "response.failed", "sequence_number": number, "response": failed_response(response, error)}
    return sse.event(to_json(data), name=b"response.failed").removesuffix(END)


class AfterOut:
    """An `Out` that passes on what follows an event, given by its sequence number. Deltas are cut at a character."""

    def __init__(self, out: Out, after: int) -> None:
        """`after`: -1: all events."""
        self._out = out
        self._after = after

    @property
    def is_begun(self) -> bool:
        """See `Out`."""
        return self._out.is_begun

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """See `Out`."""
        self._out.begin(status, headers)

    async def write(self, data: bytes) -> None:
        """Pass whole events on."""
        if self._after >= 0:
            data = b"".join([after_number(piece, self._after) for piece in sse.pieces(data)])
        if data:
            await self._out.write(data)

    def write_now(self, data: bytes) -> bool:
        """See `Out`. Never."""
        return False

    async def fail(self, error: StarlingError, open_choices: Sequence[int]) -> None:
        """End the stream with an error."""
        await self._out.fail(error, open_choices)


def _is_failure(block: bytes) -> bool:
    return block.startswith((_FAILED, _ERROR), max(0, block.find(b"data: {")))


def after_number(block: bytes, after: int) -> bytes:
    """The part of an event, with its end, after the one with the sequence number `after`; b"" if there is none."""
    found = _NUMBER.search(block)
    if found is None:
        return block
    number = int(found[1])
    if _is_failure(block):  # its number may be another one at another orchestrator
        return block
    if number <= after:
        return b""
    at = block.find(b"data: {")
    head, event = block[: at + 6], msgspec.json.decode(block[at + 6 :], type=dict[str, Any])
    delta = event.get("delta")
    if isinstance(delta, str) and number - len(delta) < after:  # a delta has a number for each character
        event["delta"] = delta[after - number :]
        return head + to_json(event) + END
    return block
