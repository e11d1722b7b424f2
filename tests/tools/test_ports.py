"""Ports of test servers: each is given once, to one process, and none that the kernel may give meanwhile."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.server import ROOT
from tools import ports

# Prints a port of the range in the arguments.
OTHER = """
import sys
from tools import ports
ports.FIRST, ports.LAST = map(int, sys.argv[1:])
print(ports.free_port())
"""


def other(first: int, last: int) -> int:
    command = [sys.executable, "-c", OTHER, str(first), str(last)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout)


def test_a_port_is_given_to_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ports.free_port()
    assert ports.FIRST <= first <= ports.LAST
    monkeypatch.setattr(ports, "FIRST", first)
    monkeypatch.setattr(ports, "LAST", first)
    assert ports.free_port() != first
    assert other(first, first) != first
