"""A hash table of 64-bit keys in arrays, which can be mapped from a file: each key is in one of two places.

    keys   u64 (entries,)   in any order without repetitions; an entry is known by its place here
    slots  i32 (slots,)     entries, -1: free; about 2.5 for each entry

A lookup of many keys is a fixed number of array operations, however full the table is (cuckoo hashing, Pagh and Rodler
2001).  Building moves all keys that collide at once, in rounds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MIX = 0x9E3779B97F4A7C15  # 2**64 / golden ratio (Knuth, The Art of Computer Programming 3, 6.4)
MIX_2 = 0xD6E8FEB86659FD93  # odd, of as many ones as zeros
_MASK = (1 << 64) - 1
_ROUNDS = 500
Keys = NDArray[np.uint64]


def _places(keys: Keys, size: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the two places of each key."""
    mixed = (keys ^ np.uint64(seed)) * np.uint64(MIX)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(MIX_2)
    first = ((mixed >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32)
    mixed *= np.uint64(MIX)
    second = ((mixed >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32)
    return first.astype(np.int64), second.astype(np.int64)


class KeyTable:
    """Finds entries by key. Read-only.

    `make` builds the arrays; their seed is in the last slot.
    """

    def __init__(self, keys: Keys, slots: NDArray[np.int32]) -> None:
        """Raises `ValueError` for arrays that no table has."""
        if keys.dtype != np.uint64 or slots.dtype != np.int32:  # machine code reads them without looking
            raise ValueError(f"keys are {keys.dtype} and slots {slots.dtype}, expected uint64 and int32")
        lacks_seed = not len(slots) or slots[-1] < 0
        if lacks_seed or (len(slots) > 1 and int(slots[:-1].max()) >= len(keys)) or int(slots.min()) < -1:
            raise ValueError(f"{len(slots)} slots for {len(keys)} keys")
        self._slots, self._size, self._seed = slots, len(slots) - 1, int(slots[-1])
        self._keys = keys
        # Without entries every lookup would need a case of its own.
        self._known = keys if len(keys) else np.zeros(1, np.uint64)
        self._fast_keys, self._fast_slots = keys.data, slots.data  # one number at a time

    @property
    def arrays(self) -> tuple[Keys, NDArray[np.int32], int, int]:
        """Keys, slots, how many of these hold entries, and the seed: for lookups in machine code."""
        return self._keys, self._slots, self._size, self._seed

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, keys: Keys) -> NDArray[np.int64]:
        """Return the entry of each key, -1 where there is none."""
        if not len(self._keys):
            return np.full(len(keys), -1, np.int64)
        first, second = _places(keys, self._size, self._seed)
        one, other = self._slots[first], self._slots[second]
        found = np.where(self._known[one] == keys, one, np.int32(-1))  # an entry of -1 is compared with the last key
        is_other = (self._known[other] == keys) & (other >= 0)
        found = np.where(is_other, other, found)
        return found.astype(np.int64)

    def find_one(self, key: int) -> int:
        """Return the entry of a key, -1 if there is none."""
        size, keys, slots = self._size, self._fast_keys, self._fast_slots
        mixed = ((key ^ self._seed) * MIX) & _MASK
        mixed = ((mixed ^ (mixed >> 32)) * MIX_2) & _MASK
        entry: int = slots[((mixed >> 32) * size) >> 32] if size else -1
        if entry >= 0 and keys[entry] == key:
            return entry
        mixed = (mixed * MIX) & _MASK
        entry = slots[((mixed >> 32) * size) >> 32] if size else -1
        return entry if entry >= 0 and keys[entry] == key else -1


def make_slots(keys: Keys) -> NDArray[np.int32]:
    """Return the slots for keys that are all different."""
    size = max(8, len(keys) * 5 // 2) if len(keys) else 0
    for seed in range(64):
        slots = _try(keys, size, seed)
        if slots is not None:
            return np.append(slots, np.int32(seed))
    raise ValueError(f"{len(keys)} keys have no table: some are equal")


def _try(keys: Keys, size: int, seed: int) -> NDArray[np.int32] | None:
    slots = np.full(size, -1, np.int32)
    places = np.stack(_places(keys, size, seed)) if len(keys) else np.zeros((2, 0), np.int64)
    side = np.zeros(len(keys), np.int8)  # where an entry is, or goes next
    waiting = np.arange(len(keys))
    for _ in range(_ROUNDS):
        if not len(waiting):
            return slots
        wanted = places[side[waiting], waiting]
        evicted = slots[wanted]
        slots[wanted] = waiting
        placed = slots[wanted] == waiting
        # Of several entries that want one place the last one has it; the entry that was there leaves, once.
        evicted = np.unique(evicted[evicted >= 0])
        waiting = np.concatenate([waiting[~placed], evicted])
        side[waiting] ^= 1
    return None
