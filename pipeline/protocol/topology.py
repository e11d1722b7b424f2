"""The table of edges: which stages talk, who binds, in which pattern, and what happens at the bound.

| edge               | binds (ROUTER) | connects (DEALER) | at the high-water mark               |
|--------------------|----------------|-------------------|--------------------------------------|
| gateway-tokenizer  | tokenizer      | gateway           | caller gets 503 `overloaded`         |
| gateway-scheduler  | scheduler      | gateway           | 429; admission credits keep below it |
| gateway-kv         | kv             | gateway           | bounded by turns of sessions         |
| scheduler-kv       | kv             | scheduler         | bounded by leases asked for          |
| scheduler-worker   | scheduler      | worker            | doorbells: the ring is the truth     |

One multiplexed connection for each pair; ROUTERs run with `ROUTER_MANDATORY`, so an unknown or full
peer is an error at the sender and never a silent drop.  Addresses are `ipc://RUN_DIR/EDGE.sock`
unless the configuration gives `tcp://` ones (`edges:`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pipeline.protocol import messages as m


class Edge(NamedTuple):
    name: str
    binder: str
    connector: str
    to_binder: Any  # union of frames the binder receives
    to_connector: Any
    high_water_mark: int  # frames, each way


EDGES = {
    edge.name: edge
    for edge in (
        Edge("gateway-tokenizer", "tokenizer", "gateway", m.GatewayToTokenizer, m.TokenizerToGateway, 4096),
        Edge("gateway-scheduler", "scheduler", "gateway", m.GatewayToScheduler, m.SchedulerToGateway, 16384),
        Edge("gateway-kv", "kv", "gateway", m.GatewayToKv, m.KvToGateway, 1024),
        Edge("scheduler-kv", "kv", "scheduler", m.SchedulerToKv, m.KvToScheduler, 4096),
        Edge("scheduler-worker", "scheduler", "worker", m.WorkerToScheduler, m.SchedulerToWorker, 1024),
    )
}
