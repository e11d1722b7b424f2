"""The head of a checkpoint's `.idx`: how much of the file is in front of its tables, without a look at the rest."""

from __future__ import annotations

HEAD_BYTES = 16  # msgpack: 2 of an array and a small integer, up to 9 of an integer, up to 5 before binary data
_INTEGER_BYTES = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}  # behind these bytes of msgpack an integer has so many more
_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4}  # behind these binary data have a length of so many
_MAX_BETWEEN = 128  # a checksum, the padding and what msgpack puts before that and the tables: 79 at most


def tables_begin(head: bytes, size: int) -> int:
    """At least the bytes up to the tables of a file of `size` bytes, and a few of these at most.

    head: its first `HEAD_BYTES`: version, checksum and the length of the payload.  `size` where they are not, as in
    version 1.
    """
    if len(head) < HEAD_BYTES or head[1] < 2:
        return size
    at = 3 + _INTEGER_BYTES.get(head[2], 0)
    n = _LENGTH_BYTES.get(head[at], 0)
    if not n:
        return size
    begin = at + 1 + n
    return min(size, begin + int.from_bytes(head[at + 1 : begin], "big") + _MAX_BETWEEN)
