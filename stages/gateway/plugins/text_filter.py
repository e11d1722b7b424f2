"""`post_inference`: the text of one sequence on its way from the decoder to its sink, through each plugin in turn.

    decoder --Piece--> first plugin --Piece--> second plugin --Piece--> outlet (the relay)

A piece is what one token added; the last one, which may add text too, is final. A plugin is called for each piece with
the whole text so far, so its output, and where in the output each token ends, are functions of the tokens alone:
a stream that is resumed, and one that is generated again after a restart, have the same bytes. A process that is
started again gets the whole text once more.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import NamedTuple, Protocol

from pipeline.errors import Conflict, StarlingError
from stages.gateway.plugins.errors import failed, refused
from stages.gateway.plugins.frames import REFUSED, Failed, Post, PostDone, Reply, frame
from stages.gateway.plugins.process_client import PluginProcess
from stages.gateway.requests.reasoning_budget import is_over_budget
from stages.gateway.requests.state import RequestState, SequenceState
from stages.gateway.requests.text_decoder import StreamDecoder
from stages.gateway.requests.token_bytes import TokenBytes

HOOK = "post_inference"
ATTEMPTS = 2  # of a call whose process ends; the hook is pure, so it may be called again

_keys = count(1)


class Outlet(Protocol):
    """Where the text goes: the relay."""

    def deliver(self, sequence: SequenceState, text: str, end: int, *, is_final: bool) -> None:
        """More text, certain with the output tokens before `end`; the final text ends the sequence."""

    def met_stop(self, sequence: SequenceState, stop_string: str, at: int) -> None:
        """A stop string is complete with the output tokens before `at`."""

    def end_reasoning(self, sequence: SequenceState, at: int) -> None:
        """The reasoning has reached its budget with the first `at` output tokens."""

    def fail(self, request: RequestState, error: StarlingError) -> None:
        """A plugin failed or refused the answer."""


class Piece(NamedTuple):
    """What one token added to the text."""

    text: str
    end: int  # output tokens up to it
    is_final: bool


class TextFilter:
    """The way of one sequence's text."""

    def __init__(self, sequence: SequenceState, processes: list[tuple[PluginProcess, str]], outlet: Outlet) -> None:
        """processes: of the plugins in their order, each with the identity that the request was admitted with."""
        self.sequence = sequence
        self.is_closed = False
        self.outlet = outlet
        self._n_decoded = 0
        self._is_complete = False  # all pieces have entered
        self._passages = [Passage(self, index, *process) for index, process in enumerate(processes)]

    def advance(self, decoder: StreamDecoder, vocabulary: TokenBytes) -> None:
        """Decode the tokens that have no text yet."""
        sequence, generation = self.sequence, self.sequence.request.spec.generation
        skip_special, kept = generation.skip_special, generation.kept_control
        tokens, visible = sequence.tokens, sequence.visible
        while not (self.is_closed or self._is_complete) and self._n_decoded < visible:
            text = decoder.push(vocabulary.shown(tokens[self._n_decoded], skip_special, kept))
            self._n_decoded += 1
            sequence.n_reasoning = decoder.n_reasoning
            self.enter(0, Piece(text, self._n_decoded, False))
            if decoder.stop_string:
                self._stop(decoder.stop_string, "")
            elif self._n_decoded >= sequence.reasoning_limit and is_over_budget(sequence, decoder, self._n_decoded):
                self.outlet.end_reasoning(sequence, self._n_decoded)
                visible = sequence.visible
        if sequence.finish_reason and not (self.is_closed or self._is_complete):
            rest = decoder.finish()
            if decoder.stop_string:
                self._stop(decoder.stop_string, rest)
            else:
                self._is_complete = True
                self.enter(0, Piece(rest, visible, True))

    def _stop(self, stop_string: str, rest: str) -> None:
        if self.is_closed:
            return
        self._is_complete = True
        self.outlet.met_stop(self.sequence, stop_string, self._n_decoded)
        self.enter(0, Piece(rest, self._n_decoded, True))

    def enter(self, index: int, piece: Piece) -> None:
        """Pass a piece on to the plugin with that index, or out after the last one."""
        if self.is_closed:
            return
        if index < len(self._passages):
            self._passages[index].enter(piece)
        else:
            self.outlet.deliver(self.sequence, piece.text, piece.end, is_final=piece.is_final)

    def fail(self, error: StarlingError) -> None:
        """End the request."""
        if not self.is_closed:
            self.outlet.fail(self.sequence.request, error)

    def close(self) -> None:
        """The sequence has ended: results that come now are dropped."""
        self.is_closed = True
        for passage in self._passages:
            passage.close()


class Passage:
    """The text of one sequence before and after one plugin."""

    def __init__(self, way: TextFilter, index: int, process: PluginProcess, identity: str) -> None:
        self.way = way
        self.process = process
        self.key = next(_keys)
        self.whole = ""  # that has entered
        self.released = ""  # that the plugin made of it
        self.pending: deque[PostCall] = deque()
        self._identity = identity
        self._index = index
        self._number = 0  # of the process that has the first `_n_sent` characters
        self._n_sent = 0
        self._is_skipped = False

    def enter(self, piece: Piece) -> None:
        """Take a piece."""
        self.whole += piece.text
        if self._is_skipped:
            self.leave(piece.text, piece)
            return
        call = PostCall(self, piece, len(self.whole))
        self.pending.append(call)
        self.process.submit(call)

    def leave(self, text: str, piece: Piece) -> None:
        """Pass on what the plugin, or its absence, made of a piece."""
        self.released += text
        self.way.enter(self._index + 1, Piece(text, piece.end, piece.is_final))

    def frame_of(self, call: PostCall) -> bytes | None:
        """The frame of a call; None: it needs none."""
        process = self.process
        info = process.info
        assert info is not None
        if self._number != process.number:
            self._number, self._n_sent = process.number, 0
            if identity_of(process) != self._identity:
                self.way.fail(
                    Conflict(
                        f"the request was admitted with plugin {self._identity}, which is now {identity_of(process)}: "
                        "its answer would differ; send the request again"
                    )
                )
                return None
        if not info.streams and not call.piece.is_final:
            self.pending.popleft()
            self.leave("", call.piece)
            return None
        sequence = self.way.sequence
        about = None
        if not self._n_sent:
            spec = sequence.request.spec
            named = (spec.id, spec.generation.endpoint, spec.shown_model, spec.tenant)
            about = (*named, sequence.spec.choice, self.released)
        text = self.whole[self._n_sent : call.n_characters]
        self._n_sent = call.n_characters
        reason = sequence.finish_reason if call.piece.is_final else ""
        return frame(Post(self.key, text, call.piece.is_final, reason, about))

    def fail(self, reason: str, *, is_temporary: bool) -> None:
        """The plugin has no result: skip it from here on, if that is configured and possible, or end the request."""
        can_skip = self.process.config.on_failure == "skip" and self.whole.startswith(self.released)
        if not can_skip:
            self.way.fail(failed(self.process.name, HOOK, reason, is_temporary=is_temporary))
            return
        self._is_skipped = True
        self.way.sequence.request.response_key = None  # another answer than the plugin's
        waiting, self.pending = self.pending, deque()
        for call in waiting:
            call.is_skipped = True
            self.leave(self.whole[len(self.released) : call.n_characters], call.piece)

    def close(self) -> None:
        """Let the process forget the text."""
        if self._n_sent:
            self.process.drop(self.key, self._number)


class PostCall:
    """One call of `post_inference`."""

    hook = HOOK

    def __init__(self, passage: Passage, piece: Piece, n_characters: int) -> None:
        self.piece = piece
        self.n_characters = n_characters  # of the text with this piece
        self.is_skipped = False
        self._passage = passage
        self._attempts = 1

    @property
    def is_dead(self) -> bool:
        """See `Call.is_dead`."""
        return self.is_skipped or self._passage.way.is_closed

    def encode(self, process: PluginProcess) -> bytes | None:
        """See `Call.encode`."""
        return self._passage.frame_of(self)

    def done(self, reply: Reply) -> None:
        """See `Call.done`."""
        passage = self._passage
        match reply:
            case PostDone():
                passage.pending.popleft()
                passage.leave(reply.text, self.piece)
            case Failed() if reply.kind == REFUSED:
                passage.way.fail(refused(passage.process.name, reply))
            case Failed():
                passage.fail(reply.message, is_temporary=False)
            case _:
                passage.fail("it sent a wrong frame", is_temporary=False)

    def fail(self, reason: str, *, is_temporary: bool) -> None:
        """See `Call.fail`."""
        if not self.is_dead:
            self._passage.fail(reason, is_temporary=is_temporary)

    def repeats(self) -> bool:
        """Once."""
        self._attempts += 1
        return self._attempts <= ATTEMPTS


def identity_of(process: PluginProcess) -> str:
    """What determines the output of a plugin, as far as the server can see it: its name, version and options."""
    info = process.info or process.last_info
    return f"{process.name}@{info.version if info is not None else '?'}#{process.options_digest}"
