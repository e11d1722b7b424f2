"""Fuzzing: the stored corpus passes, and the guard and the runner find what they must find."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools import planted_blocks, planted_fuzz, planted_hang
from tools.fuzz import corpus
from tools.fuzz.coverage import minimized
from tools.fuzz.guard import Guard, guarded
from tools.fuzz.parts import join, split
from tools.fuzz.runner import fuzz
from tools.fuzz.target import load, names


@pytest.mark.parametrize("name", names())
def test_the_corpus_of_a_target_passes(name: str) -> None:
    target = load(name)
    inputs = corpus.read_archive(name)
    assert inputs, f"no corpus: run `make fuzz TARGET={name}` and `python -m tools.fuzz save {name}`"
    with guarded(target) as guard:
        for data in [*target.seeds(), *inputs]:
            finding = guard.check(data)
            assert finding is None, f"{corpus.input_name(data)}\n{finding}"


@pytest.fixture
def guard() -> Iterator[Guard]:
    with guarded(planted_fuzz.TARGET, cpu_s=0.2) as guard:
        yield guard


@pytest.mark.parametrize(("data", "kind"), [(b"CR\xff\xff", "crash"), (b"GR\xff\xff", "memory")])
def test_the_guard_reports_a_fault(guard: Guard, data: bytes, kind: str) -> None:
    finding = guard.check(data)
    assert finding is not None
    assert finding.kind == kind
    assert "tests/tools/planted_fuzz.py:" in finding.key
    assert guard.check(b"----") is None


def test_the_guard_reports_an_endless_loop() -> None:
    with guarded(planted_hang.TARGET, cpu_s=0.2) as guard:
        finding = guard.check(b"\xff\xff")
        assert finding is not None
        assert finding.key == "hang: _TooLong at tests/tools/planted_hang.py:run"
        assert guard.check(b"--") is None


def test_the_guard_reports_a_descriptor_that_stays_open(guard: Guard) -> None:
    finding = guard.check(b"LE\xff\xff")
    os.close(planted_fuzz.kept.pop())
    assert finding is not None
    assert finding.kind == "leak"


def test_a_documented_error_is_no_finding(guard: Guard) -> None:
    assert guard.check(b"----\xff") is None


def test_what_a_fault_is_called_does_not_depend_on_the_input(guard: Guard) -> None:
    assert guard.check(b"CR\xff\xff").key == guard.check(b"CR\xff\xff+").key  # type: ignore[union-attr]


def test_minimizing_keeps_one_input_for_each_path() -> None:
    inputs = [b"----", b"-----", b"----\xff", b"CR--", b"CR\xff-", b"CR\xff-+"]
    kept, coverage = minimized(planted_fuzz.TARGET, inputs, max_bytes=1000)
    assert sorted(kept) == [b"----", b"----\xff", b"CR--", b"CR\xff-"]
    assert 0 < len(coverage.reached) < len(coverage.lines)
    assert sum(map(len, minimized(planted_fuzz.TARGET, inputs, max_bytes=6)[0])) == 4


def test_the_same_inputs_give_the_same_archive(tmp_path: Path) -> None:
    inputs = [b"b" * 100, b"a", b""]
    first = corpus.write_archive("x", inputs, tmp_path).read_bytes()
    assert corpus.write_archive("x", inputs[::-1], tmp_path).read_bytes() == first
    assert sorted(corpus.read_archive("x", tmp_path)) == sorted(inputs)
    assert corpus.read_archive("y", tmp_path) == []


def test_parts_of_an_input() -> None:
    parts = [b"", b"a", b"bc" * 500]
    assert split(join(parts)) == parts
    assert split(b"\xff\xffab") == [b"ab"]
    assert split(b"\1") == [b""]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "expected"), [("planted_fuzz", {"crash", "memory"}), ("planted_hang", {"hang"})])
def test_the_runner_finds_planted_faults(name: str, expected: set[str], tmp_path: Path) -> None:
    """By coverage: no seed meets a condition. The corpus stays, so that each turn continues the one before."""
    kinds: set[str] = set()
    for _ in range(60):  # of which the first one finds them, unless the machine is busy
        result = fuzz(f"tests.tools.{name}", 2, tmp_path)
        assert result.inputs > 0, result
        assert result.edges > 0
        kinds = {finding.partition(":")[0] for finding in result.findings}
        if kinds >= expected:
            return
    raise AssertionError(kinds)


@pytest.mark.slow
def test_the_runner_reports_an_input_that_ends_the_process(tmp_path: Path) -> None:
    result = fuzz("tests.tools.planted_blocks", 3, tmp_path)
    assert [finding.partition(":")[0] for finding in result.findings] == ["crash"] * len(result.findings)
    assert result.findings
    (path, *_) = (tmp_path / "tests.tools.planted_blocks" / "findings").glob("crash-*")
    assert path.read_bytes()[:1] == b"K"
    assert planted_blocks.TARGET.max_bytes == 2
