"""A doorbell rings as long as datagrams are unread, and reading none of them raises."""

from __future__ import annotations

import select
from pathlib import Path

from pipeline.ipc.doorbell import Doorbell, Ringer


def test_each_ring_is_read_and_none_is_lost(tmp_path: Path) -> None:
    bell, ringer = Doorbell(tmp_path / "bell.sock"), Ringer()
    poll = select.poll()
    poll.register(bell.fd, select.POLLIN)
    try:
        bell.drain()
        ringer.connect(bell.path)
        for rings in (1, 3):
            for _ in range(rings):
                assert ringer.ring()
            for _ in range(rings):
                assert poll.poll(0), "it rings until all datagrams are read"
                bell.drain()
            assert not poll.poll(0)
    finally:
        ringer.close()
        bell.close()
