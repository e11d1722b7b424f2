"""The table of the server's memory: what counts as the process's own, and what as arenas and weights."""

from __future__ import annotations

from tools.bench.memory import ANONYMOUS, Process, parse, table

SMAPS = """\
55d0c0a00000-55d0c0c00000 r-xp 00000000 fe:01 1234                       /usr/bin/python3.11
Size:               2048 kB
Rss:                2000 kB
Pss:                 200 kB
Pss_Dirty:             0 kB
Shared_Clean:       2000 kB
Private_Clean:         0 kB
Private_Dirty:         0 kB
VmFlags: rd ex mr mw me sd
55d0c1000000-55d0c1800000 rw-p 00000000 00:00 0                          [heap]
Pss:                6000 kB
Private_Clean:         0 kB
Private_Dirty:      5000 kB
7f0000000000-7f0000400000 rw-p 00000000 00:00 0 
Pss:                1000 kB
Private_Clean:       100 kB
Private_Dirty:       900 kB
7f0001000000-7f0009000000 rw-s 00000000 00:1a 77                         /dev/shm/starling-0/tiny.kv (deleted)
Pss:               64000 kB
Private_Clean:         0 kB
Private_Dirty:     64000 kB
7f0010000000-7f0016000000 r--s 00000000 fe:01 99                         /home/x/models/abc.bin
Pss:               48000 kB
Private_Clean:     48000 kB
Private_Dirty:         0 kB
"""  # noqa: W291


def test_arenas_and_weights_are_counted_apart() -> None:
    use = parse(SMAPS, "/dev/shm/starling-0")
    assert use.private == 6000 << 10
    assert use.pss == 7200 << 10
    assert (use.arenas, use.weights) == (64000 << 10, 48000 << 10)
    assert use.mappings == {"/usr/bin/python3.11": 200 << 10, "[heap]": 6000 << 10, ANONYMOUS: 1000 << 10}
    assert parse(SMAPS, "/dev/shm/starling").arenas == 0  # another server's arenas


def test_processes_of_one_role_are_one_line() -> None:
    use = parse(SMAPS, "/dev/shm/starling-0")
    lines = table([Process("kv", 1, use), Process("worker", 2, use), Process("worker", 3, use)])
    assert lines[2:] == [
        "| kv | 1 | 7.4 | 6.1 | 1.2 |",
        "| worker | 2 | 14.7 | 12.3 | 2.5 |",
        "| all | 3 | 22.1 | 18.4 | 3.7 |",
    ]
