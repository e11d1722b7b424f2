"""Ranks claim every piece of a product exactly once, whatever their speed."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pytest
from numba import njit

from shm.barrier import wait
from shm.checkpoint import load_index
from stages.worker import activations_arena as act
from stages.worker import model as worker_model
from stages.worker.adapters.prepared import prepare_adapter
from stages.worker.kernels import parameter_block as pb
from stages.worker.kernels import row_claims
from tests.worker.conftest import Ingested, TinyGguf
from tests.worker.kernel_logits import kernel_logits, same_bytes
from tools.tiny_adapter import write_adapter

Piece = tuple[int, int]


class Ranks:
    """Control words, and a parameter block of each rank. `nodes`: ranks of each memory node."""

    def __init__(self, nodes: tuple[int, ...], passed: int = 0) -> None:
        """`passed`: barriers that all ranks have passed."""
        self.n = sum(nodes)
        self.control = np.zeros(act.CONTROL_WORDS, np.int64)
        act.reset_barrier(self.control, self.n)
        base = self.control.ctypes.data
        self.blocks = np.zeros((self.n, pb.WORDS), np.int64)
        first = 0
        for size in nodes:
            for rank in range(first, first + size):
                self.blocks[rank, [pb.RANK, pb.RANKS]] = rank, self.n
                self.blocks[rank, [pb.NODE_RANK, pb.NODE_RANKS]] = rank - first, size
                self.blocks[rank, pb.LINES] = base + 8 * act.LINES
                self.blocks[rank, pb.CLAIMS] = base + 8 * act.CLAIMS
                self.blocks[rank, [pb.CLAIM_BYTES, pb.CLAIM_TOKENS]] = 4096, 8
            first += size
        self.pass_barriers(passed)

    def pass_barriers(self, n: int = 1) -> None:
        """All ranks arrive n times."""
        for rank in range(self.n):
            self.control[act.LINES + 8 * rank] += n
            if n > 1:  # as a product between them would have left the word
                product = np.uint64(4 * int(self.control[act.LINES + 8 * rank]) - 1 & 0xFFFFFFFF)
                self.control[act.CLAIMS + 8 * rank] = (product << np.uint64(32)).astype(np.int64)

    def first(self, rank: int, n: int, at_once: int, place: int = 1) -> Piece | None:
        return _piece(row_claims.first_piece(self.blocks[rank].ctypes.data, n, place, at_once))

    def next(self, rank: int, n: int, at_once: int, place: int = 1) -> Piece | None:
        return _piece(row_claims.next_piece(self.blocks[rank].ctypes.data, n, place, at_once))

    def rest(self, rank: int, n: int, at_once: int, place: int = 1) -> list[Piece]:
        """All pieces that a rank gets until nothing is left."""
        found = []
        while piece := self.next(rank, n, at_once, place):
            found.append(piece)
        return found


def _piece(word: int) -> Piece | None:
    return (word >> 32, word & 0xFFFFFFFF) if word else None


def _units(pieces: list[Piece]) -> list[int]:
    return sorted(unit for begin, end in pieces for unit in range(begin, end))


@pytest.mark.parametrize("passed", [0, 3, (1 << 29) - 1, 1 << 29, (1 << 30) - 1, 1 << 40])
@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_in_any_order_every_unit_is_claimed_once(n_ranks: int, passed: int) -> None:
    ranks, rng = Ranks((n_ranks,), passed), random.Random(n_ranks)
    for _ in range(20):
        n, at_once = rng.choice((1, 2, 7, 96, 1000)), rng.choice((1, 3, 64))
        products = dict.fromkeys(range(n_ranks), 1)
        claimed: list[list[Piece]] = [[], [], []]
        while products:  # a rank goes on to the next product as soon as nothing is left of the one before
            rank = rng.choice(list(products))
            place = products[rank]
            piece = ranks.next(rank, n, at_once, place)
            if piece:
                claimed[place - 1].append(piece)
            elif place == 3:
                del products[rank]
            else:
                products[rank] += 1
        assert [_units(pieces) for pieces in claimed] == [list(range(n))] * 3
        ranks.pass_barriers()


def test_own_pieces_are_one_stream_of_memory() -> None:
    ranks = Ranks((2,))
    assert ranks.first(1, 20, 4) == (10, 14)
    assert [ranks.next(1, 20, 4) for _ in range(2)] == [(14, 18), (18, 20)]


def test_a_rank_that_stops_keeps_the_others_from_its_present_piece_alone() -> None:
    ranks = Ranks((2,))
    assert ranks.first(0, 100, 4) == (0, 4)
    first = ranks.first(1, 100, 4)
    assert first == (50, 54)
    rest = ranks.rest(1, 100, 4)
    assert _units([first, *rest]) == list(range(4, 100))
    assert rest[12] == (38, 50), "about a quarter of what is left of the other share, from its end"
    assert ranks.next(0, 100, 4) is None


def test_shares_of_ranks_that_have_not_begun_are_computed_by_others() -> None:
    ranks = Ranks((2,))
    assert _units(ranks.rest(0, 30, 4)) == list(range(30))
    assert ranks.first(1, 30, 4) is None
    # The next product between the same barriers, which rank 1 begins first.
    assert _units(ranks.rest(1, 30, 4, place=2)) == list(range(30))
    assert ranks.first(0, 30, 4, place=2) is None


def test_neighbours_are_few_and_of_one_memory_node() -> None:
    many = Ranks((6,))
    assert _units(many.rest(0, 60, 5)) == list(range(40))
    assert _units(many.rest(5, 60, 5)) == list(range(40, 60))
    nodes = Ranks((2, 3))
    assert _units(nodes.rest(1, 50, 5)) == list(range(20))
    assert _units(nodes.rest(3, 50, 5)) == list(range(20, 50))


@pytest.mark.parametrize(("n", "at_once"), [(101, 0), (1 << 16, 8)])
def test_without_claims_a_rank_computes_its_share(n: int, at_once: int) -> None:
    ranks = Ranks((2,))
    assert ranks.first(0, n, at_once) == (0, n // 2)
    assert ranks.next(0, n, at_once) is None
    assert ranks.first(1, n, at_once) == (n // 2, n)
    ranks.pass_barriers()
    assert _units(ranks.rest(0, 30, 4)) == list(range(30))


def test_a_share_without_units_is_no_piece() -> None:
    ranks = Ranks((3,))
    assert [ranks.first(rank, 1, 0) for rank in range(3)] == [None, None, (0, 1)]


def test_what_is_claimed_at_once() -> None:
    ranks = Ranks((2, 1))
    together, alone = (ranks.blocks[rank].ctypes.data for rank in (0, 2))
    assert row_claims.units_at_once(together, 1000, 8) == 4
    assert [row_claims.units_at_once(together, 1300, tokens) for tokens in (1, 2)] == [3, 4]
    assert row_claims.units_at_once(together, 10_000, 1) == 1
    assert row_claims.units_at_once(together, 1000, 9) == 0
    assert row_claims.units_at_once(alone, 1000, 1) == 0, "no rank of its node could take anything"


@njit(nogil=True)
def _compute(params, barrier, lines, products, n, counts):
    """Count in `counts` (products, places, n) how often this rank computes each unit."""
    rank, ranks = params[pb.RANK], params[pb.RANKS]
    block = params.ctypes.data
    for product in range(products):
        for place in range(counts.shape[1]):
            piece = row_claims.first_piece(block, n, 1 + place, 3)
            while piece:
                for unit in range(row_claims.piece_start(piece), row_claims.piece_end(piece)):
                    counts[product, place, unit] += 1
                piece = row_claims.next_piece(block, n, 1 + place, 3)
        wait(barrier, lines, rank, ranks)


def test_ranks_together_claim_every_unit_once() -> None:
    ranks, n, products = Ranks((2,)), 50, 2000
    base = ranks.control.ctypes.data
    counts = np.zeros((2, products, 3, n), np.uint8)  # of each rank

    def run(rank: int, products: int) -> None:
        _compute(ranks.blocks[rank], base + 8 * act.BARRIER, base + 8 * act.LINES, products, n, counts[rank])

    run(0, 0)  # compiles
    threads = [threading.Thread(target=run, args=(rank, products)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (counts.sum(axis=0) == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "recipe", "ranks", "nodes"),
    [
        ("biased", "Q4_0_M", 2, ()),
        ("biased", "F16", 5, ()),  # two neighbourhoods
        ("gemma2", "Q8_0", 4, ()),  # a norm behind each product
        ("gpt2", "Q4_K_M", 4, (2, 2)),
        ("starcoder2", "Q4_0_M", 4, (1, 3)),  # one rank has no neighbour
        ("qwen2moe", "Q4_0_M", 3, ()),  # of each layer q, k, v and output are claimed
    ],
)
def test_bytes_do_not_depend_on_who_computes_a_piece(
    tiny_gguf: TinyGguf,
    ingested: Ingested,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: str,
    recipe: str,
    ranks: int,
    nodes: tuple[int, ...],
) -> None:
    """Biases, adapters and the residual stream are added in place: of a piece that two ranks compute, twice."""
    source, tokens = tiny_gguf(shape, recipe), np.random.default_rng(9).integers(0, 260, 40)
    index = ingested(source)
    adapter = write_adapter(tmp_path / "adapter.gguf", source, 8, 1)
    adapters = [prepare_adapter(adapter, load_index(index), tmp_path / "adapters", 64, 1 << 30)]
    expected = kernel_logits(index, tmp_path, tokens, chunk=40, adapters=adapters)
    monkeypatch.setattr(worker_model, "CLAIM_BYTES", 1)  # a piece is one unit, or two
    for chunk in (1, 2, 5, worker_model.CLAIM_TOKENS, worker_model.CLAIM_TOKENS + 1):
        found = kernel_logits(index, tmp_path, tokens, chunk=chunk, ranks=ranks, adapters=adapters, nodes=nodes)
        assert same_bytes(found, expected), f"{chunk} tokens a step"
