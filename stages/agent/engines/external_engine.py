"""An engine of other makers: a process that listens on loopback, behind a door of the agent.

    HOME/engine.log, engine.log.1   what it writes
    HOME/digest.json                of its model (local_model.py)

Its process gets a key made for this start, by its environment.  It is silent when `GET /health` has failed for
`silent_ms`: then it counts as dead, for the agent to kill it and start another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
from aiohttp import web

from pipeline.config.schema import Config
from pipeline.errors import ResourceError
from pipeline.files import make_directory
from pipeline.fleet.records import advertised_host
from pipeline.runtime.process import EXIT_CONFIG
from shm.decoding import DECODE_ERRORS
from stages.agent.disk_threads import ENGINES
from stages.agent.engines.child import Child
from stages.agent.engines.dialect import Dialect
from stages.agent.engines.door.door import Door
from stages.agent.engines.fence import fence
from stages.agent.engines.http_session import HttpSession
from stages.agent.engines.interface import Capabilities, Engine, EngineDied, Queue
from stages.agent.engines.llama_server import LlamaServer
from stages.agent.engines.local_model import LocalModel
from stages.agent.engines.log_file import LogFile
from stages.agent.engines.prometheus_text import values
from stages.agent.engines.vllm import Vllm

POLL_S = 0.1  # until it is ready
HEALTH_S = 1.0  # between two checks of its health
ANSWER_S = 5.0  # of a call
STOP_S = 10.0  # from SIGTERM to SIGKILL
DIALECTS: dict[str, Dialect] = {one.name: one for one in (LlamaServer(), Vllm())}
# Of the agent's environment, what is not the engine's business: settings, and credentials of stores.
_PRIVATE = ("STARLING_", "LLM_ENGINE_", "REDIS_", "AWS_", "AZURE_", "GOOGLE_")


class Listening(NamedTuple):
    """A door that takes connections."""

    port: int
    close: Callable[[], Awaitable[None]]


Listen = Callable[[web.Application], Awaitable[Listening]]


class ExternalEngine(Engine):
    """One start of `llama-server`, or of `vllm serve`."""

    def __init__(
        self,
        config: Config,
        model: LocalModel,
        home: Path,
        session: HttpSession,
        free_port: Callable[[], int],
        listen: Listen,
        env: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`home`: of this model's engines. `free_port`: of loopback. `listen`: opens the door. `clock`: s."""
        self._dialect = DIALECTS[model.engine.engine]
        self.adapter = self._dialect.name
        self.capabilities = Capabilities(continues_text=True)
        self._config = config
        self._engine = model.engine
        self._home = home
        self._session = session
        self._free_port = free_port
        self._listen = listen
        self._env = env
        self._clock = clock
        self._engine_url = self._engine_key = ""
        self._child: Child | None = None
        self._door: Door | None = None
        self._listening: Listening | None = None
        self._measured = Queue()  # what its metrics said last

    async def start(self) -> None:
        """Fence what an earlier one has left, start the program, and open the door."""
        await ENGINES.uninterrupted(self._fence)  # in a thread that went on it would meet the next engine of this home
        try:
            await ENGINES.uninterrupted(make_directory, self._home)
        except OSError as error:
            raise ResourceError(f"{self._home} cannot be made: {error.strerror}; check the disk") from None
        port = self._free_port()
        self._engine_url = f"http://127.0.0.1:{port}"
        self._engine_key, self.key = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        env = {name: value for name, value in self._env.items() if not name.startswith(_PRIVATE)}
        env |= self._dialect.environment(self._engine_key) | {"STARLING_HOME": str(self._home)}
        root = str(Path(__file__).resolve().parents[3])
        launch = (sys.executable, "-P", "-c", _LAUNCH.format(root), str(self._engine.memory_mb))
        command = (*launch, *self._dialect.command(self._engine, port))
        self._child = Child(command, env, self._home, LogFile(self._home / "engine.log"))
        await self._child.start()
        self._door = Door(
            self._dialect,
            self._engine,
            self._engine_url,
            self._engine_key,
            self.key,
            self._session,
            self._config.server.max_body_mb << 20,
        )
        self._listening = await self._listen(self._door.app())
        self.url = f"http://{advertised_host(self._config.fleet.agent)}:{self._listening.port}"

    async def ready(self) -> None:
        """Wait for /health."""
        assert self._child is not None
        ended = asyncio.ensure_future(self._child.wait())
        start_s = self._config.fleet.agent.start_timeout_s
        try:
            async with asyncio.timeout(start_s):
                while not ended.done():
                    if await self._is_healthy() and await self._read_template():
                        await self._measure(ANSWER_S)
                        return
                    await asyncio.wait([ended], timeout=POLL_S)
        except TimeoutError:
            raise EngineDied(
                f"the engine did not answer within fleet.agent.start_timeout_s = {start_s} s: "
                f"{self._child.last_words()}"
            ) from None
        finally:
            ended.cancel()
        raise await self._exit()

    async def ended(self) -> EngineDied:
        """Wait for the end of the process, or for its silence."""
        assert self._child is not None
        ended = asyncio.ensure_future(self._child.wait())
        silent_s = self._engine.silent_ms / 1000
        answered = self._clock()
        try:
            while not ended.done():
                if await self._is_healthy(min(ANSWER_S, silent_s)):
                    answered = self._clock()
                    await self._measure(min(ANSWER_S, silent_s))
                elif self._clock() - answered >= silent_s and not ended.done():
                    # This process may have been stopped while it asked: then the answer has come in time.
                    if await self._is_healthy(min(HEALTH_S, silent_s)):
                        continue
                    return EngineDied(f"the engine has not answered /health for {silent_s:g} s")
                await asyncio.wait([ended], timeout=min(HEALTH_S, silent_s / 2))
        finally:
            ended.cancel()
        return await self._exit()

    async def queue(self) -> Queue:
        """As of the last look at its metrics; what the door holds counts as well. Does not wait for the engine."""
        assert self._door is not None
        running = max(self._measured.running, self._door.under_way - self._measured.waiting)
        return self._measured._replace(running=running, submitted=self._door.submitted)

    async def suspend(self) -> None:
        """Shut the door."""
        if self._door is not None:
            self._door.shut()

    async def resume(self) -> None:
        """Open the door."""
        if self._door is not None:
            self._door.open()

    async def stop(self, *, at_once: bool = False) -> None:
        """Let its streams end, stop the program, and shut the door."""
        if self._door is not None and not at_once and self._child is not None and self._child.is_running:
            self._door.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.server.drain_timeout_ms / 1000):
                    while self._door.under_way:
                        await asyncio.sleep(POLL_S)
        if self._door is not None:
            self._door.shut()
        if self._child is not None:
            await self._child.stop(0.0 if at_once else STOP_S)
        if self._listening is not None:
            await self._listening.close()
            self._listening = None
        await ENGINES.run(self._fence)

    async def _exit(self) -> EngineDied:
        assert self._child is not None
        code = await self._child.wait()
        if code < 0:
            return EngineDied(f"the engine was killed by signal {-code}; its log is {self._home}/engine.log")
        said = await self._child.last_words_at_end()
        return EngineDied(
            f"the engine ended with exit code {code}: {said}; its log is {self._home}/engine.log", code == EXIT_CONFIG
        )

    async def _is_healthy(self, timeout_s: float = ANSWER_S) -> bool:
        try:
            async with self._call("/health", timeout_s) as answer:
                return bool(answer.status == 200)
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _read_template(self) -> bool:
        """Ask what its chat template has a place for. Whether it has answered."""
        assert self._door is not None
        path, said = self._dialect.template_path, {}
        try:
            if path:
                async with self._call(path) as answer:
                    said = msgspec.json.decode(await answer.read(), type=dict[str, Any])
        except (aiohttp.ClientError, TimeoutError):
            return False
        except DECODE_ERRORS:
            said = {}
        self._door.template = self._dialect.template(said)
        return True

    async def _measure(self, timeout_s: float) -> None:
        """Look at its metrics. An engine that does not show them keeps those of the last look."""
        try:
            async with self._call("/metrics", timeout_s) as answer:
                self._measured = self._dialect.queue(values(await answer.text()))
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return

    def _call(self, path: str, timeout_s: float = ANSWER_S) -> Any:
        return self._session.request(
            "GET",
            self._engine_url + path,
            headers={"Authorization": f"Bearer {self._engine_key}"},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        )

    def _fence(self) -> None:
        fence(self._home, self._home / "run", self._home / "arenas")


# The program starts in HOME, wherever this package is imported from.
_LAUNCH = "import sys; sys.path.insert(0, {!r}); from stages.agent.engines.launch import main; main(sys.argv[1:])"
