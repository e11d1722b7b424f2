"""`process_ticks` distinguishes an ended process from one that it cannot read."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys

import pytest

from shm.arena import process_ticks


def test_a_running_process_has_a_start_time_and_an_ended_one_has_none() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert process_ticks(process.pid) >= process_ticks(os.getpid()) > 0
    finally:
        process.communicate(b"\n")
    assert process_ticks(process.pid) == 0


def test_without_a_free_descriptor_no_process_counts_as_ended() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)  # the lowest free descriptor, which the limit below makes unusable
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        with pytest.raises(OSError) as refused:
            process_ticks(os.getpid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert refused.value.errno == errno.EMFILE
    assert process_ticks(os.getpid()) > 0
