"""The worker groups of a model and the cores of each (`performance.worker_groups`).

A model may have several worker groups behind one scheduler, such as one on each socket.  They share its KV pages and
its scheduler's rows, so that any of them can compute any sequence; each has a step ring and activations of its own.

A model that drafts for another one, or has a draft model, has one group.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.config import server_cores
from pipeline.config.schema import Config, ModelConfig
from pipeline.models import control_cores, core_groups
from pipeline.models.versions import ModelVersion


def count(config: Config, model: ModelConfig, name: str) -> int:
    """Number of worker groups of a version with the settings `model`. `name`: of the model, without a serial."""
    return len(cpus_of_groups(config, model, name))


def of_version(config: Config, version: ModelVersion) -> list[ModelVersion]:
    """The version as the processes of each of its worker groups have it."""
    return [version.of_group(number) for number in range(count(config, version.settings, version.name))]


def cpus_of_groups(config: Config, model: ModelConfig, name: str) -> list[list[int]]:
    """The cores of each worker group, of those that the server may run on, but the control plane's. As `count`.

    With one group those that this process may run on.  With several all processes of a server find the same ones, of
    which each uses those that it may run on (`allowed`).
    """
    is_one = config.performance.worker_groups == 1 or config.drafts(name)
    return among(server_cores.own() if is_one else server_cores.of(config), config, model, name)


def among(cores: Sequence[int], config: Config, model: ModelConfig, name: str) -> list[list[int]]:
    """`cpus_of_groups` of a server that may run on `cores`."""
    cpus = [cpu for cpu in model.cpus if cpu in cores] or control_cores.computing(config, cores)
    return core_groups.of(cpus, 1 if config.drafts(name) else config.performance.worker_groups, model.ranks)


def cores_of_ranks(config: Config, model: ModelConfig, name: str) -> list[int]:
    """The cores that the ranks of all groups run on, as far as this process can tell. As `count`."""
    groups = cpus_of_groups(config, model, name)
    # More ranks than cores are pinned to none.
    used = [cpus[: model.ranks] if 0 < model.ranks <= len(cpus) else cpus for cpus in groups]
    return list(dict.fromkeys(cpu for cpus in used for cpu in cpus))


def allowed(cpus: Sequence[int]) -> list[int]:
    """The cores of a group that this process may run on; all that it may run on if those are none of them."""
    own = server_cores.own()
    return [cpu for cpu in cpus if cpu in own] or own
