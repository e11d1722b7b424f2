"""What `starling up` checks and chooses before it starts a stage."""

from __future__ import annotations

import json
import socket
import subprocess
from collections import namedtuple
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.config import paths
from pipeline.config.load import load, resolve
from pipeline.errors import ConfigError, ResourceError
from pipeline.runtime import arena_dir, directory_lock, run_dir
from pipeline.supervise import cleanup
from starling.cli import cli
from starling.cli import up as up_module
from tests.tls_files import place

ROOT = Path(__file__).resolve().parents[2]
Usage = namedtuple("Usage", "total used free")


def test_a_port_in_use_is_refused_with_the_way_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"127.0.0.1:{port}: Address already in use; stop the program that uses it"
        ):
            up_module.check_port(resolve({"server": {"port": port}}, {}))
    up_module.check_port(resolve({"server": {"port": port}}, {}))


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot listen on 192.0.2.1:0"):
        up_module.check_port(resolve({"server": {"host": "192.0.2.1", "port": 0}}, {}))


def room(monkeypatch: pytest.MonkeyPatch, **free_mb: int) -> None:
    def usage(path: Path) -> Usage:
        kind = "shm" if "shm" in str(path) else "disk"
        return Usage(0, 0, free_mb[kind] << 20)

    monkeypatch.setattr("shutil.disk_usage", usage)


def test_arenas_stay_in_shared_memory_when_they_fit(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room(monkeypatch, shm=600, disk=0)
    assert up_module.choose_arena_dir(resolve({}, {})) is None


def test_arenas_move_out_of_a_small_shared_memory(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    room(monkeypatch, shm=64, disk=5000)
    moved = up_module.choose_arena_dir(resolve({}, {}))
    assert moved == home / "arenas"
    assert "/dev/shm has 64 MB free and the arenas need 576 MB" in capsys.readouterr().out


def test_every_command_finds_arenas_that_have_moved(home: Path, tmp_path: Path) -> None:
    """Until the end of the server, or until they move back, after which none are left of a killed server."""
    config = resolve({}, {})
    in_memory, moved = paths.arena_dir(config), home / "arenas" / paths.arena_name(config)
    run = run_dir.prepare(paths.run_dir(config))
    assert in_memory.parent == Path("/dev/shm")
    for _ in range(2):
        up_module.place_arenas(config, run, home / "arenas")
        assert f"# arenas: {moved}\n" in CliRunner().invoke(cli, ["config"]).output
        assert arena_dir.prepare(config) == moved
        (moved / "m.kv").touch()
        assert cleanup.sweep(run, paths.arena_dir(config)) == ""
        assert not moved.exists()
        assert paths.arena_dir(config) == in_memory
    up_module.place_arenas(config, run, home / "arenas")
    (arena_dir.prepare(config) / "m.kv").touch()
    lock = directory_lock.DirectoryLock(moved, run, "server.arena_dir")
    up_module.place_arenas(config, run, None)
    assert paths.arena_dir(config) == moved, "stages run there"
    lock.release()
    up_module.place_arenas(config, run, None)
    assert paths.arena_dir(config) == in_memory
    assert not moved.exists()
    up_module.place_arenas(config, run, home / "arenas")
    own = resolve({"server": {"arena_dir": str(tmp_path)}}, {})
    assert paths.arena_dir(own).parent == tmp_path, "what is configured counts"


def test_arenas_that_have_moved_are_removed_when_another_place_is_configured(home: Path, tmp_path: Path) -> None:
    """Their server was killed. The record of their place is removed at the start, after them."""
    config = resolve({}, {})
    run = run_dir.prepare(paths.run_dir(config))
    up_module.place_arenas(config, run, home / "arenas")
    moved = arena_dir.prepare(config)
    (moved / "m.kv").touch()
    own = resolve({"server": {"arena_dir": str(tmp_path / "own")}}, {})
    lock = directory_lock.DirectoryLock(moved, run, "server.arena_dir")
    up_module.place_arenas(own, run, None)
    assert paths.arena_dir(config) == moved, "stages run there"
    lock.release()
    up_module.place_arenas(own, run, None)
    assert not moved.exists()
    assert paths.arena_dir(config) != moved
    up_module.place_arenas(config, run, home / "arenas")
    (arena_dir.prepare(config) / "m.kv").touch()
    up_module.place_arenas(resolve({"server": {"arena_dir": str(home / "arenas")}}, {}), run, None)
    assert (moved / "m.kv").exists(), "the same place: they are adopted"


def test_a_place_that_cannot_be_recorded_is_an_error(home: Path) -> None:
    run = run_dir.prepare(paths.run_dir(resolve({}, {})))
    (run / paths.ARENA_PARENT_FILE).mkdir()
    with pytest.raises(ConfigError, match="arena-parent: the place of the arenas cannot be recorded"):
        arena_dir.record_parent(run, home)


def test_a_file_that_goes_while_arenas_are_measured_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages of a killed server may still replace their metrics. Nothing is there any more: as a link to nothing."""
    room(monkeypatch, shm=600, disk=600)
    config = resolve({"server": {"run_dir": str(tmp_path / "run"), "arena_dir": str(tmp_path)}}, {})
    folder = paths.arena_dir(config)
    folder.mkdir()
    (folder / ".kv.metrics.new").symlink_to(tmp_path / "gone")
    assert up_module.choose_arena_dir(config) is None


@pytest.mark.parametrize("configured", ["~/arenas", "~/not/there/yet"])
def test_the_disk_of_a_home_is_measured_where_arenas_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configured: str
) -> None:
    """`~` is the user's home, not a name in the working directory, which may be on another disk."""
    monkeypatch.setenv("HOME", str(tmp_path / "shm"))
    (tmp_path / "shm").mkdir()
    room(monkeypatch, shm=600, disk=0)
    assert up_module.choose_arena_dir(resolve({"server": {"arena_dir": configured}}, {})) is None


@pytest.mark.parametrize("configured", ["", "/dev/shm"])
def test_arenas_that_fit_nowhere_are_refused_with_numbers(
    home: Path, monkeypatch: pytest.MonkeyPatch, configured: str
) -> None:
    room(monkeypatch, shm=64, disk=5000 if configured else 100)
    with pytest.raises(ResourceError, match="the arenas need 576 MB, and /dev/shm has 64 MB free; make them"):
        up_module.choose_arena_dir(resolve({"server": {"arena_dir": configured}}, {}))


def test_the_procfile_has_a_line_for_each_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert up_module.write_procfile(tmp_path) == ROOT / "Procfile"
    lines = (ROOT / "Procfile").read_text().splitlines()
    assert sorted(line.split(":")[0] for line in lines) == sorted(up_module.STAGES)
    for line in lines:
        assert line.endswith(f"exec starling supervise {line.split(':')[0]}")

    monkeypatch.setattr(up_module, "PROCFILE", tmp_path / "none")
    written = up_module.write_procfile(tmp_path).read_text().splitlines()
    assert sorted(line.split(":")[0] for line in written) == sorted(up_module.STAGES)


@pytest.mark.parametrize("later", ["server: [", "server: {arena_dir: /elsewhere}"])
def test_the_end_removes_what_the_configuration_of_the_start_names(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    """Also if the file has been edited meanwhile, and cannot be used."""
    file = tmp_path / "starling.yaml"
    file.write_text(json.dumps({"server": {"port": 0, "arena_dir": str(tmp_path / "shm")}}))
    arenas = paths.arena_dir(load())

    def run(*_: object) -> int:
        (arenas / "m.kv").touch()
        file.write_text(later)
        return 0

    monkeypatch.setattr(up_module, "ensure_room", lambda: None)
    monkeypatch.setattr(up_module, "prepare_apart", lambda *_: None)
    monkeypatch.setattr(up_module, "run_procfile", run)
    done = CliRunner().invoke(up_module.up, standalone_mode=False)
    assert (done.exception, done.return_value) == (None, 0)
    assert not arenas.exists()


def test_the_banner_is_a_line_to_paste() -> None:
    config = resolve({"server": {"host": "0.0.0.0"}, "auth": {"api_keys": ["k"]}}, {})
    text = up_module.banner(config, 1.23)
    assert "ready at http://127.0.0.1:8080 (1.2 s)" in text
    command = text[text.index("curl") : text.index("Ctrl-C")]
    words = subprocess.run(
        ["bash", "-c", f"curl() {{ printf '%s\\0' \"$@\"; }}\n{command}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")[:-1]
    assert max(map(len, text.splitlines())) <= 80
    assert words[:2] == ["-N", "http://127.0.0.1:8080/v1/chat/completions"]
    assert "Authorization: Bearer YOUR-API-KEY" in words
    assert json.loads(words[-1])["model"] == "smollm2-135m-instruct"


def test_the_banner_has_a_key_if_one_was_made(home: Path) -> None:
    """Requests need a key as soon as `starling keys add` has made the file."""
    config = resolve({}, {})
    assert "YOUR-API-KEY" not in up_module.banner(config, 1.0)
    file = paths.state_dir(config) / "keys.json"
    file.parent.mkdir(parents=True)
    file.touch()
    assert "-H 'Authorization: Bearer YOUR-API-KEY'" in up_module.banner(config, 1.0)


def test_the_timeline_shows_each_phase_once_and_in_order() -> None:
    timeline = up_module.Timeline(1000.0)
    for phase, at in (("command", 1000.25), ("worker-m", 1002.5), ("kv", 1002.0), ("kv", 1009.0)):
        timeline.reached(phase, at)
    assert str(timeline) == "Started: command 0.25, kv 2.00, worker-m 2.50 s."


def test_a_certificate_that_cannot_be_used_is_reported_before_the_start(tmp_path: Path) -> None:
    cert, key = place(tmp_path, "one")
    config = resolve({"server": {"tls_cert": str(cert), "tls_key": str(key)}}, {})
    up_module.check_certificate(config)
    assert f"curl -N --cacert {cert} https://127.0.0.1:8080/v1/" in up_module.banner(config, 1.0)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match=str(key)):
        up_module.check_certificate(config)
    with pytest.raises(ConfigError, match="server.tls_key: missing; server.tls_cert needs it"):
        resolve({"server": {"tls_cert": str(cert)}}, {})
