"""How much of the host's GPUs is used: by `nvidia-smi` for those of NVIDIA, by /sys/class/drm for those of AMD.

Asked in a thread, because a driver may not answer: heartbeats have the last answer.  Other GPUs are not found.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

PROGRAM = "nvidia-smi"
QUERY = ("--query-gpu=utilization.gpu,memory.free", "--format=csv,noheader,nounits")
ANSWER_S = 10.0  # for nvidia-smi, which is killed then; it takes 2 s where the driver is loaded for it
DRM = Path("/sys/class/drm")
MEBIBYTE = 1 << 20
_NUMBER = re.compile(r"[0-9]{1,15}")
_CARD = re.compile(r"card[0-9]+")  # outputs of a card are card0-HDMI-A-1, and so on


class Gpu(NamedTuple):
    """What the driver says of a GPU; None: nothing, as of the memory of one that has the host's."""

    utilization: float | None  # part of the last second, or less, in which it computed
    memory_free: int | None  # bytes


class GpuUse(NamedTuple):
    """Of all GPUs of a host; None: no driver says it."""

    utilization: float | None  # mean, 0.0 to 1.0
    memory_free: int | None  # bytes, sum


class Gpus:
    """The GPUs of a host. `env`: has the PATH of nvidia-smi."""

    def __init__(self, env: Mapping[str, str], drm: Path = DRM) -> None:
        self._env = env
        self._drm = drm

    def read(self) -> GpuUse | None:
        """What they do now; None: there are none. Raises `TimeoutError`: the driver does not answer. Blocks."""
        found = [*self._nvidia(), *self._amd()]
        if not found:
            return None
        used = [one.utilization for one in found if one.utilization is not None]
        free = [one.memory_free for one in found if one.memory_free is not None]
        return GpuUse(sum(used) / len(used) if used else None, sum(free) if free else None)

    def _nvidia(self) -> list[Gpu]:
        program = shutil.which(PROGRAM, path=self._env.get("PATH", ""))
        if program is None:
            return []
        try:
            done = subprocess.run(
                [program, *QUERY],
                env=dict(self._env),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=ANSWER_S,
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{program} has not answered within {ANSWER_S:g} s") from None
        except OSError:
            return []
        # It fails where no driver is loaded, and then says so on its standard output.
        return parse_query(done.stdout.decode("utf-8", "replace")) if not done.returncode else []

    def _amd(self) -> list[Gpu]:
        try:
            cards = sorted(one for one in self._drm.iterdir() if _CARD.fullmatch(one.name))
        except OSError:
            return []
        found = []
        for card in cards:
            total = _read(card / "device" / "mem_info_vram_total")
            if total is not None:
                used = _read(card / "device" / "mem_info_vram_used")
                free = max(0, total - used) if used is not None else None
                found.append(Gpu(_part(_read(card / "device" / "gpu_busy_percent")), free))
        return found


def parse_query(text: str) -> list[Gpu]:
    """The GPUs in the answer of nvidia-smi: a line `PERCENT, MIB` for each, with words such as [N/A] for no number."""
    found = []
    for line in text.splitlines():
        used, comma, free = line.partition(",")
        if comma:
            mebibytes = _number(free)
            found.append(Gpu(_part(_number(used)), None if mebibytes is None else mebibytes * MEBIBYTE))
    return found


def _part(percent: int | None) -> float | None:
    return None if percent is None else min(1.0, percent / 100)


def _read(path: Path) -> int | None:
    try:
        return _number(path.read_text("ascii"))
    except (OSError, UnicodeDecodeError):
        return None


def _number(text: str) -> int | None:
    return int(text) if _NUMBER.fullmatch(text := text.strip()) else None
