"""The shared eviction orders against sorted lists, and the heap that drops stale items."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.eviction_order import POLICIES, EvictionOrder, PrunedHeap

Operation = tuple[str, int, int, int]
operations = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "remove", "pop"]), st.integers(0, 9), st.integers(1, 4), st.integers(0, 9)
    ),
    max_size=60,
)


@pytest.mark.parametrize("policy", POLICIES)
@given(operations=operations)
def test_entries_leave_in_the_order_of_the_policy(policy: str, operations: list[Operation]) -> None:
    order: EvictionOrder[int] = EvictionOrder(policy)
    model: dict[int, tuple[Any, ...]] = {}
    for now, (operation, key, uses, born) in enumerate(operations):
        expected = sorted(model, key=lambda k: model[k])
        if operation == "add" and key not in model:
            order.add(key, now, uses, born)
            model[key] = ({"lru": 0, "lfu": uses, "fifo": born}[policy], now)
        elif operation == "remove" and key in model:
            order.remove(key)
            del model[key]
        elif operation == "pop" and model:
            assert order.pop() == expected[0]
            del model[expected[0]]
        assert list(order.order()) == sorted(model, key=lambda k: model[k])
        assert order.expired(now - 5) == sorted((k for k in model if model[k][1] < now - 5), key=lambda k: model[k][1])
        assert len(order) == len(model)


@pytest.mark.parametrize("policy", POLICIES)
def test_remove_all_removes_each_entry(policy: str) -> None:
    order: EvictionOrder[str] = EvictionOrder(policy)
    for key in "abcd":
        order.add(key, 1, 1, 1)
    order.remove_all("ca")
    assert [order.pop(), order.pop()] == ["b", "d"]
    with pytest.raises(IndexError):
        order.pop()


def test_a_key_that_is_pushed_again_moves_to_its_new_rank() -> None:
    heap: PrunedHeap[str] = PrunedHeap()
    for key, rank in (("a", 1), ("b", 2), ("a", 3)):
        heap.push(key, rank)
    assert list(heap.order()) == ["b", "a"]
    assert [heap.pop(), heap.pop()] == ["b", "a"]
    assert len(heap) == 0


def test_stale_items_are_dropped() -> None:
    heap: PrunedHeap[int] = PrunedHeap()
    for rank in range(10_000):
        heap.push(7, rank)
    assert heap.n_items < 200
