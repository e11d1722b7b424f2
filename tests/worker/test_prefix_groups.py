"""Prefix groups of random page tables: the same in any order, near the best, with the bytes of each entry alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.schema import ModelConfig
from shm.pages import KV_SPLIT
from stages.worker import activations_arena as act
from stages.worker.checkpoint.prepare import prepare_checkpoint
from stages.worker.kernels import plan as p
from stages.worker.kernels.buffer_sizes import ENTRY_PLAN, PLAN_HEAD
from stages.worker.kernels.prefix_groups import LEAST_MEMBERS
from tests.properties import examples
from tools.step_runner import StepRunner
from tools.tiny_gguf import SHAPES, Shape, write_model

pytestmark = pytest.mark.slow

PAGE_TOKENS, SPLITS, ROWS = 64, 5, 16
EACH = KV_SPLIT // PAGE_TOKENS  # pages of a split
Table = tuple[int, ...]  # a number for each page of full splits
Groups = list[tuple[int, list[Table]]]  # splits of the prefix, tables of the members


class Text(NamedTuple):
    """What an entry has of another one's pages, and its full splits."""

    parent: int
    shared: int  # pages
    splits: int


texts = st.lists(
    st.builds(Text, st.integers(0, ROWS - 1), st.integers(0, SPLITS * EACH), st.integers(1, SPLITS)),
    min_size=6,
    max_size=ROWS,
)


def tables_of(drawn: Sequence[Text]) -> list[Table]:
    """Page tables that share as drawn: each with an earlier one, so that prefixes are nested."""
    found: list[Table] = []
    for number, text in enumerate(drawn):
        own = [number * SPLITS * EACH + page for page in range(text.splits * EACH)]
        if number:
            shared = found[text.parent % number][: min(text.shared, len(own))]
            own[: len(shared)] = shared
        found.append(tuple(own))
    return found


# ------------------------------------------------------------------ what is expected


def whole_splits(a: Table, b: Table) -> int:
    """KV splits in which two tables begin alike."""
    n = next((i for i, pages in enumerate(zip(a, b, strict=False)) if pages[0] != pages[1]), min(len(a), len(b)))
    return n // EACH


def prefixes(tables: Sequence[Table]) -> dict[Table, Table]:
    """The nodes of the tree of prefixes, each with the next shorter one."""
    nodes = {table[: whole_splits(table, other) * EACH] for table in tables for other in tables} | {()}
    return {
        node: max((one for one in nodes if len(one) < len(node) and node[: len(one)] == one), key=len)
        for node in nodes
        if node
    }


class Part(NamedTuple):
    """What a node can still use: groups, and tables in none."""

    groups: Groups
    loose: list[Table]

    @property
    def saved(self) -> int:
        return sum((len(members) - 1) * depth for depth, members in self.groups)

    @property
    def n_tables(self) -> int:
        return len(self.loose) + sum(len(members) for _, members in self.groups)


def expected(tables: Sequence[Table]) -> Groups:
    """The same rule as that of the kernel, by recursion over the tree."""
    parents, final = prefixes(tables), Groups()

    def part_of(node: Table) -> Part:
        depth = len(node) // EACH
        here = Part([], [table for table in tables if table == node])
        for child in (one for one, parent in parents.items() if parent == node):
            part = part_of(child)
            if part.n_tables * depth <= part.saved:
                final.extend(part.groups)
            else:
                here = Part([*here.groups, *part.groups], [*here.loose, *part.loose])
        if here.n_tables >= LEAST_MEMBERS and (here.n_tables - 1) * depth > here.saved:
            everything = [*here.loose, *(table for _, members in here.groups for table in members)]
            return Part([(depth, everything)], [])
        return here

    final.extend(part_of(()).groups)
    return final


def best(tables: Sequence[Table]) -> int:
    """The passes that the best choice of groups saves, by trying all: for each node, how many tables it leaves."""
    parents = prefixes(tables)

    def choices(node: Table) -> dict[int, int]:
        """By number of tables in no group: the passes that the groups below save."""
        found = {sum(table == node for table in tables): 0}
        for child in (one for one, parent in parents.items() if parent == node):
            below, joined = choices(child), dict[int, int]()
            for left, saved in found.items():
                for more, also in below.items():
                    joined[left + more] = max(joined.get(left + more, 0), saved + also)
            found = joined
        for left, saved in list(found.items()):
            if left >= LEAST_MEMBERS:
                found[0] = max(found.get(0, 0), saved + (left - 1) * (len(node) // EACH))
        return found

    return max(choices(()).values())


def plain(groups: Groups) -> list[tuple[int, list[Table]]]:
    return sorted((depth, sorted(members)) for depth, members in groups)


def saved_by(groups: Groups) -> int:
    return sum((len(members) - 1) * depth for depth, members in groups)


# ------------------------------------------------------------------ what the kernel finds


@cache
def model_of(folder: Path, shape: Shape) -> Path:
    path = write_model(folder / "m.gguf", shape, "Q4_0")
    return prepare_checkpoint(ModelConfig(name="m", path=str(path)), folder / "models")


@pytest.fixture(scope="module", params=[1, 3])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StepRunner]:
    """Pages of random K and V, which every row may name."""
    folder = tmp_path_factory.mktemp("prefix-groups")
    tokens = (SPLITS + 1) * KV_SPLIT
    with StepRunner(
        model_of(folder, SHAPES["odd"]._replace(context_length=2048)),  # three KV heads
        folder,
        ranks=request.param,
        page_tokens=PAGE_TOKENS,
        max_rows=ROWS,
        max_tokens=tokens,
        step_tokens=64,
        max_samples=ROWS,
    ) as found:
        rng = np.random.default_rng(3)
        values = found.pages.view(np.float16)
        values[:] = rng.normal(size=values.shape).astype(np.float16)
        for row in range(ROWS):
            found.write_row(row, rng.integers(0, found.model.hyper.vocab_size, tokens).astype(np.int32))
        yield found


def decode(runner: StepRunner, tables: Sequence[Table], order: Sequence[int]) -> tuple[list[bytes], Groups]:
    """One token of each entry, behind its table; the logits by table, and the groups that were found."""
    # Row n writes to its last page, which no table names.
    private = len(runner.pages) - ROWS
    for row, table in enumerate(tables):
        runner.steps.tables[row, : len(table)] = table
        runner.steps.tables[row, len(table)] = private + row
    runner.publish([(row, len(tables[row]) * PAGE_TOKENS + row, 1, 1) for row in order])
    runner.compute()
    logits = dict(zip(order, (runner.logits(place).tobytes() for place in range(len(order))), strict=True))
    at = act.offsets(runner.geometry, runner.model.hyper)[0][act.c.PLAN]
    words = runner.activations.view(at, (PLAN_HEAD + ENTRY_PLAN * len(order),), np.int64).tolist()
    groups: Groups = []
    if words[p.SHARED]:
        entries = [words[PLAN_HEAD + ENTRY_PLAN * place :][:ENTRY_PLAN] for place in range(len(order))]
        for leader, entry in enumerate(entries):
            members, place = [], leader
            for _ in range(entry[p.P_MEMBERS]):
                members.append(tables[order[place]])
                assert entries[place][p.P_SHARED] >= 0 and entries[place][p.P_PREFIX] == entry[p.P_PREFIX]
                place = entries[place][p.P_NEXT]
            if members:
                assert place == leader
                groups.append((entry[p.P_PREFIX], members))
        places = [entry[p.P_SHARED] for entry in entries if entry[p.P_SHARED] >= 0]
        assert len(set(places)) == len(places) == words[p.SHARED] == sum(len(members) for _, members in groups)
    return [logits[row] for row in sorted(order)], groups


@settings(max_examples=examples(25))
@given(drawn=texts, seed=st.integers(0, 1 << 20))
def test_the_order_of_entries_changes_neither_groups_nor_bytes(
    runner: StepRunner, drawn: list[Text], seed: int
) -> None:
    tables = tables_of(drawn)
    rows = list(range(len(tables)))
    shuffled = random.Random(seed).sample(rows, len(rows))
    logits, groups = decode(runner, tables, rows)
    assert plain(groups) == plain(expected(tables))
    again, others = decode(runner, tables, shuffled)
    assert (again, plain(others)) == (logits, plain(groups))
    for row in rows:  # too few entries for groups
        assert decode(runner, tables, [row]) == ([logits[row]], [])


@settings(max_examples=examples(100))
@given(drawn=texts)
def test_no_prefix_is_worth_more_than_what_all_groups_save(drawn: list[Text]) -> None:
    tables = tables_of(drawn)
    found = expected(tables)
    assert len([table for _, members in found for table in members]) <= len(tables)
    for node in prefixes(tables):
        sharing = sum(table[: len(node)] == node for table in tables)
        assert saved_by(found) >= (sharing - 2) * (len(node) // EACH)
    assert saved_by(found) <= best(tables)


def test_what_is_saved_is_near_the_best() -> None:
    """In all of many random steps; in a single one it may be less."""
    rng = random.Random(7)
    saved = most = 0
    for _ in range(300):
        drawn = [
            Text(rng.randrange(ROWS), rng.randrange(SPLITS * EACH + 1), rng.randint(1, SPLITS)) for _ in range(ROWS)
        ]
        tables = tables_of(drawn)
        saved, most = saved + saved_by(expected(tables)), most + best(tables)
    assert 0.98 * most <= saved <= most


def test_a_short_common_prefix_does_not_hide_longer_ones(runner: StepRunner) -> None:
    """In the order in which an entry with a short prefix came first, it led all others to it."""
    short = Text(0, 0, 1)
    long = [Text(0, EACH, SPLITS), *([Text(1, (SPLITS - 1) * EACH, SPLITS)] * 7)]
    tables = tables_of([short, *long])
    for order in (range(9), reversed(range(9))):
        _, groups = decode(runner, tables, list(order))
        assert plain(groups) == [(SPLITS - 1, sorted(tables[1:]))]


def test_all_entries_have_room_for_what_a_prefix_leaves(tmp_path: Path) -> None:
    """With many entries and heads: more places than the least number of them."""
    rows, heads = 60, 40
    assert rows * heads > act.MIN_SPLIT_RESULTS
    index = model_of(tmp_path, Shape(1, 64, heads, 5, 32, 64, 261, context_length=512))
    with StepRunner(
        index,
        tmp_path,
        ranks=2,
        page_tokens=PAGE_TOKENS,
        max_rows=rows,
        max_tokens=KV_SPLIT + PAGE_TOKENS,
        step_tokens=rows,
        max_samples=rows,
    ) as runner:
        values, rng = runner.pages.view(np.float16), np.random.default_rng(5)
        values[:] = rng.normal(size=values.shape).astype(np.float16)
        runner.steps.tables[:, :EACH] = runner.steps.tables[0, :EACH]
        for row in range(rows):
            runner.write_row(row, rng.integers(0, 261, KV_SPLIT + 1).astype(np.int32))
        runner.run([(row, KV_SPLIT, 1, 1) for row in range(rows)])
        logits = [runner.logits(row).tobytes() for row in range(rows)]
        at = act.offsets(runner.geometry, runner.model.hyper)[0][act.c.PLAN]
        words = runner.activations.view(at, (PLAN_HEAD + ENTRY_PLAN * rows,), np.int64)
        places = words[PLAN_HEAD + p.P_SHARED :: ENTRY_PLAN]
        assert sorted(places) == [heads * n for n in range(rows)]
        assert max(places) + heads <= act.n_split_results(runner.geometry, runner.model.hyper)
        for row in range(rows):  # too few entries for groups
            runner.run([(row, KV_SPLIT, 1, 1)])
            assert runner.logits(0).tobytes() == logits[row]
