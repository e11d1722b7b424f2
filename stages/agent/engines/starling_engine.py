"""The engine `starling`: `starling up` with a home of its own, and one model.

    HOME/models, cache   links to the agent's checkpoints and compiled kernels
    HOME/starling.json   the agent's configuration with this model, a port from the kernel and a key made for this start
    HOME/state, logs     as of any server
    STARLING_HOME/engines/NAME   its run directory: paths of sockets are limited to 107 bytes

`starling up` restarts its stages by itself.  The agent acts only when `up` has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from pipeline.config import paths
from pipeline.config.schema import AdapterConfig, Config, ModelConfig
from pipeline.errors import Conflict, ModelNotFound, ModelUnavailable, ResourceError, StarlingError
from pipeline.files import make_directory, replace_file
from pipeline.fleet.records import advertised_host
from pipeline.fleet.standby import MARK_VARIABLE, Home
from pipeline.ipc.control_asyncio import ask
from pipeline.runtime.process import EXIT_CONFIG
from shm.checkpoint import CheckpointError, load_index
from shm.decoding import DECODE_ERRORS
from shm.pages import NUMERICS
from stages.agent.disk_threads import ENGINES
from stages.agent.engines.child import Child
from stages.agent.engines.fence import fence, write_mark
from stages.agent.engines.http_session import HttpSession
from stages.agent.engines.interface import AdapterFile, AdapterUse, Capabilities, Engine, EngineDied, Queue
from stages.agent.engines.kernel_build import KernelBuild
from stages.agent.engines.prometheus_text import by_label, values
from stages.agent.engines.standby import REFILL_S, Standby, StandbyEngine

READY_POLL_S = 0.01  # until its control socket is there, at first; later a twentieth of the time, up to 0.2 s
READY_WAIT_S = 1.0  # of a question whether it is ready, which it answers when it is
MAX_STATE = 1 << 20  # bytes of the answer
ANSWER_S = 5.0  # of a call to the engine
CHANGE_POLL_S = 0.05  # while an adapter is loaded or unloaded
SUSPEND_S = 0.5  # of the call that ends its requests: the margin of the shortest lease is longer
STOP_MARGIN_S = 10.0  # from the end of the drain to SIGKILL
COMMAND = (sys.executable, "-P", "-m", "starling", "--config", "starling.json", "up", "--with-parent")
STANDBY_COMMAND = (sys.executable, "-P", "-m", "starling", "up", "--with-parent", "--standby")
_PRIVATE = (
    "STARLING_HOME",
    "STARLING_CONFIG",
    "STARLING_RESTARTS",
    "STARLING_LISTEN_FD",
    "STARLING_LISTEN_UNIX_FD",
    "STARLING_TLS_FD",
    MARK_VARIABLE,
    "REDIS_USERNAME",
    "REDIS_PASSWORD",
)


class StarlingEngine(Engine):
    """One `starling up`."""

    adapter = "starling"

    def __init__(
        self,
        config: Config,
        model: ModelConfig,
        digest: str,
        home: Path,
        models_dir: Path,
        session: HttpSession,
        free_port: Callable[[], int],
        env: Mapping[str, str] = os.environ,
        standby: Standby | None = None,
        kernels: KernelBuild | None = None,
    ) -> None:
        """`model`: its settings, without a path. `home`: of this model's engines. `models_dir`: has the checkpoint.

        free_port: a port that no process listens on now. `standby`: processes that become the engine sooner.
        kernels: a compilation that would take the cores from its start.
        """
        self.capabilities = Capabilities()  # until it is started
        self._config = config
        self._model = msgspec.structs.replace(model, path=str(home / "models" / f"{digest}.idx"), sha256="")
        self._home = home
        self._run_dir = self.control_dir = engine_run_dir(home, env)
        self.kv_arenas = engine_arena_dir(config, self._run_dir)
        self._models_dir = models_dir
        self._session = session
        self._free_port = free_port
        self._env = env
        self._standby = standby
        self._kernels = kernels
        self._is_starting = False
        self._was_standby = False
        self._child: Child | None = None

    async def start(self) -> None:
        """Fence what an earlier one has left, and start `up`, or let a standby engine become it."""
        if self._kernels is not None:
            await self._kernels.interrupt()
        # A fence in a thread that went on would meet the next engine of this home. What it ends is no standby engine.
        fencing = ENGINES.uninterrupted(self._fence)
        standby, fenced = await asyncio.gather(self._claim(), fencing, return_exceptions=True)
        if isinstance(standby, BaseException):
            raise standby
        if isinstance(fenced, BaseException):
            raise fenced
        port = self._free_port()
        self.key = secrets.token_urlsafe(24)
        await ENGINES.uninterrupted(self._prepare, port, standby.mark if standby is not None else "")
        self.capabilities = await ENGINES.uninterrupted(self._promises)
        self.url = f"http://{advertised_host(self._config.fleet.agent)}:{port}"
        if standby is not None:
            line = msgspec.json.encode(Home(str(self._home), str(self._home / "starling.json")))
            standby.child.send(line + b"\n")
            return
        self._child = Child(COMMAND, engine_environment(self._env, self._home), self._home)
        await self._child.start()

    def _promises(self) -> Capabilities:
        """What the engine promises of its checkpoint; nothing if the index cannot be read, which it reports itself."""
        try:
            # A fresh one: what the process keeps would stay in the agent's memory.
            revision = load_index(Path(self._model.path), is_fresh=True).revision
        except (OSError, CheckpointError):
            return Capabilities(takes_conversations=True)
        kv_type, page_tokens = f"{self._model.kv_type}{revision}", self._model.page_tokens
        return Capabilities(kv_type, NUMERICS, can_continue=True, page_tokens=page_tokens, takes_conversations=True)

    async def _claim(self) -> StandbyEngine | None:
        """A standby engine, if there is one, which `stop` ends from now on."""
        if self._standby is None:
            return None
        self._standby.begin_start()
        self._is_starting = True
        standby = await self._standby.claim()
        if standby is not None:
            self._was_standby = True
            self._child = standby.child
        return standby

    async def ready(self) -> None:
        """Wait until it is ready."""
        assert self._child is not None
        ended = asyncio.ensure_future(self._child.wait())
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self._config.fleet.agent.start_timeout_s):
                while not ended.done():
                    if await self._becomes_ready():
                        self._end_start(True)
                        return
                    pause_s = max(READY_POLL_S, min(0.2, (time.monotonic() - begun) / 20))
                    await asyncio.wait([ended], timeout=pause_s)
        except TimeoutError:
            self._end_start(False)
            raise EngineDied(
                f"the engine did not answer within fleet.agent.start_timeout_s = "
                f"{self._config.fleet.agent.start_timeout_s} s: {self._child.last_words()}"
            ) from None
        finally:
            ended.cancel()
        self._end_start(False)
        raise await self.ended()

    def _end_start(self, is_ready: bool | None) -> None:
        if self._standby is not None and self._is_starting:
            self._is_starting = False
            self._standby.end_start(was_standby=self._was_standby, is_ready=is_ready)

    async def ended(self) -> EngineDied:
        """Wait for the end of `up`."""
        assert self._child is not None
        code = await self._child.wait()
        if code < 0:
            return EngineDied(f"the engine was killed by signal {-code}")
        said = await self._child.last_words_at_end()
        # Another process may have taken the port between the question and the start.
        is_final = code == EXIT_CONFIG and "cannot listen on" not in said
        return EngineDied(f"the engine ended with exit code {code}: {said}", is_final)

    async def queue(self) -> Queue:
        """From its metrics, which are up to a second old."""
        try:
            async with self._call("GET", self._config.metrics.endpoint) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineDied(f"the engine does not answer: {error}") from None
        found = values(text)
        hits = found.get("starling_kv_cache_hits_total", 0.0)
        asked = hits + found.get("starling_kv_cache_misses_total", 0.0)
        return Queue(
            int(found.get("starling_running_sequences", 0)),
            int(found.get("starling_queue_depth", 0)),
            round(hits / asked, 4) if asked else 0.0,
            int(found.get("starling_sequences_submitted_total", 0)),
            int(found.get("starling_sessions", 0)),
            int(found.get("starling_sessions_moving", 0)),
            self._adapter_uses(text),
        )

    def _adapter_uses(self, metrics: str) -> dict[str, AdapterUse]:
        """By name of the adapter, from the engine's metrics."""
        running = by_label(metrics, "starling_model_requests_in_flight", "model")
        ended = by_label(metrics, "starling_model_requests_total", "model")
        before = f"{self._model.name}:"
        return {
            name.removeprefix(before): AdapterUse(int(running.get(name, 0)), int(ended.get(name, 0)))
            for name in running.keys() | ended.keys()
            if name.startswith(before)
        }

    async def suspend(self) -> None:
        """Drain all models, without time for the requests in flight."""
        await self._admin("drain", {"timeout_s": 0})

    async def resume(self) -> None:
        """End the drain."""
        await self._admin("resume", {})

    async def stop(self, *, at_once: bool = False) -> None:
        """Stop `up`, then whatever it has left."""
        self._end_start(None)
        if self._child is not None:
            drain_s = self._config.server.drain_timeout_ms / 1000
            await self._child.stop(0.0 if at_once else drain_s + STOP_MARGIN_S)
        await ENGINES.run(self._fence)

    async def load_adapter(self, added: AdapterFile, within_s: float) -> None:
        """Load a version of the model with one adapter more; its weights are shared."""
        body = {"path": str(added.path), "timeout_s": within_s}
        try:
            await self._change("load", added.name, body, within_s)
        except Conflict:  # one of this name is there
            await self._change("reload", added.name, body, within_s)

    async def unload_adapter(self, name: str, within_s: float) -> None:
        """Load a version of the model with one adapter less."""
        with contextlib.suppress(ModelNotFound):
            await self._change("unload", name, {"timeout_s": within_s}, within_s)

    async def _change(self, op: str, adapter: str, body: dict[str, Any], within_s: float) -> None:
        """Change an adapter. Repeated with its id until it is done: a gateway that is killed has a successor."""
        assert self._child is not None
        asked = {**body, "target": f"{self._model.name}:{adapter}", "change": secrets.token_hex(8), "wait": False}
        deadline = time.monotonic() + within_s
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._call("POST", f"/v1/admin/{op}", json=asked) as answer:
                    raw = await answer.read()
                    if answer.status != 200:
                        raise _refusal(raw, answer.status)
                    if msgspec.json.decode(raw)["change"]["done"]:
                        return
            if not self._child.is_running:
                raise EngineDied("the engine has ended while it changed an adapter")
            if time.monotonic() >= deadline:
                raise ModelUnavailable(f"the engine has not changed adapter {adapter!r} within {within_s:g} s")
            await asyncio.sleep(CHANGE_POLL_S)

    async def _admin(self, op: str, body: dict[str, Any]) -> None:
        try:
            async with self._call("POST", f"/v1/admin/{op}", timeout_s=SUSPEND_S, json=body) as answer:
                if answer.status != 200:
                    raise EngineDied(f"the engine refuses to {op}: {answer.status} {(await answer.text())[:300]}")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineDied(f"the engine does not answer: {error}") from None

    async def _becomes_ready(self) -> bool:
        """Ask over its control socket, which it opens when it accepts connections; it answers once it is ready."""
        question = {"op": "state", "timeout_s": READY_WAIT_S}
        try:
            async with asyncio.timeout(READY_WAIT_S + ANSWER_S):
                answer = await ask(self._run_dir, "gateway", question, MAX_STATE)
                return bool(msgspec.json.decode(answer)["readiness"]["ready"])
        except (OSError, TimeoutError, ValueError, *DECODE_ERRORS, KeyError, TypeError):
            return False  # it has no socket yet, or its gateway has ended

    def _call(self, method: str, path: str, timeout_s: float = ANSWER_S, **options: Any) -> Any:
        return self._session.request(
            method,
            self.url + path,
            headers={"Authorization": f"Bearer {self.key}"},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            **options,
        )

    def _fence(self) -> None:
        fence(self._home, self._run_dir, engine_arena_dir(self._config, self._run_dir))

    def _prepare(self, port: int, mark: str) -> None:
        """The home, with links to what engines share. Raises `ConfigError`, `ResourceError`.

        mark: of the standby engine that gets the home; "": none does.
        """
        try:
            make_directory(self._home)
            for name, target in (("models", self._models_dir), ("cache", paths.cache_dir(self._env))):
                target.mkdir(parents=True, exist_ok=True)
                link = self._home / name
                if not link.is_symlink() or link.readlink() != target:
                    with contextlib.suppress(FileNotFoundError):
                        link.unlink()
                    link.symlink_to(target)
            published = (AdapterConfig(name=one.name, path=str(one.path)) for one in self.adapters)
            model = msgspec.structs.replace(self._model, adapters=(*self._model.adapters, *published))
            # Its key is in it: readable for this user alone.
            encoded = msgspec.json.encode(engine_config(self._config, model, self._run_dir, port, self.key))
            replace_file(self._home / "starling.json", encoded, mode=0o600)
            if mark:
                write_mark(self._home, mark)
        except OSError as error:
            raise ResourceError(f"{self._home} cannot be made: {error.strerror}; check the disk") from None


def _refusal(raw: bytes, status: int) -> StarlingError:
    """An engine's error response as an error of this process."""
    try:
        error = msgspec.json.decode(raw)["error"]
        code, message = str(error["code"]), str(error["message"])
    except (*DECODE_ERRORS, KeyError, TypeError):
        return ModelUnavailable(f"the engine answers {status}")
    kind = {one.CODE: one for one in (Conflict, ModelNotFound, ResourceError)}.get(code)
    return kind(message) if kind is not None else StarlingError(code, message)


def engine_environment(env: Mapping[str, str], home: Path) -> dict[str, str]:
    """That of an engine with this home, from that of the agent."""
    kept = {name: value for name, value in env.items() if name not in _PRIVATE and not _is_setting(name)}
    if python_path := kept.get("PYTHONPATH"):  # it may be relative to this process's directory
        kept["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in python_path.split(os.pathsep))
    return {**kept, "STARLING_HOME": str(home)}


def make_standby(
    count: int, agent_dir: Path, env: Mapping[str, str] = os.environ, refill_s: float = REFILL_S
) -> Standby:
    """Standby engines of an agent; their home is its own until they get one, for the compiled kernels there."""
    env = engine_environment(env, paths.home(env))
    return Standby(count, STANDBY_COMMAND, env, agent_dir, refill_s=refill_s)


def make_kernel_build(
    kv_types: Collection[str], agent_dir: Path, is_loading: Callable[[], bool], env: Mapping[str, str] = os.environ
) -> KernelBuild:
    """The compilation of the kernels of an agent's engines."""
    return KernelBuild(kv_types, engine_environment(env, paths.home(env)), agent_dir, is_loading)


def engine_config(config: Config, model: ModelConfig, run_dir: Path, port: int, key: str) -> Config:
    """The agent's configuration, for a server of one model that requires `key`."""
    plain: dict[str, Any] = msgspec.to_builtins(config)
    for section in ("fleet", "registry", "rate_limits", "edges"):
        del plain[section]
    plain["server"] |= {"host": config.fleet.agent.host, "port": port, "run_dir": str(run_dir), "state_dir": ""}
    plain["server"] |= {
        "tls_cert": "",
        "tls_key": "",
        "tls_client_ca": "",
        "unix_socket": "",
        "trusted_proxies": [],
    }  # of a server that clients talk to
    plain["auth"] = {"api_keys": [{"key": key, "tenant": "fleet", "admin": True}]}
    plain["scheduler"] |= {"tenant_weights": {}}
    plain["metrics"] |= {"enabled": True}
    if config.performance.control_cores == "auto":  # all engines of the host would keep to the same core
        plain["performance"]["control_cores"] = 0
    plain["models"] = [msgspec.to_builtins(model)]
    return msgspec.convert(plain, Config)


def engine_run_dir(home: Path, env: Mapping[str, str] = os.environ) -> Path:
    """Where the sockets of the engine are whose home is `home`."""
    return paths.home(env) / "engines" / home.name


def engine_arena_dir(config: Config, run_dir: Path) -> Path:
    """Where the arenas of an engine are."""
    return paths.arena_dir(engine_config(config, ModelConfig(name="any"), run_dir, 0, "any"))


def _is_setting(variable: str) -> bool:
    """Whether it overrides a key: the engine gets the resulting configuration."""
    return variable.startswith("LLM_ENGINE_") or (variable.startswith("STARLING_") and "__" in variable)
