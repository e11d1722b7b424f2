"""Frames between scheduler and kv: leases of pages."""

from __future__ import annotations

from pipeline.protocol.messages.frame import Frame, Heartbeat, Hello


class Acquire(Frame, tag="a"):
    """Pages for a new sequence whose tokens are in row `row` of the model's step arena.

    `kv` shares as many full cached pages as match (never the page of the last token, whose logits
    are needed) and leases free pages up to `want_tokens` positions.
    """

    id: int  # correlates the answer; grows
    model: str
    sequence: str
    row: int
    n_tokens: int  # known tokens in the row
    want_tokens: int
    salt: str = ""
    sharable: int = -1  # leading positions that may be shared; -1: as many as match
    # Positions that attention reads in layers with a window, the query's included; 0: all. Older pages of their groups
    # are not needed (shm/layer_groups.py).
    window: int = 0
    ahead: int = 0  # with `window`: at most so many positions beyond the cached ones are leased
    tenant: str = ""  # for log lines
    session: str = ""  # likewise, as in `Submit`


class Extend(Frame, tag="x"):
    """More pages, so that the sequence holds `want_tokens` positions."""

    id: int
    model: str
    sequence: str
    want_tokens: int


class Commit(Frame, tag="c"):
    """The first `n_tokens` positions are computed and acknowledged: full pages may be indexed."""

    model: str
    sequence: str
    n_tokens: int
    unread: int = 0  # leading positions that no step reads any more in layers with a window: those pages are released


class Release(Frame, tag="l"):
    """The sequence has ended or was preempted; its first `n_tokens` positions are valid.

    Sent when no unacknowledged step contains the sequence: its pages can be leased again at once.
    """

    model: str
    sequence: str
    n_tokens: int


class Reconcile(Frame, tag="y"):
    """After a restart of `kv` or of the scheduler: all leases that the scheduler holds.

    `kv` allocates nothing before it and frees every page that no listed lease contains.  A scheduler that has
    just started, and holds no lease, sends it only after the worker has detached from the old generation
    (`WorkerReady`).
    """

    model: str
    leases: list[tuple[str, int, int, tuple[int, ...]]]  # sequence, row, n_tokens, pages (as in `Granted`)
    owners: tuple[tuple[str, str], ...] = ()  # tenant and session of each lease, for log lines; (): not known


class Granted(Frame, tag="G"):
    """`pages` is the sequence's whole page table so far; the first `cached_tokens` positions are computed.

    -1 stands for each page of the first places that the sequence does not hold, because no step reads it
    (`Commit.unread`).
    `id` is the request's and is unique for each model only.
    """

    id: int
    sequence: str
    pages: tuple[int, ...]
    cached_tokens: int = 0
    model: str = ""


class Denied(Frame, tag="N"):
    """No pages now (`fits`: they would fit into an empty arena) or never. `id` as in `Granted`; 0: see `KvReady`."""

    id: int
    sequence: str
    fits: bool
    needed_pages: int
    free_pages: int  # free or evictable
    total_pages: int
    model: str = ""


class KvState(Frame, tag="K"):
    """Page counts of a model. Sent with every heartbeat."""

    model: str
    total: int
    free: int
    cached: int
    leased: int
    page_bytes: int


class KvAttach(Frame, tag="t"):
    """The step arena from which `kv` reads a model's tokens. kv answers with `KvReady`, once for each arena."""

    model: str
    digest: str
    steps_path: str
    generation: int = 0  # of the step arena: another one may have the same path


class KvReady(Frame, tag="k"):
    """The model's KV arena exists. With `reconciled` False the scheduler must send `Reconcile` first.

    Sent again, with `reconciled` True, after `Reconcile` has been processed.  For each listed lease that kv cannot
    verify it sends `Denied` with id 0: the scheduler releases the sequence and acquires its pages again.
    """

    model: str
    digest: str
    arena_path: str
    pages: int
    page_tokens: int
    page_bytes: int
    reconciled: bool = True
    error: str = ""
    generation: int = 0  # of the arena's contents; when it changes, all leases are lost


SchedulerToKv = Hello | Heartbeat | KvAttach | Acquire | Extend | Commit | Release | Reconcile
KvToScheduler = Hello | Heartbeat | KvReady | Granted | Denied | KvState
