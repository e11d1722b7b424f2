"""The tokenizer's compiled functions, and `merge_words` (merge_words.py) called from Python, without numba.

    with compiling(): ...       compile them meanwhile, in a process of its own, unless they are stored
    WordMerger.find(...)        the stored function over a vocabulary's tables; None: there is none

They are compiled for any x86-64 CPU by `starling prepare` and `starling up`, before a tokenizer starts: a tokenizer
never waits for a compiler.  Without them `pair_merger.py`, `token_lattice.py` and `wordpiece.py` do the same.  A
directory of the cache is named by the sources; what they were compiled with does not matter to what they do.
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
from collections.abc import Callable, Generator, Iterator
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

NAMES = MERGE_WORDS, CUT_WORDS = "merge_words", "cut_words"
LONGEST = 512  # symbols of a word of which a merge looks at all pairs; longer ones have a heap
LONG_STEPS = 1 << 16  # pairs of a long word that one call weighs or merges: some ms
GONE = -2  # in place of a long word's symbol: merged into the one before
KNOWN_BITS = 12  # of the number of places for words whose results are remembered
KNOWN_SYMBOLS, KNOWN_RESULTS = 24, 6  # of such a word
KNOWN_ENTRY = 2 + KNOWN_RESULTS + KNOWN_SYMBOLS  # i32 of a place: how many symbols, how many results, both
# The parameters.
SYMBOLS, ENDS, N_WORDS, KEYS, SLOTS, N_SLOTS, SEED, MERGED, RANKS, OUT, OUT_ENDS, KNOWN = range(12)
SCRATCH_RANKS, SCRATCH_MERGED = range(12, 14)
# Of one long word: its symbols (0: there is none), steps of a call, links, keys, how many of them, symbols weighed.
N_SYMBOLS, STEPS, AFTER, BEFORE, HEAP, HEAP_SIZE, WEIGHED, N_PARAMETERS = range(14, 22)
_SOURCES = (
    "compile.py",
    "compiled.py",
    "cut_words.py",
    "merge_long.py",
    "merge_words.py",
    "pairs.py",
    "word_cutter.py",
)
_COMPILE_S = 600  # time limit of the compiler on a busy machine; it needs seconds
_KEPT_S = 30 * 86_400  # how long the code of other sources is kept after its last use
_COMPILER = {"PYTHONHASHSEED": "0", "NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "+sse2", "NUMBA_OPT": "2"}
Ints = NDArray[np.int32]
Ends = NDArray[np.int64]


@functools.cache
def _key() -> str:
    h = hashlib.sha256()
    native = (Path(object_file.__file__).with_name(name) for name in ("lean_numba.py", "link_once.py"))
    sources = (*(Path(__file__).with_name(name) for name in _SOURCES), *native, Path(key_table.__file__))
    for path in sources:
        h.update(path.read_bytes() + b"\0")
    return h.hexdigest()[:16]


def directory() -> Path:
    """Where the compiled functions of these sources are stored."""
    return paths.cache_dir() / f"tokenizer-{_key()}"


def is_stored() -> bool:
    """Whether all functions of these sources are compiled."""
    return all(object_file.symbol_path(directory(), name).exists() for name in NAMES)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Compile the functions while the body runs, unless they are stored. A failure is logged, and costs speed alone."""
    place = directory()
    process = None
    try:
        place.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # of another owner, or pruned by another process
            os.utime(place)
            _prune(place)
        if not is_stored():
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
    log.warning("the kernels of the tokenizer were not compiled", extra={"reason": reason})


def _prune(place: Path) -> None:
    """Remove the code of other sources that has not been used for long."""
    for other in place.parent.glob("tokenizer-*"):
        if other != place and other.stat().st_mtime < time.time() - _KEPT_S:
            shutil.rmtree(other, ignore_errors=True)


class _Function:
    """A stored function. Releases the interpreter lock while it runs.

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


def load(name: str = MERGE_WORDS) -> Callable[[int], int] | None:
    """A stored function, loaded once; None if there is none."""
    place = directory()
    path = object_file.symbol_path(place, name)
    if path not in _loaded:
        try:
            if not path.exists():
                return None
            _loaded[path] = _Function(*object_file.load(place, name))
        except (ObjectCodeError, OSError) as error:
            log.warning("a kernel of the tokenizer cannot be loaded", extra={"kernel": name, "reason": str(error)})
            return None
    return _loaded[path]


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
        given = np.zeros(N_PARAMETERS, np.int64)
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

    def merge_long(self, symbols: Ints) -> Generator[None, None, Ints]:
        """Return the merged symbols of a word of any length, which is not empty. Yields between calls of some ms."""
        symbols = np.array(symbols, np.int32)
        n = len(symbols)
        after, before, heap = np.empty(n, np.int32), np.empty(n, np.int32), np.empty(3 * n, np.int64)
        keys, slots, merged, ranks = self._tables
        given = np.zeros(N_PARAMETERS, np.int64)
        given[N_SYMBOLS], given[N_SLOTS], given[SEED], given[STEPS] = n, self._n_slots, self._seed, LONG_STEPS
        for place, array in (
            (SYMBOLS, symbols),
            (KEYS, keys),
            (SLOTS, slots),
            (MERGED, merged),
            (RANKS, ranks),
            (AFTER, after),
            (BEFORE, before),
            (HEAP, heap),
        ):
            given[place] = array.ctypes.data
        while not self._function(given.ctypes.data):
            yield
        return symbols[symbols != GONE]
