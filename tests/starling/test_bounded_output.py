"""honcho's output when its reader stays and does not read, as a terminal after Ctrl-S."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TextIO

import pytest

from starling.cli.bounded_output import BoundedOutput

Pipe = tuple[IO[bytes], TextIO]
ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 180.0
PIPE = 16 << 10  # bytes
LINE = 600  # characters


PATIENT = """
from honcho import manager
from starling.cli import honcho_patch
manager.KILL_WAIT = 60.0  # until SIGKILL: a shell without a core handles SIGTERM late
honcho_patch.main()
"""


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """Both ends of a pipe that holds `PIPE` bytes."""
    read_fd, write_fd = os.pipe()
    fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, PIPE)
    ends = os.fdopen(read_fd, "rb"), os.fdopen(write_fd, "w")
    yield ends
    for end in ends:
        end.close()


def test_lines_that_are_not_read_are_dropped_and_counted(pipe: Pipe) -> None:
    reader, writer = pipe
    output = BoundedOutput(writer, wait_s=0.0)
    line = "x" * 1000
    for _ in range(40):
        print(line, file=output, flush=True)
    read = os.read(reader.fileno(), 1 << 16)
    assert 0 < len(read) <= PIPE
    print("again", file=output, flush=True)
    after = os.read(reader.fileno(), 1 << 16).decode()
    n_whole = read.decode().count("\n")
    assert after == f"\n({40 - n_whole} lines were not printed: the reader of this output did not read)\nagain\n"


def test_a_long_line_arrives_whole(pipe: Pipe) -> None:
    reader, writer = pipe
    line = "y" * 100_000
    pid = os.fork()
    if pid == 0:
        print(line, file=BoundedOutput(writer, wait_s=WAIT_S), flush=True)
        os._exit(0)
    writer.close()
    assert reader.read().decode() == line + "\n"
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.slow
def test_honcho_ends_when_its_output_is_not_read(tmp_path: Path, pipe: Pipe) -> None:
    reader, writer = pipe
    ended, written = tmp_path / "ended", tmp_path / "written"
    procfile = tmp_path / "Procfile"
    work = f"echo {'x' * LINE}; echo >>{written}; sleep 0.02"
    procfile.write_text(f"a: trap 'touch {ended}; exit 0' TERM; while :; do {work}; done\n")
    command = [sys.executable, "-c", PATIENT, "start", "-f", str(procfile)]
    honcho = subprocess.Popen(command, cwd=ROOT, stdout=writer, stderr=subprocess.STDOUT)
    try:
        while not written.exists() or written.stat().st_size < 2 * PIPE // LINE:  # half of these lines do not fit
            assert honcho.poll() is None
        honcho.send_signal(signal.SIGTERM)
        assert honcho.wait(WAIT_S) == 143
        assert ended.exists()  # by SIGTERM, not by SIGKILL
    finally:
        if honcho.poll() is None:
            reader.close()
            honcho.kill()
            honcho.wait()
