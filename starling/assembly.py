"""What an in-process engine is made of: the chosen model, and the scheduler, KV manager and worker group for it."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipeline.config import paths
from pipeline.config.load import load as load_config
from pipeline.config.load import resolve
from pipeline.config.schema import Config, ModelConfig
from pipeline.config.user_home import expand_user
from pipeline.errors import ConfigError, ModelNotFound, ResourceError
from pipeline.models.arena_sizes import max_positions
from shm.arena import Arena
from shm.pages import KvGeometry
from shm.step_ring import create_steps
from stages.gateway.admission.lengths import Bounds
from stages.scheduler.core.engine import Engine
from stages.scheduler.core.ring import Ring
from stages.scheduler.core.settings import Settings
from stages.worker import activations_arena as act
from stages.worker.model import Arenas, Model
from starling.local_kv import LocalKv
from starling.worker_group import WorkerGroup

# Settings of a model that mean nothing without the server's other parts.
SERVER_SETTINGS = (
    "spill_path",
    "spill_mb",
    "max_sessions",
    "draft_model",
    "cpus",
    "weight",
    "share_cache",
    "device",
    "adapters",
    "max_adapter_rank",
    "adapters_mb",
    "pooling",
    "reasoning",
    "preload",
    "keep_alive",
    "pinned",
)


class Parts(NamedTuple):
    """The parts of an engine; `stack` closes them in reverse order."""

    stack: ExitStack
    scheduler: Engine
    ring: Ring
    kv: LocalKv
    group: WorkerGroup
    bounds: Bounds


def choose_model(
    model: str | Path, config: Config | str | Path | None, settings: dict[str, Any]
) -> tuple[Config, ModelConfig]:
    """The configuration with `settings` applied to the chosen model, and that model."""
    for key in SERVER_SETTINGS:
        if key in settings:
            raise ConfigError(f"{key} has no effect inside one process; leave it out", param=key)
    name = str(model)
    is_url = not isinstance(model, Path) and "://" in name
    is_file = is_url or isinstance(model, Path) or name.endswith(".gguf")
    path = name if is_url else str(expand_user(name).absolute())
    if isinstance(config, Config):
        given = config
    else:
        given = resolve({}, {}) if is_file and config is None else load_config(config)
    raw: dict[str, Any] = msgspec.to_builtins(given)
    if is_file:
        entry: dict[str, Any] = {"path": path, **settings}
    else:
        found = given.model(name)
        if found is None:
            known = ", ".join(one.name for one in given.models)
            raise ModelNotFound(f"no model {name!r} is configured; configured: {known}", param="model")
        entry = {**msgspec.to_builtins(found), "draft_model": "", **settings}
    raw["models"] = [entry]
    resolved = resolve(raw, {})
    return resolved, resolved.models[0]


def assemble(config: Config, model: ModelConfig, weights: Model) -> Parts:
    """Arenas, scheduler, KV manager and worker group for mapped weights, joined to each other."""
    hyper, digest = weights.hyper, weights.digest
    if not hyper.is_causal:
        raise ConfigError(
            f"model {model.name!r} has embeddings alone and generates no text: load another one, or use a server",
            param="model",
        )
    context = min(hyper.context_length, model.max_sequence_length or hyper.context_length)
    scheduling = config.scheduler
    settings = Settings(
        model=model.name,
        max_batch_size=config.max_batch_size(model),
        max_queue_depth=scheduling.max_queue_depth,
        max_step_tokens=scheduling.max_step_tokens,
        max_prompt_tokens=scheduling.max_prompt_tokens,
        max_output_tokens=scheduling.max_output_tokens,
        speculate=model.speculate,
        run_ahead=False,  # nothing computes while the next step is composed
        refuses_late=False,  # a request has the time that its caller gives it, however many others are submitted
        prefix_cache=config.cache.enabled,
    )
    kv_geometry = KvGeometry.of(hyper, model.page_tokens, model.kv_type)
    groups = kv_geometry.groups
    steps_geometry = settings.steps_geometry(context, model.page_tokens, hyper.vocab_size, hyper.width, groups.n_groups)
    ranks = model.ranks or len(os.sched_getaffinity(0))
    geometry = act.geometry_for(steps_geometry, hyper, scheduling.max_step_tokens, ranks)
    act.check_size(geometry, hyper, config.performance.memory_pool_size_mb, model.name)
    with ExitStack() as stack:
        # Everything is mapped once and the files are removed at once: a killed process leaves nothing behind.
        directory = Path(stack.enter_context(_arena_directory(paths.arena_parent(config))))
        keep = ExitStack()
        stack.push(keep.__exit__)
        steps_arena, steps = create_steps(directory / "steps", steps_geometry, digest)
        keep.callback(steps_arena.close)
        kv = LocalKv(
            directory / "kv",
            kv_geometry,
            digest,
            config.kv_cache_bytes(model),
            policy=config.cache.eviction_policy,
            caching=config.cache.enabled,
        )
        keep.callback(kv.close)
        kv.attach_rows(directory / "steps", digest)
        activations: Arena = act.create_activations(directory / "activations", geometry, hyper, digest)
        keep.callback(activations.close)
        group = WorkerGroup(weights, Arenas(steps, steps_geometry, kv.views, kv_geometry, activations, geometry))
        keep.callback(group.close)
        scheduler = Engine(settings, time.monotonic())
        ring = scheduler.worker.ring = Ring(steps, steps_geometry, time.time_ns())
        ring.start(1)
        scheduler.kv_ready(kv.ready(model.name, weights.index.digest))
        scheduler.attach(context, hyper.vocab_size, window=hyper.kv_window, groups=groups)
        shape = hyper.n_layers, hyper.n_kv_heads, hyper.head_dim, hyper.kv_window, hyper.n_windowed
        positions = max_positions(config, model, shape, context)
        bounds = Bounds(context, scheduling.max_prompt_tokens, scheduling.max_output_tokens, positions)
        keep.callback(setattr, scheduler.worker, "ring", None)  # its views keep the arena mapped
        return Parts(keep.pop_all(), scheduler, ring, kv, group, bounds)


def _arena_directory(parent: Path) -> tempfile.TemporaryDirectory[str]:
    """A directory for the files of arenas in `parent`, which is created. Raises `ResourceError`."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix="starling-", dir=parent)
    except OSError as error:
        raise ResourceError(
            f"server.arena_dir: {parent}: {error.strerror}; name a directory that this user can write",
            "server.arena_dir",
        ) from None
