"""Further engines to compare with: in an environment beside the project's own, as their packages need other versions.

`make peers-more` creates it.  An engine that is not installed there, or refuses the model, is left out with the reason.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import click

from tools.bench.offline.baseline import Baseline, EngineRefusesError
from tools.bench.offline.ik_baseline import IkBaseline
from tools.bench.offline.openvino_baseline import OpenVinoBaseline

MODULES = {IkBaseline.NAME: "ik_llama_cpp", OpenVinoBaseline.NAME: "openvino_genai"}
_FIND = "import importlib.util, sys; print(*(m for m in sys.argv[1:] if importlib.util.find_spec(m)))"


def environment() -> Path:
    """Where the peers are installed."""
    return Path(f"{sys.prefix}.peers")


def installed(python: Path) -> list[str]:
    """The names of the engines that an interpreter has; none if there is no such interpreter."""
    if not python.exists():
        return []
    found = subprocess.run([python, "-c", _FIND, *MODULES.values()], stdout=subprocess.PIPE, text=True, check=True)
    modules = found.stdout.split()
    return [name for name, module in MODULES.items() if module in modules]


def start(
    stack: ExitStack, model: Path, cores: list[int], geometries: list[tuple[int, int]], python: Path
) -> dict[str, list[Baseline]]:
    """By name, each peer with one instance for each (slots, tokens of a slot); they end with `stack`."""
    peers: dict[str, list[Baseline]] = {}
    for name in installed(python):
        with ExitStack() as own:
            instances = []
            try:
                for slots, tokens in geometries:
                    instances.append(Baseline(model, cores, slots, tokens, name, str(python)))
                    own.callback(instances[-1].close)
            except EngineRefusesError as error:
                click.echo(f"left out: {error}")
                continue
            stack.push(own.pop_all())
            peers[name] = instances
    return peers
