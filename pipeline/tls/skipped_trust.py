"""Imports without the system's certificate authorities.

aiohttp builds the TLS context of its client when it is imported. A process that only serves never uses it, and would
spend 40 to 100 ms and 3 MB on the system's certificates. A connection that aiohttp's client of such a process made
anyway would fail: no certificate is trusted there. Contexts made later are not affected.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")  # of OpenSSL, read whenever a context loads its default certificates
_NOWHERE = "/proc/self/no-certificates"


@contextmanager
def without_certificates() -> Iterator[None]:
    """Within it, default TLS contexts trust nothing. For a process with one thread."""
    before = {name: os.environ.get(name) for name in _VARIABLES}
    os.environ.update(dict.fromkeys(_VARIABLES, _NOWHERE))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
