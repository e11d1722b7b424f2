"""The metrics of the KV cache, summed over the versions of each model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pipeline.observe.metrics import Metrics
from stages.kv.model import ModelPages
from stages.kv.sessions.model_sessions import ModelSessions
from stages.kv.sessions.session_thread import SessionThread

_STATES = ("free", "cached", "leased")
_FRAGMENTATION = "starling_kv_cache_fragmentation_ratio"


class RemovedVersions:
    """The counters of versions that were removed, so that the totals of their models do not fall."""

    def __init__(self) -> None:
        self.totals: Counter[tuple[str, ...]] = Counter()  # by family and labels

    def add(self, model: ModelPages) -> None:
        """Add the counters of a version that is about to be removed."""
        self.totals.update(_totals(model))


def _totals(model: ModelPages) -> Counter[tuple[str, ...]]:
    if model.manager is None:
        return Counter()
    counters, stores, spilled = model.manager.pool.counters, model.stores(), model.spilled
    return Counter(
        {
            ("starling_kv_cache_hits_total", model.name): counters.hits,
            ("starling_kv_cache_misses_total", model.name): counters.misses,
            ("starling_kv_cache_evictions_total",): counters.evictions,
            ("starling_kv_cache_expired_pages_total",): counters.expired,
            ("starling_kv_cache_unread_rows_total",): counters.unread,
            ("starling_kv_cache_checksum_failures_total",): counters.checksum_failures
            + sum(store.counters.damaged for store in stores),
            ("starling_kv_cache_disk_errors_total",): sum(store.counters.errors for store in stores),
            ("starling_kv_cache_spilled_pages_total",): spilled.counters.stored if spilled is not None else 0,
            ("starling_kv_cache_restored_pages_total",): counters.restored,
            ("starling_kv_cache_imported_pages_total", model.name): counters.imported,
            ("starling_kv_cache_warmed_pages_total", model.name): counters.warmed,
            ("starling_kv_cache_warm_hits_total", model.name): counters.warm_hits,
            ("starling_kv_cache_compacted_bytes_total",): sum(s.counters.returned_bytes for s in stores),
        }
    )


def measure(
    models: list[ModelPages],
    metrics: Metrics,
    removed: RemovedVersions | None = None,
    sessions: Mapping[str, ModelSessions | SessionThread] | None = None,
) -> None:
    """Set the metrics of all models. `sessions`: of all models that were ever loaded, by name."""
    sessions = {**(sessions or {}), **{model.name: model.model_sessions for model in models}}
    names = set(sessions)
    totals: Counter[tuple[str, ...]] = Counter(removed.totals if removed is not None else ())
    levels: Counter[tuple[str, ...]] = Counter()
    levels.update({("starling_kv_cache_pages", name, state): 0 for name in names for state in _STATES})
    levels.update({("starling_kv_cache_bytes", kind): 0 for kind in ("allocated", "resident", "spilled", "saved")})
    levels.update({("starling_sessions", name): 0 for name in names})
    levels.update({("starling_sessions_moving", name): one.n_moving for name, one in sessions.items()})
    levels.update({("starling_arena_bytes", name, "kv", state): 0 for name in names for state in ("reserved", "used")})
    hole_shares: dict[tuple[str, str], float] = {}
    totals["starling_sessions_damaged_total",] = sum(one.damaged for one in sessions.values())
    totals["starling_state_file_errors_total", "sessions"] = sum(one.disk_errors for one in sessions.values())
    for model in models:
        if model.manager is None or model.geometry is None:
            continue
        totals.update(_totals(model))
        pool, page_bytes = model.manager.pool, model.geometry.page_bytes
        levels["starling_kv_cache_bytes", "allocated"] += pool.total * page_bytes
        levels["starling_kv_cache_bytes", "resident"] += (pool.cached + pool.leased) * page_bytes
        if model.arena is not None:
            levels["starling_arena_bytes", model.name, "kv", "reserved"] += model.arena.size
            levels["starling_arena_bytes", model.name, "kv", "used"] += (pool.cached + pool.leased) * page_bytes
        for kind, store in (("spilled", model.spilled), ("saved", model.saved)):
            if store is not None and store.is_open:
                levels["starling_kv_cache_bytes", kind] += store.n_written * page_bytes
                hole_shares[model.name, kind] = store.hole_bytes / store.file_bytes
        if model.has_files:  # one of the versions of a model
            hole_shares[model.name, "arena"] = model.manager.fragmentation()
        for state in _STATES:
            levels["starling_kv_cache_pages", model.name, state] += getattr(pool, state)
        levels["starling_sessions", model.name] = len(model.model_sessions)
        for seconds in pool.counters.restore_s:
            metrics.observe("starling_kv_cache_restore_seconds", seconds)
        pool.counters.restore_s.clear()
    for (family, *labels), value in (*totals.items(), *levels.items()):
        metrics.set(family, value, *labels)
    for gone in metrics.label_sets(_FRAGMENTATION) - hole_shares.keys():
        metrics.drop(_FRAGMENTATION, *gone)
    for key, share in hole_shares.items():
        metrics.set(_FRAGMENTATION, share, *key)
