"""Dummy passes of a new worker group: a prompt and an output token, before the group reports that it is ready.

They read every weight that a step reads, so that the first request finds them mapped into each rank (and in memory, if
they were on the disk), and run each kernel once.  The arenas are small ones of the group's own: no request sees a page
or a row of them.  Meanwhile the other stages prepare their parts of the model.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from pipeline.config.schema import ModelConfig
from shm import step_ring as sh
from shm import words
from shm.arena import Arena, ArenaError
from shm.checkpoint import Hyper
from shm.pages import KvGeometry, create_kv
from stages.worker import activations_arena as act
from stages.worker.kernels import compiled
from stages.worker.kernels.parameter_block import FEW
from stages.worker.model import Model
from stages.worker.rank_places import RankPlaces
from stages.worker.ranks import ArenaPaths, Attachment, Rank, attach_ranks

log = logging.getLogger("starling.worker")

PROMPT_TOKENS = 2 * FEW  # more than `FEW`: the kernels of prompts, which multiply many rows at once


def try_warm_up(model: Model, ranks: list[Rank], places: RankPlaces, settings: ModelConfig, base: Path) -> None:
    """As `warm_up`, of a model with these settings; what keeps it from computing is logged. Raises `GroupError`."""
    facts = {"model": settings.name}
    try:
        refused = warm_up(model, ranks, places, settings.kv_type, settings.page_tokens, base)
    except (ArenaError, OSError, ValueError) as error:
        log.warning("not warmed up", extra={**facts, "reason": str(error)})
        return
    if refused:
        log.error("entries of a dummy pass were refused", extra={**facts, "entries": refused})


def warm_up(model: Model, ranks: list[Rank], places: RankPlaces, kv_type: str, page_tokens: int, base: Path) -> int:
    """Compute the passes; the number of entries that the kernels refused, 0 in a sound group.

    model: with rank 0's weights; places: of all ranks.
    base: path of the group's activations arena, which does not exist yet; the arenas here are beside it, and are
    removed.  Raises `ArenaError`, `OSError` or `ValueError` if they cannot be made, and `GroupError`.
    """
    h, n_ranks = model.hyper, 1 + len(ranks)
    prompt = max(1, min(PROMPT_TOKENS, h.context_length - 1))
    kv_geometry = KvGeometry.of(h, page_tokens, kv_type)
    n_pages = kv_geometry.groups.n_pages(-(-(prompt + 1) // page_tokens) + 1)
    steps_geometry = sh.StepsGeometry(1, 1, 1, prompt + 1, n_pages, pooled_width=0 if h.is_causal else h.width)
    # Named as `Arena.create` names what it has not completed: a group that is killed here leaves them to its successor.
    names = [str(base.with_name(f".{base.name}.warm-{kind}")) for kind in ("steps", "kv", "act")]
    paths = ArenaPaths(names[0], names[1], names[2])
    arenas: list[Arena] = []
    try:
        arena, steps = sh.create_steps(Path(paths.steps), steps_geometry, model.digest)
        arenas.append(arena)
        arenas.append(create_kv(Path(paths.kv), kv_geometry, steps_geometry.max_pages, model.digest, 1)[0])
        geometry = act.geometry_for(steps_geometry, h, prompt, n_ranks, nodes=max(1, len(places.nodes)))
        path = Path(paths.activations)
        arenas.append(act.create_activations(path, geometry, h, model.digest, places.node_cpus))
        act.set_up(act.control_words(arenas[-1]), n_ranks, places.clusters, places.nodes)
        _write_row(steps, h, prompt)
        attachment = Attachment(model, paths, 0)
        try:
            attach_ranks(ranks, paths)
            refused = _compute(attachment, prompt, h.is_causal)
            act.announce(attachment.words, 2 * sh.SLOTS + 1, n_ranks)
            attach_ranks(ranks, ArenaPaths())
        finally:
            attachment.close()
    finally:
        for arena in arenas:
            arena.close()
            arena.unlink()
    return refused


def _write_row(steps: sh.Steps, h: Hyper, prompt: int) -> None:
    """The one sequence: any tokens, sampled greedily."""
    steps.tokens[0, : prompt + 1] = np.arange(prompt + 1) % h.vocab_size
    steps.tables[0] = np.arange(steps.tables.shape[1])
    steps.row_ints[0, sh.OUTPUT_START] = prompt
    steps.row_ints[0, sh.LOGPROBS] = -1
    steps.row_ints[0, sh.ORDER] = sh.pack_order(())
    steps.row_floats[0, [sh.TOP_P, sh.REPETITION]] = 1.0


def _compute(attachment: Attachment, prompt: int, generates: bool) -> int:
    """The prompt, and the token after it if the model generates, else the prompt pooled.

    Returns how many entries were refused.
    """
    refused = 0
    # row, first position, positions, samples, first sample, epoch of masks, first pooled position, pooled
    entries = [(0, 0, prompt, 1, 0, 0, 0, 0), (0, prompt, 1, 1, 0, 0, 0, 0)]
    if not generates:  # the last layer computes no tokens that are neither sampled nor pooled
        entries = [(0, 0, prompt, 0, 0, 0, 0, prompt)]
    for number, entry in enumerate(entries, 1):
        slot = number % sh.SLOTS
        attachment.steps.entries[slot, 0] = entry
        attachment.steps.slot_head[slot, : sh.SLOT_SAMPLES + 1] = (number, 1, 1, entry[sh.SAMPLES])
        words.store(attachment.steps.control, sh.HEAD, number)
        refused += int(
            compiled.run_steps(
                attachment.table.address, attachment.control, 2 * number, number, attachment.timing, 0, 0, -1
            )
        )
    return refused
