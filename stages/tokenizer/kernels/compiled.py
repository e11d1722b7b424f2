"""The compiled `merge_words` (merge_words.py), called from Python, without numba.

    with compiling(): ...       compile it meanwhile, in a process of its own, unless it is stored
    WordMerger.find(...)        the stored function over a vocabulary's tables; None: there is none

It is compiled for any x86-64 CPU by `starling prepare` and `starling up`, before a tokenizer starts: a tokenizer never
waits for a compiler.  Without it `pair_merger.py` does the same.  A directory of the cache is named by the sources;
what they were compiled with does not matter to what they do.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pipeline.config import paths
from pipeline.models import key_table
from pipeline.models.key_table import MIX, MIX_2, KeyTable
from pipeline.native import object_file
from pipeline.native.object_code import ObjectCode, ObjectCodeError

log = logging.getLogger("starling.tokenizer")

__all__ = ["MIX", "MIX_2", "WordMerger", "compiling"]

NAME = "merge_words"
LONGEST = 512  # symbols of a word: a merge looks at all of its pairs
KNOWN_BITS = 12  # of the number of places for words whose results are remembered
KNOWN_SYMBOLS, KNOWN_RESULTS = 24, 6  # of such a word
KNOWN_ENTRY = 2 + KNOWN_RESULTS + KNOWN_SYMBOLS  # i32 of a place: how many symbols, how many results, both
# The parameters.
SYMBOLS, ENDS, N_WORDS, KEYS, SLOTS, N_SLOTS, SEED, MERGED, RANKS, OUT, OUT_ENDS, KNOWN = range(12)
SCRATCH_RANKS, SCRATCH_MERGED, N_PARAMETERS = range(12, 15)
_SOURCES = ("compile.py", "compiled.py", "merge_words.py")
_COMPILE_S = 600  # time limit of the compiler on a busy machine; it needs seconds
_KEPT_S = 30 * 86_400  # how long the code of other sources is kept after its last use
_COMPILER = {"PYTHONHASHSEED": "0", "NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "+sse2", "NUMBA_OPT": "2"}
Ints = NDArray[np.int32]
Ends = NDArray[np.int64]


@functools.cache
def _key() -> str:
    h = hashlib.sha256()
    native = Path(object_file.__file__).parent / "link_once.py"
    sources = (*(Path(__file__).with_name(name) for name in _SOURCES), native, Path(key_table.__file__))
    for path in sources:
        h.update(path.read_bytes() + b"\0")
    return h.hexdigest()[:16]


def directory() -> Path:
    """Where the compiled function of these sources is stored."""
    return paths.cache_dir() / f"tokenizer-{_key()}"


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Compile the function while the body runs, unless it is stored. A failure is logged, and costs speed alone."""
    place = directory()
    process = None
    try:
        place.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # of another owner, or pruned by another process
            os.utime(place)
            _prune(place)
        if not object_file.symbol_path(place, NAME).exists():
            # -P: the modules of this installation, also in a folder that has others of their names
            command = [sys.executable, "-P", "-m", "stages.tokenizer.kernels.compile", str(place), str(os.getpid())]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=os.environ | _COMPILER,
            )
    except OSError as error:
        _warn(str(error))
    try:
        yield
        if process is not None:
            _end(process)
    finally:
        if process is not None:
            process.kill()
            process.communicate()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the compiler."""
    try:
        _, words = process.communicate(timeout=_COMPILE_S)
    except subprocess.TimeoutExpired:
        _warn(f"it did not end in {_COMPILE_S} s")
        return
    if process.returncode:
        _warn(words.decode(errors="replace").strip()[-500:])


def _warn(reason: str) -> None:
    log.warning("the kernel of the tokenizer was not compiled", extra={"reason": reason})


def _prune(place: Path) -> None:
    """Remove the code of other sources that has not been used for long."""
    for other in place.parent.glob("tokenizer-*"):
        if other != place and other.stat().st_mtime < time.time() - _KEPT_S:
            shutil.rmtree(other, ignore_errors=True)


class _Function:
    """The stored function. Releases the interpreter lock while it runs.

    Numba's calling convention (numba.core.callconv.CPUCallConv): a status is returned; pointers to the result and to
    the description of an exception precede the arguments.
    """

    def __init__(self, code: ObjectCode, address: int) -> None:
        self._code = code  # lives as long as it is called
        self._call = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(address)

    def __call__(self, parameters: int) -> int:
        result, exception = ctypes.c_int64(), ctypes.c_void_p()
        status = self._call(ctypes.byref(result), ctypes.byref(exception), parameters)
        if status:
            raise RuntimeError(f"a kernel ended with status {status}")
        return result.value


_loaded: dict[Path, _Function] = {}


def load() -> Callable[[int], int] | None:
    """The stored function, loaded once; None if there is none."""
    place = directory()
    if place not in _loaded:
        try:
            if not object_file.symbol_path(place, NAME).exists():
                return None
            _loaded[place] = _Function(*object_file.load(place, NAME))
        except (ObjectCodeError, OSError) as error:
            log.warning("the kernel of the tokenizer cannot be loaded", extra={"reason": str(error)})
            return None
    return _loaded[place]


class WordMerger:
    """Merges words over the tables of one vocabulary. May be called in several threads."""

    def __init__(self, function: Callable[[int], int], pairs: KeyTable, merged: Ints, ranks: Ints) -> None:
        """`merged` and `ranks`: of each pair."""
        self._function = function
        keys, slots, self._n_slots, self._seed = pairs.arrays
        self._tables = [np.ascontiguousarray(one) for one in (keys, slots, merged, ranks)]
        # One for each call at the same time: the words that it knows, and room for the pairs of a word.
        self._rooms: list[tuple[Ints, Ends, Ints]] = []

    @classmethod
    def find(cls, pairs: KeyTable, merged: Ints, ranks: Ints) -> Self | None:
        """One for these tables, if the function is stored."""
        function = load()
        return cls(function, pairs, merged, ranks) if function is not None else None

    def merge(self, symbols: Ints, ends: Ends) -> tuple[Ints, Ends]:
        """Merge words of at most `LONGEST` symbols: their symbols in a row, and where each ends. Returns the same."""
        symbols, ends = np.ascontiguousarray(symbols, np.int32), np.ascontiguousarray(ends, np.int64)
        out, out_ends = np.empty(len(symbols), np.int32), np.empty(len(ends), np.int64)
        try:
            room = self._rooms.pop()
        except IndexError:
            known = np.zeros(KNOWN_ENTRY << KNOWN_BITS, np.int32)
            room = known, np.empty(LONGEST, np.int64), np.empty(LONGEST, np.int32)
        keys, slots, merged, ranks = self._tables
        given = np.empty(N_PARAMETERS, np.int64)
        given[N_WORDS], given[N_SLOTS], given[SEED] = len(ends), self._n_slots, self._seed
        for place, array in (
            (SYMBOLS, symbols),
            (ENDS, ends),
            (KEYS, keys),
            (SLOTS, slots),
            (MERGED, merged),
            (RANKS, ranks),
            (OUT, out),
            (OUT_ENDS, out_ends),
            (KNOWN, room[0]),
            (SCRATCH_RANKS, room[1]),
            (SCRATCH_MERGED, room[2]),
        ):
            given[place] = array.ctypes.data
        n = self._function(given.ctypes.data)
        self._rooms.append(room)
        return out[:n], out_ends
