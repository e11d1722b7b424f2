"""The cores of a server that runs, as another process of it has stored them (pipeline/config/server_cores.py)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.config import server_cores


@contextlib.contextmanager
def stored_by_a_server(run_dir: Path, cores: Sequence[int]) -> Iterator[None]:
    """While it runs its file is locked. After that the file is what a killed server leaves."""
    path = run_dir / server_cores.FILE
    path.write_text(json.dumps(list(cores)))
    with path.open("rb+") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0))
        yield
