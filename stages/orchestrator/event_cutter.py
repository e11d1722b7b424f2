"""Cuts an engine's event stream at the ends of events, without parsing what is in them.

Bytes are forwarded in whole events, so that a stream that breaks in the middle of one can be continued by another
engine.  An engine that begins again computes the same events, although those of several choices may be interleaved in
another way.  An event's id has the place of each choice (`req-5f..:17.9`), so that what was forwarded of a choice is
dropped, choice by choice; while the engine is behind with one, the ids that it sends are corrected to what the client
has.

An event is a block of lines that ends with an empty line.  A block without data is a reconnection delay: it is
forwarded, but not counted, and so are comments, without the empty line that engines send behind each of them.  Comments
that name output tokens or the code of an error are for the orchestrator alone.
"""

from __future__ import annotations

import math
import re

from pipeline.api.output_tokens import COMMENT
from pipeline.api.response_context import FAILED, read_failed
from stages.orchestrator.output_record import OutputRecord

END = b"\n\n"
DONE = b"data: [DONE]"  # the last event of OpenAI's API
# And of Anthropic's, and of OpenAI's Responses API.
MESSAGE_STOP = b'data: {"type":"message_stop"'
RESPONSE_ENDS = (b'data: {"type":"response.completed"', b'data: {"type":"response.incomplete"')
ERRORS = (b'data: {"error":', b'data: {"type":"error"', b'data: {"type":"response.failed"')
_LAST = (DONE, MESSAGE_STOP, *RESPONSE_ENDS)
RETRY = b"retry: "  # the reconnection delay, before the first event of a stream, also of a resumed one
MAX_EVENT_BYTES = 16 << 20  # of one event that is not complete

# Most of what comes: one event with an id that is neither the last one nor an error, and the comment behind it.
USUAL = re.compile(
    rb"id: ([^\n]+)\n(?:event: [^\n]*\n)?data: (?!%b)[^\n]*\n\n(?:(: tokens [^\n]*)\n\n)?"
    % b"|".join(re.escape(begin.removeprefix(b"data: ")) for begin in (*_LAST, *ERRORS))
)
_FIRST = re.compile(rb"(?:retry: [0-9]+\n)?" + USUAL.pattern)

Place = tuple[int, int, float]  # tokens, level, units
_PLACE = re.compile(rb"([0-9]+)([fed]?)(?:-([0-9]+))?")
_LEVELS = (b"", b"f", b"e", b"d")
_ENDED = _LEVELS.index(b"e")
_BEGIN: Place = (0, 0, math.inf)


def tokens_before(last_id: str) -> int:
    """Tokens of all choices that a client had got with this event; 0 for what is no id of an event."""
    _, colon, places = last_id.rpartition(":")
    found = [_PLACE.fullmatch(place.encode()) for place in places.split(".")] if colon else []
    return sum(int(one[1]) for one in found if one is not None)


class EventTooLargeError(Exception):
    """The engine sends an event that does not end."""


class EventCutter:
    """The state of one stream, across engines.

    last_id: of the last event that the client has received. output: the record of its tokens
    """

    def __init__(self, last_id: bytes = b"", output: OutputRecord | None = None) -> None:
        self.last_id = last_id
        self.output = output or OutputRecord()
        self.n_events = 0  # forwarded
        self.is_over = False  # the last event was forwarded
        self.error = b""  # an error event, which was not forwarded
        self.error_code = ""  # of it, as a comment before it says
        self.before_error = b""  # opening events that came with it and were not forwarded: another engine may begin
        self._rest = b""
        # Events before the first one that has a place. A client with an id has received them all.
        self._n_opening: float = math.inf if last_id else 0
        self._is_opening = not last_id
        self._replay: _Replay | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the client has received an event."""
        return bool(self.n_events or self.last_id)

    def open_choices(self, n_choices: int) -> list[int]:
        """Those of a stream's `n_choices` that have not ended; an event that the client has may name another number."""
        places = _parse(self.last_id)[1] or [_BEGIN] * n_choices
        return [index for index, (_, level, _) in enumerate(places) if level < _ENDED]

    def restart(self, *, is_replay: bool) -> None:
        """Another connection continues the stream, from its first event on (`is_replay`) or after `last_id`."""
        self._rest, self.error, self.error_code, self.before_error = b"", b"", "", b""
        self._replay = _Replay(self.last_id, self._n_opening) if is_replay and self.has_begun else None

    def feed(self, data: bytes) -> bytes:
        """The bytes to forward. Raises `EventTooLargeError`."""
        if not (self._rest or self._replay or self.is_over or self.error):
            usual = (_FIRST if self._is_opening and not self.n_events else USUAL).fullmatch(data)
            if usual is not None:
                self.last_id, comment = usual.groups()
                self.n_events += 1
                if self._is_opening:
                    self._opens(self.last_id)
                if comment is None:
                    return data
                self.output.add(comment)
                return data[: usual.start(2)]
        data = self._rest + data if self._rest else data
        cut = data.rfind(END) + 2
        if cut == 1:
            cut = 0
        self._rest = data[cut:]
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLargeError(f"an event has more than {MAX_EVENT_BYTES} bytes")
        if not cut:
            return b""
        had_begun, out = self.has_begun, []
        for block in data[: cut - 2].split(END):
            while block.startswith(b":") and not (self.is_over or self.error):
                line, _, block = block.partition(b"\n")
                out.append(self._take_comment(line))
            if self.is_over or self.error:
                break
            if taken := self._take(block):
                out += (taken, END)
        events = b"".join(out)
        if self.error and self._is_opening and not had_begun:
            self.before_error, self.last_id = events, b""
            self.n_events = self._n_opening = 0
            return b""
        return events

    def _opens(self, identity: bytes) -> None:
        """An event of the client's first ones."""
        self._is_opening = not _has_place(identity)
        self._n_opening += self._is_opening

    def _take_comment(self, line: bytes) -> bytes:
        """The comment as it is to be forwarded, see `sse.comment`; b"" if it is not."""
        if line.startswith(COMMENT):
            self.output.add(line)
            return b""
        if line.startswith(FAILED):
            self.error_code = read_failed(line)
            return b""
        return line + b"\n"

    def _take(self, block: bytes) -> bytes:
        """The block as it is to be forwarded; b"" if it is not."""
        at = block.find(b"data: ")
        if at < 0 or (at and block[at - 1] != 10):
            return block if not self.has_begun else b""
        if block.startswith(RETRY) and self.has_begun:
            line, _, block = block.partition(b"\n")
            at -= len(line) + 1
        if block.startswith(ERRORS, at):
            self.error = block + END
            return b""
        identity = _id_of(block)
        if self._replay is not None:
            corrected = self._replay.take(identity)
            if self._replay.is_over:
                self._replay = None
            if corrected is None:
                return b""
            if corrected != identity:
                block = block.replace(b"id: " + identity, b"id: " + corrected, 1)
                identity = corrected
        if identity:
            self.last_id = identity
        if self._is_opening:
            self._opens(identity)
        self.n_events += 1
        self.is_over = block.startswith(_LAST, block.find(b"data: "))
        return block


class _Replay:
    """What an engine that began again sends, compared with what was forwarded."""

    def __init__(self, last_id: bytes, n_opening: float) -> None:
        self._prefix, self._delivered = _parse(last_id)
        self._n_opening = n_opening
        self._current = [_BEGIN] * len(self._delivered)
        self._n_seen = 0
        self.is_over = False  # everything that follows is new

    def take(self, identity: bytes) -> bytes | None:
        """The id with which to forward the event; None: the client has it."""
        places = _parse(identity)[1] if identity else []
        if not self._delivered and places:
            self._delivered = [_BEGIN] * len(places)
            self._current = list(self._delivered)
        if not places or places == self._current:
            return self._take_still(identity)
        moved = [index for index, place in enumerate(places) if place > self._current[index]]
        self._current = places
        is_new = any(places[index] > self._delivered[index] for index in moved)
        if is_new:
            self._delivered = [max(pair) for pair in zip(self._delivered, places, strict=True)]
        self.is_over = self._current == self._delivered and is_new
        if not is_new:
            return None
        return identity if self.is_over else self._prefix + b".".join(map(_text, self._delivered))

    def _take_still(self, identity: bytes) -> bytes | None:
        """An event that moves no choice: an opening event, or one after the end of all choices."""
        if all(place == _BEGIN for place in self._current):
            self._n_seen += 1
            return identity if self._n_seen > self._n_opening else None
        return identity if self._current == self._delivered else None


def _parse(identity: bytes) -> tuple[bytes, list[Place]]:
    """What precedes the places of an id, and the places."""
    prefix, colon, rest = identity.rpartition(b":")
    places = []
    for part in rest.split(b"."):
        match = _PLACE.fullmatch(part)
        if match is not None:
            places.append((int(match[1]), _LEVELS.index(match[2]), float(match[3]) if match[3] else math.inf))
    return prefix + colon, places


def _text(place: Place) -> bytes:
    tokens, level, units = place
    return b"%d%b" % (tokens, _LEVELS[level]) + (b"-%d" % int(units) if units < math.inf else b"")


def _has_place(identity: bytes) -> bool:
    """Whether a choice has left its beginning."""
    last = identity[identity.rfind(b":") + 1 :]
    if last.isdigit() and int(last):  # of one choice
        return True
    return bool(identity) and any(place != _BEGIN for place in _parse(identity)[1])


def _id_of(block: bytes) -> bytes:
    """The value of the `id` field, which this project's servers write before the data; b"" without one."""
    at = 0 if block.startswith(b"id: ") else block.find(b"\nid: ") + 1 or -1
    if at < 0:
        return b""
    end = block.find(b"\n", at)
    return block[at + 4 : end if end >= 0 else len(block)]
