"""Which CPUs are refused and why, and what the key of the kernel cache depends on."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.worker.kernels import features
from stages.worker.kernels.features import (
    ALL_FORMATS,
    ALL_TILES,
    AMX_NEEDS,
    MINIMUM,
    MOST_TOKENS,
    PROBED_TOKENS,
    VNNI_NEEDS,
    Thresholds,
    UnsupportedCpu,
    Verdict,
    choose_isa,
)

HASWELL = dict.fromkeys(MINIMUM, True)
SERVER = HASWELL | dict.fromkeys(VNNI_NEEDS, True)
NEWER = SERVER | dict.fromkeys(AMX_NEEDS, True)


def test_choice() -> None:
    assert choose_isa(HASWELL, "native") == "portable"
    assert choose_isa(SERVER, "native") == "vnni"
    assert choose_isa(SERVER, "portable") == "portable"
    assert choose_isa(SERVER, "vnni") == "vnni"
    assert choose_isa(NEWER, "native") == "amx"
    assert choose_isa(NEWER, "vnni") == "vnni"
    assert choose_isa(NEWER | {"avx512vnni": False}, "native") == "portable"
    assert choose_isa(SERVER, "tiles") == "tiles"


def test_amx_that_is_not_permitted_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise UnsupportedCpu("the system does not permit AMX tiles")

    monkeypatch.setattr(features, "host_features", lambda: NEWER)
    monkeypatch.setattr(features, "permit_amx", refused)
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    monkeypatch.setenv("STARLING_ISA", "native")
    assert features.isa.__wrapped__() == "vnni"
    monkeypatch.setenv("STARLING_ISA", "amx")
    with pytest.raises(UnsupportedCpu, match="does not permit"):
        features.isa.__wrapped__()


@pytest.fixture
def amx_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CPU with AMX that the system permits, no named formats, and an empty home, whose path is returned."""
    monkeypatch.setattr(features, "host_features", lambda: NEWER)
    monkeypatch.setattr(features, "permit_amx", lambda: None)
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    monkeypatch.setenv("STARLING_ISA", "native")
    monkeypatch.delenv("STARLING_AMX_FORMATS", raising=False)
    monkeypatch.setenv(features.PASSED_ON, "")  # so that what a test sets is unset after it
    monkeypatch.delenv(features.PASSED_ON)
    return tmp_path


def probe_with(monkeypatch: pytest.MonkeyPatch, home: Path, code: str) -> None:
    """Replace the probe by `code`; each run adds an x to the file `runs`."""
    monkeypatch.setattr(features, "PROBE", ["-c", f"open({str(home / 'runs')!r}, 'a').write('x'); {code}"])


def chosen(monkeypatch: pytest.MonkeyPatch) -> tuple[str, Thresholds]:
    """The instruction set, and the formats with tiles with their thresholds, that a new process would choose."""
    isa = features.isa.__wrapped__()
    with monkeypatch.context() as context:
        context.setattr(features, "isa", lambda: isa)
        return isa, features.tile_thresholds.__wrapped__()


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
        assert chosen(monkeypatch) == ("vnni", ())
        assert against in features.amx_verdict().against
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
        monkeypatch.setattr(features, "PROBE_S", 0.2)
    probe_with(monkeypatch, amx_host, code)
    for _ in range(2):
        assert chosen(monkeypatch) == ("vnni", ())
        assert re.search(reason, features.amx_verdict().against, re.DOTALL)
    child = "from stages.worker.kernels import features as f; print(f.amx_verdict().against)"
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == features.amx_verdict().against
    warning = _reason(caplog, "AMX is not used")
    assert re.match(f"its probe .*{reason}.*; starts after 2.* UTC try again, or", warning, re.DOTALL)
    monkeypatch.setattr(features, "PROBE_S", 60)
    runs = (amx_host / "runs").read_text() if (amx_host / "runs").exists() else ""
    probe_with(monkeypatch, amx_host, printing(speedups(1.3)))
    start_after(monkeypatch, 3500)
    assert chosen(monkeypatch) == ("vnni", ())
    assert len(caplog.records) == 2
    caplog.records.pop(0)
    assert re.search(reason, _reason(caplog, "AMX is not used"), re.DOTALL)
    start_after(monkeypatch, 200)
    for _ in range(2):
        assert chosen(monkeypatch) == ("amx", ALL_TILES)
    assert (amx_host / "runs").read_text() == runs + "x"


def start_after(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """The next start, so many seconds later than now: the record of the failure is made older."""
    monkeypatch.delenv(features.PASSED_ON)
    path = features._cache_dir("amx", ALL_TILES) / "amx-failure.json"
    failure = features._read_failure(path)
    assert failure is not None
    path.write_text(json.dumps(failure._replace(at=failure.at - seconds)))


def test_the_pause_after_a_second_failure_is_longer(amx_host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe_with(monkeypatch, amx_host, "raise SystemExit(1)")
    # s since the start before, and the probes until then.
    for seconds, n_probes in ((0, 1), (3590, 1), (20, 2), (3610, 2), (82700, 2), (200, 3), (86300, 3), (200, 4)):
        if seconds:
            start_after(monkeypatch, seconds)
        assert chosen(monkeypatch) == ("vnni", ())
        assert len((amx_host / "runs").read_text()) == n_probes


@pytest.mark.parametrize(
    "record", ["", "{", "[1, 2]", '[1, "x", "x"]', "[1e999, 1, 1]", '[1, 1e999, "x"]', "[1, NaN, 1]"]
)
def test_a_damaged_record_of_a_failure_is_ignored(amx_host: Path, monkeypatch: pytest.MonkeyPatch, record: str) -> None:
    place = features._cache_dir("amx", ALL_TILES)
    place.mkdir(parents=True)
    (place / "amx-failure.json").write_text(record)
    probe_with(monkeypatch, amx_host, printing(speedups(1.3)))
    assert chosen(monkeypatch) == ("amx", ALL_TILES)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_probe_that_ends_with_its_server_is_repeated_at_the_next_start(
    amx_host: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    probe_with(monkeypatch, amx_host, f"import os, signal; os.kill(os.getpid(), signal.{name}); signal.pause()")
    assert chosen(monkeypatch) == ("vnni", ())
    assert _reason(caplog, "AMX is not used") == f"its probe was stopped by {name}; the next start tries again"
    monkeypatch.delenv(features.PASSED_ON)
    probe_with(monkeypatch, amx_host, printing(speedups(1.3)))
    assert chosen(monkeypatch) == ("amx", ALL_TILES)


def test_a_failure_that_cannot_be_stored_is_repeated_at_the_next_start(
    amx_host: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder in the place of its file stands for a full disk."""
    probe_with(monkeypatch, amx_host, "raise SystemExit(1)")
    (features._cache_dir("amx", ALL_TILES) / "amx-failure.part").mkdir(parents=True)
    assert chosen(monkeypatch) == ("vnni", ())
    assert "; the next start tries again, as " in _reason(caplog, "AMX is not used")
    monkeypatch.delenv(features.PASSED_ON)
    probe_with(monkeypatch, amx_host, printing(speedups(1.3)))
    assert chosen(monkeypatch) == ("amx", ALL_TILES)


def test_a_probe_that_cannot_be_started_is_repeated_after_a_pause(
    amx_host: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as context:
        context.setattr(sys, "executable", str(amx_host / "python"))
        assert chosen(monkeypatch) == ("vnni", ())
    warning = _reason(caplog, "AMX is not used")
    assert warning.startswith("its probe cannot be started: No such file or directory; starts after 2")
    start_after(monkeypatch, 3700)
    probe_with(monkeypatch, amx_host, printing(speedups(1.3)))
    assert chosen(monkeypatch) == ("amx", ALL_TILES)


def test_without_a_place_for_the_verdict_amx_is_not_used(
    amx_host: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that cannot be made, not even by root: a file is in its place."""
    probe_with(monkeypatch, amx_host, printing(speedups(1.3)))
    (amx_host / "cache").write_text("not a folder")
    for _ in range(2):
        assert chosen(monkeypatch) == ("vnni", ())
    place = features._cache_dir("amx", ALL_TILES)
    warning = _reason(caplog, "AMX is not used")
    assert warning.startswith(f"its probe's verdict cannot be kept in {place}: Not a directory; make")
    assert not (amx_host / "runs").exists()


def test_a_verdict_that_cannot_be_stored_is_used(
    amx_host: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder in the place of its file stands for a full disk."""
    probe_with(monkeypatch, amx_host, printing(speedups(0.9, Q4_1=1.1)))
    place = features._cache_dir("amx", ALL_TILES)
    (place / "amx-speedups.part").mkdir(parents=True)
    for _ in range(2):
        assert chosen(monkeypatch) == ("amx", (("Q4_1", 16),))
    assert (amx_host / "runs").read_text() == "x"
    assert _reason(caplog, "AMX is probed at each start").startswith("its probe's verdict cannot be kept")


def test_a_stored_verdict_is_read_where_nothing_can_be_written(
    amx_host: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder in the place of the lock, which so cannot be opened."""
    place = features._cache_dir("amx", ALL_TILES)
    (place / "amx.lock").mkdir(parents=True)
    (place / "amx-speedups.json").write_text(json.dumps(Verdict(speedups(1.3), "")._asdict()))
    assert chosen(monkeypatch) == ("amx", ALL_TILES)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (speedups(1.3), ("amx", ALL_TILES)),
        (speedups(1.3, Q6_K=0.98, Q2_K=1.0), ("amx", tiles_but_for("Q6_K", "Q2_K"))),
        (speedups(0.9, Q4_1=1.1), ("amx", (("Q4_1", 16),))),
        (speedups(0.9, Q4_1=[0.9, 0.9, 1.1, 1.2], Q8_0=[0.9, 1.1, 1.1, 1.2]), ("amx", (("Q4_1", 64), ("Q8_0", 32)))),
        (speedups(1.3, Q4_1=[1.3, 1.3, 1.3, 0.9]), ("amx", tiles_but_for("Q4_1"))),
        (speedups(0.7), ("vnni", ())),
    ],
    ids=["all", "all but two", "one", "two from more tokens", "one slower in the end", "none"],
)
def test_amx_is_used_for_the_formats_that_it_makes_faster(
    amx_host: Path,
    monkeypatch: pytest.MonkeyPatch,
    found: dict[str, list[float]],
    expected: tuple[str, Thresholds],
) -> None:
    probe_with(monkeypatch, amx_host, printing(found))
    for _ in range(2):
        assert chosen(monkeypatch) == expected
    assert (amx_host / "runs").read_text() == "x"
    assert features.amx_verdict() == Verdict(found, "")


def test_formats_with_tiles_can_be_named(amx_host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe_with(monkeypatch, amx_host, printing(speedups(0.5)))
    monkeypatch.setenv("STARLING_AMX_FORMATS", "Q8_0,Q4_1")
    assert chosen(monkeypatch) == ("amx", (("Q4_1", 16), ("Q8_0", 16)))
    monkeypatch.setenv("STARLING_AMX_FORMATS", "Q8_0,Q4_1:32,Q6_K:65536,")
    assert chosen(monkeypatch) == ("amx", (("Q4_1", 32), ("Q6_K", 65536), ("Q8_0", 16)))
    monkeypatch.setenv("STARLING_ISA", "vnni")
    assert chosen(monkeypatch) == ("vnni", ())
    assert not (amx_host / "runs").exists()
    monkeypatch.setenv("STARLING_ISA", "amx")
    monkeypatch.delenv("STARLING_AMX_FORMATS")
    assert chosen(monkeypatch) == ("amx", ALL_TILES)


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
        chosen(monkeypatch)


OLDER_RECORD = json.dumps({"speedups": dict.fromkeys(ALL_FORMATS, 2.0), "against": ""})  # one number for each format


@pytest.mark.parametrize(
    "record", ["", "[]", '{"schema": 0}', '{"speedups": {"Q4_0": 2}, "against": ""}', OLDER_RECORD]
)
def test_records_of_other_versions_are_probed_again(
    amx_host: Path, monkeypatch: pytest.MonkeyPatch, record: str
) -> None:
    probe_with(monkeypatch, amx_host, printing(speedups(2)))
    stored = features._cache_dir("amx", ALL_TILES)
    stored.mkdir(parents=True)
    (stored / "amx.verdict").write_text("AMX tiles take 1.41 times as long as VNNI")
    (stored / "amx-speedups.json").write_text(record)
    for _ in range(2):
        assert chosen(monkeypatch) == ("amx", ALL_TILES)
    assert (amx_host / "runs").read_text() == "x"


def test_kernels_with_other_formats_by_tiles_have_another_cache() -> None:
    chosen = (ALL_TILES, (("Q4_1", 16),), (("Q4_1", 32),), ())
    assert len({features.cache_key("amx", thresholds) for thresholds in chosen}) == 4


def test_another_installation_uses_the_same_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And other sources use another one."""
    sources = Path(features.__file__).parents[3]
    names = ("stages/worker/kernels", "stages/worker/activations_arena.py", "pipeline/native", "shm")
    for name in names:
        copy = shutil.copytree if (sources / name).is_dir() else shutil.copy
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy(sources / name, tmp_path / name)
    here = features.cache_key.__wrapped__("portable", ALL_TILES)
    monkeypatch.setattr(features, "__file__", str(tmp_path / "stages/worker/kernels/features.py"))
    assert features.cache_key.__wrapped__("portable", ALL_TILES) == here
    for name in ("barrier", "sampler_steps"):
        before = features.cache_key.__wrapped__("portable", ALL_TILES)
        (tmp_path / f"shm/{name}.py").write_text("changed")
        assert features.cache_key.__wrapped__("portable", ALL_TILES) != before


@pytest.mark.parametrize("missing", MINIMUM)
def test_cpus_below_the_minimum_are_refused(missing: str) -> None:
    with pytest.raises(UnsupportedCpu, match=f"lacks {missing}; the kernels need x86-64-v3"):
        choose_isa(HASWELL | {missing: False}, "native")


def test_isa_restrictions_are_checked() -> None:
    with pytest.raises(UnsupportedCpu, match="'sse', expected one of portable, vnni, amx, native, tiles"):
        choose_isa(SERVER, "sse")
    with pytest.raises(UnsupportedCpu, match="lacks avx512vnni"):
        choose_isa(SERVER | {"avx512vnni": False}, "vnni")
    with pytest.raises(UnsupportedCpu, match="lacks amx-tile, amx-int8"):
        choose_isa(SERVER, "amx")


def test_the_cache_has_a_directory_for_each_target(tmp_path: Path) -> None:
    code = (
        "from stages.worker.kernels import simd; from numba.core import config;"
        "print(simd.ISA, config.CACHE_DIR, config.CPU_NAME)"
    )
    directories = set()
    for isa in ("portable", "native"):
        environment = {**os.environ, "STARLING_ISA": isa, "STARLING_HOME": str(tmp_path)}
        out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        chosen, directory, cpu = out.stdout.split()
        assert chosen == "portable" or isa == "native"
        assert Path(directory).parent == tmp_path / "cache"
        assert (cpu == "x86-64-v3") == (chosen == "portable")
        directories.add(directory)
    if chosen != "portable":
        assert len(directories) == 2


def test_a_restriction_that_comes_too_late_is_refused(tmp_path: Path) -> None:
    """Functions that were jitted for another CPU must not be used as portable ones."""
    code = "import numba; numba.njit(lambda x: x); import stages.worker"
    # On a CPU without AVX-512 this process has already set numba to the portable CPU, which a child would inherit.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment = {**inherited, "STARLING_ISA": "portable", "STARLING_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "import it first" in done.stderr


def make_old_caches(home: Path) -> None:
    """Eight caches of other sources; `kernels-N` was last used N days ago."""
    for days in range(8):
        old = home / "cache" / f"kernels-{days}"
        old.mkdir(parents=True)
        os.utime(old, (time.time() - 86400 * days, time.time() - 86400 * days))


def test_old_caches_are_removed(tmp_path: Path) -> None:
    """With `portable`, which uses one cache on every CPU: a CPU with AMX has another one for the probe."""
    make_old_caches(tmp_path)
    environment = {**os.environ, "STARLING_HOME": str(tmp_path), "STARLING_ISA": "portable"}
    code = "import stages.worker; print(stages.worker.settle.__module__)"
    subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    left = {path.name for path in (tmp_path / "cache").iterdir()}
    assert {"kernels-0", "kernels-1", "kernels-2"} <= left
    assert len(left) == 4


def test_the_cache_of_a_failed_amx_probe_counts_as_used(amx_host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU whose AMX fails the probe two caches are in use: the probe's and that of VNNI."""
    make_old_caches(amx_host)
    probe_with(monkeypatch, amx_host, "raise SystemExit(1)")
    assert features.isa.__wrapped__() == "vnni"
    used = {features._cache_dir("amx", ALL_TILES), features._cache_dir("vnni", ())}
    features._cache_dir("vnni", ()).mkdir()
    features._prune(amx_host / "cache")
    assert {path.name for path in (amx_host / "cache").iterdir()} == {
        "kernels-0",
        "kernels-1",
        *(path.name for path in used),
    }
