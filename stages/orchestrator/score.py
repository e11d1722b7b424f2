"""The score of an agent for a request: an estimate of the seconds until its first token, lower is better.

    score = alpha * cache_level - beta * kv_hit + gamma * queue_len + delta * (size / bandwidth)

    cache_level         until the model can run once its bytes are on the host
    kv_hit              of computing the part of this prompt that is cached there
    queue_len           of what is ahead of it
    size / bandwidth    until the missing bytes are on the host

All terms are in seconds; the weights have no dimension and are 1 by default.  Pure functions.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import msgspec

from pipeline.api.adapter_names import adapted_digest
from pipeline.api.output_tokens import version_name
from pipeline.fleet.bodies import CacheLevel, HeartbeatResponse, LoadedModel
from stages.orchestrator.rates import DISK_BYTES_PER_S, NET_BYTES_PER_S, PEER_BYTES_PER_S, EngineRates

RESIDENT: tuple[CacheLevel, ...] = ("GPU_RESIDENT", "CPU_RESIDENT")


class Weights(NamedTuple):
    """Of the terms."""

    alpha: float = 1.0  # cache level
    beta: float = 1.0  # KV hit
    gamma: float = 1.0  # queue
    delta: float = 1.0  # transfer


class Terms(msgspec.Struct, frozen=True, gc=False):
    """The terms of one agent, s."""

    cache_level_s: float = 0.0
    kv_hit_s: float = 0.0
    queue_s: float = 0.0
    transfer_s: float = 0.0

    def total(self, weights: Weights) -> float:
        """The score."""
        return (
            weights.alpha * self.cache_level_s
            - weights.beta * self.kv_hit_s
            + weights.gamma * self.queue_s
            + weights.delta * self.transfer_s
        )


class Residence(NamedTuple):
    """Where a model is, seen from an agent."""

    level: CacheLevel
    nbytes: int  # of the checkpoint
    missing: int  # of them, not on the host


def loaded(details: HeartbeatResponse, model: str) -> LoadedModel | None:
    """The agent's entry of the model, whatever its state.

    Of MODEL:ADAPTER that of the model with the name and the digest of both; None if it does not have the adapter.
    """
    base, colon, adapter = model.partition(":")
    for running in details.loaded_models:  # no generator: each choice of an agent asks several times
        if running.model_id == base:
            break
    else:
        return None
    if not colon:
        return running
    one = next((one for one in running.adapters if one.name == adapter), None)
    if one is None:
        return None
    is_starting = running.model_state == "READY" and not one.is_ready
    state = "LOADING" if is_starting else running.model_state
    digest = adapted_digest(running.digest, one.digest)
    return msgspec.structs.replace(running, model_id=model, digest=digest, model_state=state, adapters=())


def names_in(details: HeartbeatResponse) -> list[str]:
    """The models that an agent has loaded or is loading, and their adapters."""
    return [
        name
        for one in details.loaded_models
        for name in (one.model_id, *(f"{one.model_id}:{adapter.name}" for adapter in one.adapters))
    ]


def version_of(model: LoadedModel) -> str:
    """The name of a version: streams continue only where it is the same. "": the engine promises no equal bytes."""
    if not model.numerics or not model.digest:
        return ""
    return version_name(model.digest, model.kv_type, model.numerics)


def text_kind_of(model: LoadedModel) -> str:
    """What engines have in common that can go on from each other's text; "": this one cannot."""
    return f"{model.engine}:{model.digest}" if model.continues_text and model.digest else ""


def residence(
    details: HeartbeatResponse, model: str, digest: str, nbytes: int, holders: Collection[str] = ()
) -> Residence:
    """Where the model is.

    digest, nbytes: of the catalog's entry; "" and 0 if it has none.  holders: agents that give others its pieces.
    """
    running = loaded(details, model)
    if running is not None and running.model_state == "READY":
        # With the progress of a download it computes layers as they arrive.
        missing = running.progress.total - running.progress.done if running.progress is not None else 0
        return Residence(running.cache_level, running.bytes or nbytes, max(0, missing))
    for cached in details.cached_models:
        if model in cached.names or (digest and cached.digest == digest):
            if cached.is_complete:
                return Residence(cached.cache_level, cached.bytes or nbytes, 0)
            return Residence(_away(details, holders), nbytes, max(0, nbytes - cached.bytes))
    return Residence(_away(details, holders), nbytes, nbytes)


def shared_files(details: HeartbeatResponse) -> list[str]:
    """Digests of the files whose pieces the agent gives to other agents."""
    return [one.digest for one in details.cached_models if one.is_complete and details.shares_pieces]


def _away(details: HeartbeatResponse, holders: Collection[str]) -> CacheLevel:
    """The level of a model that is not on the host."""
    return "PEER_CACHED" if details.shares_pieces and any(one != details.agent_id for one in holders) else "REMOTE"


def terms(details: HeartbeatResponse, where: Residence, rates: EngineRates, *, ahead: int, matched_bytes: int) -> Terms:
    """The terms of an agent. `ahead`: sequences before the request; `matched_bytes`: of its prompt, cached there."""
    is_resident = where.level in RESIDENT
    start_s = 0.0 if is_resident else rates.start_s.value
    if where.level == "NVME_CACHED":
        start_s += where.nbytes / DISK_BYTES_PER_S
    return Terms(
        cache_level_s=start_s,
        kv_hit_s=matched_bytes * rates.prefill_s_per_byte.value if is_resident else 0.0,
        queue_s=ahead * rates.turn_s.value,
        transfer_s=where.missing
        / (details.download_bytes_per_s or (PEER_BYTES_PER_S if where.level == "PEER_CACHED" else NET_BYTES_PER_S)),
    )
