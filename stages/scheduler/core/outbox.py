"""Frames for the gateways, gathered until the stage sends them.

Every terminal event of a sequence passes through here: as the `finish` of its last tokens, or as `Rejected`.
"""

from __future__ import annotations

from pipeline.protocol.messages import Logprob, Pooled, Rejected, SequenceEvent, SequenceTokens
from stages.scheduler.core.sequence import SequenceState
from stages.scheduler.policy.admission import Refusal


class Outbox:
    """Output of one model. Gateways are named by their connection."""

    def __init__(self) -> None:
        self.tokens: dict[bytes, list[SequenceTokens]] = {}  # by gateway
        self.started: dict[bytes, list[str]] = {}  # by gateway: sequences that have left the queue
        self.rejected: list[tuple[bytes, Rejected]] = []  # (gateway, frame)
        self.pooled: list[tuple[bytes, Pooled]] = []  # likewise
        # By gateway, for the timelines of requests. They leave with the next tokens or vectors, or when `flush_events`
        # is set.
        self.events: dict[bytes, list[SequenceEvent]] = {}
        self.flush_events = False
        self.now = 0.0  # s: when the current frame or round began, for events

    def add_tokens(
        self,
        sequence: SequenceState,
        start: int,
        tokens: tuple[int, ...],
        logprobs: tuple[Logprob, ...] = (),
        finish: str = "",
        error: str = "",
        message: str = "",
        param: str = "",
        attachment: int = 0,
    ) -> None:
        """Output tokens from output index `start`, and the finish reason if the sequence ends with them."""
        gateway = sequence.gateway
        if not gateway:
            return
        cached = 0 if sequence.has_emitted else sequence.cached_tokens
        sequence.has_emitted = True
        part = SequenceTokens(
            sequence.id,
            start,
            tokens,
            logprobs,
            finish,
            error,
            message,
            cached,
            sequence.accepted,
            revision=sequence.revision,
            param=param,
            attachment=attachment,
        )
        parts = self.tokens.get(gateway)
        if parts is None:
            self.tokens[gateway] = [part]
        else:
            parts.append(part)

    def add_scores(self, sequence: SequenceState, start: int, scores: bytes) -> None:
        """Scores of prompt tokens, from the one with index `start` in the prompt."""
        if sequence.gateway:
            cached = 0 if sequence.has_emitted else sequence.cached_tokens
            sequence.has_emitted = True
            part = SequenceTokens(
                sequence.id,
                sequence.outputs,
                (),
                cached_tokens=cached,
                score_start=start,
                scores=scores,
                revision=sequence.revision,
            )
            self.tokens.setdefault(sequence.gateway, []).append(part)

    def add_started(self, sequence: SequenceState) -> None:
        """The sequence has its pages: its prompt is computed from now on."""
        if sequence.gateway:
            self.started.setdefault(sequence.gateway, []).append(sequence.id)

    def add_event(
        self,
        sequence: SequenceState,
        name: str,
        at: float = 0.0,
        *,
        pid: int = 0,
        **facts: int | float | str,
    ) -> None:
        """What happened to a sequence `at` (0.0: `now`), by the engine's clock. `pid`: of the worker that did it."""
        if sequence.gateway:
            event = SequenceEvent(sequence.id, name, at or self.now, pid, facts)
            self.events.setdefault(sequence.gateway, []).append(event)

    def add_worker_event(self, gateways: set[bytes], name: str, at: float, pid: int) -> None:
        """What happened to a worker group of the model, for the gateways that have sequences of the model."""
        for gateway in gateways:
            self.events.setdefault(gateway, []).append(SequenceEvent("", name, at, pid))

    def add_pooled(self, sequence: SequenceState, vector: bytes) -> None:
        """The vector of a sequence that generates nothing, which ends with it."""
        if sequence.gateway:
            self.pooled.append((sequence.gateway, Pooled(sequence.id, vector)))

    def add_rejected(self, gateway: bytes, sequence_id: str, refusal: Refusal) -> None:
        """A sequence that was not admitted; nothing when `gateway` is b""."""
        if gateway:
            self.rejected.append((gateway, rejected_frame(sequence_id, refusal)))

    def drop_gateway(self, gateway: bytes) -> None:
        """The gateway is disconnected: forget what it has not received."""
        self.tokens.pop(gateway, None)
        self.started.pop(gateway, None)
        self.events.pop(gateway, None)
        self.rejected = [(to, frame) for to, frame in self.rejected if to != gateway]
        self.pooled = [(to, frame) for to, frame in self.pooled if to != gateway]


def rejected_frame(sequence_id: str, refusal: Refusal) -> Rejected:
    """The frame for a refusal."""
    return Rejected(sequence_id, refusal.code, refusal.message, refusal.param, refusal.retry_after_s)
