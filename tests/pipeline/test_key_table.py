"""Tables of keys in arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.models.key_table import KeyTable, make_slots

keys = st.lists(st.integers(0, (1 << 64) - 1), unique=True, max_size=200)


@settings(deadline=None)
@given(keys, st.lists(st.integers(0, (1 << 64) - 1), max_size=20))
def test_all_keys_are_found_and_no_others(some: list[int], others: list[int]) -> None:
    array = np.array(some, np.uint64)
    table = KeyTable(array, make_slots(array))
    asked = [*some, *others]
    places = {key: i for i, key in enumerate(some)}
    expected = [places.get(key, -1) for key in asked]
    assert table.find(np.array(asked, np.uint64)).tolist() == expected
    assert [table.find_one(key) for key in asked] == expected


def test_a_table_of_many_keys() -> None:
    array = np.arange(200_000, dtype=np.uint64) << np.uint64(20)
    table = KeyTable(array, make_slots(array))
    assert (table.find(array) == np.arange(len(array))).all()
    assert (table.find(array + np.uint64(1)) == -1).all()


@pytest.mark.parametrize("slots", [[], [5, 0], [-2, 0], [1, -1]])
def test_slots_of_other_keys_are_refused(slots: list[int]) -> None:
    with pytest.raises(ValueError, match="slots for 3 keys"):
        KeyTable(np.arange(3, dtype=np.uint64), np.array(slots, np.int32))
