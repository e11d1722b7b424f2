"""Downloads one file over HTTP and continues an interrupted download. Knows nothing of models.

`PART.tag` beside `PART` contains the entity tag (or date) of the partial file.  If the server still has that version
it sends the rest (`If-Range`); otherwise the download starts again.
"""

from __future__ import annotations

import http.client
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import ConfigError, ModelUnavailable, ResourceError

CHUNK = 1 << 20  # bytes read at a time
TIMEOUT_S = 30.0  # without data


def download(url: str, part: Path, progress: Callable[[str, int, int], None], subject: str) -> None:
    """Download `url` into `part`, which keeps the received bytes when this raises.

    Raises `ConfigError` (the server refuses or lacks the file), `ModelUnavailable` (network, 5xx,
    connection lost), `ResourceError` (not enough space).  Messages begin with `subject`.
    """
    tag_file = part.with_name(part.name + ".tag")
    have = part.stat().st_size if part.exists() and tag_file.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "starling", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
        request.add_header("If-Range", tag_file.read_text())
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            _receive(response, part, tag_file, have, progress, subject)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # the file has shrunk, or is complete: start again
            part.unlink(missing_ok=True)
            tag_file.unlink(missing_ok=True)
        kind = ConfigError if error.code in (400, 401, 403, 404, 405, 410) else ModelUnavailable
        raise kind(f"{subject}: {url} answers {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ModelUnavailable(
            f"{subject}: {url} could not be downloaded ({reason}); the received part is kept, try again"
        ) from None
    tag_file.unlink(missing_ok=True)


def _receive(
    response: http.client.HTTPResponse,
    part: Path,
    tag_file: Path,
    have: int,
    progress: Callable[[str, int, int], None],
    subject: str,
) -> None:
    done = have if response.status == 206 else 0
    length = int(response.headers.get("Content-Length") or 0)
    total = done + length if length else 0
    free = shutil.disk_usage(part.parent).free
    if length > free:
        raise ResourceError(
            f"{subject}: needs {length:,} bytes in {part.parent}, which has {free:,} free; free some or "
            "move STARLING_HOME"
        )
    tag = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
    # A weak tag does not guarantee equal bytes, so two parts cannot be joined by it.
    if tag and not tag.startswith("W/"):
        tag_file.write_text(tag)
    else:
        tag_file.unlink(missing_ok=True)
    with part.open("ab" if done else "wb") as out:
        while chunk := response.read(CHUNK):
            out.write(chunk)
            done += len(chunk)
            progress("download", done, total)
    if total and done != total:
        raise OSError(f"connection lost after {done:,} of {total:,} bytes")
