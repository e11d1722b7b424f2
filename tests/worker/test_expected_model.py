"""A spare worker group opens the model that it expects, and uses that only while its files are the same."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shm.checkpoint
from pipeline.config import paths
from pipeline.config.load import resolve
from pipeline.config.schema import Config
from pipeline.models import store, versions
from pipeline.models.versions import VersionTable
from shm.checkpoint import Checkpoint
from stages.worker import expected_model, waiting_ranks
from stages.worker.checkpoint.usable import usable_version
from stages.worker.expected_model import Expected, choose, open_checkpoint, open_expected, watch_file
from stages.worker.kernels import compiled
from stages.worker.model import Model
from tests.worker.conftest import Ingested, TinyGguf

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_model, "_opened", None)
    monkeypatch.setattr(shm.checkpoint, "SETTLED_NS", -1)  # an index that was just written is kept, too
    compiled.addresses("f16")


@pytest.fixture
def expected(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path) -> Expected:
    """A copy, which a test may change."""
    index_path = ingested(tiny_gguf("small", "Q8_0"))
    for suffix in (".idx", ".bin"):
        shutil.copy(index_path.with_suffix(suffix), tmp_path)
    return Expected(tmp_path / index_path.name, "f16")


def test_the_expected_model_is_open_and_mapped_when_it_comes(expected: Expected) -> None:
    open_expected(expected)
    checkpoint = open_checkpoint(expected.index_path)
    assert expected_model.model_of(checkpoint) is expected_model.model_of(checkpoint)
    assert expected_model.is_mapped(checkpoint)
    assert expected_model.model_of(checkpoint).checkpoint is checkpoint


def test_another_model_is_opened_as_any_other(expected: Expected, tiny_gguf: TinyGguf, ingested: Ingested) -> None:
    open_expected(expected)
    other = ingested(tiny_gguf("small", "Q4_0"))
    checkpoint = open_checkpoint(other)
    assert checkpoint.index_path == other
    assert not expected_model.is_mapped(checkpoint)
    assert expected_model.model_of(checkpoint).checkpoint is checkpoint


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_files_that_were_replaced_are_opened_again(expected: Expected, suffix: str) -> None:
    open_expected(expected)
    path = expected.index_path.with_suffix(suffix)
    shutil.copy(path, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)
    checkpoint = open_checkpoint(expected.index_path)
    assert checkpoint.info.st_ino == expected.index_path.with_suffix(".bin").stat().st_ino
    assert not expected_model.is_mapped(checkpoint)


def test_a_copy_of_the_weights_is_another_model(expected: Expected) -> None:
    open_expected(expected)
    checkpoint = Checkpoint(expected.index_path)  # as without `use_mmap`
    assert isinstance(expected_model.model_of(checkpoint), Model)
    assert expected_model.model_of(checkpoint).checkpoint is checkpoint
    assert not expected_model.is_mapped(checkpoint)


def test_large_weights_are_opened_and_not_mapped(expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_model, "MAX_BYTES", 0)
    open_expected(expected)
    checkpoint = open_checkpoint(expected.index_path)
    assert expected_model.model_of(checkpoint).checkpoint is checkpoint
    assert not expected_model.is_mapped(checkpoint)


@pytest.mark.parametrize("replace", [False, True])
def test_the_removal_of_the_file_is_noticed(expected: Expected, replace: bool) -> None:
    """Else a process that waits would keep its space."""
    watch = watch_file(expected)
    try:
        open_expected(expected)
        store.mark_used(expected.index_path.stem, expected.index_path.parent)
        assert not select.select([watch], [], [], 0)[0]
        path = expected.index_path.with_suffix(".bin")
        if replace:
            shutil.copy(path, path.with_suffix(".new"))
            os.replace(path.with_suffix(".new"), path)
        else:
            path.unlink()
        assert select.select([watch], [], [], 60)[0]
    finally:
        os.close(watch)


def test_a_file_that_has_just_been_removed_is_not_made_again(expected: Expected) -> None:
    path = expected.index_path.with_suffix(".bin")
    path.unlink()
    with pytest.raises(FileNotFoundError):
        watch_file(expected)
    assert not path.exists()


def maps_of(path: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]


def test_another_version_does_not_keep_the_file_while_it_is_prepared(expected: Expected) -> None:
    """Nothing watches the file any more, and a download takes long."""
    open_expected(expected)
    path = expected.index_path.with_suffix(".bin")
    waiting_ranks.begin_version(expected.index_path)
    assert maps_of(path)
    waiting_ranks.begin_version(None)
    assert not maps_of(path)


@pytest.fixture
def home(tiny_gguf: TinyGguf, ingested: Ingested, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Models `a` and `b`, prepared; neither was used."""
    models = tmp_path / "home" / "models"
    models.mkdir(parents=True)
    cache = Path(os.environ.get("STARLING_HOME", Path.home() / ".starling")) / "cache"
    (tmp_path / "home" / "cache").symlink_to(cache)
    monkeypatch.setenv("STARLING_HOME", str(tmp_path / "home"))
    found = []
    for name, kind in (("a", "Q8_0"), ("b", "Q4_0")):
        index_path = ingested(tiny_gguf("small", kind))
        for suffix in (".idx", ".bin"):
            shutil.copy(index_path.with_suffix(suffix), models)
        found.append({"name": name, "path": str(models / index_path.name)})
    (tmp_path / "run").mkdir(mode=0o700)
    return resolve({"server": {"run_dir": str(tmp_path / "run")}, "models": found}, {})


def digest_of(config: Config, name: str) -> str:
    model = config.model(name)
    assert model is not None
    return Path(model.path).stem


def load(config: Config, *names: str) -> None:
    """As if these models were loaded, the last one last."""
    table = versions.initial(config)
    kept = tuple(one for one in table.versions if one.name in names)
    versions.write(config, VersionTable(table.configured, 1, kept))
    for at, name in enumerate(names, 1):
        path = Path(config.model(name).path).with_suffix(".used")  # type: ignore[union-attr]
        path.touch()
        os.utime(path, (at, at))


@pytest.mark.parametrize(("earlier", "loaded", "chosen"), [
    ((), ("a",), "b"),  # it is not loaded
    (("a", "b"), ("a", "b"), "b"),  # both are: the one that was loaded last may be loaded again
    (("b", "a"), (), "a"),  # neither is: the one that was used last
])  # fmt: skip
def test_the_model_that_may_come_next_is_expected(
    home: Config, earlier: tuple[str, ...], loaded: tuple[str, ...], chosen: str
) -> None:
    load(home, *earlier)
    load(home, *loaded)
    expected = choose(home)
    assert expected is not None
    assert expected.index_path.stem == digest_of(home, chosen)


def test_only_the_index_of_the_model_that_is_expected_is_read(home: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    load(home, "a")
    read: list[Path] = []

    def note(path: Path, event: str) -> int:
        read.append(path)
        return usable_version(path, event)

    monkeypatch.setattr(expected_model, "usable_version", note)
    assert choose(home) is not None
    assert [path.stem for path in read] == [digest_of(home, "b")]


# Prepares a spare of two ranks; prints how many files are watched, and the watches that rank 1 has.
SPARE = """
import os, sys
from pipeline.config.load import resolve
from stages.worker import waiting_ranks

reader, writer = os.pipe()
models = [{"name": "m", "path": sys.argv[2], "ranks": 2}]
config = resolve({"server": {"run_dir": sys.argv[1]}, "models": models}, {})
watched = waiting_ranks.prepare_spare(config, lambda: None, lambda: os.write(writer, b"1"))
os.read(reader, 1)
(rank,) = waiting_ranks._waiting
files = [os.readlink(f"/proc/{rank.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{rank.pid}/fd")]
print(len(watched), sum("inotify" in file for file in files))
"""


def test_only_rank_0_of_a_spare_has_the_watch(home: Config) -> None:
    """It closes that when a version comes; the number of watches per user is limited."""
    model, run_dir = home.models[0], str(paths.run_dir(home))
    found = subprocess.run(
        [sys.executable, "-c", SPARE, run_dir, model.path], stdout=subprocess.PIPE, text=True, check=True
    )
    assert found.stdout == "1 0\n"


# Prepares a spare of two ranks, with an index that is cut short whenever it has been mapped, and prints how many files
# are watched, whether rank 1 has prepared itself, and the lines that name the damaged file.
DAMAGED = """
import logging, mmap, os, sys
from pipeline.config.load import resolve
from stages.worker import waiting_ranks

class CutShort(mmap.mmap):
    def __new__(cls, fd, *arguments, **options):
        mapped = super().__new__(cls, fd, *arguments, **options)
        if os.path.sameopenfile(fd, index):
            os.truncate(index, 10)
        return mapped

def restore(event, arguments):
    if event == "open" and arguments[0] == sys.argv[2]:
        os.pwrite(index, content, 0)

lines = os.memfd_create("lines")
handler = logging.StreamHandler(os.fdopen(lines, "w", closefd=False))
handler.setFormatter(logging.Formatter("%(message)s, %(effect)s: %(reason)s"))
logging.getLogger("starling").addHandler(handler)
index, mmap.mmap = os.open(sys.argv[2], os.O_RDWR), CutShort
content = os.pread(index, os.fstat(index).st_size, 0)
sys.addaudithook(restore)
reader, writer = os.pipe()
models = [{"name": "m", "path": sys.argv[2], "ranks": 2}]
config = resolve({"server": {"run_dir": sys.argv[1]}, "models": models}, {})
watched = waiting_ranks.prepare_spare(config, lambda: None, lambda: os.write(writer, b"1"))
print(len(watched), os.read(reader, 1).decode(), [waiting_ranks.state(rank) for rank in waiting_ranks._waiting])
print(os.pread(lines, 4096, 0).decode(), end="")
"""


def test_an_index_that_cannot_be_read_ends_no_spare(home: Config) -> None:
    """It waits without a model. What is behind the end of a file is as what a damaged disk refuses: a SIGBUS."""
    path, run_dir = Path(home.models[0].path), str(paths.run_dir(home))
    size = path.stat().st_size
    done = subprocess.run([sys.executable, "-c", DAMAGED, run_dir, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reason = f"{path}: cannot be read: it ends after 10 of {size} bytes; remove it to ingest again"
    assert done.stdout == f"0 1 ['']\ncheckpoint cannot be used, no spare opens it: {reason}\n"


# Prepares a spare of two ranks, of which the second alone cannot open the model, and prints the lines about that.
ONE_RANK = """
import logging, os, sys
from pipeline.config.load import resolve
from stages.worker import expected_model, waiting_ranks

def open_in_rank_0(expected, rank_0=os.getpid(), open_expected=expected_model.open_expected):
    if os.getpid() != rank_0:
        raise OSError(5, "Input/output error")
    open_expected(expected)

lines = os.memfd_create("lines")
handler = logging.StreamHandler(os.fdopen(lines, "w", closefd=False))
handler.setFormatter(logging.Formatter("%(message)s: %(reason)s"))
log = logging.getLogger("starling.worker")
log.addHandler(handler)
log.setLevel(logging.DEBUG)
expected_model.open_expected = open_in_rank_0
reader, writer = os.pipe()
config = resolve({"server": {"run_dir": sys.argv[1]}, "models": [{"name": "m", "path": sys.argv[2], "ranks": 2}]}, {})
waiting_ranks.prepare_spare(config, lambda: None, lambda: os.write(writer, b"1"))
os.read(reader, 1)
print(os.pread(lines, 4096, 0).decode(), end="")
"""


def test_a_rank_that_alone_cannot_open_the_model_says_so(home: Config) -> None:
    arguments = [str(paths.run_dir(home)), home.models[0].path]
    done = subprocess.run([sys.executable, "-c", ONE_RANK, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "a rank opens no model ahead: [Errno 5] Input/output error\n"


def test_weights_that_cannot_be_opened_end_no_spare(
    home: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(expected: Expected) -> None:
        raise OSError(5, "Input/output error", str(expected.index_path))

    monkeypatch.setattr(expected_model, "open_expected", refuse)
    model = {"name": "m", "path": home.models[0].path, "ranks": 1}  # nothing is forked
    config = resolve({"server": {"run_dir": str(paths.run_dir(home))}, "models": [model]}, {})
    for fd in waiting_ranks.prepare_spare(config, lambda: None, lambda: None):
        os.close(fd)
    (record,) = caplog.records
    assert record.message == "no model is opened ahead"
    assert "Input/output error" in record.__dict__["reason"]


def test_none_is_expected_that_is_not_prepared(home: Config) -> None:
    for model in home.models:
        Path(model.path).unlink()
    assert choose(home) is None
