"""Fuzzes targets in child processes and summarizes what they found."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tools.fuzz import corpus
from tools.fuzz.guard import ROOT
from tools.fuzz.target import load

GRACE_S = 120  # for a child to import its target, and to end
_UNITS = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_COVERED = re.compile(r"cov: (\d+)")
_STOPPED = re.compile(r"(crash|timeout|oom|leak)-[0-9a-f]{40}$")


class Result(NamedTuple):
    """What fuzzing one target gave."""

    target: str
    seconds: float
    inputs: int  # executed
    edges: int  # of the instrumented code, covered by the corpus; libFuzzer's `cov`
    corpus: int  # inputs
    findings: list[str]  # first line: the key; then the details

    @property
    def line(self) -> str:
        """The figures, for people."""
        rate = self.inputs / self.seconds if self.seconds else 0.0
        return (
            f"{self.target:18} {self.inputs:10,} inputs {rate:9,.0f}/s {self.edges:6} edges {self.corpus:6} in corpus"
            f" {len(self.findings):4} findings"
        )


def fuzz(name: str, seconds: float, workspace: Path) -> Result:
    """Fuzz a target for about `seconds`. The corpus and the findings stay in `workspace/NAME`."""
    inputs, found = workspace / name / "corpus", workspace / name / "findings"
    found.mkdir(parents=True, exist_ok=True)
    corpus.add_to_directory(inputs, [*load(name).seeds(), *corpus.read_archive(name)])
    began = time.monotonic()
    executed = edges = 0
    spent = 0.0
    while (left := seconds - (time.monotonic() - began)) >= 1 or not spent:
        limit = str(max(1, round(left)))
        command = [sys.executable, "-m", "tools.fuzz.child", name, str(inputs), str(found), limit]
        try:
            child = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=left + GRACE_S, check=False
            )
            output, code = child.stderr, child.returncode
        except subprocess.TimeoutExpired as expired:
            output, code = (expired.stderr or b"").decode("utf-8", "replace"), -1
        spent = time.monotonic() - began
        executed += sum(map(int, _UNITS.findall(output)))
        edges = max([edges, *map(int, _COVERED.findall(output))])
        (workspace / name / "log.txt").write_text(output, "utf-8", "backslashreplace")
        if code and not any(_STOPPED.fullmatch(path.name) for path in found.iterdir()):
            # The child could not start, or ended without naming an input: that is a finding, and no use repeating.
            (found / "child.txt").write_text(f"the process ended with {code}\n{output[-4000:]}\n")
            break
        if code and time.monotonic() - began < 1:
            break
    return Result(name, spent, executed, edges, len(list(inputs.iterdir())), read_findings(found))


def read_findings(directory: Path) -> list[str]:
    """The texts of all findings in a directory; for an input that ended its process, the file's name."""
    texts = [path.read_text("utf-8", "replace") for path in sorted(directory.glob("*.txt"))]
    stopped = [path for path in sorted(directory.iterdir()) if _STOPPED.fullmatch(path.name)]
    return texts + [f"{path.name.partition('-')[0]}: the process ended at {path}" for path in stopped]
