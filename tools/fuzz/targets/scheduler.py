"""Frames into the scheduler's engine: submissions, cancellations, and kv's answers, between rounds.

The input is parts: byte 0 of each tells the edge (even: gateway, odd: kv), the rest is the payload of a frame.  No
worker computes the steps that rounds publish.  Whatever came, each sequence ends when it is cancelled.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import msgspec

from pipeline.protocol import messages as m
from shm.step_ring import StepsGeometry, blank_steps
from stages.scheduler.core.engine import Engine
from stages.scheduler.core.ring import Ring
from stages.scheduler.core.settings import Settings
from tools.fuzz.parts import join, split
from tools.fuzz.target import Target

GATEWAY = b"gateway"
CONTEXT = 400
VOCAB = 128
PAGE_TOKENS, PAGES = 16, 64
_DECODERS = (
    msgspec.msgpack.Decoder(m.FRAMES["gateway-scheduler"].to_binder),
    msgspec.msgpack.Decoder(m.FRAMES["scheduler-kv"].to_binder),
    msgspec.msgpack.Decoder(m.FRAMES["scheduler-kv"].to_connector),
)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what an endpoint drops a frame for


def _frame(part: bytes) -> m.Frame | None:
    for decoder in _DECODERS[:1] if part[0] % 2 == 0 else _DECODERS[1:]:
        try:
            found: m.Frame = decoder.decode(part[1:])
        except _UNREADABLE:
            continue
        return found
    return None


def run(data: bytes) -> None:
    """Deliver the frames with a round after each, then cancel what is left."""
    settings = Settings("m", 4, max_queue_depth=8, max_tenant_depth=4)
    engine = Engine(settings, 0.0)
    geometry = StepsGeometry(settings.n_rows, 4, settings.max_samples, CONTEXT, -(-CONTEXT // PAGE_TOKENS) + 1, 0)
    ring = engine.worker.ring = Ring(blank_steps(geometry), geometry, serial=1)
    ring.start(1)
    engine.attach(CONTEXT, VOCAB)
    engine.kv_ready(m.KvReady("m", "", "", PAGES, PAGE_TOKENS, 1024))
    now = 0.0
    for part in split(data, 32):
        frame = _frame(part) if part else None
        now += 0.1
        if isinstance(frame, m.Submit):
            engine.submissions.submit(GATEWAY, frame, now)
        elif isinstance(frame, m.Cancel):
            engine.submissions.cancel(frame)
        elif isinstance(frame, m.Granted):
            engine.pages.granted(frame)
        elif isinstance(frame, m.Denied):
            engine.pages.denied(frame)
        elif isinstance(frame, m.KvState):
            engine.pages.kv_state(frame)
        engine.tick(now)
        engine.steps.run_round(now)
        engine.leases.frames.clear()
        engine.outbox.tokens.clear()
        engine.outbox.rejected.clear()
    for name in list(engine.table.live):
        engine.submissions.cancel(m.Cancel(name))
    engine.detached(now)
    assert not engine.table.live, f"{sorted(engine.table.live)} did not end"
    assert not engine.is_busy, "something waits"


def _submit(name: str, prompt: int, forced: bytes = b"", stop_ids: tuple[int, ...] = ()) -> m.Submit:
    return m.Submit(
        sequence=name,
        request=name,
        model="m",
        tenant="t",
        prompt=array("i", range(prompt)).tobytes(),
        max_tokens=5,
        sampling=m.Sampling(),
        forced=forced,
        stop_ids=stop_ids,
    )


def seeds() -> Iterator[bytes]:
    """A request that begins, is granted its pages and is cancelled; refused ones; answers to no request."""
    first, forced = _submit("a", 20), _submit("b", 5, forced=array("i", [1, 2]).tobytes(), stop_ids=(5,))
    granted = m.Granted(1, "a", (0, 1, 2), 0, "m")
    frames: list[tuple[int, m.Frame]] = [(0, first), (1, granted), (0, forced), (0, m.Cancel("a")), (0, first)]
    yield join(bytes([edge]) + m.encode(frame) for edge, frame in frames)
    yield join(bytes([0]) + m.encode(_submit(str(i), i)) for i in range(12))
    yield join([b"\1" + m.encode(granted), b"\0" + m.encode(_submit("c", 500))])


TARGET = Target(
    run,
    seeds,
    errors=(),
    modules=(
        "stages.scheduler.core.submission_queue",
        "stages.scheduler.core.row_scheduler",
        "stages.scheduler.core.page_supply",
        "stages.scheduler.core.sequence_table",
        "stages.scheduler.core.leases",
        "stages.scheduler.policy.admission",
    ),
)
