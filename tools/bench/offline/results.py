"""The results of a benchmark: units of work, their figures, the report and its table."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
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
        digits = 0 if self.median >= 100 else 1
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f}-{self.high:,.{digits}f})"


def share_text(share: float | None, of_rounds: Sequence[float] | None) -> str:
    """A share of the bandwidth, and its range over the rounds, as a table shows them."""
    if share is None:
        return ""
    spread = "" if of_rounds is None else f" ({100 * of_rounds[0]:.0f}-{100 * of_rounds[1]:.0f})"
    return f"{100 * share:.0f} %{spread}"


class Figure(msgspec.Struct):
    """One row of the table."""

    work: Work
    candidate: Rate
    baseline: Rate | None = None
    read_gb_s: float | None = None  # rate at which a decode step reads weights and KV
    bandwidth_share: float | None = None  # rate of reading divided by a plain read's in the same round, median
    bandwidth_shares: tuple[float, float] | None = None  # lowest and highest of the rounds
    peers: dict[str, Rate] = {}  # of further engines

    def compare(self, nbytes: float, rates: Sequence[float], reads: Sequence[float]) -> None:
        """Set the share of the bandwidth. `rates` and `reads`: tokens and bytes per second of the same rounds.

        Cores and memory change their speed between rounds, for both alike; so a share is that of one round.
        """
        shares = [nbytes * rate / read for rate, read in zip(rates, reads, strict=True)]
        self.bandwidth_share = round(statistics.median(shares), 3)
        self.bandwidth_shares = (round(min(shares), 3), round(max(shares), 3))

    @property
    def ratio(self) -> float | None:
        """Rate of the candidate divided by that of the baseline."""
        return round(self.candidate.median / self.baseline.median, 2) if self.baseline else None

    @property
    def ratio_to_best(self) -> float | None:
        """Rate of the candidate divided by the highest of all other engines."""
        others = [rate.median for rate in (self.baseline, *self.peers.values()) if rate is not None]
        return round(self.candidate.median / max(others), 2) if others else None


class Report(msgspec.Struct):
    """All results of a run; its JSON is the last line of output."""

    machine: dict[str, Any]
    model: dict[str, Any]
    figures: list[Figure]
    engine: dict[str, Any]  # overhead, load, memory, instruction set
    baseline: dict[str, Any] | None = None
    peers: dict[str, dict[str, Any]] = {}  # what further engines say of themselves
    http: dict[str, Any] | None = None  # figures of tools.bench.http
    kv: dict[str, Any] | None = None  # figures of tools.bench.kv

    def as_json(self) -> bytes:
        """The report as one line of JSON."""
        value = msgspec.to_builtins(self)
        for row, figure in zip(value["figures"], self.figures, strict=True):
            row["work"] = {k: v for k, v in figure.work._asdict().items() if v}
            row["ratio"], row["ratio_to_best"] = figure.ratio, figure.ratio_to_best
        return msgspec.json.encode(value)

    def lines(self) -> list[str]:
        """The report's table."""
        names = list(self.peers)
        more = [f"{name} tokens/s" for name in names] + (["ratio to best"] if names else [])
        rows = [("work", "starling tokens/s", "llama.cpp tokens/s", "ratio", *more, "read GB/s", "of bandwidth")]
        for f in self.figures:
            share = share_text(f.bandwidth_share, f.bandwidth_shares)
            read = "" if f.read_gb_s is None else f"{f.read_gb_s:.1f}"
            ratio = "" if f.ratio is None else f"{f.ratio:.2f}"
            others = [str(f.peers.get(name, "")) for name in names]
            others += [f"{f.ratio_to_best or 0:.2f}"] if names else []
            rows.append((f.work.title, str(f.candidate), str(f.baseline or ""), ratio, *others, read, share))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


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
