"""Loading, reloading and unloading models while the server runs: `starling load`, `reload`, `unload`.

    load, reload   memory -> begin -> the stages follow the record -> ready -> self-test -> switch
    unload         retire -> its streams finish, or their time is up -> drop

One version is loaded at a time; who comes meanwhile waits.  A version that cannot be loaded, or does not
pass, is dropped, and whatever served goes on serving.  A version that is replaced stays until the last request
that began on it has ended.  Whatever is under way is in the record: a gateway that takes over goes on with
it.  A change has an id, given by whoever asks: asking again is asking how far it is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from pipeline.config import paths
from pipeline.config.rules import check_name
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import (
    Conflict,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    ModelUnavailable,
    ResourceError,
    StarlingError,
)
from pipeline.models import capacity, store, versions
from pipeline.models.versions import ModelVersion, Op, Outcome
from stages.gateway.service import Service
from stages.gateway.versions import self_test

log = logging.getLogger("starling.gateway.loader")

POLL_S = 0.05  # how a version is coming along
MAX_CHANGES = 64  # under way or waiting
SELF_TEST_S = 60.0  # for its repetitions
PASSING = ("MODEL_UNAVAILABLE", "OVERLOADED")  # errors of a self-test that may be over in a moment
LOOK_AGAIN_S = 0.2  # for memory that a version gives back when it goes

Look = Callable[[Config], capacity.FreeMemory]


class Change:
    """One that is under way in this process."""

    def __init__(self, change: str, op: Op, name: str) -> None:
        self.id, self.op, self.name = change, op, name
        self.phase = "waiting for its turn"
        self.over: asyncio.Task[None] | None = None


class Loader:
    """One per gateway, beside its service. `wall` is s since 1970."""

    def __init__(self, service: Service, look: Look = capacity.measure, wall: Callable[[], float] = time.time) -> None:
        self._service = service
        self._instances = service.instances
        self._config = service.config
        self._look_at_room = look
        self._wall = wall
        self._changes: dict[str, Change] = {}
        self._failed: dict[str, StarlingError] = {}  # changes that never came into the record
        self._ended: dict[str, int] = {}  # by version that goes: requests that were not finished in time
        self._turn = asyncio.Lock()
        self.on_unloaded: Callable[[str], object] = lambda name: None  # no version of that model is left

    # ---------------------------------------------------------------- asking

    def load(self, name: str, path: str, change: str, timeout_s: float, kv_cache_mb: int = 0) -> None:
        """Begin, unless it is under way or over already. Raises `StarlingError`."""
        if self._knows(change):
            return
        if self._instances.versions(name) and not self._instances.is_leaving(name):
            raise Conflict(f"model {name!r} is loaded already; `starling reload {name}` loads it anew", "target")
        self._begin("load", self._settings(name, path, kv_cache_mb), change, timeout_s)

    def reload(self, name: str, path: str, change: str, timeout_s: float) -> None:
        """Begin, unless it is under way or over already. Raises `StarlingError`."""
        if self._knows(change):
            return
        if self._instances.serving(name) is None:
            if self._instances.loading(name):
                raise Conflict(f"model {name!r} is being loaded for the first time; wait for that", "target")
            raise _not_loaded(name, self._instances.names)
        self._begin("reload", self._settings(name, path), change, timeout_s)

    def unload(self, name: str, change: str, timeout_s: float) -> None:
        """Begin, unless it is under way or over already. Raises `StarlingError`."""
        if self._knows(change):
            return
        serving = self._instances.serving(name)
        if serving is None:
            raise _not_loaded(name, self._instances.names)
        if self._instances.loading(name):
            raise Conflict(f"model {name!r} is being reloaded; wait for that", "target")
        self._instances.retire(serving.id, change, self._wall() + timeout_s)
        self._service.notice_change()
        log.info("unloading", extra={"instance": serving.id, "in_flight": self._service.in_use(serving.id)})

    def report(self, change: str) -> dict[str, Any]:
        """How far a change is: `done`, and with it how it ended. Raises the error that it ended with."""
        if change in self._failed:
            raise self._failed[change]
        outcome = self._instances.outcome(change)
        if outcome is not None:
            if outcome.code:
                raise StarlingError(outcome.code, outcome.message, outcome.param)
            return {"done": True, **_fields(outcome)}
        known = self._changes.get(change)
        if known is not None:
            return {"done": False, "phase": known.phase}
        leaving = next((one for one in self._instances.retiring() if one.change == change), None)
        if leaving is not None:
            return {"done": False, "phase": f"{self._service.in_use(leaving.id)} requests are in flight"}
        raise ModelUnavailable(f"there is no change {change!r} (any more)")

    def state(self) -> list[dict[str, Any]]:
        """Every version that is there."""
        return [
            {
                "model": one.name,
                "instance": one.id,
                "state": one.state,
                "digest": one.digest or None,
                "path": one.settings.path or None,
                "in_flight": self._service.in_use(one.id),
            }
            for one in self._instances.all
        ]

    def _knows(self, change: str) -> bool:
        return (
            change in self._changes
            or change in self._failed
            or self._instances.outcome(change) is not None
            or any(one.change == change for one in self._instances.all)
        )

    def _settings(self, name: str, path: str, kv_cache_mb: int = 0) -> ModelConfig:
        """What a version of the model is loaded with. Raises `StarlingError`."""
        if path and not _is_path(path):
            raise InvalidRequest(
                f"path is {path[:200]!r}; it is the absolute path of a file of the server's machine, in UTF-8", "path"
            )
        try:
            settings = self._instances.settings(name)
        except ModelNotFound:
            if not path:
                raise
            if reason := check_name(name):
                raise InvalidRequest(f"the name {name[:140]!r} cannot be used: {reason}", "target") from None
            settings = ModelConfig(name=name)
        self._check_slug(settings)
        if path:
            settings = msgspec.structs.replace(settings, path=os.path.normpath(path), sha256="")
        else:
            # As the configuration spells it (a URL, `~`, nothing) only registry.py finds it, by the model's name.
            settings = msgspec.structs.replace(settings, path=str(store.gguf_path(settings, paths.models_dir())))
        if kv_cache_mb:
            settings = msgspec.structs.replace(settings, kv_cache_mb=kv_cache_mb)
        _check_file(settings)
        return settings

    def _check_slug(self, settings: ModelConfig) -> None:
        """Raises `InvalidRequest` when a model of another name would have the same files: sessions, cached pages."""
        for one in self._instances.all:
            if one.settings.slug == settings.slug and one.name != settings.name:
                raise InvalidRequest(
                    f"the name {settings.name!r} is too much like {one.name!r}, which is loaded: their files would be "
                    f"the same; use another name, or unload that one",
                    "target",
                )

    # ---------------------------------------------------------------- doing

    def _begin(self, op: Op, settings: ModelConfig, change: str, timeout_s: float) -> None:
        if len(self._changes) >= MAX_CHANGES:
            raise Conflict(f"{MAX_CHANGES} changes are under way; wait for them", "target")
        if not self._instances.loading() and not self._instances.retiring():
            # Nothing will be given back: what does not fit now will not fit in a while.
            capacity.check(self._config, settings, self._look_at_room(self._config))
        until = self._wall() + timeout_s
        self._start(Change(change, op, settings.name), self._bring(change, op, settings, until))

    def _start(self, change: Change, work: Any) -> None:
        self._changes[change.id] = change
        change.over = asyncio.get_running_loop().create_task(self._watched(change, work))

    async def _watched(self, change: Change, work: Any) -> None:
        try:
            await work
        except StarlingError as error:
            self._fail(change, error)
        except Exception:
            log.exception("a change failed")
            self._fail(change, InternalError("a fault of the gateway; it is in its log"))
        finally:
            self._changes.pop(change.id, None)

    def _fail(self, change: Change, error: StarlingError) -> None:
        if self._instances.outcome(change.id) is None:
            self._failed[change.id] = error
            while len(self._failed) > MAX_CHANGES:
                del self._failed[next(iter(self._failed))]
        log.error("%s of %s failed: %s", change.op, change.name, error.message)

    async def _bring(self, change: str, op: Op, settings: ModelConfig, until: float) -> None:
        """From nothing to a version that serves. Raises `StarlingError`; then it has left nothing behind."""
        async with self._turn:
            is_there = self._instances.serving(settings.name) is not None
            if is_there != (op == "reload"):
                what = "loaded" if is_there else "unloaded"
                raise Conflict(f"model {settings.name!r} was {what} meanwhile", "target")
            self._check_slug(settings)
            await self._wait_for_room(change, settings, until)
            new = self._instances.begin(settings, change, op, until)
            log.info("loading", extra={"instance": new.id, "path": settings.path})
            await self._finish(new)

    async def _wait_for_room(self, change: str, settings: ModelConfig, until: float) -> None:
        """Until what goes has given its memory back, if that is what is missing. Raises `ResourceError`."""
        while True:
            try:
                capacity.check(self._config, settings, self._look_at_room(self._config))
                return
            except ResourceError:
                if not self._instances.retiring() or self._wall() >= until:
                    raise
            self._say(change, "waiting for memory that an older version gives back")
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _finish(self, new: ModelVersion) -> None:
        """Of a version that has begun."""
        try:
            await self._wait_ready(new)
            self._say(new.change, "self-test")
            await self._test(new)
            if self._wall() >= new.until:
                raise _too_late(new)
            old = self._instances.switch(new.id)
        except StarlingError as error:
            served = self._instances.serving(new.name)
            goes_on = f"; {served.id} goes on serving" if served is not None else ""
            outcome = Outcome(
                new.change,
                new.op,
                new.name,
                new.id,
                previous=served.id if served is not None else "",
                code=error.code,
                message=error.message + goes_on,
                param=error.param,
            )
            self._drop(new.id, outcome)
            raise StarlingError(error.code, error.message + goes_on, error.param) from None
        self._service.notice_change()
        log.info(
            "serves from now on",
            extra={"model": new.name, "instance": new.id, "previous": old.id if old is not None else None},
        )

    async def _test(self, new: ModelVersion) -> None:
        """The self-test; again when a stage that took part in it was started anew meanwhile."""
        patience = min(new.until, self._wall() + SELF_TEST_S)
        while True:
            try:
                await self_test.check(self._service, new, self._instances.serving(new.name))
                return
            except StarlingError as error:
                if error.code not in PASSING or self._wall() >= patience:
                    raise
                log.info("self-test again", extra={"instance": new.id, "reason": error.message})
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _wait_ready(self, new: ModelVersion) -> None:
        """Until its worker, its pages and its vocabulary are there. Raises why they will not be."""
        service, run_dir = self._service, paths.run_dir(self._config)
        while not service.is_ready(new):
            state = service.states.get(new.id)
            if state is not None and state.digest and not self._digest_of(new):
                self._instances.pin(new.id, state.digest)
            failure = versions.read_failure(run_dir, new.stage)
            if failure is not None and failure.code == "CONFIG":
                raise InvalidRequest(failure.message, "path")  # its file, which whoever asks for it can change
            if failure is not None:
                raise StarlingError(failure.code, failure.message, failure.param)
            refused = service.refused.get(new.id)
            if refused is not None and refused.code not in ("MODEL_UNAVAILABLE", "MODEL_NOT_FOUND"):
                raise refused
            reason = state.reason if state is not None else "its worker is being started"
            self._say(new.change, f"loading: {reason or 'its vocabulary is being read'}")
            if self._wall() >= new.until:
                raise _too_late(new, reason)
            await asyncio.sleep(POLL_S)

    def _digest_of(self, instance: ModelVersion) -> str:
        known = self._instances.get(instance.id)
        return known.digest if known is not None else ""

    def _say(self, change: str, phase: str) -> None:
        known = self._changes.get(change)
        if known is not None:
            known.phase = phase

    def _drop(self, instance_id: str, outcome: Outcome | None) -> None:
        self._instances.drop(instance_id, outcome)
        self._service.forget(instance_id)

    # ---------------------------------------------------------------- time

    def tick(self) -> None:
        """Every 100 ms, in the running loop."""
        for one in self._instances.loading():
            if one.change not in self._changes:
                log.warning("going on with what another gateway began", extra={"instance": one.id})
                self._start(Change(one.change, one.op, one.name), self._go_on(one))
        self._pin()
        for one in self._instances.retiring():
            self._retire(one)

    async def _go_on(self, new: ModelVersion) -> None:
        async with self._turn:
            await self._finish(new)

    def _pin(self) -> None:
        """A model as configured is the file that it was when all stages had opened it."""
        service = self._service
        for one in self._instances.all:
            state, described = service.states.get(one.id), service.described.get(one.id)
            if one.digest or state is None or described is None or not state.ready:
                continue
            if state.digest == described.digest:
                try:
                    self._instances.pin(one.id, state.digest)
                except ResourceError as error:
                    log.debug("%s", error.message)  # again at the next tick

    def _retire(self, one: ModelVersion) -> None:
        service = self._service
        ended = 0
        if one.until and self._wall() >= one.until:
            error = StarlingError(
                "DRAINING",
                f"model {one.name} was unloaded, and this was not finished in time; send it again",
                retry_after_s=5.0,
            )
            ended = service.end_all(error, instance=one.id)
            self._ended[one.id] = self._ended.get(one.id, 0) + ended
        if service.in_use(one.id):
            return
        outcome = None
        if one.op == "unload" and one.change:
            outcome = Outcome(one.change, one.op, one.name, one.id, one.digest, ended=self._ended.pop(one.id, 0))
        try:
            self._drop(one.id, outcome)
        except ResourceError as error:
            log.debug("%s", error.message)  # again at the next tick
            return
        log.info("unloaded", extra={"instance": one.id})
        if not self._instances.versions(one.name):
            self.on_unloaded(one.name)


def new_change() -> str:
    return secrets.token_hex(8)


def _fields(outcome: Outcome) -> dict[str, Any]:
    return {
        "op": outcome.op,
        "model": outcome.name,
        "instance": outcome.instance,
        "digest": outcome.digest or None,
        "previous": outcome.previous or None,
        "ended": outcome.ended,
    }


def _is_path(path: str) -> bool:
    """Absolute, and of characters that a file's name and the record can have."""
    try:
        return os.path.isabs(path) and b"\0" not in path.encode()
    except UnicodeEncodeError:
        return False


def _check_file(settings: ModelConfig) -> None:
    """Raises `InvalidRequest` for what is no GGUF file at the first look, and waits for nobody: all streams would."""
    path = Path(settings.path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            is_file = stat.S_ISREG(os.fstat(fd).st_mode)
            head = os.read(fd, len(store.MAGIC)) if is_file else b""
        finally:
            os.close(fd)
    except OSError as error:
        raise InvalidRequest(
            f"model {settings.name!r}: {path} cannot be read: {error.strerror}; path must be a GGUF file that the "
            f"server may read",
            "path",
        ) from None
    if not is_file:
        raise InvalidRequest(f"model {settings.name!r}: {path} is no regular file; path must be a GGUF file", "path")
    if head != store.MAGIC:
        raise InvalidRequest(
            f"model {settings.name!r}: {path} is no GGUF file (it begins with {head!r}, not {store.MAGIC!r})",
            "path",
        )


def _not_loaded(name: str, names: list[str]) -> ModelNotFound:
    return ModelNotFound(f"model {name!r} is not loaded; loaded: {', '.join(names) or 'none'}", "target")


def _too_late(new: ModelVersion, reason: str = "") -> StarlingError:
    why = f" ({reason})" if reason else ""
    return ModelUnavailable(f"{new.id} was not ready in time{why}; give it more with --timeout")
