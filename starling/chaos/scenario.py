"""The scenarios: which faults `starling chaos` injects, in which order."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from pipeline.config.schema import Config
from pipeline.models import versions, worker_groups
from pipeline.models.versions import ModelVersion
from starling.chaos import disks, faults, processes
from starling.chaos.traffic import Traffic

SCENARIOS = ("kill-each", "zombie", "disk-full", "slow-disk", "bit-flip", "memory", "reload", "mixed")
DISK_S = 4.0  # how long the disk stays full or slow
PRESSURE_S = 6.0  # how long long prompts evict each other from the arena


class Action(NamedTuple):
    """A fault to inject. One that lasts is ended after `hold_s`."""

    kind: str
    do: Callable[[], str]
    end: Callable[[], object] | None = None
    hold_s: float = 0.0
    refuses_sessions: bool = False  # the server cannot store a turn meanwhile and rightly refuses it
    is_required: bool = False  # without a target the scenario fails


def targets(config: Config) -> list[str]:
    """Names of the processes to kill.

    Workers of an unloaded model may still run; they are left out.
    """
    serving = {one.stage for one in loaded_groups(config) if one.state == "serving"}
    stages = {name: name.partition("/")[0] for name in processes.find_processes(config)}
    return sorted(name for name, stage in stages.items() if not stage.startswith("worker") or stage in serving)


def loaded_groups(config: Config) -> list[ModelVersion]:
    """The worker groups of all loaded versions."""
    return [group for one in versions.read(config).versions for group in worker_groups.of_version(config, one)]


def actions(scenario: str, config: Config, traffic: Traffic, rng: random.Random) -> list[Action]:
    """One round of the scenario, in order."""
    loaded = versions.read(config).versions
    models = {one.stage: (one.name, one.group) for one in loaded_groups(config)}

    def kill(name: str, number: signal.Signals) -> Action:
        verb = {signal.SIGKILL: "kill", signal.SIGSTOP: "stop", signal.SIGSEGV: "segv"}[number]
        rank = f"/{name.rsplit('/', 1)[1]}" if "/" in name else ""
        kind = f"{verb} {name.split('-')[0]}{rank}"
        return Action(kind, lambda: processes.send_signal(config, successor(name), number))

    def successor(name: str) -> str:
        """The process that does this one's work now: a reload gives a model's worker another name."""
        stage, _, rank = name.partition("/")
        serving = [one for one in loaded_groups(config) if one.state == "serving"]
        names = [one.stage for one in serving if (one.name, one.group) == models.get(stage)]
        return "/".join(filter(None, (names[0], rank))) if names else name

    kills = [kill(name, signal.SIGKILL) for name in targets(config)]
    stops = [kill(name, signal.SIGSTOP) for name in targets(config)]
    flips = [Action("bit-flip", lambda: faults.flip_bit(config, rng))]
    crashes = [kill(name, signal.SIGSEGV) for name in targets(config) if name.startswith("worker")]
    full = disks.FullDisk(config)
    slow = disks.SlowDisk(config, rng.choice((5, 20, 80)))
    fulls = [Action("disk-full", full.begin, full.end, DISK_S, refuses_sessions=True)]
    slows = [Action("slow-disk", slow.begin, slow.end, DISK_S)]
    is_required = scenario == "reload"
    served = [one.name for one in loaded if one.state == "serving"]  # not what is configured
    reloads = [Action("reload", partial(faults.reload, name), is_required=is_required) for name in served]
    presses = [Action("memory", traffic.press, traffic.release, PRESSURE_S)] if traffic.can_press else []
    rounds = {
        "kill-each": kills,
        "zombie": stops,
        "bit-flip": flips,
        "memory": [],
        "disk-full": fulls,
        "slow-disk": slows,
        "reload": reloads,
        "mixed": kills + stops + crashes + flips * 4 + fulls + slows + presses + reloads,
    }
    chosen = list(rounds[scenario])
    if scenario == "mixed":
        rng.shuffle(chosen)
    return chosen
