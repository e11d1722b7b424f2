"""An engine as page exchange sees it: an arena in a file, its manager, and one request of six full pages."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from pipeline.protocol import messages as m
from shm.pages import KvGeometry, create_kv
from stages.agent.kv_pages.arena_pages import FoundPages, find_pages
from stages.kv.lease import Grant
from stages.kv.manager import Manager
from stages.kv.page_exchange import PageExchange
from stages.kv.page_import import PageImports
from tests.kv.world import DIGEST, GEOMETRY, PAGE_TOKENS, FakeRows, contents, manager

N_PAGES = 16
TOKENS = [token for page in range(6) for token in [page + 5] * PAGE_TOKENS] + [1]
REQUEST = "req-" + "0" * 24


class Side:
    """An engine's arena in a file, its manager and its exchange."""

    def __init__(self, folder: Path, name: str, geometry: KvGeometry = GEOMETRY, n_pages: int = N_PAGES) -> None:
        self.path = folder / f"{name}.kv"
        self.arena, self.views = create_kv(self.path, geometry, n_pages, DIGEST, 1)
        self.rows = FakeRows()
        self.manager: Manager = manager(self.views, self.rows)
        self.now = 0.0
        known = {0: TOKENS}
        pages = SimpleNamespace(
            arena=self.arena,
            digest=DIGEST.hex(),
            geometry=geometry,
            rows=SimpleNamespace(known=lambda row, n: (np.array(known[row][:n], np.int32), 1)),
        )
        self.loaded: Any = SimpleNamespace(manager=self.manager, pages=pages, name="tiny", imports=PageImports())
        self.exchange = PageExchange(lambda name: self.loaded if name == "tiny" else None, lambda: self.now)

    def compute(self, sequence: str, tokens: list[int], salt: str = "") -> None:
        """Run a sequence, which goes on holding its pages."""
        serial = self.rows.take(0, tokens)
        grant = self.acquire(sequence, tokens, salt, serial)
        for place in range(grant.cached_tokens // PAGE_TOKENS, len(tokens) // PAGE_TOKENS):
            self.views.pages[grant.pages[place]] = contents(tokens, place, salt)
        self.manager.commit(sequence, len(tokens))

    def acquire(self, sequence: str, tokens: list[int], salt: str = "", serial: int = 0) -> Grant:
        grant = self.manager.acquire(sequence, np.array(tokens, np.int32), len(tokens), 0, serial, salt)
        assert isinstance(grant, Grant)
        return grant

    def found(self, request: str = REQUEST) -> FoundPages:
        """The pages of a request, as its agent finds them."""
        answer = self.exchange.tails({"model": "tiny", "request": request})
        return find_pages(self.path, answer["digest"], answer["tails"], 1 << 30, answer["lowest"])

    def begin(self, sequence: str = f"{REQUEST}/0~1", salt: str = "", window: int = 0) -> bool:
        """A sequence is about to acquire its pages; whether it has to wait for some."""
        frame = m.Acquire(1, "tiny", sequence, 0, len(TOKENS), len(TOKENS), salt, window=window)
        return self.exchange.begin(self.loaded, frame)

    def step(self) -> list[str]:
        """One turn of the loop; the sequences whose pages are there."""
        return [frame.sequence for _, frame in self.exchange.step([self.loaded])]

    def use(self, sequence: str = f"{REQUEST}/0~1", salt: str = "", window: int = 0) -> None:
        """A sequence is about to acquire its pages, and nothing else happens meanwhile."""
        if self.begin(sequence, salt, window):
            while not self.step():
                pass
        self.manager.check()
        self.loaded.imports.end(sequence)

    def check_shared(self, grant: Grant, tokens: list[int], salt: str = "") -> None:
        """The cached pages have the contents that belong to the tokens."""
        for place in range(grant.cached_tokens // PAGE_TOKENS):
            np.testing.assert_array_equal(self.views.pages[grant.pages[place]], contents(tokens, place, salt))
        self.manager.check()
