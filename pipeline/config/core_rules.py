"""How the configuration must not divide the server's cores among worker groups and the control plane."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config import server_cores
from pipeline.config.schema import Config


def problems(config: Config) -> Iterator[tuple[str, str, str]]:
    """Key, value and reason of each problem. `server_cores.check` has those that depend on the machine."""
    groups = config.performance.worker_groups
    if isinstance(groups, str) or groups == 1:
        return
    for index, model in enumerate(config.models):
        n_cores = len(model.cpus)
        reason = ""
        if model.cpus and groups > n_cores:
            reason = server_cores.too_many_groups(model.name, n_cores)
        elif model.cpus and groups * model.ranks > n_cores:
            reason = f"models.{index}.ranks = {model.ranks} of each group take a core each, and cpus has {n_cores}"
        elif config.drafts(model.name):
            reason = f"model {model.name!r} drafts or has a draft_model, for which it has one group: set 1 or auto"
        if reason:
            yield "performance.worker_groups", str(groups), reason
            return
