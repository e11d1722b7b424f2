"""`starling doctor`: what it finds on machines with limits, in homes with faults; and how it says so."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from pipeline import cgroup
from pipeline.config import paths, server_cores
from pipeline.config.load import resolve
from pipeline.config.schema import DEMO_MODEL, Config, ModelConfig, PerformanceConfig, ServerConfig
from pipeline.errors import ConfigError
from pipeline.models import digests, registry, sources
from pipeline.models.pull import pull
from pipeline.models.sources import FileSource
from pipeline.models.store import no_progress
from pipeline.runtime import directory_lock
from starling.cli import cli
from starling.cli.doctor import check_cores, lines
from starling.doctor import machine
from starling.doctor.finding import Finding
from starling.doctor.home import certificate
from tests.emulated_machine import memory_nodes
from tests.stored_cores import stored_by_a_server
from tests.tls_files import place

CONFIG = Config(models=(ModelConfig(name=DEMO_MODEL),))


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


# ------------------------------------------------------------------ limits of control groups


def test_the_tightest_limit_of_version_2_counts(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "cg/a/cpu.max": "150000 100000\n",
            "cg/a/memory.max": "2000000000\n",
            "cg/a/memory.current": "500000000\n",
            "cg/a/memory.stat": "anon 1\ninactive_file 100000000\n",
            "cg/a/b/cpu.max": "max 100000\n",
            "cg/a/b/memory.max": "max\n",
        },
    )
    assert cgroup.read(tmp_path / "proc", tmp_path / "cg") == (1.5, 2_000_000_000, 1_600_000_000)


def test_limits_of_version_1(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/docker/x\n2:memory:/docker/x\n",
            "cg/cpu/cpu.cfs_quota_us": "200000",
            "cg/cpu/cpu.cfs_period_us": "100000",
            "cg/memory/memory.limit_in_bytes": "1000000000",
            "cg/memory/memory.usage_in_bytes": "400000000",
        },
    )
    assert cgroup.read(tmp_path / "proc", tmp_path / "cg") == (2.0, 1_000_000_000, 600_000_000)
    write(tmp_path, {"cg/memory/memory.limit_in_bytes": "9223372036854771712", "cg/cpu/cpu.cfs_quota_us": "-1"})
    assert cgroup.read(tmp_path / "proc", tmp_path / "cg") == (None, None, None)


def test_the_choice_of_amx_is_described() -> None:
    thresholds = (("Q4_0", 16), ("Q4_1", 64), ("Q8_0", 16))
    assert machine.described(thresholds) == "from 16 tokens for Q4_0, Q8_0; from 64 tokens for Q4_1"


def test_a_machine_without_control_groups(tmp_path: Path) -> None:
    assert cgroup.read(tmp_path, tmp_path) == (None, None, None)


def test_cores() -> None:
    none, eight = cgroup.Limits(None, None, None), list(range(8))
    assert machine.cores(CONFIG, none, eight).state == "ok"
    found = machine.cores(CONFIG, cgroup.Limits(1.5, None, None), eight)
    assert (found.state, found.remedy.partition(",")[0]) == ("warning", "set models[].ranks: 1")
    ranks = Config(models=(ModelConfig(name=DEMO_MODEL, ranks=4),))
    assert machine.cores(ranks, none, [0, 1]).state == "warning"
    assert machine.cores(ranks, cgroup.Limits(4.0, None, None), eight).state == "ok"


def test_ranks_are_those_of_all_groups_beside_the_cores_of_the_control_plane() -> None:
    quota, model = cgroup.Limits(6.0, None, None), ModelConfig(name=DEMO_MODEL)
    assert "core 3 is the control plane's" in machine.cores(CONFIG, quota, [3, 4, 5]).found
    assert "cores 0, 1 are the control plane's" in machine.cores(CONFIG, quota, list(range(17))).found
    assert "control plane" not in machine.cores(CONFIG, quota, [3, 4]).found
    assert "a model has 7 ranks" in machine.cores(CONFIG, quota, list(range(8))).found
    assert machine.cores(CONFIG, quota, list(range(7))).state == "ok"
    groups = Config(models=(msgspec.structs.replace(model, ranks=4),), performance=PerformanceConfig(worker_groups=2))
    found = machine.cores(groups, quota, list(range(9)))
    assert "a model has 8 ranks in 2 groups" in found.found
    assert found.remedy.startswith("set models[].ranks: 3,")


def test_memory(tmp_path: Path, home: Path) -> None:
    write(tmp_path, {"proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n"})
    here = machine.Machine(tmp_path / "proc", tmp_path / "sys")
    none = cgroup.Limits(None, None, None)
    assert machine.memory(CONFIG, none, here).state == "ok"
    limited = machine.memory(CONFIG, cgroup.Limits(None, 500_000_000, 400_000_000), here)
    assert limited.state == "problem"
    assert "400 MB free below the control group's limit of 500 MB" in limited.found


@pytest.mark.parametrize(("hard", "state"), [(-1, "ok"), (4096, "ok"), (600, "problem")])
def test_open_files(hard: int, state: str) -> None:
    assert machine.file_limit(CONFIG, 100, hard).state == state


@pytest.mark.parametrize(
    ("now", "newest", "source", "state"),
    [
        (1.8e9, 1.7e9, "tsc", "ok"),
        (1.8e9, 1.9e9, "tsc", "warning"),
        (1.8e9, 0.0, "hpet", "warning"),
        (86400.0, 0.0, "tsc", "problem"),
        (1.8e9, 0.0, "", "ok"),
    ],
)
def test_the_clock(tmp_path: Path, now: float, newest: float, source: str, state: str) -> None:
    if source:
        write(tmp_path, {"sys/devices/system/clocksource/clocksource0/current_clocksource": source + "\n"})
    found = machine.clock(machine.Machine(tmp_path / "proc", tmp_path / "sys"), now, newest)
    assert found.state == state, found


@pytest.mark.parametrize(
    ("enabled", "shmem", "use_mmap", "for_arenas", "state"),
    [
        ("always [madvise] never", "[never]", False, True, "ok"),
        ("always madvise [never]", "[never]", False, True, "warning"),
        ("always madvise [never]", "never [deny] force", True, False, "warning"),
        ("always madvise [never]", "[never] deny force", True, False, "ok"),  # an older kernel
        ("", "", True, False, "ok"),
    ],
)
def test_huge_pages(tmp_path: Path, enabled: str, shmem: str, use_mmap: bool, for_arenas: bool, state: str) -> None:
    folder = "sys/kernel/mm/transparent_hugepage"
    write(tmp_path, {f"{folder}/enabled": enabled, f"{folder}/shmem_enabled": shmem})
    config = Config(models=CONFIG.models, performance=PerformanceConfig(use_mmap=use_mmap))
    found = machine.huge_pages(config, machine.Machine(tmp_path / "proc", tmp_path / "sys"), for_arenas, True)
    assert found.state == state
    assert found.found.endswith("mapped weights: yes")
    assert f"KV cache: {'yes' if for_arenas else 'no'}" in found.found


def test_memory_nodes(tmp_path: Path) -> None:
    memory_nodes(tmp_path / "sys" / "devices" / "system" / "node", {0: "0-3,8", 1: "4-7"})
    emulated = machine.Machine(tmp_path / "proc", tmp_path / "sys")
    (found,) = machine.nodes(CONFIG, emulated, list(range(9)))
    assert found == Finding("memory nodes", "ok", "2, with 5 and 4 cores: none has a copy of the weights")
    auto = Config(models=CONFIG.models, performance=PerformanceConfig(weight_copies="auto"))
    (found,) = machine.nodes(auto, emulated, [0, 4])
    assert found.found == "2, with 1 and 1 cores: each has a copy of the weights if memory allows it"
    assert list(machine.nodes(CONFIG, emulated, [4, 5])) == []
    assert list(machine.nodes(CONFIG, machine.Machine(tmp_path / "proc", tmp_path / "none"), [4, 5])) == []


# ------------------------------------------------------------------ this home


def test_a_port_that_is_taken(home: Path) -> None:
    from starling.doctor.home import port

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = Config(models=CONFIG.models, server=ServerConfig(port=taken.getsockname()[1]))
        assert port(config).state == "problem"
    assert port(config).state == "ok"
    assert port(Config(models=CONFIG.models, server=ServerConfig(host="0.0.0.0", port=0))).state == "warning"


def test_files_of_models(tmp_path: Path, home: Path) -> None:
    from starling.doctor.home import model_files

    def found(path: str = "") -> Finding:
        return model_files(ModelConfig(name=DEMO_MODEL, path=path))

    assert found().state == "warning"
    assert found("/no/such.gguf").state == "problem"
    (tmp_path / "new.gguf").write_bytes(b"GGUF")
    assert found(str(tmp_path / "new.gguf")).state == "warning"


def test_files_of_pulled_models(home: Path, tmp_path: Path) -> None:
    """They are checked whether the configuration names them or not, each by the digest that was pulled."""
    from starling.doctor.home import check_home

    folder = home / "models"
    content = b"GGUF" + bytes(100)
    (tmp_path / "one.gguf").write_bytes(content)
    record = pull(FileSource(tmp_path / "one.gguf"), folder, "org/one")
    config = Config(models=(ModelConfig(name=DEMO_MODEL),), server=ServerConfig(port=0))

    def found() -> Finding:
        (only,) = [one for one in check_home(config) if one.check == "model org/one"]
        return only

    assert (found().state, found().found) == ("warning", f"0 MB, sha256 {record.digest[:12]}; not prepared")
    blob = registry.blob_path(folder, record.digest)
    blob.unlink()
    assert found() == Finding(
        "model org/one",
        "problem",
        f"{blob}, the file that was pulled, is missing",
        f"run `starling pull {sources.shown(record.source)} --name org/one --sha256 {record.digest}`",
    )
    blob.write_bytes(content[::-1])
    assert (found().state, record.digest in found().found) == ("warning", True)
    # Once the other file has been read, both digests are known.
    digests.remember("one", blob, digests.compute(blob, no_progress), folder)
    other = hashlib.sha256(content[::-1]).hexdigest()
    assert found().state == "problem"
    assert found().found == f"{blob} has SHA-256 {other}, expected {record.digest}"


def test_a_checkpoint_that_is_gone_is_a_problem(home: Path, tmp_path: Path) -> None:
    from starling.doctor.home import model_files

    record = registry.Record("tiny", "1" * 64, 10, "hf:org/tiny", is_checkpoint=True)
    (home / "models").mkdir(parents=True)
    registry.write(home / "models", "tiny", record)
    found = model_files(ModelConfig(name="tiny"))
    assert (found.state, found.remedy) == (
        "problem",
        "run `starling pull hf:org/tiny --name tiny`, with the same --quant",
    )
    registry.model_path(home / "models", record).write_bytes(b"damaged")
    assert model_files(ModelConfig(name="tiny")).found.endswith("is damaged, or not complete")


def test_what_a_crash_has_left(home: Path) -> None:
    from starling.doctor.home import leftovers

    assert not [one for one in leftovers(CONFIG) if str(os.getpid()) in one.found]
    (home / "models" / ".fetch").mkdir(parents=True)
    (home / "models" / ".fetch" / "x.part").write_bytes(bytes(4096))
    (home / "models" / f"{'0' * 64}.bin").write_bytes(bytes(4096))
    texts = [one.found for one in leftovers(CONFIG)]
    assert any("unfinished downloads" in text for text in texts)
    assert any("checkpoints without a model file" in text for text in texts)


def test_arenas_in_the_home_are_found_when_another_place_is_configured(home: Path, tmp_path: Path) -> None:
    from starling.doctor.home import leftovers

    config = Config(models=CONFIG.models, server=ServerConfig(arena_dir=str(tmp_path / "own")))
    folder = paths.home_arena_parent() / paths.arena_name(config)
    write(folder, {"m.kv": "x" * 4096})
    assert any(f"{folder} has" in one.found and "no live server" in one.found for one in leftovers(config))


def test_files_that_go_while_they_are_measured_are_no_error(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage replaces its metrics every second, and a server that stops removes its arenas."""
    from starling.doctor.home import _arenas_of_dead_servers

    config = Config(models=CONFIG.models, server=ServerConfig(arena_dir=str(tmp_path)))
    folder = paths.arena_dir(config)
    write(folder, {"server.lock": "x" * 4096, ".kv.metrics.new": "x"})

    def renaming(look: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def renamed(path: Any, **options: Any) -> os.stat_result:
            if str(path).endswith(".metrics.new"):
                Path(path).unlink(missing_ok=True)
            return look(path, **options)

        return renamed

    with monkeypatch.context() as patched:
        for name in ("stat", "lstat"):
            patched.setattr(os, name, renaming(getattr(os, name)))
        assert machine.arenas(config).found
    assert [path.name for path in folder.iterdir()] == ["server.lock"]
    assert len(list(_arenas_of_dead_servers(config, runs=False, shm=tmp_path))) == 1

    lock = directory_lock._short_lock

    def removed(directory: Path) -> AbstractContextManager[None]:
        shutil.rmtree(directory)
        return lock(directory)

    monkeypatch.setattr(directory_lock, "_short_lock", removed)
    assert list(_arenas_of_dead_servers(config, runs=False, shm=tmp_path)) == []


def test_kernels_are_compiled_when_every_entry_is_stored(home: Path) -> None:
    from stages.worker.kernels import features, stored_code
    from starling.doctor.home import kernels

    features.cache_dir().mkdir(parents=True, exist_ok=True)
    for name in stored_code.ENTRIES:
        assert kernels(CONFIG).state == "warning"
        stored_code.store(name, "f16", b"code", "symbol")
    assert kernels(CONFIG).state == "ok"


def test_the_kernels_of_the_tokenizer_are_compiled_when_all_are_stored(home: Path) -> None:
    from pipeline.native import object_file
    from stages.tokenizer.kernels import compiled
    from starling.doctor.home import tokenizer_kernels

    compiled.directory().mkdir(parents=True)
    for name in compiled.NAMES:
        assert tokenizer_kernels().state == "warning"
        object_file.store(compiled.directory(), name, b"code", "symbol")
    assert tokenizer_kernels().state == "ok"


# ------------------------------------------------------------------ the command


def test_the_report_of_an_empty_home(home: Path) -> None:
    done = CliRunner().invoke(cli, ["doctor", "--json"], env={"STARLING_SERVER__PORT": "0"}, standalone_mode=False)
    rows = {row["check"]: row for row in json.loads(done.output)}
    assert {"cpu", "cores", "memory", "arenas", "huge pages", "files", "clock", "port", "disk", "kernels"} <= set(rows)
    assert "tokenizer" in rows
    assert all(row["remedy"] for row in rows.values() if row["state"] != "ok")
    failed = [row for row in rows.values() if row["state"] == "problem"]
    assert done.return_value == (78 if failed else 0)
    text = CliRunner().invoke(cli, ["doctor"], env={"STARLING_SERVER__PORT": "0"}).output
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text


def test_a_wrong_configuration_is_a_problem(home: Path) -> None:
    done = CliRunner().invoke(cli, ["doctor"], env={"STARLING_SERVER__PORT": "x"}, standalone_mode=False)
    assert done.return_value == 78
    assert "FAIL  configuration" in done.output
    assert "server.port" in done.output


def test_the_cores_of_a_server_count_only_while_it_runs(home: Path) -> None:
    run_dir = home / "run"
    run_dir.mkdir(mode=0o700, parents=True)
    settings = {"performance": {"control_cores": 1}, "server": {"run_dir": str(run_dir)}}
    config = resolve({"models": [{"name": "m", "path": "/m.gguf"}], **settings}, {})
    if len(server_cores.own()) < 2:
        pytest.skip("a rank and the control plane need a core each")
    check_cores(config)
    with stored_by_a_server(run_dir, [0]), pytest.raises(ConfigError, match="the server has 1"):
        check_cores(config)
    check_cores(config)


@pytest.mark.parametrize("length", [1, 60, 300])
def test_lines_have_80_columns(length: int) -> None:
    shown = list(lines(Finding("model a-long-name-of-a-model", "warning", "word " * length, "do " * length)))
    assert max(map(len, shown)) <= 80


def test_it_takes_no_second(home: Path) -> None:
    """No import of numba: that alone takes longer than all checks."""
    code = (
        "import sys; from starling.cli import main\n"
        "try: main()\nfinally: print('numba' in sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "doctor"]
    begun = time.monotonic()
    done = subprocess.run(command, env={**os.environ, "STARLING_SERVER__PORT": "0"}, capture_output=True, text=True)
    assert time.monotonic() - begun < 60
    assert done.stderr.strip() == "False"


def test_a_certificate_is_checked_as_at_a_start(tmp_path: Path) -> None:
    cert, key = place(tmp_path, "one")
    config = Config(server=ServerConfig(tls_cert=str(cert), tls_key=str(key)))
    found = certificate(config)
    assert (found.state, found.found) == ("ok", f"{cert} is valid until 2119-01-01")
    key.chmod(0o644)
    assert certificate(config).state == "problem"
    assert str(key) in certificate(config).found
    place(tmp_path, "expired")
    assert (certificate(config).state, certificate(config).found) == ("problem", f"{cert} has expired")
