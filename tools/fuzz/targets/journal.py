"""The gateway's journal: opened, recovered, continued and opened again.

byte 0   bit 0: the rest is the file. Otherwise it is parts: a byte for the kind of a record, and its payload
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import msgspec

from pipeline.api.requests.generation_request import GenerationRequest, SessionTurn
from pipeline.protocol.messages import Sampling, encode
from pipeline.record_file import HEAD_CHECKED
from stages.gateway.requests.journal import FILE, MAGIC, Journal, JournalEntry, RequestEnd
from stages.gateway.requests.spec import RequestSpec, SequenceSpec
from stages.gateway.requests.state import RequestState, submission
from tools.fuzz.parts import join, scratch, split
from tools.fuzz.target import Target

NOW = 1e9
MAX_BYTES = 1 << 20


def _open() -> tuple[Journal, list[JournalEntry]]:
    journal = Journal(scratch() / "journal", MAX_BYTES, lambda: NOW)
    return journal, journal.take_entries()


def run(data: bytes) -> None:
    """Restore the requests as a successor of the gateway does; a second start finds the same."""
    raw = data[1:]
    if data[:1] and not data[0] & 1:
        records = [HEAD_CHECKED.encode(part[0], part[1:]) for part in split(raw) if part]
        raw = MAGIC + b"".join(records)
    directory = scratch() / "journal"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    (directory / FILE).write_bytes(raw)
    journal, entries = _open()
    try:
        assert journal.left_out == 0
        for spec, end in entries:
            request = RequestState(spec, 1.0 + spec.deadline - NOW, 1.0)
            for sequence in request.sequences:
                encode(submission(sequence, b"", 1.0))
            msgspec.msgpack.encode(spec.without_prompts())
            if end is None:
                journal.end(RequestEnd(spec.id, NOW), is_kept=True)
    finally:
        journal.close()
    again, found = _open()
    again.close()
    assert {spec.id for spec, _ in found} <= {spec.id for spec, _ in entries}  # others may have expired
    assert all(end is not None for _, end in found)


def _spec(name: str) -> RequestSpec:
    sampling = Sampling(seed=2**64 - 1, logit_bias=((3, -1.5),))
    generation = GenerationRequest(
        endpoint="chat", model="m", stream=True, stop=("\n",), turn=SessionTurn("s", 1, 0), session_id="s"
    )
    return RequestSpec(
        id=name,
        tenant="t",
        model="m",
        digest="ab",
        numerics=1,
        generation=generation,
        seed=1,
        created=1,
        fingerprint="fp",
        deadline=NOW + 60,
        prompts=(b"1234",),
        echoes=("e",),
        sequences=(SequenceSpec(0, 0, 0, 9, sampling, (1,)), SequenceSpec(0, 0, 1, 9, sampling, (1,))),
        version="m@1",
        tokenizer="cd",
    )


def seeds() -> Iterator[bytes]:
    """Requests in flight, ended, failed and abandoned."""
    records = []
    for name, code in (("req-1", None), ("req-2", ""), ("req-3", "TIMEOUT"), ("req-4", "ABANDONED")):
        records.append((1, msgspec.msgpack.encode(_spec(name))))
        if code is not None:
            records.append((2, msgspec.msgpack.encode(RequestEnd(name, NOW - 1, code, "why"))))
    yield b"\0" + join(bytes([kind]) + payload for kind, payload in records)
    yield b"\0" + join([b"\1" + records[0][1], b"\2" + msgspec.msgpack.encode(RequestEnd("req-1", NOW))])
    yield b"\1" + MAGIC + b"".join(HEAD_CHECKED.encode(*record) for record in records)
    yield b"\1"


TARGET = Target(
    run,
    seeds,
    errors=(),
    modules=("pipeline.record_file", "stages.gateway.requests.journal", "stages.gateway.requests.spec"),
)
