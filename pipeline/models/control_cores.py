"""Cores for the control plane: gateway, tokenizer, scheduler and kv compute on them, and ranks on the others.

`starling up`, the worker pool and all supervisors wait there (`keep_parent`): each wakes every few seconds.

Ranks wait for each other in every layer, so that all of them wait while another process takes the core of one.  On a
server with more than two cores the first ones are the control plane's therefore (`performance.control_cores`), unless
a configured model has `cpus` or needs all cores.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence

from pipeline import procfs
from pipeline.config import server_cores
from pipeline.config.schema import Config, ModelConfig
from pipeline.models import core_groups

log = logging.getLogger("starling.stage")

FEW = 2  # cores of a server that has none to spare
CORES_FOR_ONE = 16  # of a server, for each core of its control plane; an estimate


def count(config: Config, n_cores: int) -> int:
    """Number of cores of the control plane alone, if models leave it any. One at least is left for ranks."""
    setting = config.performance.control_cores
    if setting == "auto":
        setting = 1 + (n_cores - 1) // CORES_FOR_ONE if n_cores > FEW else 0
    return min(setting, max(0, n_cores - 1))


def reserved(config: Config, cores: Sequence[int]) -> list[int]:
    """Those of a server's cores that its control plane has for itself: the same ones for all models and stages.

    [] if a model has `cpus`, which may be beside other engines, or if the others are too few for one.
    """
    n = count(config, len(cores))
    models = config.models
    if any(model.cpus for model in models) or not all(_suffice(config, model, cores, cores[n:]) for model in models):
        return []
    return list(cores[:n])


def computing(config: Config, cores: Sequence[int]) -> list[int]:
    """Those of a server's cores that the ranks of a model without `cpus` are divided among."""
    return list(cores[len(reserved(config, cores)) :])


def _suffice(config: Config, model: ModelConfig, cores: Sequence[int], left: Sequence[int]) -> bool:
    """Whether a model has its worker groups and ranks on what is left of the cores, too, without smaller groups.

    Without `ranks` each of a given number of groups must have equally many cores.
    """
    groups = 1 if config.drafts(model.name) else config.performance.worker_groups
    now = core_groups.of(left, groups, model.ranks)
    sizes = [len(cpus) for cpus in now]
    if len(now) != len(core_groups.of(cores, groups, model.ranks)) or sum(sizes) > len(left):
        return False
    if model.ranks:
        return min(sizes) >= model.ranks
    return groups == "auto" or len(set(sizes)) == 1


def keep(config: Config) -> list[int]:
    """Keep this process, a stage of the control plane without threads yet, to its cores; they are returned.

    [] and no change where there are none.  With several worker groups it raises as `server_cores.store`.
    """
    if config.performance.worker_groups == 1:
        cores = reserved(config, server_cores.own())
    else:
        server_cores.store(config)
        cores = reserved(config, server_cores.of(config))
    if not cores:
        return []
    try:
        server_cores.keep_to(cores)
    except OSError as error:  # the control group has lost them meanwhile: the stage runs where it may
        log.warning("the stage runs on any core", extra={"cores": cores, "error": error.strerror})
        return []
    return cores


def keep_parent(config: Config) -> None:
    """Keep this process, which only starts others and waits, to those cores of the control plane that it may run on.

    Its children begin where it might run before (`server_cores.leave`).
    """
    own = server_cores.own()
    is_one = config.performance.worker_groups == 1
    cores = [cpu for cpu in reserved(config, own if is_one else server_cores.of(config)) if cpu in own]
    if not cores:
        return
    try:
        server_cores.keep_to(cores)
        for thread in procfs.threads():  # that which writes the log
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(thread, cores)
    except OSError as error:
        log.warning("a supervisor runs on any core", extra={"cores": cores, "error": error.strerror})
