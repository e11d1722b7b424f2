"""The table of edges: which stages communicate, which one binds, and what happens when a queue is full.

| edge               | binds (ROUTER) | connects (DEALER) | at the high-water mark               |
|--------------------|----------------|-------------------|--------------------------------------|
| gateway-tokenizer  | tokenizer      | gateway           | caller gets 503 `overloaded`         |
| gateway-scheduler  | scheduler      | gateway           | 429; admission credits keep below it |
| gateway-kv         | kv             | gateway           | bounded by the turns of sessions     |
| scheduler-kv       | kv             | scheduler         | bounded by the leases requested      |
| scheduler-worker   | scheduler      | worker            | doorbells: the ring is authoritative |

Each pair of stages has one multiplexed connection.  ROUTERs run with `ROUTER_MANDATORY`, so an unknown or full
peer is an error at the sender and never a silent drop.  Addresses are `ipc://RUN_DIR/EDGE.sock` unless the
configuration gives others (`edges:`), see pipeline/config/addresses.py.  The frames of each edge are in
`messages.FRAMES`; this table does not import them, so that a configuration can be checked without the protocol.
"""

from __future__ import annotations

from typing import NamedTuple


class Edge(NamedTuple):
    """One connection between two stages."""

    name: str
    binder: str
    connector: str
    high_water_mark: int  # frames, each way
    # The connector derives readiness (`/ready`) from the binder's heartbeats, so the binder sends them at the
    # configured interval even when it is idle.
    is_readiness_source: bool = False
    shares_memory: bool = False  # both stages map the same arenas, so they run on one machine


EDGES = {
    edge.name: edge
    for edge in (
        Edge("gateway-tokenizer", "tokenizer", "gateway", 4096, is_readiness_source=True),
        Edge("gateway-scheduler", "scheduler", "gateway", 16384, is_readiness_source=True),
        Edge("gateway-kv", "kv", "gateway", 1024, is_readiness_source=True),
        Edge("scheduler-kv", "kv", "scheduler", 4096, shares_memory=True),
        Edge("scheduler-worker", "scheduler", "worker", 1024, shares_memory=True),
    )
}
