"""The gateway's end of a plugin's process: starts it, makes calls in their order, and bounds each in time.

    submit --> queue --> in flight (at most WINDOW) --> reply

The process makes one call at a time, so the first call in flight is the one that it works on: its time is limited, and
if the process ends it is the one that is to blame. The calls behind it have not begun and go to the successor. What
happens to the first one is its own decision (`Call.repeats`): `pre_inference` is never called twice for a request.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import msgspec

from pipeline.config.schema import PluginConfig
from pipeline.observe.helper_output import HelperOutput
from stages.gateway.plugins.frames import LENGTH, Drop, Failed, Ready, Reply, Start, decode_reply, frame

log = logging.getLogger("starling.gateway.plugins")

WINDOW = 64  # calls that the process has at once
STREAM_BUFFER = 1 << 20  # of replies, in the gateway
UNSENT_BYTES = 1 << 20  # in the pipe's buffer here; then calls wait
GRACE_S = 0.25  # after a call's time: a reply that has come is read first
RESTART_S = 0.5  # after a start that failed, doubled each time
RESTART_MAX_S = 30.0


class Call(Protocol):
    """One call."""

    hook: str

    @property
    def is_dead(self) -> bool:
        """Whether its result is not needed any more."""

    def encode(self, process: PluginProcess) -> bytes | None:
        """Return its frame; None: it has been answered without a call."""

    def done(self, reply: Reply) -> None:
        """Take the reply."""

    def fail(self, reason: str, *, is_temporary: bool) -> None:
        """There is none. `is_temporary`: the process was ended, or cannot be started now."""

    def repeats(self) -> bool:
        """Whether the call may be made again after the end of the process during it."""


class PluginProcess:
    """One plugin. `on_change` is called when `problem` changes, `on_restart` when the process has ended."""

    def __init__(
        self,
        config: PluginConfig,
        target: str,
        max_reply: int,
        on_change: Callable[[], None],
        on_restart: Callable[[], None],
    ) -> None:
        self.config = config
        self.info: Ready | None = None  # of the process that runs
        self.last_info: Ready | None = None  # of the last one that ran
        self.number = 0  # of the process: it changes with each start
        self.problem = "it is being started"  # why it makes no calls; "": it does
        options = json.dumps([target, config.options], sort_keys=True)
        self.options_digest = hashlib.sha256(options.encode()).hexdigest()[:12]
        self._target = target
        self._max_reply = max_reply
        self._on_change = on_change
        self._on_restart = on_restart
        self._queue: deque[Call] = deque()
        self._in_flight: deque[Call] = deque()
        self._process: asyncio.subprocess.Process | None = None
        self._output: HelperOutput | None = None  # of the process
        self._timer: asyncio.TimerHandle | None = None
        self._has_expired = False
        self._cannot_start = False
        self._task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """As configured."""
        return self.config.name

    @property
    def pid(self) -> int:
        """Of the process; 0: none runs."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Start the process, and keep it running."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """End the process. Calls that wait have no reply."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def submit(self, call: Call) -> None:
        """Make a call after those before it. It waits while the process is restarted, not if it cannot start."""
        if self._cannot_start:
            call.fail(self.problem, is_temporary=True)
            return
        self._queue.append(call)
        self._pump()

    def drop(self, key: int, number: int) -> None:
        """Let the process forget a sequence, if it is still the one with this number."""
        if number == self.number and self.info is not None:
            self._write(frame(Drop(key)))

    # ---------------------------------------------------------------- the process

    async def _run(self) -> None:
        pause = RESTART_S
        process: asyncio.subprocess.Process | None = None
        try:
            while True:
                try:
                    process = self._process = await self._spawn()
                    info = await self._initialize(process)
                except (OSError, EOFError, RuntimeError, TimeoutError, msgspec.MsgspecError) as error:
                    await self._end(process)
                    self._fail_start(error)
                    await asyncio.sleep(pause)
                    pause = min(RESTART_MAX_S, 2 * pause)
                    continue
                pause = RESTART_S
                reason = await self._exchange(process, info)
                await self._end(process)
                self._restart(reason)
        finally:
            self._stop_timer()
            self._process = None
            await self._end(process)

    async def _spawn(self) -> asyncio.subprocess.Process:
        output = self._output = HelperOutput(log, {"plugin": self.name})
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "stages.gateway.plugins.plugin_process",
            str(os.getpid()),
            self.name,  # for `ps`
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=output.write_fd,
            limit=STREAM_BUFFER,
            start_new_session=True,  # its own children end with it
        )
        output.started(process.pid)
        output.watch(asyncio.get_running_loop())
        return process

    async def _end(self, process: asyncio.subprocess.Process | None) -> None:
        """End the process, what it has started, and the lines of its output. Idempotent."""
        if process is not None and process.returncode is None:
            _kill(process)
            await process.wait()
        if self._output is not None:
            self._output.close()
            self._output = None

    async def _initialize(self, process: asyncio.subprocess.Process) -> Ready:
        assert process.stdin is not None
        start = Start(self._target, self.config.options, self.config.memory_mb << 20)
        process.stdin.write(frame(start))
        try:
            async with asyncio.timeout(self.config.start_timeout_ms / 1000):
                reply = await self._read(process)
        except TimeoutError:
            bound = f"{self.config.start_timeout_ms} ms (plugins.start_timeout_ms)"
            raise TimeoutError(f"initialize took longer than {bound}") from None
        if isinstance(reply, Failed):
            raise RuntimeError(f"{reply.message} ({reply.place})")
        if not isinstance(reply, Ready):
            raise RuntimeError("it sent a wrong frame")
        return reply

    def _fail_start(self, error: BaseException) -> None:
        reason = "it ended while it was started" if isinstance(error, EOFError) else str(error)
        self._process, self._cannot_start = None, True
        self._set_problem(f"it cannot be started: {reason}")
        log.error("a plugin cannot be started", extra={"plugin": self.name, "reason": reason})
        waiting, self._queue = self._queue, deque()
        for call in waiting:
            call.fail(self.problem, is_temporary=True)

    def _set_problem(self, problem: str) -> None:
        self.problem = problem
        self._on_change()

    async def _exchange(self, process: asyncio.subprocess.Process, info: Ready) -> str:
        """Make calls until the process ends or has to be ended. Returns the reason."""
        self.info = self.last_info = info
        self.number += 1
        self._cannot_start = self._has_expired = False
        self._set_problem("")
        log.info("a plugin is ready", extra={"plugin": self.name, "version": info.version})
        self._pump()
        try:
            while True:
                reply = await self._read(process)
                if not self._in_flight:
                    return "it sent a frame that belongs to no call"
                call = self._in_flight.popleft()
                self._watch_first()
                if isinstance(reply, Failed) and reply.place:
                    log.error("a plugin failed", extra={"plugin": self.name, "hook": call.hook, "error": reply.place})
                if not call.is_dead:
                    try:
                        call.done(reply)
                    except Exception:  # a fault of the gateway: other calls go on
                        log.exception("the result of a plugin was not processed", extra={"plugin": self.name})
                self._pump()
        except (OSError, EOFError, RuntimeError, msgspec.MsgspecError) as error:
            if self._has_expired:
                return f"it took longer than {self.config.timeout_ms} ms (plugins.timeout_ms)"
            return "its process ended" if isinstance(error, EOFError | OSError) else str(error)

    async def _read(self, process: asyncio.subprocess.Process) -> Reply:
        assert process.stdout is not None
        (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        if length > self._max_reply:
            raise RuntimeError(f"its result has {length} bytes, the bound is {self._max_reply}")
        return decode_reply(await process.stdout.readexactly(length))

    def _restart(self, reason: str) -> None:
        """The process has ended: decide about the call that it was making, and leave the rest to the successor."""
        self._stop_timer()
        self._process = self.info = None
        self._set_problem("it is being restarted")
        self._on_restart()
        waiting, self._in_flight = self._in_flight, deque()
        hook = waiting[0].hook if waiting else ""
        log.error("a plugin is restarted", extra={"plugin": self.name, "hook": hook, "reason": reason})
        self._queue.extendleft(reversed(waiting))
        if waiting and (self._has_expired or not waiting[0].repeats()):
            self._queue.popleft()
            if not waiting[0].is_dead:
                waiting[0].fail(reason, is_temporary=not self._has_expired)

    # ---------------------------------------------------------------- calls

    def _pump(self) -> None:
        """Send what the process may have now."""
        while self.info is not None and self._queue and len(self._in_flight) < WINDOW and not self._is_clogged():
            call = self._queue.popleft()
            if call.is_dead:
                continue
            try:
                data = call.encode(self)
            except Exception as error:  # of msgspec, for values that msgpack cannot have
                call.fail(f"the call cannot be encoded: {type(error).__name__}", is_temporary=False)
                continue
            if data is None:
                continue
            self._in_flight.append(call)
            self._write(data)
            if len(self._in_flight) == 1:
                self._watch_first()

    def _is_clogged(self) -> bool:
        stdin = self._process.stdin if self._process is not None else None
        return stdin is None or bool(self._in_flight and stdin.transport.get_write_buffer_size() > UNSENT_BYTES)

    def _write(self, data: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError, RuntimeError):  # of a process that has ended: `_read` finds that
                self._process.stdin.write(data)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch_first(self) -> None:
        self._stop_timer()
        if self._in_flight:
            loop, call = asyncio.get_running_loop(), self._in_flight[0]
            self._timer = loop.call_later(self.config.timeout_ms / 1000, self._expire, call, False)

    def _expire(self, call: Call, has_waited: bool) -> None:
        if not has_waited:
            self._timer = asyncio.get_running_loop().call_later(GRACE_S, self._expire, call, True)
        elif self._in_flight and self._in_flight[0] is call and self._process is not None:
            self._has_expired = True
            _kill(self._process)


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
