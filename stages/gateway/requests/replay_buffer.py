"""Ended requests that readers may still ask for: as bytes, bounded in bytes, in number and in time.

What was a request with its sequences, tokens and logprobs (hundreds of bytes for each token) becomes one
msgpack record, without what no reader can ask for: the prompt, and tokens past the end of the text.  A reader
gets a request made of it, whose answer has the same bytes; those who read at the same time get the same one.
The clock is given.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakValueDictionary

import msgspec

from pipeline.errors import StarlingError
from pipeline.protocol.messages import Logprob
from stages.gateway.endpoints.generation_request import GenerationRequest
from stages.gateway.requests.journal import KEEP_S, MAX_KEPT
from stages.gateway.requests.state import Outcome, RequestState, SequencePhase, SequenceState

MAX_BYTES = 16 << 20  # of all of them
ENTRY_BYTES = 512  # what an entry takes beside its record


class _Line(msgspec.Struct, array_like=True, gc=False):
    """A sequence, as `record.Sequence` has it at the end."""

    prompt_index: int
    choice: int
    n_prompt: int
    max_tokens: int
    tokens: bytes  # i32 little-endian: those that are text
    logprobs: list[Logprob]
    text: str
    used: int
    cached_tokens: int
    begun_at: float
    is_flushed: bool
    finish: str  # "": it has failed
    stop_string: str


class _Ended(msgspec.Struct, array_like=True, gc=False):
    """A request, as `record.Request` has it at the end."""

    id: str
    ask: GenerationRequest  # without its prompts
    model: str
    instance: str
    tenant: str
    created: int
    fingerprint: str
    started_at: float
    client_id: str
    seed: int
    tokenizer: str
    response_cache: str
    echoes: list[str]
    error: tuple[str, str, str, int, float] | None  # code, message, param, status, retry_after_s
    lines: list[_Line]


_decode = msgspec.msgpack.Decoder(_Ended).decode


class _Entry(NamedTuple):
    record: bytes
    tenant: str
    until: float

    @property
    def size(self) -> int:
        return len(self.record) + ENTRY_BYTES


class ReplayBuffer:
    """One per gateway. `clock` is monotonic, in s."""

    def __init__(self, clock: Callable[[], float], max_bytes: int = MAX_BYTES, max_entries: int = MAX_KEPT) -> None:
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self.bytes = 0
        self._clock = clock
        self._entries: dict[str, _Entry] = {}  # oldest first
        self._read: WeakValueDictionary[str, RequestState] = WeakValueDictionary()  # by somebody at this moment

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, request: RequestState) -> bool:
        """Keep a request that has ended. False: it is larger than all that may be kept."""
        self._drop(request.id)
        entry = _Entry(to_record(request), request.tenant, self._clock() + KEEP_S)
        if entry.size > self.max_bytes:
            return False
        while len(self._entries) >= self.max_entries or self.bytes + entry.size > self.max_bytes:
            self._drop(next(iter(self._entries)))
        self._entries[request.id] = entry
        self.bytes += entry.size
        return True

    def find(self, request_id: str) -> RequestState | None:
        """It, to be read."""
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        request = self._read.get(request_id)
        if request is None:
            request = self._read[request_id] = from_record(entry.record)
        return request

    def expire(self) -> None:
        """Often: what is too old goes."""
        now = self._clock()
        while self._entries and now >= next(iter(self._entries.values())).until:
            self._drop(next(iter(self._entries)))

    def _drop(self, request_id: str) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self.bytes -= entry.size
            self._read.pop(request_id, None)


def to_record(request: RequestState) -> bytes:
    """Of a request that has ended, finished or failed."""
    error = request.error
    return msgspec.msgpack.encode(
        _Ended(
            request.id,
            msgspec.structs.replace(request.ask, prompts=[], messages=None),
            request.model,
            request.instance,
            request.tenant,
            request.created,
            request.fingerprint,
            request.started_at,
            request.client_id,
            request.seed,
            request.tokenizer,
            request.response_cache,
            request.echoes,
            (error.code, error.message, error.param, error.status, error.retry_after_s) if error is not None else None,
            [
                _Line(
                    s.prompt_index,
                    s.choice,
                    s.n_prompt,
                    s.max_tokens,
                    array("i", s.tokens[: s.end]).tobytes(),
                    s.logprobs[: s.end],
                    "".join(s.text),
                    s.used,
                    s.cached_tokens,
                    s.begun_at,
                    s.is_flushed,
                    s.finish if s.state is SequencePhase.FINISHED else "",
                    s.stop_string,
                )
                for s in request.sequences
            ],
        )
    )


def from_record(record: bytes) -> RequestState:
    """What `to_record` was given, as far as readers are concerned."""
    ended = _decode(record)
    request = RequestState(
        ended.id,
        ended.ask,
        ended.model,
        ended.tenant,
        0.0,
        created=ended.created,
        fingerprint=ended.fingerprint,
        started_at=ended.started_at,
        client_id=ended.client_id,
        instance=ended.instance,
    )
    request.seed, request.tokenizer = ended.seed, ended.tokenizer
    request.response_cache, request.echoes = ended.response_cache, ended.echoes
    for index, line in enumerate(ended.lines):
        sequence = SequenceState(
            request, index, line.prompt_index, line.choice, b"", line.max_tokens, ended.ask.sampling, ()
        )
        tokens = array("i")
        tokens.frombytes(line.tokens)
        sequence.n_prompt, sequence.tokens, sequence.logprobs = line.n_prompt, tokens.tolist(), line.logprobs
        sequence.text, sequence.text_length = [line.text], len(line.text)
        sequence.end, sequence.used, sequence.is_flushed = len(sequence.tokens), line.used, line.is_flushed
        sequence.cached_tokens, sequence.begun_at = line.cached_tokens, line.begun_at
        sequence.finish, sequence.stop_string = line.finish, line.stop_string
        sequence.move(SequencePhase.FINISHED if line.finish else SequencePhase.FAILED)
        request.sequences.append(sequence)
    if ended.error is not None:
        code, message, param, status, retry_after_s = ended.error
        request.error = StarlingError(code, message, param, status=status, retry_after_s=retry_after_s)
    request.end(Outcome.FINISHED if ended.error is None else Outcome.FAILED)
    return request
