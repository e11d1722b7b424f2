"""Cores for the control plane: gateway, tokenizer, scheduler and kv compute on them, and ranks on the others.

Ranks wait for each other in every layer, so that all of them wait while another process takes the core of one.  On a
server with more than two cores the first one is the control plane's therefore (`performance.control_cores`).  A model
whose `cpus` name such cores, or whose `ranks` need them, computes there all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pipeline.config import server_cores
from pipeline.config.schema import Config, ModelConfig

log = logging.getLogger("starling.stage")

FEW = 2  # cores of a server that has none to spare


def count(config: Config, n_cores: int) -> int:
    """Number of cores of the control plane alone, if the server has so many. One at least is left for ranks."""
    setting = config.performance.control_cores
    if setting == "auto":
        return int(n_cores > FEW)
    return min(setting, max(0, n_cores - 1))


def computing(config: Config, model: ModelConfig, cores: Sequence[int]) -> list[int]:
    """Those of a server's cores that a model's ranks are divided among.

    All of them where the others are too few for the ranks or worker groups that the configuration asks for.
    """
    groups = config.performance.worker_groups
    needed = max(1, model.ranks) * (1 if groups == "auto" else groups)
    left = list(cores[count(config, len(cores)) :])
    return left if len(left) >= needed else list(cores)


def keep(config: Config) -> list[int]:
    """Keep this process, a stage of the control plane without threads yet, to its cores; they are returned.

    [] and no change where there are none, or where a configured model computes on them.
    """
    cores = server_cores.own()
    reserved = cores[: count(config, len(cores))]
    used = {cpu for model in config.models for cpu in model.cpus or computing(config, model, cores)}
    if not reserved or used & set(reserved):
        return []
    try:
        server_cores.keep_to(reserved)
    except OSError as error:  # the control group has lost them meanwhile: the stage runs where it may
        log.warning("the stage runs on any core", extra={"cores": reserved, "error": error.strerror})
        return []
    return reserved
