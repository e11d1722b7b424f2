"""The prefix groups of a step (shared_prefixes.py): which single queries attend to which shared prefix together.

A group of m entries behind a prefix of d KV splits saves (m - 1) * d passes over a split.  An entry is in one group at
most, so a short prefix that many entries share competes with longer ones that some of them share.  `group_prefixes`
decides this from the longest prefixes to the shortest:

1. A merge sort orders the entries by their page tables.  Each entry keeps the number of pages that it has in common
   with the one before (EQUAL), and lists are merged by these numbers: pages that are known to be equal are not read
   again.  So a table is read about twice, and n entries take n log n comparisons, whatever the clients' prompts are.
2. Neighbours whose common prefix is the longest meet first, as in the tree of all prefixes.  A node of the tree is a
   prefix of d splits with the entries that it can still use (COUNT), which save some passes in their groups (SAVED).
   What comes from a longer prefix stays apart if its groups save d passes or more for each of its entries.  The others
   become one group as soon as that saves more than their own groups do.

The outcome depends on the tables alone, not on the order of the entries or the numbers of their pages.  It is not
always the best one.  But if n entries share d splits, all groups together save (n - 2) * d passes or more.

Groups and nodes are circles of entries: two circles become one when an entry of each swap their successors.  In the
words of an entry's plan NEXT is its successor in its group.  A group's leader has MEMBERS and PREFIX and, until the
search is over, the leader of the node's next group in SHARED.  The entry that names a node has COUNT in EQUAL, SAVED,
the node's d in DEPTH, and in BELOW the node with the next shorter prefix.
"""

from __future__ import annotations

from numba import njit

from shm.pages import KV_SPLIT
from stages.worker.kernels import parameter_block as pb
from stages.worker.kernels import plan as p
from stages.worker.kernels.buffer_sizes import SPLIT_UNITS
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.parameter_access import param
from stages.worker.kernels.simd import get_i32, put_i64

LEAST_MEMBERS = 3  # of a prefix group: with two, an own pass over the prefix gains less than it costs


@njit(**INNER)
def _get(params, entry, word):
    return param(p.entry_at(params, entry), word)


@njit(**INNER)
def _put(params, entry, word, value):
    put_i64(p.entry_at(params, entry) + 8 * word, value)


# ------------------------------------------------------------------ order


@njit(**INNER)
def _compare(params, a, b, equal, each):
    """Pages that two entries have in common, at least `equal`, and whether `a` comes first. `each`: pages of a split.

    It reads pages of full splits, which hold nothing that this step writes.
    """
    pages_a, pages_b = _get(params, a, p.P_PREFIX) * each, _get(params, b, p.P_PREFIX) * each
    at_a = param(params, pb.PLAN_TABLES) + _get(params, a, p.P_TABLE)
    at_b = param(params, pb.PLAN_TABLES) + _get(params, b, p.P_TABLE)
    end = min(pages_a, pages_b)
    while equal < end and get_i32(at_a + 4 * equal) == get_i32(at_b + 4 * equal):
        equal += 1
    if equal == end:
        return equal, pages_a < pages_b
    return equal, get_i32(at_a + 4 * equal) < get_i32(at_b + 4 * equal)


@njit(**INNER)
def _merge(params, a, b, each):
    """Merge two lists of entries, each in order and linked by NEXT; returns the first entry."""
    first = last = -1
    equal_a = equal_b = 0  # pages that the next entry of each list has in common with `last`
    while a >= 0:
        if b >= 0:
            takes_b = equal_b > equal_a
            if equal_a == equal_b:
                equal, takes_b = _compare(params, b, a, equal_a, each)
                if takes_b:
                    equal_a = equal
                else:
                    equal_b = equal
            if takes_b:
                a, b, equal_a, equal_b = b, a, equal_b, equal_a
        _put(params, a, p.P_EQUAL, equal_a)
        if last < 0:
            first = a
        else:
            _put(params, last, p.P_NEXT, a)
        last, a = a, _get(params, a, p.P_NEXT)
        if a >= 0:
            equal_a = _get(params, a, p.P_EQUAL)
        else:
            a, b, equal_a = b, -1, equal_b
    return first


@njit(**INNER)
def _sort(params, first, each):
    """Order entries, of which BELOW links one to the next, into one list that NEXT links; returns its first entry."""
    while _get(params, first, p.P_BELOW) >= 0:
        at, last = first, -1
        while at >= 0:
            after, merged = _get(params, at, p.P_BELOW), at
            if after >= 0:
                merged, after = _merge(params, at, after, each), _get(params, after, p.P_BELOW)
            if last < 0:
                first = merged
            else:
                _put(params, last, p.P_BELOW, merged)
            last, at = merged, after
        _put(params, last, p.P_BELOW, -1)
    return first


# ------------------------------------------------------------------ groups


@njit(**INNER)
def _swap(params, a, b, word):
    after = _get(params, a, word)
    _put(params, a, word, _get(params, b, word))
    _put(params, b, word, after)


@njit(**INNER)
def _finish(params, node, depth):
    """Hand what a node can still use to the node with the next shorter prefix, and return that.

    `depth`: splits that the next entry shares: a node of so many is made if there is none between the two.
    """
    below = _get(params, node, p.P_BELOW)
    count, saved = _get(params, node, p.P_EQUAL), _get(params, node, p.P_SAVED)
    if below < 0 or _get(params, below, p.P_DEPTH) < depth:
        _put(params, node, p.P_DEPTH, depth)
        if count * depth <= saved:
            _put(params, node, p.P_EQUAL, 0)
            _put(params, node, p.P_SAVED, 0)
        return node
    depth = _get(params, below, p.P_DEPTH)
    if count * depth <= saved:
        return below
    if _get(params, below, p.P_EQUAL) == 0:  # all groups of `below` stay as they are
        _put(params, node, p.P_DEPTH, depth)
        _put(params, node, p.P_BELOW, _get(params, below, p.P_BELOW))
        return node
    _swap(params, node, below, p.P_SHARED)
    count, saved = count + _get(params, below, p.P_EQUAL), saved + _get(params, below, p.P_SAVED)
    if count >= LEAST_MEMBERS and (count - 1) * depth > saved:
        saved = (count - 1) * depth
        at = _get(params, below, p.P_SHARED)
        while at != below:
            _swap(params, at, below, p.P_NEXT)
            _put(params, at, p.P_MEMBERS, 0)
            at = _get(params, at, p.P_SHARED)
        _put(params, below, p.P_SHARED, below)
        _put(params, below, p.P_MEMBERS, count)
        _put(params, below, p.P_PREFIX, depth)
    _put(params, below, p.P_EQUAL, count)
    _put(params, below, p.P_SAVED, saved)
    return below


@njit(**INNER)
def _group(params, at, each):
    """Put entries into groups, which may have one member. `at`: the first one, in the order of their page tables."""
    node = -1  # with the longest prefix that entries to come may share
    while at >= 0:
        depth, after = _get(params, at, p.P_EQUAL) // each, _get(params, at, p.P_NEXT)
        while node >= 0 and _get(params, node, p.P_DEPTH) > depth:
            node = _finish(params, node, depth)
        _put(params, at, p.P_NEXT, at)
        _put(params, at, p.P_SHARED, at)
        _put(params, at, p.P_MEMBERS, 1)
        _put(params, at, p.P_EQUAL, 1)
        _put(params, at, p.P_SAVED, 0)
        _put(params, at, p.P_DEPTH, _get(params, at, p.P_PREFIX))
        _put(params, at, p.P_BELOW, node)
        node, at = at, after
    while node >= 0 and _get(params, node, p.P_DEPTH) > 0:
        node = _finish(params, node, 0)


@njit(**INNER)
def _attends_to_prefixes(params):
    """Whether any layer attends to all positions before a query."""
    for index in range(param(params, pb.N_LAYERS)):
        if param(param(params, pb.LAYERS) + 8 * pb.LAYER_WORDS * index, pb.WINDOW) == 0:
            return True
    return False


@njit(**INNER)
def group_prefixes(params):
    """Only rank 0: find the prefix groups of the plan of `params`; SHARED of the plan is the number of their entries.

    None where a page belongs to some layers only, where every layer has a window, where queries attend to what is
    behind them, and where there are so few queries that their KV splits are units of their own.
    """
    plan = param(params, pb.PLAN)
    kept, heads = param(plan, p.ENTRIES_KEPT), param(params, pb.N_HEADS)
    put_i64(plan + 8 * p.SHARED, 0)
    if (
        kept * param(params, pb.N_KV_HEADS) < SPLIT_UNITS
        or param(params, pb.PAGE_GROUPS) > 1
        or param(params, pb.ATTENDS_ALL)
        or not _attends_to_prefixes(params)
    ):
        return
    first, behind_splits = -1, 0
    for i in range(kept):
        splits = _get(params, i, p.P_START) // KV_SPLIT
        _put(params, i, p.P_MEMBERS, 0)
        if _get(params, i, p.P_COUNT) == 1 and splits > 0:
            _put(params, i, p.P_PREFIX, splits)
            _put(params, i, p.P_NEXT, -1)
            _put(params, i, p.P_BELOW, first)
            first = i
            behind_splits += 1
    if behind_splits < LEAST_MEMBERS:
        return
    each = KV_SPLIT // param(params, pb.PAGE_TOKENS)
    _group(params, _sort(params, first, each), each)
    for i in range(kept):
        _put(params, i, p.P_SHARED, -1)
    used = 0
    for i in range(kept):
        members, prefix, at = _get(params, i, p.P_MEMBERS), _get(params, i, p.P_PREFIX), i
        if members < LEAST_MEMBERS:
            _put(params, i, p.P_MEMBERS, 0)
            continue
        for _ in range(members):  # each entry has a place at SPLIT_RESULTS for its heads
            _put(params, at, p.P_SHARED, used * heads)
            _put(params, at, p.P_PREFIX, prefix)
            at = _get(params, at, p.P_NEXT)
            used += 1
    put_i64(plan + 8 * p.SHARED, used)
