"""`python -m tools.checks [ROOT]` runs every check, prints each violation, and exits 1 when there is one."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.checks import commands, cycles, diagrams, layers, length, links, prose

CHECKS = {
    "import layers": layers.problems,
    "import cycles": cycles.problems,
    "file length": length.problems,
    "links": links.problems,
    "shell commands": commands.problems,
    "diagrams": diagrams.problems,
    "prose": prose.problems,
}


def main(root: Path) -> int:
    """Run the checks below `root`; returns the exit code."""
    failed = False
    for name, check in CHECKS.items():
        found = list(check(root))
        failed = failed or bool(found)
        print(f"{name}: {'ok' if not found else ''}")
        for line in found:
            print(f"  {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]))
