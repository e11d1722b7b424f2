"""What `starling kv` and `starling kv check` report, as plain data for JSON."""

from __future__ import annotations

import msgspec

from stages.kv.audit import PageAudit


class Run(msgspec.Struct):
    """Consecutive pages of a prefix without a branch."""

    digest: str  # hash of the last page, hex
    parent: str  # hash of the page before the first one, hex; "": the run starts a prefix
    first: int  # place of the first page
    pages: int
    held: int  # number of these pages that sequences hold
    uses: int  # number of sequences that have held a page, the highest of these pages
    idle_s: float  # since the last use
    others: int = 0  # pages of further layer groups at the same places


class DiskReport(msgspec.Struct):
    """One page file."""

    kind: str  # "saved" or "spilled"
    path: str
    file_bytes: int
    pages: int
    cells: int
    hole_bytes: int = 0  # of cells without a page
    problems: list[str] = []


class SessionReport(msgspec.Struct):
    """One session."""

    id: str
    tenant: str
    tokens: int
    turns: int
    idle_s: float
    ttl_s: int


class ModelReport(msgspec.Struct):
    """One version of a model: arena, prefixes, page files and sessions."""

    model: str
    arena: str
    is_there: bool
    total: int = 0
    free: int = 0
    cached: int = 0
    leased: int = 0
    page_bytes: int = 0
    page_tokens: int = 0
    generation: int = 0  # of the arena
    audit: PageAudit | None = None  # of the running kv stage; None: it does not run, or this is not a check
    fragmentation: float | None = None  # share of leased positions without a token; None: no metrics of a kv stage
    unreachable: int = 0  # cached pages whose previous page is neither in the arena nor on disk
    runs: list[Run] = []
    disks: list[DiskReport] = []
    sessions: list[SessionReport] = []
    problems: list[str] = []


class Report(msgspec.Struct):
    """All models."""

    is_checked: bool
    models: list[ModelReport]
    audit_error: str = ""  # why a running kv stage did not answer

    @property
    def problems(self) -> list[str]:
        """All problems, one sentence each."""
        found = [self.audit_error] if self.audit_error else []
        for model in self.models:
            found += [*model.problems, *(problem for disk in model.disks for problem in disk.problems)]
        return found
