"""Whose prefixes begin at a root hash: the owner (pipeline/api/page_owner.py) of each root that sequences came with.

A root depends on the tenant's salt and on the request's own `cache_salt`, so it does not show its tenant. The owners of
roots without a request's salt are always known; others are learned as sequences arrive, and forgotten with the process
or when there are too many. Pages of a forgotten root count as everybody's where they are dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from pipeline.api.page_owner import key_owner, owner_of
from shm.prefix_hash import PageHash, RootHasher

MAX_ROOTS = 16_384


class RootOwners:
    """The owners that one process has learned, for one arena."""

    def __init__(self) -> None:
        self._owners: OrderedDict[PageHash, str] = OrderedDict()  # longest unused first

    def learn(self, root: PageHash, salt: str) -> None:
        """A sequence with this salt has come; its chain begins at `root`."""
        self._owners[root] = owner_of(salt)  # also instead of what another engine has said
        self._owners.move_to_end(root)
        if len(self._owners) > MAX_ROOTS:
            self._owners.popitem(last=False)

    def learn_owner(self, root: PageHash, owner: str) -> None:
        """A prefix that begins at `root` has come from another engine, which knows its owner."""
        self._owners.setdefault(root, owner)
        if len(self._owners) > MAX_ROOTS:
            self._owners.popitem(last=False)

    def owner(self, root: PageHash, root_hash_of: RootHasher) -> str | None:
        """The owner of a root; None: not known."""
        if root not in self._owners and root == root_hash_of(""):
            return ""
        return self._owners.get(root)

    def others(self, owner: str, root_hash_of: RootHasher, owners: Collection[str]) -> frozenset[PageHash]:
        """The roots that are certainly not of the API keys with the salt `owner`. `owners`: all that are configured."""
        known = {root for root, one in self._owners.items() if key_owner(one) != owner}
        known.update(root_hash_of(f"{one}\0" if one else "") for one in (*owners, "") if one != owner)
        return frozenset(known)
