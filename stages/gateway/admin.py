"""Operations for the operator: `state`, `drain`, `resume`, `load`, `reload`, `unload`, `trace`.

They come over the control socket, or over HTTP with an admin's key: POST with the same fields in the body and the op in
the path, but GET for `state`, which has no field there and is answered at once.

    {"op": "state", "timeout_s": 1.0}  answered when the server is ready, or after that time; default: at once
    {"op": "drain", "target": "all" or a model, "timeout_s": 0.0, "keep": true, "exit": false}
    {"op": "resume", "target": "all" or a model}
    {"op": "load", "target": model, "path": file, "kv_cache_mb": 512, "timeout_s": 600.0, "change": id, "wait": true}
    {"op": "reload", "target": model, "path": file, "timeout_s": 600.0, "change": id, "wait": true}
    {"op": "unload", "target": model, "timeout_s": 30.0, "change": id, "wait": true}  an adapter: 600.0
    {"op": "trace", "request": id}  only over the control socket: answered by the request's timeline

The target of `load`, `reload` and `unload` may be MODEL:ADAPTER, and `path` then a PEFT directory as well.

Every other answer is the state after the operation. The answers to `load`, `reload` and `unload` also have `change`,
which contains `done` and the outcome or the progress. With `wait` false they return at once. Repeating an operation
with the same `change` (an id that the client chooses) starts nothing and returns the outcome as soon as it is
known, or the progress after `PROGRESS_S`. Drains survive a restart
of the gateway in a small file beside the arenas, which is removed when the whole server stops; the table of loaded
models is in the run directory.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from pipeline.errors import InvalidRequest
from pipeline.files import replace_file
from shm.decoding import DECODE_ERRORS
from stages.gateway.admission.drain import ALL
from stages.gateway.service import Service
from stages.gateway.versions.loader import new_change_id

log = logging.getLogger("starling.gateway.admin")

MAX_TIMEOUT_S = 86_400.0
POLL_S = 0.05  # between two checks whether a change has ended, if no event comes
PROGRESS_S = 0.2  # until a repeated operation returns the progress of a change that has not ended
MAX_WAITING = 8  # operations; further ones are answered at once, so that the control socket has connections left
LOAD_TIMEOUT_S, UNLOAD_TIMEOUT_S = 600.0, 30.0  # defaults of timeout_s; an adapter's unload is a load
MAX_KV_CACHE_MB = 16_777_216
MAX_NAME = 256  # characters of a request's name
FIELDS = {
    "state": ("timeout_s",),
    "drain": ("target", "timeout_s", "keep", "exit"),
    "resume": ("target",),
    "load": ("target", "path", "kv_cache_mb", "timeout_s", "change", "wait"),
    "reload": ("target", "path", "timeout_s", "change", "wait"),
    "unload": ("target", "timeout_s", "change", "wait"),
    "trace": ("request",),
}


class Admin:
    """One per gateway. `drains_file`: where drains are stored over a restart."""

    def __init__(self, service: Service, drains_file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._n_waiting = 0  # operations that wait for the end of a change
        self._loader = service.loader
        self._loader.on_unloaded = self._forget
        self._drains_file = drains_file
        self._clock = clock
        for target, timeout_s in self._read_drains().items():
            service.readiness.drains.begin(target, timeout_s)

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Perform an operation and return its answer. Raises `StarlingError`."""
        op = request.get("op")
        if not isinstance(op, str) or op not in FIELDS:
            raise InvalidRequest(f"op is {op!r}; it must be one of {', '.join(FIELDS)}", "op")
        for name in request:
            if name != "op" and name not in FIELDS[op]:
                known = ", ".join(FIELDS[op]) or "none"
                raise InvalidRequest(f"{op} has no field {name[:100]!r}; its fields: {known}", name[:100])
        request = {name: value for name, value in request.items() if value is not None}  # as in all other bodies
        if op == "trace":
            return {"trace": self._service.timelines.find(_text(request, "request", MAX_NAME))}
        if op == "drain":
            self._drain(request)
        elif op == "resume":
            self._resume(request)
        elif op == "state":
            await self._wait_until_ready(request)
        else:
            change = await self._change(op, request)
            return {**self.state(), "change": change}
        return self.state()

    def state(self) -> dict[str, Any]:
        """The body of /v1/admin/state."""
        service = self._service
        return {
            "in_flight": service.in_flight.count,
            "models": {name: service.in_flight.of_model(name) for name in self._names()},
            "instances": self._loader.state(),
            "use": {name: service.on_demand.fields(name) for name in self._names()},
            "draining": service.readiness.drains.report(),
            "readiness": service.readiness.report(service.in_flight.count),
        }

    def _names(self) -> list[str]:
        """All models, those that are being unloaded included."""
        return list(dict.fromkeys(one.name for one in self._service.catalog.all))

    async def _change(self, op: str, request: dict[str, Any]) -> dict[str, Any]:
        """Start a change, or return the progress of one that was started before."""
        target, path = _text(request, "target", 256), _text(request, "path", 4096)
        if not target:
            raise InvalidRequest("target is missing: the model's name", "target")
        change = _text(request, "change", 64) or new_change_id()
        is_model_unloaded = op == "unload" and ":" not in target
        timeout_s = _seconds(request, UNLOAD_TIMEOUT_S if is_model_unloaded else LOAD_TIMEOUT_S)
        waits, is_repeated = _flag(request, "wait"), self._loader.is_known(change)
        if op == "unload":
            self._loader.unload(target, change, timeout_s)
        elif op == "reload":
            self._loader.reload(target, path, change, timeout_s)
        else:
            megabytes = request.get("kv_cache_mb", 0)
            if isinstance(megabytes, bool) or not isinstance(megabytes, int) or not 0 <= megabytes <= MAX_KV_CACHE_MB:
                raise InvalidRequest(
                    f"kv_cache_mb is {megabytes!r}; it must be 1 to {MAX_KV_CACHE_MB}, 0: as configured",
                    "kv_cache_mb",
                )
            self._loader.load(target, path, change, timeout_s, megabytes)
        may_wait = is_repeated and self._n_waiting < MAX_WAITING
        deadline = self._clock() + (math.inf if waits else PROGRESS_S if may_wait else 0.0)
        self._n_waiting += 1
        try:
            while not (report := self._loader.report(change))["done"] and self._clock() < deadline:
                await self._service.readiness.wait_for_change(POLL_S)
        finally:
            self._n_waiting -= 1
        return {"id": change, **report}

    async def _wait_until_ready(self, request: dict[str, Any]) -> None:
        deadline = self._clock() + _seconds(request, 0.0)
        if self._n_waiting >= MAX_WAITING:
            return
        service = self._service
        self._n_waiting += 1
        try:
            while not service.readiness.report(service.in_flight.count)["ready"] and self._clock() < deadline:
                await service.readiness.wait_for_change(POLL_S)
        finally:
            self._n_waiting -= 1

    def _drain(self, request: dict[str, Any]) -> None:
        target = self._target(request)
        timeout_s, is_persistent = _seconds(request, 0.0), _flag(request, "keep")
        is_exit = _flag(request, "exit", default=False)
        self._service.readiness.drains.begin(target, timeout_s, is_persistent, is_exit=is_exit)
        self._changed()
        log.info("drained by an operator", extra={"target": target, "timeout_s": timeout_s})

    def _resume(self, request: dict[str, Any]) -> None:
        target = self._target(request)
        lifted = self._service.readiness.drains.lift(target)
        self._changed()
        log.info("resumed by an operator", extra={"target": target, "lifted": lifted})

    def _forget(self, model: str) -> None:
        """Lift the drain of a model that has been unloaded: when it is loaded again it takes requests."""
        if self._service.readiness.drains.lift(model):
            self._changed()

    def _target(self, request: dict[str, Any]) -> str:
        target = request.get("target", ALL)
        if not isinstance(target, str):
            raise InvalidRequest(f"target is {target!r}; it must be {ALL!r} or a model's name", "target")
        return ALL if target == ALL else self._service.catalog.resolve(target)

    def _changed(self) -> None:
        self._service.readiness.notify()
        persistent = self._service.readiness.drains.persistent
        try:
            if persistent:
                replace_file(self._drains_file, msgspec.json.encode(persistent))
            else:
                self._drains_file.unlink(missing_ok=True)
        except OSError as error:  # the drain stays in force until this process ends
            log.warning("a drain cannot be stored and will end with this process", extra={"error": str(error)})

    def _read_drains(self) -> dict[str, float]:
        try:
            stored = msgspec.json.decode(self._drains_file.read_bytes(), type=dict[str, float])
        except FileNotFoundError:
            return {}
        except (OSError, *DECODE_ERRORS) as error:
            log.error(
                "stored drains cannot be read and are not in force",
                extra={"path": str(self._drains_file), "reason": str(error)},
            )
            return {}
        names = {ALL, *self._names(), *self._service.catalog.known_names()}
        return {target: timeout_s for target, timeout_s in stored.items() if target in names}


def _seconds(request: dict[str, Any], default: float) -> float:
    value = request.get("timeout_s", default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TIMEOUT_S:
        raise InvalidRequest(f"timeout_s is {value!r}; it must be from 0 to {MAX_TIMEOUT_S:g}", "timeout_s")
    return float(value)


def _flag(request: dict[str, Any], name: str, *, default: bool = True) -> bool:
    value = request.get(name, default)
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} is {value!r}; it must be true or false", name)
    return value


def _text(request: dict[str, Any], name: str, most: int) -> str:
    value = request.get(name, "")
    if not isinstance(value, str) or len(value) > most:
        raise InvalidRequest(f"{name} is {str(value)[:100]!r}; it must be a string of up to {most} characters", name)
    return value
