"""Faults at one moment that are not signals: a flipped bit in the KV cache, and a reload. They return a description."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np

from pipeline.config import paths
from pipeline.config.schema import Config
from shm.arena import ArenaError
from shm.pages import HEADER, PAGE_FULL, attach_kv
from starling.chaos.processes import NoTargetError

RELOAD_S = 120.0  # until a reload counts as failed


def flip_bit(config: Config, rng: random.Random) -> str:
    """Change one bit of a cached page in a KV arena: a full page without references.

    Describes the change. Raises `NoTargetError` if there is no such page.
    """
    arenas = sorted(paths.arena_dir(config).glob("*.kv"))
    rng.shuffle(arenas)
    for path in arenas:
        try:
            arena, views, _ = attach_kv(path)
        except (OSError, ArenaError):
            continue
        try:
            fields = views.headers.view(HEADER)[:, 0]
            idle = np.flatnonzero((fields["state"] == PAGE_FULL) & (fields["refs"] == 0)).tolist()
            if idle:
                page, at = rng.choice(idle), rng.randrange(views.pages.shape[1])
                views.pages[page, at] ^= 1 << rng.randrange(8)
                return f"flipped a bit of page {page}, byte {at}, in {path.name}"
        finally:
            del views
            arena.close()
    raise NoTargetError("there is no cached page without references")


def reload(model: str) -> str:
    """Run `starling reload MODEL`: load the same file as a new version.

    Raises `NoTargetError` if the command fails, for example because memory does not suffice for two versions.
    """
    command = [sys.executable, "-P", "-m", "starling", "reload", model]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RELOAD_S, check=False)
    except subprocess.TimeoutExpired:
        raise NoTargetError(f"starling reload {model} has not finished after {RELOAD_S:.0f} s") from None
    if done.returncode:
        output = (done.stderr or done.stdout).strip().splitlines()
        raise NoTargetError(f"starling reload {model} exits with {done.returncode}: {output[-1] if output else ''}")
    return f"reloaded {model}"
