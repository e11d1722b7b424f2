"""The kv process: the I/O around `manager.py`. Owns the KV arena of every model.

One scheduler asks; the frames and what they promise are in pipeline/messages.py.  A scheduler that
comes up (its first start, its restart, ours) attaches, is told that nothing is declared, and
declares; it is told so once for each incarnation, because a second declaration could cross with a grant.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from pipeline import messages as m
from pipeline import paths, registry
from pipeline.config_schema import Config, ModelConfig
from pipeline.loop import StageLoop
from shm.arena import Arena, ArenaError
from shm.checkpoint import load_index
from shm.pages import KvGeometry
from stages.kv import prefix
from stages.kv.adopt import open_arena
from stages.kv.manager import DeclaredLease, Denial, Grant, Manager
from stages.kv.rows import Rows

log = logging.getLogger("starling.kv")

RETRY_S = 0.2  # until a model is prepared, and until its arena fits
EXPIRE_S = 1.0
ALLOW_S = 120.0  # reserving and scanning a large arena


@dataclass
class ModelPages:
    """One model's arena and who uses it."""

    config: ModelConfig
    rows: Rows = field(default_factory=Rows)
    digest: str = ""  # hex
    geometry: KvGeometry | None = None
    arena: Arena | None = None
    manager: Manager | None = None
    error: str = "not prepared yet"  # why there is no manager
    attached: tuple[bytes, m.KvAttach] | None = None  # the scheduler's key and what it said
    is_answered: bool = False
    last_state: m.KvState | None = None


class KvStage:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.loop = StageLoop("kv", config)
        self.models = {model.name: ModelPages(model) for model in config.models}
        self.hub = self.loop.bind("scheduler-kv", self._on_frame)
        self.hub.on_down = self._on_down
        self.loop.on_tick.append(self._push_states)
        self._next_open = self._next_expire = float("-inf")
        self._next_push = float("-inf")

    def run(self) -> int:
        return self.loop.run(self._work)

    # -------------------------------------------------------------- models

    def _work(self) -> float | None:
        now = time.monotonic()
        missing = [model for model in self.models.values() if model.manager is None]
        if missing and now >= self._next_open:
            self._next_open = now + RETRY_S
            for model in missing:
                self._open(model)
        if now >= self._next_expire:
            self._next_expire = now + EXPIRE_S
            for model in self.models.values():
                if model.manager is not None:
                    model.manager.expire()
        self.loop.busy = self.loop.stopping and any(
            model.manager is not None and model.manager.leases for model in self.models.values()
        )
        return RETRY_S if missing else EXPIRE_S

    def _open(self, model: ModelPages) -> None:
        """Make or adopt the arena once the model is prepared; answer a scheduler that waits for it."""
        index_path = registry.find_index(model.config, paths.models_dir())
        before = model.error
        try:
            if index_path is None:
                model.error = f"model {model.config.name!r} is not prepared yet"
            else:
                with self.loop.allow(ALLOW_S):
                    self._open_arena(model, index_path)
        except (ArenaError, OSError) as error:
            model.error = str(error)
            if model.error != before:
                log.error("%s", error)
        if model.error != before:
            self._answer_attach(model)
        waiting = [model.error for model in self.models.values() if model.manager is None]
        self.loop.ready, self.loop.reason = not waiting, waiting[0] if waiting else ""

    def _open_arena(self, model: ModelPages, index_path: Path) -> None:
        index = load_index(index_path)
        config, hyper = model.config, index.hyper
        geometry = KvGeometry(
            hyper.n_layers, hyper.n_kv_heads, hyper.head_dim, config.page_tokens, config.kv_type
        )
        raw = bytes.fromhex(index.digest)
        path = paths.arena_dir(self.config) / f"{config.slug}.kv"
        # The clock's ns: a generation that no earlier arena of this name has had.
        home = open_arena(path, geometry, raw, self.config.kv_cache_bytes(config), time.time_ns())
        model.digest, model.geometry, model.arena = index.digest, geometry, home.arena
        manager = Manager(
            home.views,
            geometry.page_tokens,
            prefix.roots(raw, geometry),
            model.rows.read,
            policy=self.config.cache.eviction_policy,
            ttl_ns=self.config.cache.ttl_s * 1_000_000_000,
            caching=self.config.cache.enabled,
        )
        if home.found is None:
            manager.declared = False
        else:
            manager.adopt(home.found.full, home.found.limbo)
        model.manager, model.error = manager, ""
        log.info(
            "KV arena stands",
            extra={
                "model": config.name, "pages": manager.total, "page_bytes": geometry.page_bytes,
                "is_adopted": home.found is not None, "cached": manager.cached, "limbo": manager.leased,
                "torn": home.found.torn if home.found else 0,
            },
        )  # fmt: skip

    # -------------------------------------------------------------- the scheduler

    def _on_down(self, peer: bytes, hello: m.Hello) -> None:
        """Its leases stay: the worker may be writing to their pages until the successor declares."""
        for model in self.models.values():
            if model.attached is not None and model.attached[0] == peer:
                model.attached = None

    def _on_frame(self, peer: bytes, frame: m.Frame) -> None:
        self.loop.progress += 1
        model = self.models.get(getattr(frame, "model", ""))
        if isinstance(frame, m.KvAttach):
            self._attach(peer, frame, model)
            return
        if model is None or model.manager is None or model.attached is None or model.attached[0] != peer:
            log.warning("a frame for a model that is not attached", extra={"frame": type(frame).__name__})
            return
        manager = model.manager
        match frame:
            case m.Commit(_, sequence, n_tokens):
                manager.commit(sequence, n_tokens)
            case m.Extend(id_, _, sequence, want):
                self._answer(peer, id_, sequence, manager.extend(sequence, want))
            case m.Acquire():
                self._answer(peer, frame.id, frame.sequence, self._acquire(model, manager, frame))
            case m.Release(_, sequence, n_tokens):
                manager.release(sequence, n_tokens)
            case m.Declare():
                self._declare(peer, model, manager, frame)

    def _attach(self, peer: bytes, frame: m.KvAttach, model: ModelPages | None) -> None:
        if model is None:
            error = f"model {frame.model!r} is not configured here"
            self.hub.send(peer, m.KvReady(frame.model, frame.digest, "", 0, 0, 0, False, error))
            return
        if model.attached is None or model.attached[0] != peer:
            model.is_answered = False
            if model.manager is not None:
                model.manager.declared = False
        elif model.is_answered and model.attached[1] != frame:
            # The same scheduler with another arena: its rows are elsewhere, its leases stand.
            error = self._read_rows(model, frame)
            if error:
                log.error("the scheduler's rows cannot be read: %s", error)
        model.attached = (peer, frame)
        self._answer_attach(model)

    def _answer_attach(self, model: ModelPages) -> None:
        """`KvReady`, once for each incarnation of the scheduler; with the reason when it cannot be."""
        if model.attached is None or model.is_answered:
            return
        peer, frame = model.attached
        manager, error = model.manager, model.error
        if manager is not None:
            error = self._read_rows(model, frame)
        if manager is None or error:
            self.hub.send(peer, m.KvReady(frame.model, frame.digest, "", 0, 0, 0, False, error))
            return
        model.is_answered = self.hub.send(peer, self._ready(model, manager, declared=False))

    def _read_rows(self, model: ModelPages, frame: m.KvAttach) -> str:
        """Map the scheduler's rows; why that cannot be, or ""."""
        if frame.digest != model.digest:
            return f"model {frame.model!r} is {model.digest[:16]} here, not {frame.digest[:16]}"
        try:
            model.rows.attach(Path(frame.steps_path), bytes.fromhex(frame.digest))
        except (ArenaError, OSError) as error:
            return str(error)
        return ""

    def _ready(self, model: ModelPages, manager: Manager, declared: bool) -> m.KvReady:
        assert model.arena is not None
        assert model.geometry is not None
        return m.KvReady(
            model.config.name, model.digest, str(model.arena.path), manager.total,
            model.geometry.page_tokens, model.geometry.page_bytes, declared, "", model.arena.generation,
        )  # fmt: skip

    def _declare(self, peer: bytes, model: ModelPages, manager: Manager, frame: m.Declare) -> None:
        refused = manager.declare(DeclaredLease(*lease) for lease in frame.leases)
        for sequence in refused:
            log.warning("a declared lease is not recognised", extra={"sequence": sequence})
            self.hub.send(peer, m.Denied(0, sequence, True, 0, manager.free + manager.cached, manager.total))
        self.hub.send(peer, self._ready(model, manager, declared=True))

    def _acquire(self, model: ModelPages, manager: Manager, frame: m.Acquire) -> Grant | Denial:
        known = model.rows.known(frame.row, frame.n_tokens)
        if known is None:
            log.error("row out of bounds", extra={"sequence": frame.sequence, "row": frame.row})
            return Denial(False, 0, manager.free + manager.cached, manager.total)
        tokens, serial = known
        return manager.acquire(frame.sequence, tokens, frame.want_tokens, frame.row, serial, frame.salt)

    def _answer(self, peer: bytes, id_: int, sequence: str, answer: Grant | Denial) -> None:
        # Not sent: the scheduler is gone, and its successor declares; or it asks again.
        if isinstance(answer, Grant):
            self.hub.send(peer, m.Granted(id_, sequence, answer.pages, answer.cached_tokens))
        else:
            self.hub.send(
                peer, m.Denied(id_, sequence, answer.fits, answer.needed, answer.free, answer.total)
            )

    # -------------------------------------------------------------- telling

    def _push_states(self) -> None:
        """`KvState` to each scheduler: when it has changed, and with every heartbeat."""
        now = time.monotonic()
        is_due = now >= self._next_push
        if is_due:
            self._next_push = now + self.config.server.heartbeat_ms / 1000
        for model in self.models.values():
            if model.manager is None or model.attached is None or not model.is_answered:
                continue
            state = self._state(model, model.manager)
            if is_due or state != model.last_state:
                model.last_state = state
                self.hub.send(model.attached[0], state)

    @staticmethod
    def _state(model: ModelPages, manager: Manager) -> m.KvState:
        assert model.geometry is not None
        counters = manager.counters
        return m.KvState(
            model.config.name, manager.total, manager.free, manager.cached, manager.leased,
            model.geometry.page_bytes, counters.hits, counters.misses, counters.evictions, counters.spilled,
        )  # fmt: skip


def main(config: Config) -> int:
    """Run until told to stop; returns the exit code."""
    return KvStage(config).run()
