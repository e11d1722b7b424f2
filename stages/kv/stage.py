"""The kv process: the I/O around `manager.py`. Owns the KV arena of every model.

    scheduler  one peer: attaches to a model, acquires, extends, commits and releases leases
    gateways   begin, commit, abort and close turns of sessions
    control    `starling kv check` requests an audit of the page tables, `starling kv clear` drops cached pages, and
               a fleet's agent exchanges pages and sessions with other engines (page_exchange.py, prefix_exchange.py,
               session_exchange.py)

`pipeline/protocol/messages/` defines the frames.  After a start of the scheduler or of this stage, the scheduler
attaches, receives `KvReady` with reconciled = False, and sends `Reconcile` with its leases.  It receives that `KvReady`
once for each of its incarnations, because a second `Reconcile` could cross a grant on the way.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.errors import Conflict, InvalidRequest
from pipeline.ipc.control_poll import Later, PollControlServer
from pipeline.ipc.liveness import IDLE_INTERVALS
from pipeline.ipc.poll_loop import PollLoop
from pipeline.models import versions
from pipeline.protocol import messages as m
from pipeline.runtime import process, timer_coalescing
from pipeline.runtime.malloc_trim import MallocTrimmer
from shm.arena import ArenaError
from stages.kv.audit import audit
from stages.kv.cache_metrics import measure
from stages.kv.clearing import Clearing
from stages.kv.frame_names import frame_names, sequence_names
from stages.kv.lease import Denial, Grant, LeaseClaim
from stages.kv.loaded_versions import MAX_STALL_S, LoadedVersion, LoadedVersions
from stages.kv.manager import Manager
from stages.kv.page_exchange import PageExchange
from stages.kv.prefix_exchange import PrefixExchange
from stages.kv.session_exchange import SessionExchange
from stages.kv.sessions.model_sessions import answer

log = logging.getLogger("starling.kv")

STOP_POLL_S = 0.05  # between two checks of the peers, after SIGTERM
STEADY_FREE = 1 / 8  # of the pages free or evictable: then nothing waits for a tick
CHORES_S = 1.0  # between two rounds of expiry, saving and compaction


class KvStage:
    """The stage's sockets and their handlers."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.loop = PollLoop("kv", config)
        self.versions = LoadedVersions(config, self.loop, self._answer_attach)
        self.hub = self.loop.bind("scheduler-kv", self._on_frame)
        self.hub.on_down = self._on_scheduler_down
        self.gateways = self.loop.bind("gateway-kv", self._on_gateway_frame)
        self.gateways.on_down = self._on_gateway_down
        self.control = PollControlServer(paths.run_dir(config), self.loop, self._on_command)
        self.exchange = PageExchange(lambda name: self.versions.find(name, ""))
        self.prefix_exchange = PrefixExchange(lambda name: self.versions.find(name, ""))
        self.session_exchange = SessionExchange(self.versions)
        self.loop.on_tick += [self._tick, self.exchange.expire, MallocTrimmer(self.loop.clock).tick]
        self.clearing: Clearing | None = None  # the last one
        self._has_noted_uses = False  # at the stop
        self._changes = -1  # readable when the record of versions has changed
        self._watch_record()
        self._next_chores = self._pushed_at = float("-inf")

    def run(self) -> int:
        """Serve until SIGTERM; returns the exit code."""
        try:
            return self.loop.run(self._work)
        finally:
            self.control.close()
            if self._changes >= 0:
                os.close(self._changes)
            self.exchange.close()
            self.prefix_exchange.close()
            self.versions.close()

    def _watch_record(self) -> None:
        """Wake when the record of versions changes: an arena is created while the worker of its version starts."""
        try:
            self._changes = process.open_touch_watch(versions.bell_path(self.config))
            self.loop.add_fd(self._changes, self._on_change)
        except OSError:  # the number of watches per user is limited: the scheduler's frame comes later
            log.warning("record of versions cannot be watched")

    def _on_change(self) -> None:
        os.read(self._changes, 65536)  # `_work` follows, which looks at the record

    # -------------------------------------------------------------- between frames

    def _work(self) -> float | None:
        """Periodic work; returns the seconds until the next call, None: at the next tick."""
        now = time.monotonic()
        is_importing = self._import_pages()
        self._finish_page_ins()
        for result in self.versions.poll_sessions():
            self._reply(result.holder, result.reply)
            if result.finish is not None:
                result.finish()
        if self.loop.stopping:
            delay = self._work_while_stopping()
            return 0.0 if is_importing else delay
        self.versions.poll_record()
        missing = self.versions.open_missing(now)
        if not missing:
            self.versions.update_readiness()
            self.versions.prune_files(now)
        more = False
        if now >= self._next_chores:
            more = self.versions.do_chores()
            self._next_chores = now + (CHORES_S / 10 if more else CHORES_S)
        if self.clearing is not None and not self.clearing.is_done and self.clearing.step():
            self.loop.mark_active()
            return 0.0
        if is_importing or self.prefix_exchange.step() or self.versions.warm_some():
            self.loop.mark_active()
            return 0.0
        page_in_due = min((one.page_ins.next_due for one in self.versions.by_id.values()), default=float("inf"))
        if self.loop.is_idle and not missing and not more and page_in_due == float("inf"):
            return None
        next_open = self.versions.next_open if missing else float("inf")
        return max(0.0, min(self._next_chores, next_open, page_in_due) - now)

    def _work_while_stopping(self) -> float:
        """If the scheduler continues, exit for a successor: the arena stays.

        If it stops too, the arena will be removed: serve until it has finished, and save pages meanwhile.
        """
        beats = self.hub.last_heartbeat
        peers = [peer for peer in self.hub.peers if peer in beats]
        if any(beats[peer].reason != "stopping" for peer in peers):
            self.loop.busy = self.loop.awaits_heartbeats(self.hub)
            return STOP_POLL_S
        if not self._has_noted_uses:
            self._has_noted_uses = True
            for pages in self.versions.pages():
                pages.note_uses()
        is_saving = any(pages.save_recent() for pages in self.versions.pages())
        is_writing = any(pages.is_writing for pages in self.versions.pages())
        self.loop.busy = bool(self.hub.peers) or is_saving or is_writing or self.versions.is_writing_sessions
        return 0.0 if is_saving else STOP_POLL_S  # the threads end the wait when they have written a page

    # -------------------------------------------------------------- the scheduler

    def _on_scheduler_down(self, peer: bytes, hello: m.Hello) -> None:
        """Its leases stay: the worker may write to their pages until the successor reconciles.

        Its rows are unmapped: their memory must be free before the successor creates its own.
        """
        for loaded in self.versions.by_id.values():
            if loaded.peer == peer:
                loaded.peer = loaded.frame = None
                loaded.pages.rows.detach()
                loaded.page_ins.clear()
                loaded.imports.clear()

    def _on_frame(self, peer: bytes, frame: m.Frame) -> None:
        self.loop.progress += 1
        name = getattr(frame, "model", "")
        if name not in self.versions.by_id:  # the record may have changed since the last poll
            self.versions.poll_record()
        loaded = self.versions.by_id.get(name)
        if isinstance(frame, m.KvAttach):
            self._attach(peer, frame, loaded)
            return
        if loaded is None or loaded.manager is None or loaded.peer != peer:
            log.warning(
                "a frame for a model that is not attached", extra={"frame": type(frame).__name__, **frame_names(frame)}
            )
            return
        manager = loaded.manager
        if isinstance(frame, m.Commit):
            manager.commit(frame.sequence, frame.n_tokens, frame.unread)
        elif isinstance(frame, m.Extend):
            self._answer(peer, frame, manager.extend(frame.sequence, frame.want_tokens))
            if manager.is_suspect(frame.sequence):  # its refusal was lost
                self._refuse(peer, loaded, manager, frame.sequence)
        elif isinstance(frame, m.Acquire):
            self.versions.pause_warming()
            loaded.page_ins.end(frame.sequence)
            loaded.imports.end(frame.sequence)
            if not self.exchange.begin(loaded, frame):
                self._read_and_grant(peer, loaded, manager, frame)
        elif isinstance(frame, m.Release):
            loaded.page_ins.end(frame.sequence)
            loaded.imports.end(frame.sequence)
            manager.release(frame.sequence, frame.n_tokens)
        elif isinstance(frame, m.Reconcile):
            self._reconcile(peer, loaded, manager, frame)

    def _attach(self, peer: bytes, frame: m.KvAttach, loaded: LoadedVersion | None) -> None:
        if loaded is None:
            error = f"model {frame.model!r} is not loaded here"
            self.hub.send(peer, m.KvReady(frame.model, frame.digest, "", 0, 0, 0, False, error))
            return
        if loaded.peer != peer:
            loaded.page_ins.clear()
            loaded.imports.clear()
            loaded.is_answered = False
            if loaded.manager is not None:
                loaded.manager.is_reconciled = False
        elif loaded.frame != frame:
            # The same scheduler with a new step arena: its rows have moved, its leases are unchanged.  It waits for
            # another answer before it attaches a worker.
            loaded.is_answered = False
        loaded.peer, loaded.frame = peer, frame
        self._answer_attach(loaded)

    def _answer_attach(self, loaded: LoadedVersion) -> None:
        """Send `KvReady` once for each step arena; with the reason if there is no KV arena."""
        peer, frame, manager = loaded.peer, loaded.frame, loaded.manager
        if peer is None or frame is None or loaded.is_answered or (manager is None and loaded.is_opening):
            return
        error = loaded.error if manager is None else self._attach_rows(loaded, frame)
        if manager is None or error:
            self.hub.send(peer, m.KvReady(frame.model, frame.digest, "", 0, 0, 0, False, error))
        else:
            loaded.is_answered = self.hub.send(peer, self._ready(loaded, manager, manager.is_reconciled))

    def _attach_rows(self, loaded: LoadedVersion, frame: m.KvAttach) -> str:
        """Map the scheduler's rows; returns the reason if that fails, or ""."""
        if frame.digest != loaded.pages.digest:
            return f"model {frame.model!r} is {loaded.pages.digest[:16]} here, not {frame.digest[:16]}"
        try:
            loaded.pages.rows.attach(Path(frame.steps_path), bytes.fromhex(frame.digest))
        except (ArenaError, OSError) as error:
            return str(error)
        return ""

    @staticmethod
    def _ready(loaded: LoadedVersion, manager: Manager, reconciled: bool) -> m.KvReady:
        arena, geometry = loaded.pages.arena, loaded.pages.geometry
        assert arena is not None
        assert geometry is not None
        return m.KvReady(
            loaded.name,
            loaded.pages.digest,
            str(arena.path),
            manager.pool.total,
            geometry.page_tokens,
            geometry.page_bytes,
            reconciled,
            "",
            arena.generation,
        )

    def _reconcile(self, peer: bytes, loaded: LoadedVersion, manager: Manager, frame: m.Reconcile) -> None:
        refused = manager.reconcile(LeaseClaim(*lease) for lease in frame.leases)
        owners = {lease[0]: owner for lease, owner in zip(frame.leases, frame.owners, strict=False)}
        for sequence in refused:
            owner = owners.get(sequence, ("", ""))
            log.warning("a lease of the scheduler is refused", extra=sequence_names(sequence, loaded.name, *owner))
            self._refuse(peer, loaded, manager, sequence)
        self.hub.send(peer, self._ready(loaded, manager, reconciled=True))

    def _refuse(self, peer: bytes, loaded: LoadedVersion, manager: Manager, sequence: str) -> None:
        """Let the scheduler release a lease, and acquire it again."""
        pool = manager.pool
        self.hub.send(peer, m.Denied(0, sequence, True, 0, pool.free + pool.cached, pool.total, loaded.name))

    def _grant(self, peer: bytes, loaded: LoadedVersion, manager: Manager, frame: m.Acquire) -> None:
        began = time.monotonic()
        answer = self._acquire(loaded, manager, frame)
        self._answer(peer, frame, answer)
        if log.isEnabledFor(logging.DEBUG):
            took_ms = round((time.monotonic() - began) * 1000, 3)
            granted = (len(answer.pages), answer.cached_tokens) if isinstance(answer, Grant) else (0, 0)
            facts = {"pages": granted[0], "cached_tokens": granted[1], "duration_ms": took_ms}
            log.debug("pages are requested", extra={**frame_names(frame), **facts})
        loaded.page_ins.end(frame.sequence)
        loaded.imports.end(frame.sequence)

    def _read_and_grant(self, peer: bytes, loaded: LoadedVersion, manager: Manager, frame: m.Acquire) -> None:
        """Grant the pages now, or when those on a disk have been read."""
        if not loaded.page_ins.begin(frame):
            self._grant(peer, loaded, manager, frame)

    def _import_pages(self) -> bool:
        """Copy some pages of other engines, and answer the grants that waited for them. True: call again."""
        for loaded, frame in self.exchange.step(self.versions.by_id.values()):
            if loaded.peer is not None and loaded.manager is not None:
                self._read_and_grant(loaded.peer, loaded, loaded.manager, frame)
            else:
                loaded.imports.end(frame.sequence)
        return any(loaded.imports.is_waiting for loaded in self.versions.by_id.values())

    def _finish_page_ins(self) -> None:
        """Answer the grants whose pages have been read, or that have waited long enough."""
        for loaded in self.versions.by_id.values():
            loaded.pages.poll_stores()
            for frame in loaded.page_ins.due():
                if loaded.peer is not None and loaded.manager is not None:
                    self._grant(loaded.peer, loaded, loaded.manager, frame)
                loaded.page_ins.end(frame.sequence)

    @staticmethod
    def _acquire(loaded: LoadedVersion, manager: Manager, frame: m.Acquire) -> Grant | Denial:
        known = loaded.pages.rows.known(frame.row, frame.n_tokens)
        if known is None:
            log.error("row out of bounds", extra={"row": frame.row, **frame_names(frame)})
            return Denial(False, 0, manager.pool.free + manager.pool.cached, manager.pool.total)
        tokens, serial = known
        return manager.acquire(
            frame.sequence,
            tokens,
            frame.want_tokens,
            frame.row,
            serial,
            frame.salt,
            frame.sharable,
            frame.window,
            frame.ahead,
        )

    def _answer(self, peer: bytes, request: m.Acquire | m.Extend, answer: Grant | Denial) -> None:
        # If `send` fails, the scheduler is gone and its successor reconciles; or it sends the request again.
        if isinstance(answer, Grant):
            granted = m.Granted(request.id, request.sequence, answer.pages, answer.cached_tokens, request.model)
            self.hub.send(peer, granted)
        else:
            counts = answer.fits, answer.needed, answer.free, answer.total
            self.hub.send(peer, m.Denied(request.id, request.sequence, *counts, request.model))

    # -------------------------------------------------------------- gateways

    def _on_gateway_frame(self, peer: bytes, frame: m.Frame) -> None:
        self.loop.progress += 1
        self.versions.poll_record()  # the gateway writes it before it sends frames for a new version
        # The first frame after a start may come before the first round of `_work`.
        self.versions.open_missing(time.monotonic())
        name = getattr(frame, "model", "")
        is_close = isinstance(frame, m.SessionClose)  # which needs no version of the model
        sessions = self.versions.sessions_of(name) if is_close else self.versions.sessions.get(name)
        loaded = self.versions.find(name, frame.version if isinstance(frame, m.SessionBegin) else "")
        if sessions is not None:
            sessions.handle(peer, frame, loaded.pages.tokenizer if loaded is not None else "")
        else:
            self._reply(peer, answer(None, peer, frame))

    def _reply(self, peer: bytes, reply: m.Frame | None) -> None:
        if reply is not None:
            self.gateways.send(peer, reply)  # if that fails, the gateway is gone; its successor asks again

    def _on_gateway_down(self, peer: bytes, hello: m.Hello) -> None:
        for sessions in self.versions.sessions.values():
            sessions.drop_holder(peer)

    # -------------------------------------------------------------- commands

    def _on_command(self, request: dict[str, Any]) -> dict[str, Any] | Later:
        """The control socket's handler.

        `{"op": "audit"}` for `starling kv check`; `{"op": "clear", "model", "tenant"}` and `{"op": "clear_progress"}`
        for `starling kv clear`, where "" stands for all; those of page_exchange.py, prefix_exchange.py and
        session_exchange.py.
        """
        if request.get("op") == "session":
            return self.session_exchange.answer(request)
        if request.get("op") == "tails":
            return self.exchange.tails(request)
        if request.get("op") == "take":
            return self.exchange.take(request)
        if request.get("op") == "prefixes":
            return self.prefix_exchange.prefixes(request)
        if request.get("op") == "keep":
            if self.clearing is not None and not self.clearing.is_done:
                raise Conflict("cached pages are being cleared; what would be cached now is not wanted")
            self.loop.mark_active()
            return self.prefix_exchange.keep(request)
        if request.get("op") == "clear":
            self._clear(str(request.get("model", "")), str(request.get("tenant", "")))
            return self._clearing_report()
        if request == {"op": "clear_progress"}:
            return self._clearing_report()
        if request != {"op": "audit"}:
            raise InvalidRequest(f"unknown request {str(request)[:100]}, expected {{'op': 'audit'}}", "op")
        with self.loop.allow_stall(MAX_STALL_S):
            audits = [audit(pages) for pages in self.versions.pages()]
        return {"models": [msgspec.to_builtins(one) for one in audits if one is not None]}

    def _clear(self, model: str, tenant: str) -> None:
        if self.clearing is not None and not self.clearing.is_done:
            raise Conflict("cached pages are being cleared already; try again when that has ended")
        # Imported here: what checks keys is needed by this command only, and brings `ssl`.
        from pipeline.api.key_file import KeyFile, key_path
        from pipeline.api.keys import tenant_salt

        keys = KeyFile(key_path(paths.state_dir(self.config)))
        keys.refresh()
        tenants = {*self.config.tenants, *(key.tenant for key in keys.keys.values())}
        owners = frozenset(tenant_salt(self.config, one, has_key_file=keys.exists) for one in tenants)
        owner = tenant_salt(self.config, tenant, has_key_file=keys.exists) if tenant else None
        if owner == "":
            raise Conflict(f"tenant {tenant!r} shares its cached pages with others; leave out --tenant to drop them")
        chosen = [one for one in self.versions.by_id.values() if model in ("", one.version.name)]
        for one in chosen:
            one.warming.stop()
        self.exchange.close()  # what they would bring is cached by no answer of this server
        self.prefix_exchange.close()
        self.clearing = Clearing([one.pages for one in chosen], owner, owners)
        self.loop.mark_active()
        log.info("cached pages are cleared by an operator", extra={"model": model, "tenant": tenant})

    def _clearing_report(self) -> dict[str, Any]:
        if self.clearing is None:
            raise Conflict("nothing was cleared since this process started; the kv stage may have been restarted")
        reports = [msgspec.to_builtins(one) for one in self.clearing.reports]
        return {"done": self.clearing.is_done, "models": reports}

    # -------------------------------------------------------------- states and metrics

    def _tick(self) -> None:
        """Send `KvState` to each scheduler when it has changed, and with its heartbeats; update the metrics."""
        now = time.monotonic()
        heartbeat_s = self.config.server.heartbeat_ms / 1000
        is_due = now - self._pushed_at >= 0.9 * heartbeat_s * (2 if self.loop.is_steady else 1)
        if self.loop.is_idle:
            is_due = timer_coalescing.has_period_elapsed(
                now, self._pushed_at, max(timer_coalescing.IDLE_HEARTBEAT_S, IDLE_INTERVALS * heartbeat_s)
            )
        if is_due:
            self._pushed_at = now
            measure(self.versions.pages(), self.loop.metrics, self.versions.removed, self.versions.sessions)
        is_steady = self.loop.ready
        for loaded in self.versions.by_id.values():
            if loaded.manager is None or loaded.peer is None or not loaded.is_answered:
                is_steady = False
                continue
            state = self._state(loaded, loaded.manager)
            # Where pages are short, sequences wait for the state that says that some are free.
            is_steady = is_steady and state.free + state.cached >= state.total * STEADY_FREE
            if is_due or state != loaded.last_state:
                loaded.last_state = state
                self.hub.send(loaded.peer, state)
        self.loop.is_steady = is_steady

    @staticmethod
    def _state(loaded: LoadedVersion, manager: Manager) -> m.KvState:
        assert loaded.pages.geometry is not None
        pool = manager.pool
        return m.KvState(
            loaded.name,
            pool.total,
            pool.free,
            pool.cached,
            pool.leased,
            loaded.pages.geometry.page_bytes,
        )


def main(config: Config) -> int:
    """Run the stage; returns its exit code."""
    return KvStage(config).run()
