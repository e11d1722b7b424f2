"""The cache salt of sequences that a LoRA adapter computes: pages and answers are shared within one adapter alone.

    SALT NUL NUL DIGEST

SALT is that of the same sequence without an adapter.  It has at most one NUL (`Caller.salted`), and no two in a row
before more text, so no tenant and no request can give a salt of this form.
"""

from __future__ import annotations

_MARK = "\0\0"


def with_adapter(salt: str, digest: str) -> str:
    """The salt of a sequence with the adapter of this digest (hex); `salt` itself for ""."""
    return f"{salt}{_MARK}{digest}" if digest else salt


def without_adapter(salt: str) -> tuple[str, str]:
    """The salt of the same sequence without an adapter, and the adapter's digest, "" if it has none."""
    own, mark, digest = salt.rpartition(_MARK)
    return (own, digest) if mark and digest else (salt, "")
