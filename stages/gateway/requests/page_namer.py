"""Names the KV pages of a prompt to what forwards the answer (pipeline/api/page_names.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.api import page_names
from shm.arena import ArenaError
from shm.pages import KvGeometry, attach_kv
from shm.prefix_hash import page_hashes, root_hash
from stages.gateway.requests.spec import RequestSpec
from stages.gateway.versions.catalog import VersionCatalog

MAX_HASHED = 4096  # pages of a prompt, from its beginning: under 2 ms


class PageNamer:
    """One per gateway. `arena_dir`: where the kv stage has its arenas."""

    def __init__(self, arena_dir: Path, catalog: VersionCatalog) -> None:
        self._arena_dir = arena_dir
        self._catalog = catalog
        self._geometries: dict[str, KvGeometry] = {}  # by version

    def header(self, spec: RequestSpec) -> str:
        """The header's value for an admitted request; "" if its prompt has no full page, or it has several prompts."""
        geometry = self._geometry(spec.version)
        if geometry is None or len(spec.prompts) != 1 or spec.generation.session_id is not None:
            return ""
        tokens = np.frombuffer(spec.prompts[0], "<i4")
        root = root_hash(bytes.fromhex(spec.digest), geometry, spec.generation.cache_salt)
        hashes = page_hashes(root, tokens[: MAX_HASHED * geometry.page_tokens], geometry.page_tokens)
        return page_names.encode(len(tokens), geometry.page_tokens, hashes)

    def _geometry(self, version_id: str) -> KvGeometry | None:
        """Of the version's arena, in whose header it is; None if there is no arena."""
        known = self._geometries.get(version_id)
        version = self._catalog.get(version_id)
        if known is not None or version is None:
            return known
        try:
            arena, views, geometry = attach_kv(self._arena_dir / f"{version.slug}.kv")
        except (ArenaError, OSError):
            return None
        del views
        arena.close()
        self._geometries = {name: one for name, one in self._geometries.items() if self._catalog.get(name) is not None}
        self._geometries[version_id] = geometry
        return geometry
