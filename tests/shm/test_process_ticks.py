"""Who is gone is told from who cannot be looked at: what a process had is passed on only when it is gone."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys

import pytest

from shm.arena import process_ticks


def test_a_living_process_has_its_time_and_a_dead_one_none() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert process_ticks(process.pid) >= process_ticks(os.getpid()) > 0
    finally:
        process.communicate(b"\n")
    assert process_ticks(process.pid) == 0


def test_without_a_descriptor_left_nobody_is_taken_for_dead() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)  # the lowest one that is free: from it on there are none
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        with pytest.raises(OSError) as refused:
            process_ticks(os.getpid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert refused.value.errno == errno.EMFILE
    assert process_ticks(os.getpid()) > 0
