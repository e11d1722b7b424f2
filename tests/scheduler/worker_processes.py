"""Processes in place of worker groups, and frames of theirs and of kv, for tests of a version's runner."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import msgspec

from pipeline.protocol.messages import Hello, KvReady, WorkerReady
from shm.arena import process_ticks
from shm.layer_groups import LayerGroups
from stages.scheduler.core.submission_queue import UNAVAILABLE_S

from .peers import VOCAB

DIGEST = "ab" * 32
GATEWAY = b"gateway"
LATE = 10 * UNAVAILABLE_S  # the scheduler has run for a long time before the event


class Group:
    """A process in place of a worker group: it can be killed and waited for."""

    def __init__(self, epoch: int) -> None:
        self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        pid = self.process.pid
        self.hello = Hello("worker:m", epoch, pid, process_ticks(pid))
        self.ready = WorkerReady("m", DIGEST, epoch, 1, ((pid, self.hello.start_ticks),), VOCAB, 400)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def cannot_attach(group: Group) -> WorkerReady:
    return msgspec.structs.replace(group.ready, error="m.act: needs 9 bytes but /dev/shm has 1 free")


def other_arena(*, reconciled: bool = False) -> KvReady:
    return KvReady("m", DIGEST, "/other", 128, 16, 1024, generation=2, reconciled=reconciled)


def index_of(ready: WorkerReady, **fields: int) -> Any:
    """The index of the file that a group reports."""
    groups = LayerGroups(*ready.page_groups)
    hyper = {"context_length": ready.context_length, "vocab_size": ready.vocab_size, "width": ready.width}
    return SimpleNamespace(digest=ready.digest, hyper=SimpleNamespace(**{**hyper, **fields}, page_groups=groups))
