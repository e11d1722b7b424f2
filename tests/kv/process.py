"""A real kv process with a minimal scheduler, worker and gateway.

The model is an index file without weights, which kv does not need.  The contents that the "worker" writes into a page
are a function of all tokens up to the page's end, so a test can tell whose page it received.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml

from pipeline.config import addresses, paths
from pipeline.config.load import load
from pipeline.ipc.endpoint import Link
from pipeline.models import store
from pipeline.observe.metrics import Snapshot
from pipeline.protocol import messages as m
from pipeline.protocol.topology import EDGES
from shm import checkpoint
from shm.arena import Arena
from shm.pages import KvArena, attach_kv
from shm.step_ring import SERIAL, StepsGeometry, create_steps
from stages.kv.storage.page_file import PageFile
from tests.kv.world import contents

ROOT = Path(__file__).parents[2]
PAGE_TOKENS = 16
PAGES = 12
ROWS = 16
MODEL = "tiny"
WAIT_S = 120.0
# A peer of which nothing came for ten times as long counts as dead: longer than this process may have no core.
HEARTBEAT_MS = 500

# The limits on disks, which a busy machine would reach as well: pages would be computed that a test expects to be read.
START = """
from starling.cli import main
from stages.kv import model, page_ins
from stages.kv.storage import disk_store
disk_store.SLOW_S = {slow_s}
model.OPEN_WAIT_S = {open_wait_s}
page_ins.WAIT_S = {read_wait_s}
main()
"""

_peers: weakref.WeakSet[Scheduler | Gateway] = weakref.WeakSet()


def _tick() -> None:
    """Send heartbeats that are due, of every peer: while a test waits for one of them, kv would discard the others."""
    for peer in list(_peers):
        peer.tick()


def write_model(home: Path, name: str = MODEL, seed: int = 0) -> str:
    """A GGUF file (its first bytes) and its index. Returns the digest."""
    gguf = home / f"{name}.gguf"
    gguf.write_bytes(b"GGUF" + bytes([seed]) * 64)
    config = load_config(home)
    models_dir = home / "models"
    model = config.model(name)
    assert model is not None
    digest = store.fetch(model, models_dir).digest
    hyper = checkpoint.Hyper(2, 64, 2, 2, 32, 64, 128, 4096, 1e-5, 32, "halves", "silu")
    tokenizer = checkpoint.TokenizerData("gpt2", "", [], [], [], [], 0, 0, -1, -1, -1, False, False, "")
    index = checkpoint.Index(
        checkpoint.VERSION,
        digest,
        "llama",
        name,
        1,
        68,
        0,
        hyper,
        msgspec.Raw(msgspec.msgpack.encode(tokenizer)),
        [],
    )
    checkpoint.write_index(models_dir / f"{digest}.idx", index)
    return digest


def configure(home: Path, cache: dict[str, Any] | None = None, **model: Any) -> None:
    """`home`/starling.yaml: one model, a KV arena of a few pages."""
    settings = {
        "server": {"run_dir": str(home / "run"), "arena_dir": str(home / "shm"), "heartbeat_ms": HEARTBEAT_MS},
        "models": [
            {"name": MODEL, "path": str(home / f"{MODEL}.gguf"), "page_tokens": PAGE_TOKENS, "kv_cache_mb": 1, **model}
        ],
        "cache": cache or {},
    }
    (home / "starling.yaml").write_text(yaml.safe_dump(settings))


def n_saved(home: Path) -> int:
    """Pages in the files of the state directory."""
    count = 0
    for path in (home / "state" / "kv").glob("*.pages"):
        with contextlib.suppress(ValueError), PageFile(path) as file:  # a file that is being made has no header yet
            count += sum(1 for _ in file.records())
    return count


def load_config(home: Path) -> Any:
    return load(home / "starling.yaml", {"STARLING_HOME": str(home), "HOME": str(home)})


class KvProcess:
    """`starling stage kv`. No access to a disk counts as slow, however busy the machine is."""

    def __init__(
        self,
        home: Path,
        faults: str = "",
        site: Path | None = None,
        open_wait_s: float = WAIT_S,
        read_wait_s: float = WAIT_S,
    ) -> None:
        """`site`: a directory with a sitecustomize.py for the process.

        `open_wait_s`: for which a start waits for its page files; `read_wait_s`: and a grant for its pages.
        """
        self.home = home
        self.site = site
        self.open_wait_s, self.read_wait_s = open_wait_s, read_wait_s
        self.faults = faults
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> KvProcess:
        environment = {
            **os.environ,
            "STARLING_HOME": str(self.home),
            "PYTHONPATH": os.pathsep.join(str(path) for path in (self.site, ROOT) if path is not None),
            "STARLING_CONFIG": str(self.home / "starling.yaml"),
            "STARLING_FAULTS": self.faults,
        }
        start = START.format(slow_s=WAIT_S, open_wait_s=self.open_wait_s, read_wait_s=self.read_wait_s)
        with open(self.home / "kv.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", start, "stage", "kv"],
                env=environment,
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        return self

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Signal and wait; returns the exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)

    def __enter__(self) -> KvProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def log(self) -> str:
        return (self.home / "kv.log").read_text()


class Scheduler:
    """The parts of the scheduler and the worker that use a kv process."""

    def __init__(self, home: Path, digest: str, max_tokens: int = 512) -> None:
        config = load_config(home)
        self.digest = digest
        self.steps_path = paths.arena_dir(config) / f"{MODEL}.steps"
        self.geometry = StepsGeometry(ROWS, 4, 4, max_tokens, max_tokens // PAGE_TOKENS)
        self.steps_arena, self.steps = create_steps(self.steps_path, self.geometry, bytes.fromhex(digest))
        env = {"STARLING_HOME": str(home)}
        self.link = Link(
            EDGES["scheduler-kv"],
            addresses.edge_address(config, "scheduler-kv", env),
            "scheduler",
            heartbeat_ms=HEARTBEAT_MS,
        )
        _peers.add(self)
        self.link.on_up = lambda hello: self._up()
        self.link.on_down = lambda hello: self._down()
        self.ready: m.KvReady | None = None
        self.frames: list[m.Frame] = []
        self.stopping = False
        self.serial = time.time_ns()
        self.ids = 0
        self.sequences: dict[str, dict[str, Any]] = {}  # row, tokens, salt, pages, computed
        self.rows = list(range(ROWS))
        self.arena: Arena | None = None
        self.kv: KvArena | None = None

    def close(self) -> None:
        self.link.close()
        self.steps_arena.close()
        self._drop_arena()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def replace_steps(self, generation: int) -> None:
        """Create another step arena, and let kv attach to it."""
        self.steps_arena.close()
        digest = bytes.fromhex(self.digest)
        self.steps_arena, self.steps = create_steps(self.steps_path, self.geometry, digest, generation)
        self.link.send(m.KvAttach(MODEL, self.digest, str(self.steps_path), generation))

    # -------------------------------------------------------------- the link

    def _up(self) -> None:
        self.link.send(m.KvAttach(MODEL, self.digest, str(self.steps_path)))

    def _down(self) -> None:
        self.ready = None

    def _drop_arena(self) -> None:
        if self.arena is not None:
            self.kv = None
            self.arena.close()
            self.arena = None

    def tick(self) -> None:
        """Send a heartbeat if it is due."""
        reason = "stopping" if self.stopping else ""
        self.link.tick(m.Heartbeat("scheduler", self.link.epoch, 1, False, not self.stopping, reason))

    def turn(self, timeout_s: float = 0.02) -> None:
        _tick()
        select.select([self.link.fd], [], [], timeout_s)
        for frame in self.link.receive():
            if isinstance(frame, m.KvReady) and not frame.error:
                self._on_ready(frame)
            self.frames.append(frame)

    def _on_ready(self, frame: m.KvReady) -> None:
        if frame.reconciled:
            self.ready = frame
            return
        if self.arena is None or self.arena.generation != frame.generation:
            self._drop_arena()
            self.arena, self.kv, _ = attach_kv(Path(frame.arena_path), bytes.fromhex(self.digest))
            self.sequences = {name: s for name, s in self.sequences.items() if not s["pages"]}
        held = [(name, s["row"], s["computed"], s["pages"]) for name, s in self.sequences.items() if s["pages"]]
        self.link.send(m.Reconcile(MODEL, held))

    def wait(self, what: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
        """Exchange frames until `what` returns a true value; returns it."""
        deadline = time.monotonic() + timeout_s
        while not (found := what()):
            assert time.monotonic() < deadline, "the condition did not become true in time"
            self.turn()
        return found

    def wait_ready(self) -> m.KvReady:
        return self.wait(lambda: self.ready)

    def take(self, kind: type, **fields: Any) -> Any:
        """Remove and return the first frame of this kind with these fields; wait for it if necessary."""

        def find() -> Any:
            for frame in self.frames:
                if isinstance(frame, kind) and all(getattr(frame, k) == v for k, v in fields.items()):
                    self.frames.remove(frame)
                    return frame
            return None

        return self.wait(find)

    # -------------------------------------------------------------- sequences

    def acquire(self, name: str, tokens: list[int], ahead: int = 0, salt: str = "") -> Any:
        """Acquire pages for a sequence: returns `Granted` or `Denied`."""
        self.ask(name, tokens, ahead, salt)
        return self.answer(name)

    def ask(self, name: str, tokens: list[int], ahead: int = 0, salt: str = "") -> None:
        row = self.rows.pop(0)
        self.serial += 1
        self.steps.row_ints[row, SERIAL] = self.serial
        self.steps.tokens[row, : len(tokens)] = tokens
        self.ids += 1
        self.sequences[name] = {
            "row": row,
            "tokens": tokens,
            "salt": salt,
            "pages": (),
            "computed": 0,
            "id": self.ids,
        }
        self.link.send(m.Acquire(self.ids, MODEL, name, row, len(tokens), len(tokens) + ahead, salt))

    def answer(self, name: str) -> Any:
        sequence = self.sequences[name]

        def find() -> Any:
            for frame in self.frames:
                if isinstance(frame, m.Granted | m.Denied) and frame.id == sequence["id"]:
                    self.frames.remove(frame)
                    return frame
            return None

        answer = self.wait(find)
        if isinstance(answer, m.Granted):
            sequence["pages"] = answer.pages
            sequence["computed"] = answer.cached_tokens
        else:
            self.rows.append(sequence["row"])
            del self.sequences[name]
        return answer

    def compute(self, name: str, n_tokens: int = -1) -> None:
        """Write all positions up to `n_tokens` (all) and commit them."""
        s = self.sequences[name]
        end = len(s["tokens"]) if n_tokens < 0 else n_tokens
        assert self.kv is not None
        for i in range(s["computed"] // PAGE_TOKENS, -(-end // PAGE_TOKENS)):
            page = s["pages"][i]
            if (i + 1) * PAGE_TOKENS <= end:
                self.kv.pages[page] = contents(s["tokens"], i, s["salt"], self.kv.pages.shape[1])
            else:
                self.kv.pages[page] = 0xEE
        s["computed"] = max(end, s["computed"])
        self.link.send(m.Commit(MODEL, name, s["computed"]))

    def release(self, name: str) -> None:
        s = self.sequences.pop(name)
        self.rows.append(s["row"])
        self.link.send(m.Release(MODEL, name, s["computed"]))

    def run(self, name: str, tokens: list[int], salt: str = "") -> Any:
        """A whole request; returns its `Granted` after checking the cached pages."""
        answer = self.acquire(name, tokens, salt=salt)
        assert isinstance(answer, m.Granted), answer
        self.check(name, answer.cached_tokens)
        self.compute(name)
        self.release(name)
        return answer

    def check(self, name: str, cached_tokens: int) -> None:
        """Check that the pages that are cached have the contents of the sequence's tokens."""
        s = self.sequences[name]
        assert self.kv is not None
        for i in range(cached_tokens // PAGE_TOKENS):
            expected = contents(s["tokens"], i, s["salt"], self.kv.pages.shape[1])
            np.testing.assert_array_equal(self.kv.pages[s["pages"][i]], expected)

    def state(self) -> m.KvState:
        """A state that kv sends after it has handled every frame before; others may be on their way."""
        self.ids += 1
        assert self.link.send(m.Extend(self.ids, MODEL, "unknown", 1))
        self.take(m.Denied, id=self.ids)
        self.frames = [frame for frame in self.frames if not isinstance(frame, m.KvState)]
        state: m.KvState = self.take(m.KvState)
        assert state.free + state.cached + state.leased == state.total
        return state

    def total(self, family: str) -> float:
        """A counter in the metrics that kv wrote last, summed over its labels."""
        raw = (self.steps_path.parent / "kv.metrics").read_bytes()
        return sum(entry.value for entry in msgspec.msgpack.decode(raw, type=Snapshot).families.get(family, []))

    def wait_total(self, family: str, value: float) -> None:
        """Wait until kv has written this value."""
        self.wait(lambda: self.total(family) == value)


class Gateway:
    """A gateway that uses sessions."""

    def __init__(self, home: Path) -> None:
        config = load_config(home)
        address = addresses.edge_address(config, "gateway-kv", {"STARLING_HOME": str(home)})
        self.link = Link(EDGES["gateway-kv"], address, "gateway", heartbeat_ms=HEARTBEAT_MS)
        _peers.add(self)

    def tick(self) -> None:
        """Send a heartbeat if it is due."""
        self.link.tick(m.Heartbeat("gateway", self.link.epoch, 1, False, True))

    def turn(self) -> list[m.Frame]:
        _tick()
        select.select([self.link.fd], [], [], 0.02)
        return self.link.receive()

    def wait(self, is_up: bool) -> None:
        """Wait until kv is up, or known to be down."""
        deadline = time.monotonic() + WAIT_S
        while (self.link.peer is not None) != is_up:
            assert time.monotonic() < deadline, "kv did not come up, or its end was not noticed"
            self.turn()

    def ask(self, frame: m.Frame) -> m.Frame:
        """Send and return the answer."""
        assert self.link.send(frame)
        deadline = time.monotonic() + WAIT_S
        while True:
            for answer in self.turn():
                return answer
            assert time.monotonic() < deadline, "no answer"
