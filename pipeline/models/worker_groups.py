"""The worker groups of a model and the cores of each (`performance.worker_groups`).

A model may have several worker groups behind one scheduler, such as one on each socket.  They share its KV pages and
its scheduler's rows, so that any of them can compute any sequence; each has a step ring and activations of its own.

A model that drafts for another one, or has a draft model, has one group.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.config import server_cores
from pipeline.config.schema import Config, ModelConfig
from pipeline.models import control_cores
from pipeline.models.versions import ModelVersion
from shm import memory_nodes


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
    setting = config.performance.worker_groups
    is_one = setting == 1 or config.drafts(name)
    cores = server_cores.own() if is_one else server_cores.of(config)
    cpus = [cpu for cpu in model.cpus if cpu in cores] or control_cores.computing(config, model, cores)
    if is_one:
        return [cpus]
    by_node = memory_nodes.of(cpus)
    if setting == "auto":
        return by_node if min(map(len, by_node)) >= model.ranks else [cpus]
    return divide(by_node, setting)


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


def divide(by_node: Sequence[Sequence[int]], groups: int) -> list[list[int]]:
    """Cores, given by memory node, divided among so many groups.

    A group has cores of one node if each node can have equally many groups.  With fewer cores than groups, which
    happens where the server may run on fewer cores than the configuration was checked with, all groups have all.
    """
    flat = [cpu for node in by_node for cpu in node]
    if len(flat) < groups:
        return [list(flat) for _ in range(groups)]
    each, rest = divmod(groups, len(by_node))
    if rest or min(map(len, by_node)) < each:
        return _parts(flat, groups)
    return [part for node in by_node for part in _parts(node, each)]


def _parts(cpus: Sequence[int], n: int) -> list[list[int]]:
    return [list(cpus[i * len(cpus) // n : (i + 1) * len(cpus) // n]) for i in range(n)]
