"""A process that fuzzes one target until its time is over: `python -m tools.fuzz.child TARGET CORPUS FINDINGS SECONDS`.

`atheris` (libFuzzer) mutates inputs and keeps those that reach new code.  What the guard reports is written to the
directory FINDINGS, once per key, and fuzzing continues.  An input that ends or blocks the process is written there by
libFuzzer itself (`crash-*`, `timeout-*`, `oom-*`).
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import atheris

from tools.fuzz.guard import Finding, Guard
from tools.fuzz.target import load

PACKAGES = ["pipeline", "shm", "stages", "yaml", "jinja2", "tests"]  # instrumented where they are imported
BLOCKED_S = 20  # for one input, when the guard's timer cannot interrupt it
LIMIT_MB = 4096  # of the process: the guard has finer bounds


def store(finding: Finding, data: bytes, directory: Path) -> None:
    """Write the input and the finding, unless one of the same key is there."""
    name = hashlib.sha256(finding.key.encode()).hexdigest()[:16]
    if not (directory / f"{name}.txt").exists():
        (directory / f"{name}.input").write_bytes(data)
        (directory / f"{name}.txt").write_text(f"{finding.key}\n{finding.text}\n", "utf-8", "backslashreplace")


def main(name: str, corpus: Path, findings: Path, seconds: int) -> None:
    """Fuzz. Does not return: libFuzzer ends the process."""
    with atheris.instrument_imports(include=PACKAGES):
        target = load(name)
    guard = Guard(target)

    def test_one_input(data: bytes) -> None:
        finding = guard.check(data)
        if finding is not None:
            store(finding, data, findings)

    options = {
        "max_total_time": seconds,
        "max_len": target.max_bytes,
        "timeout": BLOCKED_S,
        "rss_limit_mb": LIMIT_MB,
        "artifact_prefix": f"{findings}/",
        "print_final_stats": 1,
    }
    atheris.Setup([sys.argv[0], str(corpus), *(f"-{key}={value}" for key, value in options.items())], test_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
