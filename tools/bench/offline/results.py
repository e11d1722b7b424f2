"""The results of a benchmark: units of work, their figures, the report and its table."""

from __future__ import annotations

import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec


class Work(NamedTuple):
    """One thing to time: a prompt of `tokens`, or `batch` sequences decoding after `cached` tokens each."""

    kind: str  # "prefill" or "decode"
    tokens: int = 0
    batch: int = 1
    cached: int = 0

    @property
    def title(self) -> str:
        """The unit of work as a table shows it."""
        if self.kind == "prefill":
            return f"prefill {self.tokens:,}"
        return f"decode, batch {self.batch}" + (f", {self.cached:,} cached" if self.cached > 64 else "")


class Rate(msgspec.Struct, frozen=True):
    """Tokens per second over the repetitions."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Rate:
        """Median and range of `values`."""
        return cls(*(round(v, 1) for v in (statistics.median(values), min(values), max(values))))

    def __str__(self) -> str:
        return f"{self.median:,.0f} ({self.low:,.0f}-{self.high:,.0f})"


# llama.cpp's strongest build (native, AMX, the better of flash attention on and off) with the demo model on
# two cores of a machine that reads 100 MB at 57 GB/s; the wheel is compiled for AVX2 and slower.
STRONGEST_BANDWIDTH_GB_S = 57.0
STRONGEST = {
    ("prefill", 512, 1, 0): 1464.0,
    ("decode", 0, 1, 16): 292.0,
    ("decode", 0, 4, 16): 383.0,
    ("decode", 0, 8, 16): 516.0,
    ("decode", 0, 16, 16): 653.0,
    ("decode", 0, 32, 16): 646.0,
    ("decode", 0, 1, 512): 177.0,
    ("decode", 0, 1, 1024): 132.0,
    ("decode", 0, 1, 2048): 85.0,
}


class Figure(msgspec.Struct):
    """One row of the table."""

    work: Work
    candidate: Rate
    baseline: Rate | None = None
    strongest: float | None = None  # `STRONGEST`, scaled by this machine's bandwidth; tokens per second
    read_gb_s: float | None = None  # rate at which a decode step reads weights and KV
    bandwidth_share: float | None = None  # ratio of `read_gb_s` to a plain read of as many bytes

    @property
    def ratio(self) -> float | None:
        """Rate of the candidate divided by that of the baseline."""
        return round(self.candidate.median / self.baseline.median, 2) if self.baseline else None

    @property
    def ratio_to_strongest(self) -> float | None:
        """Rate of the candidate divided by `strongest`."""
        return round(self.candidate.median / self.strongest, 2) if self.strongest else None


class Report(msgspec.Struct):
    """All results of a run; its JSON is the last line of output."""

    machine: dict[str, Any]
    model: dict[str, Any]
    figures: list[Figure]
    engine: dict[str, Any]  # overhead, load, memory, instruction set
    baseline: dict[str, Any] | None = None
    http: dict[str, Any] | None = None  # figures of tools.bench.http
    kv: dict[str, Any] | None = None  # figures of tools.bench.kv

    def as_json(self) -> bytes:
        """The report as one line of JSON."""
        value = msgspec.to_builtins(self)
        for row, figure in zip(value["figures"], self.figures, strict=True):
            row["work"] = {k: v for k, v in figure.work._asdict().items() if v}
            row["ratio"] = figure.ratio
            row["ratio_to_strongest"] = figure.ratio_to_strongest
        return msgspec.json.encode(value)

    def lines(self) -> list[str]:
        """The report's table."""
        head = ("work", "starling tokens/s", "llama.cpp tokens/s", "ratio", "strongest build", "ratio")
        rows = [(*head, "read GB/s", "of bandwidth")]
        for f in self.figures:
            strongest = "" if f.strongest is None else f"{f.strongest:,.0f}"
            to_strongest = "" if f.ratio_to_strongest is None else f"{f.ratio_to_strongest:.2f}"
            share = "" if f.bandwidth_share is None else f"{100 * f.bandwidth_share:.0f} %"
            read = "" if f.read_gb_s is None else f"{f.read_gb_s:.1f}"
            ratio = "" if f.ratio is None else f"{f.ratio:.2f}"
            middle = (str(f.candidate), str(f.baseline or ""), ratio, strongest, to_strongest)
            rows.append((f.work.title, *middle, read, share))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


class Quiet:
    """Share of the cores that other programs use from now on: above a few percent, measure again."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._begun = self._now()

    def _now(self) -> tuple[int, int, int]:
        """Ticks of all cores, busy ticks, and ticks of the benchmark's processes."""
        fields = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        own = 0
        for pid in self._pids:
            after_name = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            own += int(after_name[11]) + int(after_name[12])
        return sum(fields), sum(fields) - fields[3] - fields[4], own

    def others_share(self) -> float:
        """Share of the cores that other programs have used since the object was made."""
        total, busy, own = (b - a for a, b in zip(self._begun, self._now(), strict=True))
        return round(max(0, busy - own) / max(1, total), 3)


def busy_share(seconds: float = 1.0) -> float:
    """Share of all cores that is in use now, measured while this process sleeps."""
    quiet = Quiet([])
    time.sleep(seconds)
    return quiet.others_share()


def machine(cores: list[int]) -> dict[str, Any]:
    """CPU, memory and versions that the figures depend on."""
    cpu: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        cpu.setdefault(key.strip(), value.strip())
    flags = set(cpu.get("flags", "").split())
    named = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "amx_tile")
    return {
        "cpu": cpu.get("model name", platform.processor()),
        "family_model": f"{cpu.get('cpu family', '?')}/{cpu.get('model', '?')}",
        "features": [name for name in named if name in flags],
        "cores_used": cores,
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
