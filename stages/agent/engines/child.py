"""A child process in a process group of its own, with the end of its output.

The program is expected to end when this process ends (it gets the pid in STARLING_PARENT_PID).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.runtime.process import PARENT_VARIABLE
from stages.agent.disk_threads import ENGINES
from stages.agent.engines.log_file import LogFile

KEPT_LINES = 40
END_S = 2.0  # for the end of the output after that of the process, and for the disk to take it
MAX_LINE = 2000  # characters
_ERROR = re.compile(r'\bERROR\b|"level": ?"error"|^starling: ')


class Child:
    """One process. `start` is called from the main thread: the kernel ends the child with the thread that forked it."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        log_file: LogFile | None = None,
        *,
        has_input: bool = False,
    ) -> None:
        """`log_file`: gets all that it writes; None: the program has logs of its own.

        has_input: its stdin is a pipe that `send` writes to, and that ends with this process; else it is empty.
        """
        self._command = command
        self._log_file = log_file
        self._env = {**env, PARENT_VARIABLE: str(os.getpid())}
        self._cwd = cwd
        self._has_input = has_input
        self._input = -1  # the end of its stdin that is written to
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)

    async def start(self) -> None:
        """Raises `ConfigError` if the program cannot be run."""
        # Not a pipe of asyncio: its `wait` would end only when that is closed, too.
        reader, self._input = os.pipe() if self._has_input else (asyncio.subprocess.DEVNULL, -1)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._env,
                cwd=self._cwd,
                stdin=reader,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                process_group=0,
            )
        except BaseException as error:
            self._close_input()
            if isinstance(error, OSError):
                raise ConfigError(f"{self._command[0]} cannot be run: {error.strerror}") from None
            raise
        finally:
            if self._has_input:
                os.close(reader)
        self._reader = asyncio.create_task(self._read(self._process))

    def send(self, line: bytes) -> None:
        """Write up to 16 KiB to its stdin, and close that. The end of a child that has ended is seen as any other."""
        try:
            os.write(self._input, line)  # the pipe is empty, and has room for it
        except BrokenPipeError:
            pass
        finally:
            self._close_input()

    def _close_input(self) -> None:
        if self._input >= 0:
            os.close(self._input)
            self._input = -1

    @property
    def is_running(self) -> bool:
        """Whether it has been started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def wait(self) -> int:
        """Wait for its end; the exit code, or -signal."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM; after `timeout_s` SIGKILL for the group. Idempotent."""
        if self._process is not None and self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._process.wait()
            if self.is_running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                await self._process.wait()
        self._close_input()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
        if self._log_file is not None:
            self._log_file.close()
            await ENGINES.run(self._log_file.wait, END_S)

    def last_words(self) -> str:
        """Of what it has written last, the first error, or else the last line: for a message."""
        said = [line for line in self.lines if line.strip()]
        return next((line for line in said if _ERROR.search(line)), said[-1] if said else "no output")

    async def last_words_at_end(self) -> str:
        """The same after its end, when all that it has written has been read."""
        if self._reader is not None:  # a descendant that outlives it may keep the pipe open
            await asyncio.wait([self._reader], timeout=END_S)
        return self.last_words()

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # longer than the reader's buffer, which has been emptied
                continue
            if not line:
                return
            if self._log_file is not None:
                self._log_file.append(line)
            self.lines.append(line.decode("utf-8", "replace").rstrip()[:MAX_LINE])
