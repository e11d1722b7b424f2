"""What the processes of a running server hold in memory, beside arenas and weights.

    STARLING_HOME=... python -m tools.bench.memory [--details]

Prints a table of the processes of the server of this home, by role, and ends with one JSON line.  PSS is the
proportional set size: a page that n processes map counts 1/n in each, so that the sum is what the server takes from the
machine.  "Private" is what would be free if the process ended, "shared" the rest of its PSS.  Arenas (everything in the
arena directory) and weights (`*.bin`) are counted apart.  `--details` lists the largest mappings of each process.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from pipeline import procfs
from pipeline.config import paths
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.observe import status
from starling.cli.down import running

DETAILS = 8  # mappings per process
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)$")
ANONYMOUS = "[anonymous]"


class Use(NamedTuple):
    """Memory of one process, bytes."""

    private: int
    shared: int  # the rest of the PSS
    arenas: int  # PSS of arenas
    weights: int  # PSS of weights
    mappings: Counter[str]  # PSS by file, without arenas and weights

    @property
    def pss(self) -> int:
        """PSS beside arenas and weights."""
        return self.private + self.shared


class Process(NamedTuple):
    """One process of the server."""

    role: str
    pid: int
    use: Use


def parse(smaps: str, arena_dir: str) -> Use:
    """The sums of one /proc/PID/smaps."""
    private = pss = arenas = weights = 0
    mappings: Counter[str] = Counter()
    path = ""
    for line in smaps.splitlines():
        if found := _MAPPING.match(line):
            path = found[1].removesuffix(" (deleted)") or ANONYMOUS
            continue
        name, _, rest = line.partition(":")
        if name not in ("Pss", "Private_Clean", "Private_Dirty"):
            continue
        size = int(rest.split()[0]) << 10
        if path.startswith(arena_dir + "/"):
            arenas += size if name == "Pss" else 0
        elif path.endswith(".bin"):
            weights += size if name == "Pss" else 0
        elif name == "Pss":
            pss += size
            mappings[path] += size
        else:
            private += size
    return Use(private, max(0, pss - private), arenas, weights, mappings)


def measure(config: Config) -> list[Process]:
    """Every process of the running server, in the order of its tree. Empty when none runs."""
    run_dir = paths.run_dir(config)
    roots = running(run_dir)
    pids = procfs.process_tree(roots[0][1]) if roots else []
    for _, pid in roots[1:]:
        pids += [one for one in procfs.process_tree(pid) if one not in pids]
    named = _roles(run_dir)
    found = []
    for pid in pids:
        try:
            smaps = Path(f"/proc/{pid}/smaps").read_text()
        except OSError:
            continue
        if smaps:
            found.append(Process(named.get(pid) or _role(pid), pid, parse(smaps, str(paths.arena_dir(config)))))
    return found


def _roles(run_dir: Path) -> dict[int, str]:
    """The roles of stages, ranks and supervisors by pid, from the status records."""
    roles = {}
    for record in status.read_all(run_dir):
        if not record.alive:
            continue
        roles[record.pid] = record.stage
        if record.stage.startswith("worker"):
            for rank, pid in enumerate(procfs.children(record.pid), 1):
                roles[pid] = f"{record.stage}, rank {rank}"
        if record.parent > 1:
            roles[record.parent] = f"{record.stage}, supervisor"
    return roles


def _role(pid: int) -> str:
    """The role of a process without a status record, from its command."""
    command = procfs.command(pid)
    words = " ".join(command)
    if "supervise" in command:
        return "worker pool"
    if "honcho" in words:  # of a server that `honcho start` started
        return "honcho"
    if "resource_tracker" in words:
        return "resource tracker"
    return "starling up" if "up" in command else Path(command[0]).name if command else "?"


def table(processes: list[Process]) -> list[str]:
    """Lines of a Markdown table; processes of one role are added."""
    by_role: dict[str, list[Use]] = {}
    for process in processes:
        by_role.setdefault(process.role, []).append(process.use)
    lines = ["| process | n | PSS, MB | private | shared |", "|---|---|---|---|---|"]
    for role, uses in [*by_role.items(), ("all", [process.use for process in processes])]:
        sums = [sum(getattr(use, name) for use in uses) / 1e6 for name in ("pss", "private", "shared")]
        lines.append(f"| {role} | {len(uses)} | " + " | ".join(f"{size:.1f}" for size in sums) + " |")
    return lines


def main() -> None:
    """Measure the server of STARLING_HOME."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--details", action="store_true", help="the largest mappings of each process")
    details = parser.parse_args().details
    processes = measure(load())
    if not processes:
        parser.error("no server runs in this STARLING_HOME; start one with `starling up`")
    print("\n".join(table(processes)))
    if details:
        for process in processes:
            print(f"\n{process.role} ({process.pid}):")
            for path, size in process.use.mappings.most_common(DETAILS):
                print(f"  {size / 1e6:6.1f} MB  {path}")
    sums = {
        name: round(sum(getattr(process.use, name) for process in processes) / 1e6, 1)
        for name in ("pss", "private", "shared", "arenas", "weights")
    }
    each = {f"{process.role} ({process.pid})": round(process.use.pss / 1e6, 1) for process in processes}
    print(json.dumps({"processes": len(processes), "mb": sums, "pss_mb": each}))


if __name__ == "__main__":
    main()
