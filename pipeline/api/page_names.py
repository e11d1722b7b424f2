"""How an engine names the KV pages of a prompt to what forwards its answers, so that it can route later prompts.

    X-Starling-Pages: TOKENS END:NAME,END:NAME,...

TOKENS: of the prompt.  END: tokens up to the end of a page.  NAME: the first 64 bits of the page's hash, hex.  The hash
covers all tokens up to the page's end (shm/prefix_hash.py), so that equal names are equal prefixes at each engine of a
version.  Of more than `MAX_NAMES` pages some are named, evenly, the last one included.  Only senders of
`X-Starling-Relay` with an administrator's key get the header.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

HEADER = "X-Starling-Pages"
MAX_NAMES = 64
_FORM = re.compile(r"([0-9]{1,7}) ((?:[0-9]{1,7}:[0-9a-f]{16})(?:,[0-9]{1,7}:[0-9a-f]{16})*)")


class PageNames(NamedTuple):
    """Some pages of a prompt, in their order."""

    n_tokens: int
    pages: tuple[tuple[int, int], ...]  # end, in tokens, and name


def name_of(page_hash: bytes) -> int:
    """The name of a page: its hash's first 8 bytes, little-endian."""
    return int.from_bytes(page_hash[:8], "little")


def encode(n_tokens: int, page_tokens: int, hashes: Sequence[bytes]) -> str:
    """The header's value. `hashes`: of the prompt's full pages; "" without any."""
    step = -(-len(hashes) // MAX_NAMES) or 1
    chosen = range(len(hashes) - 1, -1, -step)
    named = [f"{(page + 1) * page_tokens}:{name_of(hashes[page]):016x}" for page in reversed(chosen)]
    return f"{n_tokens} {','.join(named)}" if named else ""


def decode(value: str) -> PageNames | None:
    """The header's value; None if it is not one."""
    match = _FORM.fullmatch(value)
    if match is None:
        return None
    pages = [one.split(":") for one in match[2].split(",")[:MAX_NAMES]]
    return PageNames(int(match[1]), tuple((int(end), int(name, 16)) for end, name in pages))
