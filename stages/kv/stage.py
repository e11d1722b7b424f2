"""The kv process: the I/O around `manager.py`. Owns the KV arena of every model.

One scheduler asks for pages, gateways ask for sessions; the frames and what they promise are in
pipeline/messages.py.  A scheduler that comes up (its first start, its restart, ours) attaches, is told that
nothing is declared, and declares; it is told so once for each incarnation, because a second declaration
could cross with a grant.
"""

from __future__ import annotations

import gc
import logging
import time
from pathlib import Path

from pipeline import messages as m
from pipeline import paths, registry
from pipeline.config_schema import Config
from pipeline.loop import StageLoop
from pipeline.wire import QUIET_BEATS
from shm.arena import ArenaError
from shm.checkpoint import CheckpointError
from stages.kv.manager import DeclaredLease, Denial, Grant, Manager
from stages.kv.model import ModelPages, measure, prune
from stages.kv.session_frames import answer

log = logging.getLogger("starling.kv")

RETRY_S = 0.2  # until a model is prepared, and until its arena fits
CHORES_S = 1.0  # expiry and saving
PRUNE_S = 3600.0  # files of what is not served any more
ALLOW_S = 120.0  # reserving and scanning a large arena
HEAR_S = 0.5  # after SIGTERM: how long until the scheduler's heartbeats say whether it stops too


class Attached:
    """A model, and the scheduler that uses it."""

    def __init__(self, pages: ModelPages) -> None:
        self.pages = pages
        self.error = "not prepared yet"  # why there is no manager
        self.peer: bytes | None = None
        self.frame: m.KvAttach | None = None
        self.is_answered = False  # this incarnation of the scheduler has its KvReady
        self.last_state: m.KvState | None = None

    @property
    def name(self) -> str:
        return self.pages.model.name

    @property
    def manager(self) -> Manager | None:
        return self.pages.manager


class KvStage:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.loop = StageLoop("kv", config)
        self.models = {
            model.name: Attached(ModelPages(config, model, self.loop.breathe)) for model in config.models
        }
        self.hub = self.loop.bind("scheduler-kv", self._on_frame)
        self.hub.on_down = self._on_down
        self.gateways = self.loop.bind("gateway-kv", self._on_gateway)
        self.gateways.on_down = self._gateway_down
        self.loop.on_tick.append(self._tick)
        self._next_open = self._next_chores = self._next_push = self._next_prune = float("-inf")
        self._stopping_since = float("inf")

    def run(self) -> int:
        try:
            return self.loop.run(self._work)
        finally:
            for model in self.models.values():
                model.pages.close()

    # -------------------------------------------------------------- between frames

    def _work(self) -> float | None:
        now = time.monotonic()
        if self.loop.stopping:
            return self._wind_up(now)
        missing = [model for model in self.models.values() if model.manager is None]
        if missing and now >= self._next_open:
            self._next_open = now + RETRY_S
            for model in missing:
                self._open(model)
        if not missing and now >= self._next_prune:
            self._next_prune = now + PRUNE_S
            prune([model.pages for model in self.models.values()], time.time())
        if now >= self._next_chores:
            more = False
            for model in self.models.values():
                model.pages.expire()
                more |= model.pages.save_proven()
                more |= model.pages.compact()
            self._next_chores = now + (CHORES_S / 10 if more else CHORES_S)
        return max(0.0, min(self._next_chores, self._next_open if missing else self._next_chores) - now)

    def _wind_up(self, now: float) -> float:
        """Stopping: if the scheduler goes on, we only make way for a successor, and the arena stays.

        If it stops too, the arena will be removed: serve it while it drains, and save pages meanwhile.
        """
        self._stopping_since = min(self._stopping_since, now)
        beats = self.hub.last_beat
        peers = [peer for peer in self.hub.peers if peer in beats]
        if any(beats[peer].reason != "stopping" for peer in peers):
            self.loop.busy = now - self._stopping_since < HEAR_S
            return HEAR_S / 10
        is_saving = any(model.pages.save_recent() for model in self.models.values())
        self.loop.busy = bool(self.hub.peers) or is_saving
        return 0.0 if is_saving else HEAR_S / 10

    def _open(self, model: Attached) -> None:
        """Make or adopt the arena once the model is prepared; answer a scheduler that waits for it."""
        index_path = registry.find_index(model.pages.model, paths.models_dir())
        before = model.error
        try:
            if index_path is None:
                model.error = f"model {model.name!r} is not prepared yet"
            else:
                with self.loop.allow(ALLOW_S):
                    model.pages.open(index_path)
                model.error = ""
                gc.freeze()  # an index of many pages stands for long: collections need not look at it
        except (ArenaError, CheckpointError, OSError) as error:
            model.error = str(error)
            if model.error != before:
                log.error("%s", error, extra={"model": model.name})
        if model.error != before:
            self._answer_attach(model)
        waiting = [model.error for model in self.models.values() if model.manager is None]
        self.loop.ready, self.loop.reason = not waiting, waiting[0] if waiting else ""

    # -------------------------------------------------------------- the scheduler

    def _on_down(self, peer: bytes, hello: m.Hello) -> None:
        """Its leases stay: the worker may be writing to their pages until the successor declares."""
        for model in self.models.values():
            if model.peer == peer:
                model.peer = model.frame = None

    def _on_frame(self, peer: bytes, frame: m.Frame) -> None:
        self.loop.progress += 1
        name = getattr(frame, "model", "")
        model = self.models.get(name)
        if isinstance(frame, m.KvAttach):
            self._attach(peer, frame, model)
            return
        if model is None or model.manager is None or model.peer != peer:
            log.warning("a frame for a model that is not attached", extra={"frame": type(frame).__name__})
            return
        manager = model.manager
        if isinstance(frame, m.Commit):
            manager.commit(frame.sequence, frame.n_tokens)
        elif isinstance(frame, m.Extend):
            self._answer(peer, frame.id, frame.sequence, manager.extend(frame.sequence, frame.want_tokens))
        elif isinstance(frame, m.Acquire):
            self._answer(peer, frame.id, frame.sequence, self._acquire(model, manager, frame))
        elif isinstance(frame, m.Release):
            manager.release(frame.sequence, frame.n_tokens)
        elif isinstance(frame, m.Declare):
            self._declare(peer, model, manager, frame)

    def _attach(self, peer: bytes, frame: m.KvAttach, model: Attached | None) -> None:
        if model is None:
            error = f"model {frame.model!r} is not configured here"
            self.hub.send(peer, m.KvReady(frame.model, frame.digest, "", 0, 0, 0, False, error))
            return
        if model.peer != peer:
            model.is_answered = False
            if model.manager is not None:
                model.manager.declared = False
        elif model.is_answered and model.frame != frame:
            # The same scheduler with another arena: its rows are elsewhere, its leases stand.
            error = self._read_rows(model, frame)
            if error:
                log.error("the scheduler's rows cannot be read: %s", error)
        model.peer, model.frame = peer, frame
        self._answer_attach(model)

    def _answer_attach(self, model: Attached) -> None:
        """`KvReady`, once for each incarnation of the scheduler; with the reason when it cannot be."""
        peer, frame, manager = model.peer, model.frame, model.manager
        if peer is None or frame is None or model.is_answered:
            return
        error = model.error if manager is None else self._read_rows(model, frame)
        if manager is None or error:
            self.hub.send(peer, m.KvReady(frame.model, frame.digest, "", 0, 0, 0, False, error))
        else:
            model.is_answered = self.hub.send(peer, self._ready(model, manager, declared=False))

    def _read_rows(self, model: Attached, frame: m.KvAttach) -> str:
        """Map the scheduler's rows; why that cannot be, or ""."""
        if frame.digest != model.pages.digest:
            return f"model {frame.model!r} is {model.pages.digest[:16]} here, not {frame.digest[:16]}"
        try:
            model.pages.rows.attach(Path(frame.steps_path), bytes.fromhex(frame.digest))
        except (ArenaError, OSError) as error:
            return str(error)
        return ""

    @staticmethod
    def _ready(model: Attached, manager: Manager, declared: bool) -> m.KvReady:
        arena, geometry = model.pages.arena, model.pages.geometry
        assert arena is not None
        assert geometry is not None
        return m.KvReady(
            model.name, model.pages.digest, str(arena.path), manager.pool.total, geometry.page_tokens,
            geometry.page_bytes, declared, "", arena.generation,
        )  # fmt: skip

    def _declare(self, peer: bytes, model: Attached, manager: Manager, frame: m.Declare) -> None:
        refused = manager.declare(DeclaredLease(*lease) for lease in frame.leases)
        for sequence in refused:
            log.warning("a declared lease is not recognised", extra={"sequence": sequence})
            pool = manager.pool
            self.hub.send(peer, m.Denied(0, sequence, True, 0, pool.free + pool.cached, pool.total))
        self.hub.send(peer, self._ready(model, manager, declared=True))

    @staticmethod
    def _acquire(model: Attached, manager: Manager, frame: m.Acquire) -> Grant | Denial:
        known = model.pages.rows.known(frame.row, frame.n_tokens)
        if known is None:
            log.error("row out of bounds", extra={"sequence": frame.sequence, "row": frame.row})
            return Denial(False, 0, manager.pool.free + manager.pool.cached, manager.pool.total)
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

    # -------------------------------------------------------------- gateways

    def _on_gateway(self, peer: bytes, frame: m.Frame) -> None:
        self.loop.progress += 1
        model = self.models.get(getattr(frame, "model", ""))
        reply = answer(model.pages.sessions if model is not None else None, peer, frame)
        if model is not None:
            model.pages.free_sessions()
        if reply is not None:
            self.gateways.send(peer, reply)  # not sent: it is gone, and asks again when it is back

    def _gateway_down(self, peer: bytes, hello: m.Hello) -> None:
        for model in self.models.values():
            if model.pages.sessions is not None:
                model.pages.sessions.drop_holder(peer)

    # -------------------------------------------------------------- telling

    def _tick(self) -> None:
        """`KvState` to each scheduler: when it has changed, and with every heartbeat. Metrics."""
        now = time.monotonic()
        is_due = now >= self._next_push
        if is_due:
            beats = QUIET_BEATS if self.loop.is_quiet else 1
            self._next_push = now + 0.9 * beats * self.config.server.heartbeat_ms / 1000
            measure([model.pages for model in self.models.values()], self.loop.metrics)
        for model in self.models.values():
            if model.manager is None or model.peer is None or not model.is_answered:
                continue
            state = self._state(model, model.manager)
            if is_due or state != model.last_state:
                model.last_state = state
                self.hub.send(model.peer, state)

    @staticmethod
    def _state(model: Attached, manager: Manager) -> m.KvState:
        assert model.pages.geometry is not None
        pool, counters = manager.pool, manager.pool.counters
        return m.KvState(
            model.name, pool.total, pool.free, pool.cached, pool.leased,
            model.pages.geometry.page_bytes, counters.hits, counters.misses, counters.evictions,
            counters.spilled,
        )  # fmt: skip


def main(config: Config) -> int:
    """Run until told to stop; returns the exit code."""
    return KvStage(config).run()
