"""Layer groups: how the layers of a model are divided among KV pages.

A model whose layers all read the same positions has one group: a page holds all layers.  Where only some layers have a
sliding window, such a page would stay for the layers that read all positions.  There each group has layers of one kind,
a page holds one group, and pages of groups with a window are released behind it.  All groups have the same number of
layers, so that all pages have one size and every free page is usable for every group; the last group of a kind may be
filled up with unused space.

A *place* is a run of `page_tokens` positions of a sequence.  A page table has the pages of a place side by side, those
of groups without a window first:

    place 0                        place 1
    full  windowed  windowed ...   full  windowed  windowed ...
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

NO_PAGE = -1  # in a page table: the sequence does not hold the page, because no step reads it
MAX_GROUPS = 8  # so many pages of a place are leased, named and verified one by one
LONG_TEXT = 8  # windows: the length of the text that is to take the least memory
LEAST_SAVED = 0.1  # of that text's memory; else more pages are not worth it


class LayerGroups(NamedTuple):
    """The groups of a model."""

    n_groups: int = 1
    full: int = 0  # of these, groups of layers that read all positions, where other layers have a window; 0: one group

    @property
    def windowed(self) -> int:
        """Groups whose pages are released behind the window, if there is a window."""
        return self.n_groups - self.full

    def n_pages(self, n_places: int, n_unread: int = 0) -> int:
        """Pages that a sequence holds of its first `n_places` places, the first `n_unread` of which are unread."""
        return n_places * self.n_groups - n_unread * self.windowed

    def held(self, pages: Sequence[int], n_unread: int) -> list[int]:
        """The pages of a page table, without those of groups with a window at the first `n_unread` places."""
        end = n_unread * self.n_groups
        kept = [page for i, page in enumerate(pages[:end]) if i % self.n_groups < self.full] if self.full else []
        return [*kept, *pages[end:]]

    def table(self, held: Sequence[int], n_unread: int) -> list[int]:
        """The page table whose pages are `held`: the reverse of `held`."""
        full, pages = self.full, list(held)
        found: list[int] = []
        for place in range(n_unread):
            found += pages[place * full : (place + 1) * full]
            found += [NO_PAGE] * self.windowed
        return found + pages[n_unread * full :]

    def without_unread(self, pages: Sequence[int], n_unread: int) -> tuple[int, ...]:
        """The page table with NO_PAGE for the pages that are not held."""
        end = n_unread * self.n_groups
        return (
            *(page if i % self.n_groups < self.full else NO_PAGE for i, page in enumerate(pages[:end])),
            *pages[end:],
        )

    def n_unread(self, pages: Sequence[int]) -> int:
        """Number of places without a page at the beginning of a page table, by its first group with a window."""
        found = (place for place, page in enumerate(pages[self.full :: self.n_groups]) if page != NO_PAGE)
        return next(found, len(pages) // self.n_groups)


ONE_GROUP = LayerGroups()


@lru_cache(maxsize=64)
def divide_layers(n_layers: int, n_windowed: int) -> tuple[int, LayerGroups]:
    """The layers of a page, and the groups, of a model in which `n_windowed` of `n_layers` layers have a window.

    One group if all layers are of one kind, or if others save too little memory.
    """
    best, least = (n_layers, ONE_GROUP), ((1 - LEAST_SAVED) * LONG_TEXT * n_layers, 1)
    for layers in range(1, n_layers if 0 < n_windowed < n_layers else 0):
        full, windowed = -(-(n_layers - n_windowed) // layers), -(-n_windowed // layers)
        cost = layers * (LONG_TEXT * full + windowed), full + windowed
        if full + windowed <= MAX_GROUPS and cost < least:
            best, least = (layers, LayerGroups(full + windowed, full)), cost
    return best


def places_of_layers(windows: Sequence[int], page_layers: int, groups: LayerGroups) -> list[tuple[int, int]]:
    """For each layer the group that it is in, and its place within the group's pages.

    windows: of each layer, 0 where it reads all positions.
    """
    if groups.n_groups == 1:
        return [(0, layer) for layer in range(len(windows))]
    found, n_full, n_windowed = [], 0, 0
    for window in windows:
        if window:
            found.append((groups.full + n_windowed // page_layers, n_windowed % page_layers))
            n_windowed += 1
        else:
            found.append((n_full // page_layers, n_full % page_layers))
            n_full += 1
    return found
