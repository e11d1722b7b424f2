"""The journal: records before a damaged one are recovered, records after it never are."""

from __future__ import annotations

import errno
import os
from array import array
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.api.requests.generation_request import GenerationRequest, SessionTurn
from pipeline.faults import points
from pipeline.files import temporary_path
from pipeline.protocol.messages import Sampling
from pipeline.record_file import RECORD_HEAD_BYTES
from stages.gateway.requests import journal
from stages.gateway.requests.journal import (
    FILE,
    KEEP_S,
    MAGIC,
    MAX_ENDED,
    UNREADABLE_FILE,
    Journal,
    RequestEnd,
    parse,
)
from stages.gateway.requests.spec import RequestSpec, SequenceSpec
from tests.gateway.journal_records import NOW, make_spec, open_journal, part_of, recovered, spec_of

Actions = st.lists(
    st.tuples(st.sampled_from(["open", "answered", "failed", "abandoned"]), st.integers(0, 7)), max_size=24
)


def expected(records: list[RequestSpec | RequestEnd]) -> dict[str, RequestEnd | None]:
    state: dict[str, RequestEnd | None] = {}
    for record in records:
        if isinstance(record, RequestSpec):
            state.pop(record.id, None)
            state[record.id] = None
        elif record.code == "ABANDONED":
            state.pop(record.id, None)
        else:
            state[record.id] = record
    return state


def play(target: Journal, actions: list[tuple[str, int]]) -> list[RequestSpec | RequestEnd]:
    """Perform the actions. Returns the records that were written, in order."""
    written: list[RequestSpec | RequestEnd] = []
    live: set[str] = set()
    for action, number in actions:
        name = f"req-{number}"
        if action == "open":
            record = make_spec(name, bytes([number]) * 4 * number)
            assert target.open(record)
            written.append(record)
            live.add(name)
        elif name in live:
            live.discard(name)
            code = {"answered": "", "failed": "TIMEOUT", "abandoned": "ABANDONED"}[action]
            ended = RequestEnd(name, NOW, code)
            target.end(ended, is_kept=action != "abandoned")
            written.append(ended)
    return written


@settings(deadline=None, max_examples=60)
@given(Actions, st.data())
def test_a_crash_at_any_byte_loses_only_the_record_that_was_being_written(
    actions: list[tuple[str, int]], data: st.DataObject
) -> None:
    with TemporaryDirectory() as name:
        directory = Path(name)
        target = open_journal(directory)
        written = play(target, actions)
        target.close()
        raw = target.path.read_bytes()
        ends = [len(MAGIC), *(end for _, _, end in parse(raw))]
        assert len(ends) == len(written) + 1
        cut = data.draw(st.integers(0, len(raw)))
        rest = data.draw(st.binary(max_size=40))
        target.path.write_bytes(raw[:cut] + rest)
        whole = sum(end <= cut for end in ends) - 1
        assert recovered(directory) == expected(written[: max(0, whole)])
        assert recovered(directory) == expected(written[: max(0, whole)])  # the first start repaired the file


@settings(deadline=None, max_examples=60)
@given(Actions.filter(lambda a: any(kind == "open" for kind, _ in a)), st.data())
def test_a_record_with_a_flipped_bit_is_dropped(actions: list[tuple[str, int]], data: st.DataObject) -> None:
    with TemporaryDirectory() as name:
        directory = Path(name)
        target = open_journal(directory)
        written = play(target, actions)
        target.close()
        raw = bytearray(target.path.read_bytes())
        ends = [len(MAGIC), *(end for _, _, end in parse(bytes(raw)))]
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
        target.path.write_bytes(raw)
        assert recovered(directory) == expected(written[: max(0, sum(end <= at for end in ends) - 1)])


def test_the_file_stays_within_its_bound_and_keeps_requests_in_flight(tmp_path: Path) -> None:
    target = open_journal(tmp_path, max_bytes=8192)
    assert target.open(make_spec("req-0"))
    for number in range(1, 200):
        assert target.open(make_spec(f"req-{number}"))
        target.end(RequestEnd(f"req-{number}", NOW, "ABANDONED"), is_kept=False)
        assert target.path.stat().st_size <= 8192
    target.close()
    assert recovered(tmp_path) == {"req-0": None}
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_requests_that_do_not_fit_are_counted_and_continue(tmp_path: Path) -> None:
    target = open_journal(tmp_path, max_bytes=4096)
    taken = [number for number in range(100) if target.open(make_spec(f"req-{number}"))]
    assert 0 < len(taken) < 100
    assert target.left_out == 100 - len(taken)
    for number in range(100):
        target.end(RequestEnd(f"req-{number}", NOW, "ABANDONED"), is_kept=False)
    assert target.open(make_spec("req-7"))
    target.close()
    assert recovered(tmp_path) == {"req-7": None}


def test_requests_in_flight_of_one_tenant_leave_room_for_those_of_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1.0
    target = open_journal(tmp_path, 1 << 16, part_of=part_of, clock=lambda: now)
    taken = [name for number in range(80) if target.open(spec_of("busy", name := f"req-busy-{number}"))]
    assert 0 < len(taken) < 80
    for number in range(80):  # the file is rewritten meanwhile
        assert target.open(spec_of("quiet", f"req-{number}"))
        target.end(RequestEnd(f"req-{number}", NOW, "ABANDONED"), is_kept=False)
        assert not target.open(spec_of("busy", "req-busy"))
    assert target.left_out == 160 - len(taken)
    assert [vars(record)["tenant"] for record in caplog.records] == ["busy"]
    now += journal.PART_LOG_S
    assert not target.open(spec_of("busy", "req-busy"))
    assert [vars(record)["tenant"] for record in caplog.records] == ["busy", "busy"]
    assert target.open(spec_of("quiet", "req-quiet"))
    target.close()
    assert recovered_ids(tmp_path) == [*taken, "req-quiet"]
    target = open_journal(tmp_path, 1 << 16, part_of=part_of)  # of the successor
    assert not target.open(spec_of("busy", "req-busy"))
    target.end(RequestEnd(taken[0], NOW), is_kept=True)
    assert target.open(spec_of("busy", "req-busy"))
    assert not target.open(spec_of("busy", "req-more"))
    target.close()
    assert recovered_ids(tmp_path) == [*taken, "req-quiet", "req-busy"]


def test_a_successor_keeps_requests_in_flight_beyond_a_tenants_part(tmp_path: Path) -> None:
    target = open_journal(tmp_path, 1 << 16)
    taken = [name for number in range(30) if target.open(spec_of("busy", name := f"req-{number}"))]
    target.close()
    for _ in range(2):
        target = open_journal(tmp_path, 1 << 14, part_of=part_of)
        assert not target.open(spec_of("busy", "req-busy"))
        target.close()
        assert [spec.id for spec, _ in target.take_entries()] == taken


def test_ended_requests_expire(tmp_path: Path) -> None:
    target = open_journal(tmp_path)
    target.open(make_spec("req-a"))
    target.end(RequestEnd("req-a", NOW), is_kept=True)
    target.close()
    assert recovered(tmp_path, lambda: NOW + KEEP_S - 1) == {"req-a": RequestEnd("req-a", NOW)}
    assert recovered(tmp_path, lambda: NOW + KEEP_S + 1) == {}


def test_a_full_disk_is_not_fatal_and_leaves_no_partial_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = open_journal(tmp_path)
    assert target.open(make_spec("req-a"))
    write = os.pwrite
    room = [100]

    def pwrite(fd: int, data: bytes, at: int) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(fd, data[: room[0]], at)
        room[0] -= done
        return done

    monkeypatch.setattr(os, "pwrite", pwrite)
    for _ in range(3):
        assert not target.open(make_spec("req-b"))
    target.end(RequestEnd("req-a", NOW, "ABANDONED"), is_kept=False)
    assert target.left_out == 4
    assert len(caplog.records) == 1
    monkeypatch.undo()
    assert target.open(make_spec("req-c"))
    target.close()
    assert set(recovered(tmp_path)) == {"req-a", "req-c"}


def test_an_injected_disk_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARLING_FAULTS", "disk:enospc@journal")
    target = open_journal(tmp_path)
    assert not target.open(make_spec("req-a"))
    target.close()
    assert recovered(tmp_path) == {}


def test_an_interrupted_rewrite_is_ignored(tmp_path: Path) -> None:
    target = open_journal(tmp_path)
    target.open(make_spec("req-a"))
    target.close()
    new_file = temporary_path(tmp_path / FILE)
    new_file.write_bytes(MAGIC + b"half")
    assert recovered(tmp_path) == {"req-a": None}
    assert not new_file.exists()


# ------------------------------------------------------------------ a journal of an earlier release

V0_1_0 = Path(__file__).parent / "data" / "v0.1.0.journal"  # written by the code of tag v0.1.0


def old_spec(name: str, endpoint: str, prompts: list[list[int]], n: int, **more: Any) -> RequestSpec:
    """What the requests in `V0_1_0` asked for, every field with a value other than its default."""
    sampling = Sampling(
        seed=2**64 - 1,
        temperature=0.5,
        top_k=40,
        top_p=0.9,
        repetition_penalty=1.25,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logprobs=2,
        min_tokens=1,
        order=("mask", "temperature"),
        logit_bias=((3, -1.5),),
    )
    generation = GenerationRequest(
        endpoint=endpoint,
        model="m",
        n=n,
        max_tokens=9,
        max_tokens_field="max_completion_tokens",
        seed=2**64 - 1,
        sampling=sampling,
        stop=("\n", "ä"),
        stop_token_ids=(7,),
        stream=True,
        include_usage=True,
        echo=endpoint == "completions",
        logprobs=True,
        top_logprobs=2,
        skip_special=False,
        cache_salt="a\0b",
        speculate=4,
        **more,
    )
    return RequestSpec(
        id=name,
        tenant="tenant",
        model="m",
        digest="ab" * 32,
        numerics=1,
        generation=generation,
        seed=2**64 - 1,
        created=17,
        fingerprint="fp_abab",
        deadline=NOW + 60,
        priority=3,
        client_id=f"client-{name}",
        prompts=tuple(array("i", prompt).tobytes() for prompt in prompts),
        echoes=("x", "y") if endpoint == "completions" else (),
        sequences=tuple(
            SequenceSpec(index, index, choice, 9, sampling, (1, 7))
            for index in range(len(prompts))
            for choice in range(n)
        ),
        version="m@1",
        tokenizer="cd" * 32,
    )


def as_v0_1_0(record: bytes) -> Any:
    """What a gateway of v0.1.0 reads: the fields that it knows; it ignores those that were appended since."""
    n_fields = RequestSpec.__struct_fields__.index("idempotency_key")
    n_sampling = Sampling.__struct_fields__.index("min_p")
    fields = msgspec.msgpack.decode(record[RECORD_HEAD_BYTES:])[:n_fields]
    del fields[RequestSpec.__struct_fields__.index("generation")]["sampling"][n_sampling:]
    for sequence in fields[RequestSpec.__struct_fields__.index("sequences")]:
        del sequence[SequenceSpec.__struct_fields__.index("sampling")][n_sampling:]
    return fields


def test_a_journal_of_v0_1_0_is_read_and_what_is_written_can_be_read_by_it(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(V0_1_0.read_bytes())
    turn = {"session_id": "sess", "creates_session": True, "session_ttl_s": 60, "turn": SessionTurn("sess", 3, 1)}
    expected_entries = [
        (old_spec("req-0a", "chat", [[1, 2, 3]], 2), None),
        (old_spec("req-0b", "completions", [[1], [2, 3]], 1), None),
        (old_spec("req-0c", "generate", [[4, 5]], 1, **turn), None),
        (old_spec("req-0d", "chat", [[9]], 1), RequestEnd("req-0d", NOW + 1)),
        (old_spec("req-0e", "chat", [[9]], 1), RequestEnd("req-0e", NOW + 1, "TIMEOUT", "too late")),
    ]
    target = open_journal(tmp_path)
    assert target.take_entries() == expected_entries
    target.close()
    old = {value.id: record for record, value, _ in parse(V0_1_0.read_bytes()) if isinstance(value, RequestSpec)}
    new = open_journal(tmp_path / "new")
    for spec, _ in expected_entries:
        assert new.open(spec)
    new.close()
    written = {value.id: record for record, value, _ in parse((tmp_path / "new" / FILE).read_bytes())}
    assert len(written) == len(expected_entries)
    for name, record in written.items():
        assert as_v0_1_0(record) == msgspec.msgpack.decode(old[name][RECORD_HEAD_BYTES:])


def test_the_kv_revision_is_recorded_and_a_record_without_it_is_of_revision_0() -> None:
    """Requests of models whose computation has not changed go on across an upgrade."""
    spec = msgspec.structs.replace(make_spec("req-0"), kv_revision=1)
    raw = journal.encode(1, spec)
    assert [value for _, value, _ in parse(MAGIC + raw)] == [spec]
    fields = msgspec.msgpack.decode(raw[RECORD_HEAD_BYTES:])[: RequestSpec.__struct_fields__.index("kv_revision")]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=RequestSpec) == make_spec("req-0")


def test_answers_with_a_key_stay_until_they_are_forgotten(tmp_path: Path) -> None:
    target = open_journal(tmp_path)
    keyed = msgspec.structs.replace(make_spec("req-keyed"), idempotency_key="k", body_digest=b"d" * 32)
    failed = msgspec.structs.replace(make_spec("req-failed"), idempotency_key="l", body_digest=b"d" * 32)
    for spec in (keyed, failed):
        assert target.open(spec)
    target.end(RequestEnd("req-keyed", NOW), is_kept=True, is_pinned=True)
    target.end(RequestEnd("req-failed", NOW, "TIMEOUT"), is_kept=True)
    for number in range(2 * MAX_ENDED):
        assert target.open(make_spec(f"req-{number}"))
        target.end(RequestEnd(f"req-{number}", NOW), is_kept=True)
    target.close()
    for _ in range(2):  # the second time from the file that the first successor has rewritten
        reader = open_journal(tmp_path, wall=lambda: NOW + KEEP_S + 1)
        assert reader.take_entries() == [(keyed, RequestEnd("req-keyed", NOW))]
        reader.close()
    reader = open_journal(tmp_path)
    reader.forget("req-keyed")
    reader.close()
    assert "req-keyed" in recovered_ids(tmp_path), "it leaves the file with the next rewriting"


def test_an_answer_that_was_dropped_stays_away(tmp_path: Path) -> None:
    target = open_journal(tmp_path)
    for name in ("req-1", "req-2"):
        assert target.open(make_spec(name))
        target.end(RequestEnd(name, NOW), is_kept=True)
    for name in ("req-1", "req-1", "req-unknown"):
        target.drop(name)
    target.close()
    for _ in range(2):
        assert recovered_ids(tmp_path) == ["req-2"]


def test_answers_with_a_key_make_room_for_requests_in_flight(tmp_path: Path) -> None:
    target = open_journal(tmp_path, max_bytes=8192)
    for number in range(40):
        spec = make_spec(f"req-{number}")
        assert target.open(msgspec.structs.replace(spec, idempotency_key=f"k{number}", body_digest=b"d" * 32))
        target.end(RequestEnd(spec.id, NOW), is_kept=True, is_pinned=True)
    assert target.left_out == 0
    assert target.path.stat().st_size <= 8192
    target.close()
    assert recovered_ids(tmp_path)[-1] == "req-39"


def recovered_ids(directory: Path) -> list[str]:
    reader = open_journal(directory)
    reader.close()
    return [spec.id for spec, _ in reader.take_entries()]


@pytest.mark.parametrize("point", ["journal_open", "journal_sync", "journal_rename"])
def test_a_journal_that_could_not_be_opened_works_when_the_disk_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    before = open_journal(tmp_path)
    assert before.open(make_spec("req-old"))
    before.close()
    monkeypatch.setenv("STARLING_FAULTS", f"disk:erofs@{point}")
    target = open_journal(tmp_path)
    monkeypatch.undo()
    points.fault_point("disk", point)  # without a plan
    assert target.open(make_spec("req-a"))
    target.close()
    assert set(recovered(tmp_path)) == {"req-old", "req-a"}


def test_an_unreadable_journal_is_renamed_as_soon_as_the_disk_permits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = open_journal(tmp_path)
    assert before.open(make_spec("req-old"))
    before.close()
    old = before.path.read_bytes()
    now = 1.0
    monkeypatch.setenv("STARLING_FAULTS", "disk:eio@journal_read, disk:erofs@journal_rename")
    target = open_journal(tmp_path, clock=lambda: now)
    assert target.take_entries() == []
    assert "the journal cannot be read" in caplog.text
    assert not target.open(make_spec("req-a"))
    assert target.path.read_bytes() == old
    monkeypatch.undo()
    for point in ("journal_read", "journal_rename"):
        points.fault_point("disk", point)  # without a plan
    now += journal.REOPEN_S
    assert target.open(make_spec("req-b"))
    assert target.unreadable == 1
    target.close()
    assert (tmp_path / UNREADABLE_FILE).read_bytes() == old
    assert set(recovered(tmp_path)) == {"req-b"}


def test_a_journal_without_a_directory_works_when_there_is_one(tmp_path: Path) -> None:
    now = 1.0
    (tmp_path / "d").write_bytes(b"a file where the directory should be")
    target = open_journal(tmp_path / "d", clock=lambda: now)
    assert not target.open(make_spec("req-a"))
    assert not target.open(make_spec("req-b"))
    (tmp_path / "d").unlink()
    assert not target.open(make_spec("req-c"))  # it is not tried so soon
    assert target.left_out == 3
    now += journal.REOPEN_S
    assert target.open(make_spec("req-c"))
    target.close()
    assert set(recovered(tmp_path / "d")) == {"req-c"}


@pytest.mark.parametrize("deadline", [float("nan"), float("inf"), -1e300])
def test_a_request_that_cannot_be_restored_is_damage(tmp_path: Path, deadline: float) -> None:
    """Its checksum is right: another release or a bad memory wrote it."""
    journal = open_journal(tmp_path)
    spec = make_spec("req-1")
    journal.open(spec)
    journal.open(msgspec.structs.replace(make_spec("req-2"), deadline=deadline))
    journal.close()
    assert list(recovered(tmp_path)) == ["req-1"]
    journal = open_journal(tmp_path / "prompts")
    journal.open(spec)
    (sequence, *_) = spec.sequences
    for prompt in (1, -1):
        wrong = (msgspec.structs.replace(sequence, prompt=prompt),)
        journal.open(msgspec.structs.replace(make_spec("req-2"), sequences=wrong))
    journal.close()
    assert list(recovered(tmp_path / "prompts")) == ["req-1"]
