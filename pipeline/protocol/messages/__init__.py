"""Every message between processes: typed, tagged, positional structs ("frames"), encoded as msgpack.

frame.py              what all frames are; those of every edge
generation.py         sampling parameters and constraints of a sequence
gateway_tokenizer.py  one module for each edge, with the union of frames of each direction
gateway_scheduler.py
gateway_kv.py
scheduler_kv.py
scheduler_worker.py

`FRAMES` maps an edge's name to its two unions;
`topology.py` says which stage binds the edge and what happens when its queue is full.  Structs are
`array_like`: fields are appended with a default; removing or reordering one needs a new `PROTOCOL_VERSION`.
Frames carry descriptors; logits, weights and KV pages stay in arenas.  No module of this package uses sockets.

Ids: a *request* id is the public one (`req-...`, unique everywhere).  A *sequence* id is `request/choice`;
a sequence is the unit of scheduling and leasing.

Users import every name from this package.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pipeline.protocol.messages.frame import (
    PROTOCOL_VERSION,
    Frame,
    Heartbeat,
    Hello,
    encode,
)
from pipeline.protocol.messages.gateway_kv import (
    MAX_SESSION_ID,
    GatewayToKv,
    KvToGateway,
    SessionAbort,
    SessionBegin,
    SessionClose,
    SessionCommit,
    SessionDone,
    SessionHeld,
    SessionRefused,
)
from pipeline.protocol.messages.gateway_scheduler import (
    Cancel,
    GatewayToScheduler,
    Logprob,
    ModelState,
    ModelVocabulary,
    Pooled,
    Rejected,
    SchedulerState,
    SchedulerToGateway,
    SequenceEvent,
    SequenceTokens,
    Submit,
    Tokens,
    request_of,
)
from pipeline.protocol.messages.gateway_tokenizer import (
    CancelText,
    Describe,
    Described,
    Detokenize,
    Detokenized,
    Encode,
    Encoded,
    GatewayToTokenizer,
    Render,
    TokenizerFailed,
    TokenizerToGateway,
)
from pipeline.protocol.messages.generation import (
    CONSTRAINT_KINDS,
    DRY_BREAKERS,
    POOLINGS,
    Constraint,
    ReasoningPrefix,
    Sampling,
)
from pipeline.protocol.messages.scheduler_kv import (
    Acquire,
    Commit,
    Denied,
    Extend,
    Granted,
    KvAttach,
    KvReady,
    KvState,
    KvToScheduler,
    Reconcile,
    Release,
    SchedulerToKv,
)
from pipeline.protocol.messages.scheduler_worker import (
    Attach,
    Detach,
    SchedulerToWorker,
    StepDone,
    StepPublished,
    WorkerReady,
    WorkerToScheduler,
)

__all__ = [
    "CONSTRAINT_KINDS",
    "DRY_BREAKERS",
    "FRAMES",
    "MAX_SESSION_ID",
    "POOLINGS",
    "PROTOCOL_VERSION",
    "Acquire",
    "Attach",
    "Cancel",
    "CancelText",
    "Commit",
    "Constraint",
    "Denied",
    "Describe",
    "Described",
    "Detach",
    "Detokenize",
    "Detokenized",
    "EdgeFrames",
    "Encode",
    "Encoded",
    "Extend",
    "Frame",
    "GatewayToKv",
    "GatewayToScheduler",
    "GatewayToTokenizer",
    "Granted",
    "Heartbeat",
    "Hello",
    "KvAttach",
    "KvReady",
    "KvState",
    "KvToGateway",
    "KvToScheduler",
    "Logprob",
    "ModelState",
    "ModelVocabulary",
    "Pooled",
    "ReasoningPrefix",
    "Reconcile",
    "Rejected",
    "Release",
    "Render",
    "Sampling",
    "SchedulerState",
    "SchedulerToGateway",
    "SchedulerToKv",
    "SchedulerToWorker",
    "SequenceEvent",
    "SequenceTokens",
    "SessionAbort",
    "SessionBegin",
    "SessionClose",
    "SessionCommit",
    "SessionDone",
    "SessionHeld",
    "SessionRefused",
    "StepDone",
    "StepPublished",
    "Submit",
    "TokenizerFailed",
    "TokenizerToGateway",
    "Tokens",
    "WorkerReady",
    "WorkerToScheduler",
    "encode",
    "request_of",
]


class EdgeFrames(NamedTuple):
    """The unions of frames of one edge, by receiver."""

    to_binder: Any
    to_connector: Any


FRAMES: dict[str, EdgeFrames] = {
    "gateway-tokenizer": EdgeFrames(GatewayToTokenizer, TokenizerToGateway),
    "gateway-scheduler": EdgeFrames(GatewayToScheduler, SchedulerToGateway),
    "gateway-kv": EdgeFrames(GatewayToKv, KvToGateway),
    "scheduler-kv": EdgeFrames(SchedulerToKv, KvToScheduler),
    "scheduler-worker": EdgeFrames(WorkerToScheduler, SchedulerToWorker),
}
