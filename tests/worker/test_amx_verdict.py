"""When the AMX probe runs, what it makes of AMX, and what happens where it gives no verdict."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stages.worker.kernels import amx_verdict, features
from stages.worker.kernels.amx_verdict import PROBED_TOKENS, Found, Verdict
from stages.worker.kernels.features import ALL_FORMATS, ALL_TILES, MOST_TOKENS, Thresholds, UnsupportedCpu
from tests.worker.test_features import NEWER


@pytest.fixture
def amx_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CPU with AMX that the system permits, no named formats, and a folder for the kernel cache.

    Returns the folder above that of the cache.
    """
    monkeypatch.setattr(features, "host_features", lambda: NEWER)
    monkeypatch.setattr(features, "permit_amx", lambda: None)
    monkeypatch.setattr(amx_verdict, "isa", lambda: features.isa.__wrapped__())
    monkeypatch.setattr(amx_verdict, "cache_dir", lambda: tmp_path / "cache" / "kernels")
    monkeypatch.setenv("STARLING_ISA", "native")
    monkeypatch.delenv("STARLING_AMX_FORMATS", raising=False)
    monkeypatch.setenv(amx_verdict.PASSED_ON, "")  # so that what a test sets is unset after it
    monkeypatch.delenv(amx_verdict.PASSED_ON)
    return tmp_path


def probe_with(monkeypatch: pytest.MonkeyPatch, home: Path, code: str) -> None:
    """Replace the probe by `code`; each run adds an x to the file `runs`."""
    monkeypatch.setattr(amx_verdict, "PROBE", ["-c", f"open({str(home / 'runs')!r}, 'a').write('x'); {code}"])


def chosen() -> Thresholds:
    """What uses tiles in the groups of a process that has prepared itself."""
    if amx_verdict.needs_probe():
        amx_verdict.pass_on(Found.decode(amx_verdict.find_verdict().encode()))  # as a compiler's process and a build
    return amx_verdict.tile_thresholds()


def found_against() -> str:
    verdict = amx_verdict.amx_verdict()
    assert verdict is not None
    return verdict.against


def _reason(caplog: pytest.LogCaptureFixture, event: str) -> str:
    """Of the one warning, which is of that event."""
    (warning,) = caplog.records
    assert warning.message == event
    reason: str = warning.__dict__["reason"]
    return reason


def speedups(default: float, **others: float | list[float]) -> dict[str, list[float]]:
    """By format: a number for all of PROBED_TOKENS, or one for each."""
    found = dict.fromkeys(ALL_FORMATS, [default] * len(PROBED_TOKENS))
    return found | {name: v if isinstance(v, list) else [v] * len(PROBED_TOKENS) for name, v in others.items()}


def tiles_but_for(*names: str) -> Thresholds:
    return tuple(pair for pair in ALL_TILES if pair[0] not in names)


def printing(found: dict[str, list[float]]) -> str:
    return f"print({json.dumps(Verdict(found, '')._asdict())!r})"


@pytest.mark.parametrize(
    ("code", "against"),
    [
        ('print(\'{"speedups": {}, "against": "other bytes"}\')', "other bytes"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "ended with -4"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended with -11"),
    ],
)
def test_amx_is_probed_in_a_process_of_its_own(
    amx_host: Path, monkeypatch: pytest.MonkeyPatch, code: str, against: str
) -> None:
    """A CPU may report tiles that it cannot run: an instruction set is chosen even when the probe is killed."""
    probe_with(monkeypatch, amx_host, code)
    for _ in range(2):
        assert chosen() == ()
        assert against in found_against()
    assert (amx_host / "runs").read_text() == "x"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise MemoryError('no room for a matrix')", "ended with 1: .*MemoryError: no room for a matrix"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended with -9"),
        ("import signal; signal.pause()", "did not end in 0.2 s"),
        ("print('nonsense')", "printed 'nonsense'"),
        ('print(\'{"speedups": {"Q4_0": [2, 2, 2, 2]}, "against": ""}\')', "expected 4 numbers for each format"),
    ],
    ids=["memory", "killed", "time", "nonsense", "incomplete"],
)
def test_a_probe_without_a_verdict_is_repeated_after_a_pause(
    amx_host: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: str,
    reason: str,
) -> None:
    """This process and those that it starts use VNNI, with one warning, and so does a start in the pause."""
    if reason.startswith("did not end"):
        monkeypatch.setattr(amx_verdict, "PROBE_S", 0.2)
    probe_with(monkeypatch, amx_host, code)
    for _ in range(2):
        assert chosen() == ()
        assert re.search(reason, found_against(), re.DOTALL)
    child = "from stages.worker.kernels import amx_verdict as f; print(f.amx_verdict().against)"
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found_against()
    warning = _reason(caplog, "AMX is not used")
    assert re.match(f"its probe .*{reason}.*; starts after 2.* UTC try again, or", warning, re.DOTALL)
    monkeypatch.setattr(amx_verdict, "PROBE_S", 60)
    runs = (amx_host / "runs").read_text() if (amx_host / "runs").exists() else ""
    probe_with(monkeypatch, amx_host, printing(speedups(1.3)))
    start_after(monkeypatch, 3500)
    assert chosen() == ()
    assert re.search(reason, amx_verdict.why_not(), re.DOTALL)
    start_after(monkeypatch, 200)
    for _ in range(2):
        assert chosen() == ALL_TILES
    assert (amx_host / "runs").read_text() == runs + "x"


@pytest.mark.parametrize("found", [None, Found(None, "another process keeps the probe's lock")])
def test_a_verdict_that_another_process_stores_meanwhile_is_used(
    amx_host: Path, caplog: pytest.LogCaptureFixture, found: Found | None
) -> None:
    place = amx_verdict.cache_dir()
    place.mkdir(parents=True)
    (place / "amx-speedups.json").write_text(json.dumps(Verdict(speedups(1.3), "")._asdict()))
    amx_verdict.pass_on(found)
    assert amx_verdict.PASSED_ON not in os.environ
    assert amx_verdict.tile_thresholds() == ALL_TILES
    assert not caplog.records


@pytest.mark.parametrize("text", ["", "nonsense", "7", "[1]", '[{}, ""]', "[null, null, null]"])
def test_what_is_no_finding_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Found.decode(text)


def start_after(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """The next start, so many seconds later than now: the record of the failure is made older."""
    monkeypatch.delenv(amx_verdict.PASSED_ON, raising=False)
    path = amx_verdict.cache_dir() / "amx-failure.json"
    failure = amx_verdict._read_failure(path)
    assert failure is not None
    path.write_text(json.dumps(failure._replace(at=failure.at - seconds)))


def test_the_pause_after_a_second_failure_is_longer(amx_host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe_with(monkeypatch, amx_host, "raise SystemExit(1)")
    # s since the start before, and the probes until then.
    for seconds, n_probes in ((0, 1), (3590, 1), (20, 2), (3610, 2), (82700, 2), (200, 3), (86300, 3), (200, 4)):
        if seconds:
            start_after(monkeypatch, seconds)
        assert chosen() == ()
        assert len((amx_host / "runs").read_text()) == n_probes


@pytest.mark.parametrize(
    "record", ["", "{", "[1, 2]", '[1, "x", "x"]', "[1e999, 1, 1]", '[1, 1e999, "x"]', "[1, NaN, 1]"]
)
def test_a_damaged_record_of_a_failure_is_ignored(amx_host: Path, monkeypatch: pytest.MonkeyPatch, record: str) -> None:
    place = amx_verdict.cache_dir()
    place.mkdir(parents=True)
    (place / "amx-failure.json").write_text(record)
    probe_with(monkeypatch, amx_host, printing(speedups(1.3)))
    assert chosen() == ALL_TILES


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_probe_that_ends_with_its_server_is_repeated_at_the_next_start(
    amx_host: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    probe_with(monkeypatch, amx_host, f"import os, signal; os.kill(os.getpid(), signal.{name}); signal.pause()")
    assert chosen() == ()
    assert _reason(caplog, "AMX is not used") == f"its probe was stopped by {name}; the next start tries again"
    monkeypatch.delenv(amx_verdict.PASSED_ON)
    probe_with(monkeypatch, amx_host, printing(speedups(1.3)))
    assert chosen() == ALL_TILES


def test_a_failure_that_cannot_be_stored_is_repeated_at_the_next_start(
    amx_host: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder in the place of its file stands for a full disk."""
    probe_with(monkeypatch, amx_host, "raise SystemExit(1)")
    (amx_verdict.cache_dir() / "amx-failure.part").mkdir(parents=True)
    assert chosen() == ()
    assert "; the next start tries again, as " in _reason(caplog, "AMX is not used")
    monkeypatch.delenv(amx_verdict.PASSED_ON)
    probe_with(monkeypatch, amx_host, printing(speedups(1.3)))
    assert chosen() == ALL_TILES


def test_a_probe_that_cannot_be_started_is_repeated_after_a_pause(
    amx_host: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as context:
        context.setattr(sys, "executable", str(amx_host / "python"))
        assert chosen() == ()
    warning = _reason(caplog, "AMX is not used")
    assert warning.startswith("its probe cannot be started: No such file or directory; starts after 2")
    start_after(monkeypatch, 3700)
    probe_with(monkeypatch, amx_host, printing(speedups(1.3)))
    assert chosen() == ALL_TILES


def test_a_probe_whose_lock_another_process_keeps_is_not_waited_for(
    amx_host: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    probe_with(monkeypatch, amx_host, printing(speedups(1.3)))
    monkeypatch.setattr(amx_verdict, "PROBE_S", 0.2)
    place = amx_verdict.cache_dir()
    place.mkdir(parents=True)
    with open(place / "amx.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert chosen() == ()
    assert _reason(caplog, "AMX is not used").startswith("another process keeps the probe's lock")
    assert amx_verdict.last_failure() is None
    monkeypatch.delenv(amx_verdict.PASSED_ON)
    monkeypatch.setattr(amx_verdict, "PROBE_S", 60)
    assert chosen() == ALL_TILES


def test_without_a_place_for_the_verdict_amx_is_not_used(
    amx_host: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that cannot be made, not even by root: a file is in its place."""
    probe_with(monkeypatch, amx_host, printing(speedups(1.3)))
    (amx_host / "cache").write_text("not a folder")
    for _ in range(2):
        assert chosen() == ()
    place = amx_verdict.cache_dir()
    warning = _reason(caplog, "AMX is not used")
    assert warning.startswith(f"its probe's verdict cannot be kept in {place}: Not a directory; make")
    assert not (amx_host / "runs").exists()


def test_a_verdict_that_cannot_be_stored_is_used(
    amx_host: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder in the place of its file stands for a full disk."""
    probe_with(monkeypatch, amx_host, printing(speedups(0.9, Q4_1=1.1)))
    place = amx_verdict.cache_dir()
    (place / "amx-speedups.part").mkdir(parents=True)
    for _ in range(2):
        assert chosen() == (("Q4_1", 16),)
    assert (amx_host / "runs").read_text() == "x"
    assert _reason(caplog, "AMX is probed at each start").startswith("its probe's verdict cannot be kept")


def test_a_stored_verdict_is_read_where_nothing_can_be_written(
    amx_host: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder in the place of the lock, which so cannot be opened."""
    place = amx_verdict.cache_dir()
    (place / "amx.lock").mkdir(parents=True)
    (place / "amx-speedups.json").write_text(json.dumps(Verdict(speedups(1.3), "")._asdict()))
    assert chosen() == ALL_TILES
    assert not caplog.messages


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (speedups(1.3), ALL_TILES),
        (speedups(1.3, Q6_K=0.98, Q2_K=1.0), tiles_but_for("Q6_K", "Q2_K")),
        (speedups(0.9, Q4_1=1.1), (("Q4_1", 16),)),
        (speedups(0.9, Q4_1=[0.9, 0.9, 1.1, 1.2], Q8_0=[0.9, 1.1, 1.1, 1.2]), (("Q4_1", 64), ("Q8_0", 32))),
        (speedups(1.3, Q4_1=[1.3, 1.3, 1.3, 0.9]), tiles_but_for("Q4_1")),
        (speedups(0.7), ()),
    ],
    ids=["all", "all but two", "one", "two from more tokens", "one slower in the end", "none"],
)
def test_amx_is_used_for_the_formats_that_it_makes_faster(
    amx_host: Path,
    monkeypatch: pytest.MonkeyPatch,
    found: dict[str, list[float]],
    expected: Thresholds,
) -> None:
    probe_with(monkeypatch, amx_host, printing(found))
    for _ in range(2):
        assert chosen() == expected
    assert (amx_host / "runs").read_text() == "x"
    assert amx_verdict.amx_verdict() == Verdict(found, "")


def test_formats_with_tiles_can_be_named(amx_host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe_with(monkeypatch, amx_host, printing(speedups(0.5)))
    monkeypatch.setenv("STARLING_AMX_FORMATS", "Q8_0,Q4_1")
    assert chosen() == (("Q4_1", 16), ("Q8_0", 16))
    monkeypatch.setenv("STARLING_AMX_FORMATS", "Q8_0,Q4_1:32,Q6_K:65536,")
    assert chosen() == (("Q4_1", 32), ("Q6_K", 65536), ("Q8_0", 16))
    monkeypatch.setenv("STARLING_ISA", "vnni")
    assert chosen() == ()
    assert not (amx_host / "runs").exists()
    monkeypatch.setenv("STARLING_ISA", "amx")
    monkeypatch.delenv("STARLING_AMX_FORMATS")
    assert chosen() == ALL_TILES


@pytest.mark.parametrize(
    ("named", "against"),
    [
        ("Q8_0,Q9_9", "STARLING_AMX_FORMATS names Q9_9, expected some of"),
        ("Q8_0,Q4_1,Q8_0:32", "STARLING_AMX_FORMATS names Q8_0 twice, expected each format once"),
        *(
            (f"Q4_1:{tokens}", f"STARLING_AMX_FORMATS has 'Q4_1:{tokens}', expected Q4_1:TOKENS with TOKENS from 16 to")
            for tokens in ("", "15", "-16", "1e3", str(MOST_TOKENS + 1), "9" * 20, "\u0661\u0666", "16:32")
        ),
    ],
)
def test_formats_that_cannot_be_named_are_refused(
    amx_host: Path, monkeypatch: pytest.MonkeyPatch, named: str, against: str
) -> None:
    monkeypatch.setenv("STARLING_AMX_FORMATS", named)
    with pytest.raises(UnsupportedCpu, match=re.escape(against)):
        chosen()


OLDER_RECORD = json.dumps({"speedups": dict.fromkeys(ALL_FORMATS, 2.0), "against": ""})  # one number for each format


@pytest.mark.parametrize(
    "record", ["", "[]", '{"schema": 0}', '{"speedups": {"Q4_0": 2}, "against": ""}', OLDER_RECORD]
)
def test_records_of_other_versions_are_probed_again(
    amx_host: Path, monkeypatch: pytest.MonkeyPatch, record: str
) -> None:
    probe_with(monkeypatch, amx_host, printing(speedups(2)))
    stored = amx_verdict.cache_dir()
    stored.mkdir(parents=True)
    (stored / "amx.verdict").write_text("AMX tiles take 1.41 times as long as VNNI")
    (stored / "amx-speedups.json").write_text(record)
    for _ in range(2):
        assert chosen() == ALL_TILES
    assert (amx_host / "runs").read_text() == "x"
