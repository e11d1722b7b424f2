"""The kv process: the I/O around `manager.py`. Owns the KV arena of every model.

One scheduler asks for pages, gateways ask for sessions; the frames and what they promise are in
pipeline/protocol/messages.py.  A scheduler that comes up (its first start, its restart, ours) attaches, is told that
nothing is declared, and declares; it is told so once for each incarnation, because a second declaration
could cross with a grant.
"""

from __future__ import annotations

import gc
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.errors import Conflict, InvalidRequest
from pipeline.ipc.control_poll import PollControlServer
from pipeline.ipc.liveness import IDLE_INTERVALS
from pipeline.ipc.poll_loop import PollLoop
from pipeline.models import versions
from pipeline.models.versions import ModelVersion
from pipeline.protocol import messages as m
from pipeline.runtime import timer_coalescing
from pipeline.runtime.malloc_trim import MallocTrimmer
from shm.arena import ArenaError
from shm.checkpoint import CheckpointError
from stages.kv.manager import DeclaredLease, Denial, Grant, Manager
from stages.kv.model import ModelPages, Past, Reserved, measure, prune
from stages.kv.pool import audit
from stages.kv.sessions.session_frames import answer
from stages.kv.sessions.version_sessions import Book

log = logging.getLogger("starling.kv")

RETRY_S = 0.2  # until a model is prepared, and until its arena fits
WIND_UP_S = 0.05  # between two looks at who is still there, after SIGTERM
CHORES_S = 1.0  # expiry and saving
PRUNE_S = 3600.0  # files of what is not served any more
ALLOW_S = 120.0  # reserving and scanning a large arena


class Attached:
    """A version of a model, and the scheduler that uses it."""

    def __init__(self, instance: ModelVersion, pages: ModelPages) -> None:
        self.instance = instance
        self.pages = pages
        self.reserving: Future[Reserved] | None = None  # its arena is being made, on the thread
        self.error = "not prepared yet"  # why there is no manager
        self.is_coming = False  # being loaded, and nothing has gone wrong: nobody is told of each step
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
        self.loop = PollLoop("kv", config)
        self.models: dict[str, Attached] = {}  # by instance
        self.books: dict[str, Book] = {}  # by model
        self._past = Past()
        # Reserving and freeing hundreds of MB takes as long as tens of steps: not in the loop, when others run.
        self._thread = ThreadPoolExecutor(1, "arenas")
        self.follower = versions.VersionFollower(config)
        self._remove_strangers()
        self._follow()
        self.hub = self.loop.bind("scheduler-kv", self._on_frame)
        self.hub.on_down = self._on_down
        self.gateways = self.loop.bind("gateway-kv", self._on_gateway)
        self.gateways.on_down = self._gateway_down
        self.control = PollControlServer(paths.run_dir(config), self.loop, self._operate)
        self.loop.on_tick += [self._tick, MallocTrimmer(self.loop.clock).tick]
        self._next_open = self._next_chores = self._next_prune = self._pushed = float("-inf")

    def run(self) -> int:
        try:
            return self.loop.run(self._work)
        finally:
            self.control.close()
            self._thread.shutdown()
            for model in self.models.values():
                model.pages.close()

    # -------------------------------------------------------------- which models there are

    def _follow(self) -> None:
        """What the record names, and nothing else."""
        self.loop.mark_active()
        wanted = {one.id: one for one in self.follower.table.versions}
        for name in [name for name in self.models if name not in wanted]:
            self._remove(self.models.pop(name))
        for instance in wanted.values():
            name = instance.name
            known = self.models.get(instance.id)
            if known is None:
                directory = paths.state_dir(self.config) / "sessions"
                book = self.books.setdefault(name, Book(directory, name.replace("/", "--")))
                pages = ModelPages(self.config, instance.model, self.loop.report_progress, name, book)
                self.models[instance.id] = Attached(instance, pages)
                self._next_open = float("-inf")
                continue
            begins = instance.state == "serving" != known.instance.state
            known.instance, known.pages.model = instance, instance.model
            if begins and known.manager is not None:
                known.pages.open_sessions()
        for model in self.models.values():
            if model.manager is not None and not model.pages.has_files and self._is_alone(model):
                model.pages.open_files()
        self._share()

    def _share(self) -> None:
        """Who is new takes pages over from older versions of the same file, as long as they are there."""
        for model in self.models.values():
            name, serial = model.instance.name, model.instance.serial
            versions = [other for other in self.models.values() if other.instance.name == name]
            model.pages.share([other.pages for other in versions if other.instance.serial < serial])

    def _is_alone(self, model: Attached) -> bool:
        """No other version of it has the files, and none has a better claim to them."""
        name = model.instance.name
        others = [other for other in self.models.values() if other is not model and other.instance.name == name]
        yields = model.instance.state != "serving" and any(o.instance.state == "serving" for o in others)
        return not yields and not any(other.pages.has_files for other in others)

    def _remove(self, model: Attached) -> None:
        """The gateway is through with it."""
        log.info("model is gone", extra={"instance": model.instance.id})
        self._past.add(model.pages)
        model.pages.close_files()  # now: whoever takes its place wants them
        self._thread.submit(_bury, model)

    def _remove_strangers(self) -> None:
        """What an earlier life has left of instances that are gone since."""
        arenas = paths.arena_dir(self.config)
        wanted = {one.slug for one in self.follower.table.versions}
        for path in arenas.glob("*.kv"):
            if path.stem not in wanted:
                path.unlink(missing_ok=True)
        for path in arenas.glob(".*.kv.*"):
            path.unlink(missing_ok=True)  # half made, by a predecessor: this stage's lock is ours

    # -------------------------------------------------------------- between frames

    def _work(self) -> float | None:
        now = time.monotonic()
        if self.loop.stopping:
            return self._wind_up()
        if self.follower.poll():
            self._follow()
        missing = self._open_missing(now)
        if not missing:
            self._look_ready()
            if now >= self._next_prune:
                self._next_prune = now + PRUNE_S
                prune([model.pages for model in self.models.values()], time.time())
        more = False
        if now >= self._next_chores:
            for model in self.models.values():
                model.pages.expire()
                more |= model.pages.save_some()
                more |= model.pages.compact()
            for name, book in self.books.items():
                book.expire()
                self._free_sessions(name)
            self._next_chores = now + (CHORES_S / 10 if more else CHORES_S)
        if self.loop.is_idle and not missing and not more:
            return None  # ticks are often enough
        return max(0.0, min(self._next_chores, self._next_open if missing else self._next_chores) - now)

    def _open_missing(self, now: float) -> list[Attached]:
        """Open, now and then, what is not open. Returns what was not."""
        missing = [model for model in self.models.values() if model.manager is None]
        if missing and now >= self._next_open:
            self._next_open = now + RETRY_S
            for model in missing:
                self._open(model)
        return missing

    def _wind_up(self) -> float:
        """Stopping: if the scheduler goes on, we only make way for a successor, and the arena stays.

        If it stops too, the arena will be removed: serve it while it drains, and save pages meanwhile.
        """
        beats = self.hub.last_heartbeat
        peers = [peer for peer in self.hub.peers if peer in beats]
        if any(beats[peer].reason != "stopping" for peer in peers):
            self.loop.busy = self.loop.is_awaiting_heartbeats
            return WIND_UP_S
        is_saving = any(model.pages.save_recent() for model in self.models.values())
        self.loop.busy = bool(self.hub.peers) or is_saving
        return 0.0 if is_saving else WIND_UP_S

    def _open(self, model: Attached) -> None:
        """Make or adopt the arena once the model is prepared; answer a scheduler that waits for it."""
        before, model.is_coming = model.error, model.instance.state == "loading"
        try:
            model.error = self._opened(model)
            if not model.error:
                self._share()
                gc.freeze()  # an index of many pages stands for long: collections need not look at it
        except (ArenaError, CheckpointError, OSError) as error:
            model.error, model.is_coming = str(error), False
            if model.error != before:
                log.error("%s", error, extra={"model": model.name})
        if model.error != before and (model.manager is not None or not model.is_coming):
            self._answer_attach(model)
        self._look_ready()

    def _opened(self, model: Attached) -> str:
        """Why there are no pages yet, "" when there are."""
        is_loading = model.instance.state == "loading"
        if is_loading and not model.instance.digest:
            return f"model {model.name!r} is being prepared"
        index_path = versions.find_index(model.instance, paths.models_dir())
        if index_path is None:
            return f"model {model.name!r} is not prepared yet"
        if not is_loading:
            with self.loop.allow_stall(ALLOW_S):
                reserved = model.reserving.result() if model.reserving is not None else None
                model.pages.open(index_path, reserved, is_alone=self._is_alone(model))
                if model.instance.state == "serving":
                    model.pages.open_sessions()
        elif model.reserving is None:
            model.reserving = self._thread.submit(model.pages.reserve, index_path)
            model.reserving.add_done_callback(self._reserved)
            return f"the arena of model {model.name!r} is being made"
        elif not model.reserving.done():
            return model.error
        else:
            reserving, model.reserving = model.reserving, None
            model.pages.open(index_path, reserving.result(), is_alone=self._is_alone(model))
        model.reserving = None
        return ""

    def _reserved(self, _: Future[Reserved]) -> None:
        """On the thread."""
        self._next_open = float("-inf")
        self.loop.wake()

    def _look_ready(self) -> None:
        """A model that is being loaded, or goes, makes nobody wait."""
        serving = [model for model in self.models.values() if model.instance.state == "serving"]
        waiting = [model.error for model in serving if model.manager is None]
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
        if name not in self.models and self.follower.poll():  # newer than our last look at the record
            self._follow()
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
            self._answer(peer, frame, manager.extend(frame.sequence, frame.want_tokens))
        elif isinstance(frame, m.Acquire):
            self._answer(peer, frame, self._acquire(model, manager, frame))
        elif isinstance(frame, m.Release):
            manager.release(frame.sequence, frame.n_tokens)
        elif isinstance(frame, m.Reconcile):
            self._declare(peer, model, manager, frame)

    def _attach(self, peer: bytes, frame: m.KvAttach, model: Attached | None) -> None:
        if model is None:
            error = f"model {frame.model!r} is not loaded here"
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
        if peer is None or frame is None or model.is_answered or (manager is None and model.is_coming):
            return
        error = model.error if manager is None else self._read_rows(model, frame)
        if manager is None or error:
            self.hub.send(peer, m.KvReady(frame.model, frame.digest, "", 0, 0, 0, False, error))
        else:
            model.is_answered = self.hub.send(peer, self._ready(model, manager, reconciled=False))

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
    def _ready(model: Attached, manager: Manager, reconciled: bool) -> m.KvReady:
        arena, geometry = model.pages.arena, model.pages.geometry
        assert arena is not None
        assert geometry is not None
        return m.KvReady(
            model.name,
            model.pages.digest,
            str(arena.path),
            manager.pool.total,
            geometry.page_tokens,
            geometry.page_bytes,
            reconciled,
            "",
            arena.generation,
        )

    def _declare(self, peer: bytes, model: Attached, manager: Manager, frame: m.Reconcile) -> None:
        refused = manager.declare(DeclaredLease(*lease) for lease in frame.leases)
        for sequence in refused:
            log.warning("a declared lease is not recognised", extra={"sequence": sequence})
            pool = manager.pool
            self.hub.send(peer, m.Denied(0, sequence, True, 0, pool.free + pool.cached, pool.total, model.name))
        self.hub.send(peer, self._ready(model, manager, reconciled=True))

    @staticmethod
    def _acquire(model: Attached, manager: Manager, frame: m.Acquire) -> Grant | Denial:
        known = model.pages.rows.known(frame.row, frame.n_tokens)
        if known is None:
            log.error("row out of bounds", extra={"sequence": frame.sequence, "row": frame.row})
            return Denial(False, 0, manager.pool.free + manager.pool.cached, manager.pool.total)
        tokens, serial = known
        return manager.acquire(frame.sequence, tokens, frame.want_tokens, frame.row, serial, frame.salt)

    def _answer(self, peer: bytes, ask: m.Acquire | m.Extend, answer: Grant | Denial) -> None:
        # Not sent: the scheduler is gone, and its successor declares; or it asks again.
        if isinstance(answer, Grant):
            granted = m.Granted(ask.id, ask.sequence, answer.pages, answer.cached_tokens, ask.model)
            self.hub.send(peer, granted)
        else:
            counts = answer.fits, answer.needed, answer.free, answer.total
            self.hub.send(peer, m.Denied(ask.id, ask.sequence, *counts, ask.model))

    # -------------------------------------------------------------- gateways

    def _on_gateway(self, peer: bytes, frame: m.Frame) -> None:
        self.loop.progress += 1
        if self.follower.poll():  # it knows best who serves
            self._follow()
        # After a start a gateway that has waited is heard before the first round.
        self._open_missing(time.monotonic())
        name = getattr(frame, "model", "")
        book = self.books.get(name)
        version = self._version(name, getattr(frame, "instance", ""))
        try:
            sessions = book.choose(frame, version.pages.tokenizer) if book is not None and version is not None else None
        except Conflict as error:
            self.gateways.send(peer, m.SessionRefused(getattr(frame, "id", 0), error.code, error.message, error.param))
            return
        reply = answer(sessions, peer, frame)
        self._free_sessions(name)
        if reply is not None:
            self.gateways.send(peer, reply)  # not sent: it is gone, and asks again when it is back

    def _version(self, name: str, instance: str) -> Attached | None:
        """The named version of a model, without a name the one that serves."""
        if instance in self.models:
            return self.models[instance]
        versions = [model for model in self.models.values() if model.instance.name == name]
        return min(versions, key=lambda model: model.instance.state != "serving", default=None)

    def _free_sessions(self, name: str) -> None:
        """Free the pages of sessions that are gone, in every version of their model."""
        freed = self.books[name].take_freed() if name in self.books else []
        if not freed:
            return
        for model in self.models.values():
            if model.instance.name == name and model.manager is not None:
                model.manager.pool.discard(freed)

    def _gateway_down(self, peer: bytes, hello: m.Hello) -> None:
        for book in self.books.values():
            book.drop_holder(peer)

    # -------------------------------------------------------------- commands

    def _operate(self, request: dict[str, Any]) -> dict[str, Any]:
        """The control socket's handler: `{"op": "books"}`, for `starling kv check`."""
        if request != {"op": "books"}:
            raise InvalidRequest(f"{str(request)[:100]} is not known here; there is {{'op': 'books'}}", "op")
        with self.loop.allow_stall(ALLOW_S):
            taken = [audit.take(model.pages) for model in self.models.values()]
        return {"models": [msgspec.to_builtins(one) for one in taken if one is not None]}

    # -------------------------------------------------------------- telling

    def _tick(self) -> None:
        """`KvState` to each scheduler: when it has changed, and with every heartbeat. Metrics."""
        now = time.monotonic()
        heartbeat_s = self.config.server.heartbeat_ms / 1000
        is_due = now - self._pushed >= 0.9 * heartbeat_s
        if self.loop.is_idle:
            is_due = timer_coalescing.has_period_elapsed(
                now, self._pushed, max(timer_coalescing.IDLE_HEARTBEAT_S, IDLE_INTERVALS * heartbeat_s)
            )
        if is_due:
            self._pushed = now
            pages = [model.pages for model in self.models.values()]
            measure(pages, self.loop.metrics, self._past, set(self.books))
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
        pool = manager.pool
        return m.KvState(
            model.name,
            pool.total,
            pool.free,
            pool.cached,
            pool.leased,
            model.pages.geometry.page_bytes,
        )


def _bury(model: Attached) -> None:
    """Close and remove what an instance had, its arena with it. On the thread: freeing it takes time."""
    try:
        if model.reserving is not None:
            model.reserving.result().home.arena.unlink()
        if model.pages.arena is not None:
            model.pages.arena.unlink()
        model.pages.close()
    except Exception:
        log.exception("what an instance had could not be removed", extra={"instance": model.instance.id})


def main(config: Config) -> int:
    """Run until told to stop; returns the exit code."""
    return KvStage(config).run()
