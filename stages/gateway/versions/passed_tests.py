"""The self-tests that versions have passed: the tokens after the first words of their text, by all they depend on.

    STATE_DIR/self-tests.json   the last `MAX_TESTS`; replaced atomically, and ignored if it does not decode

A version of which the same is loaded again need only give the same tokens with the same logprobs (self_test.py).
Another model file, other kernels, another CPU or other settings of the output are another key.  What is recorded for a
key stays until newer keys take its place: other tokens of the same key are damage.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import NamedTuple

import msgspec

from pipeline.files import replace_file
from shm.decoding import DECODE_ERRORS

log = logging.getLogger("starling.gateway.loader")

MAX_TESTS = 64
MAX_BYTES = 64 << 10  # of the file


class ProbeToken(NamedTuple):
    """One of the answer to the self-test."""

    token: int
    logprob: float


Probe = tuple[ProbeToken, ...]


class PassedTests:
    """One per gateway. `path`: of the file; None: they end with this process."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._by_key = _read(path) if path is not None else {}

    def find(self, key: str) -> Probe | None:
        """The tokens of the test that was passed with that key."""
        return self._by_key.get(key)

    def add(self, key: str, probe: Probe) -> None:
        """A test was passed; an earlier one of that key stays. What cannot be stored is lost with this process."""
        if key in self._by_key:
            return
        self._by_key[key] = probe
        while len(self._by_key) > MAX_TESTS:
            del self._by_key[next(iter(self._by_key))]
        if self._path is None:
            return
        try:
            replace_file(self._path, msgspec.json.encode(self._by_key))
        except OSError as error:
            log.warning("a passed self-test is not stored", extra={"path": str(self._path), "reason": str(error)})


def key_of(**facts: object) -> str:
    """The key of a test: `facts` are all that its tokens depend on, as values that JSON has."""
    return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()


def _read(path: Path) -> dict[str, Probe]:
    try:
        if path.stat().st_size > MAX_BYTES:
            return {}
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Probe])
    except FileNotFoundError:
        return {}
    except (OSError, *DECODE_ERRORS) as error:
        log.warning("passed self-tests cannot be read", extra={"path": str(path), "reason": str(error)})
        return {}
