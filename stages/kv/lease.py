"""The lease of a sequence, and what the kv stage answers about it (manager.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shm.layer_groups import ONE_GROUP, LayerGroups
from shm.prefix_hash import PageHash


class Grant(NamedTuple):
    """The whole page table of a sequence; its first `cached_tokens` positions are computed.

    NO_PAGE stands for a page that the sequence does not hold, because it does not read it.
    """

    pages: tuple[int, ...]
    cached_tokens: int = 0


class Denial(NamedTuple):
    """Too few pages.

    `fits`: an empty arena would be large enough.  `needed`: pages beyond those that the sequence holds or shares;
    `free`: pages that are free or can be evicted.
    """

    fits: bool
    needed: int
    free: int
    total: int


class LeaseClaim(NamedTuple):
    """A lease that the scheduler holds; `pages` is the sequence's page table."""

    sequence: str
    row: int
    n_tokens: int
    pages: tuple[int, ...]


@dataclass(slots=True)
class Lease:
    """The pages that a sequence holds."""

    sequence: str
    row: int
    serial: int  # of the row; 0: unknown, its tokens are not read
    root: PageHash
    pages: list[int]  # the page table
    hashes: list[PageHash]  # of the sequence's full places, as far as its tokens are known
    n_shared: int  # places shared when the lease began
    n_final: int  # leading places whose pages are shared, cached, or duplicates of cached ones
    born_ns: int  # admission of the sequence
    n_tokens: int  # positions with a known token: of the prompt, then as far as is committed
    n_unread: int = 0  # leading places without pages of groups with a window, because no step reads them
    n_released: int = 0  # of these, pages that the sequence had
    is_suspect: bool = False  # refused by `reconcile`: holds its pages until its release and caches none
    groups: LayerGroups = ONE_GROUP
    # Where the pages of a prompt are granted as it is computed, and those of some groups stay:
    n_prompt: int = 0  # places of the prompt
    n_window: int = 0  # places of which it holds pages of groups with a window meanwhile, at most

    @property
    def held(self) -> list[int]:
        """The pages that the sequence holds."""
        return self.groups.held(self.pages, self.n_unread)

    @property
    def n_places(self) -> int:
        """Places that the page table has."""
        return len(self.pages) // self.groups.n_groups

    @property
    def n_expected(self) -> int:
        """Pages that the rest of its prompt takes, beside those that it holds."""
        return expected_pages(self.groups, self.n_places, self.n_unread, self.n_prompt, self.n_window)


def expected_pages(groups: LayerGroups, n_places: int, n_unread: int, n_prompt: int, n_window: int) -> int:
    """Pages that a prompt of `n_prompt` places takes beside those of its first `n_places`. As the fields of `Lease`."""
    if n_places >= n_prompt:
        return 0
    return groups.full * (n_prompt - n_places) + groups.windowed * max(0, n_window - (n_places - n_unread))
