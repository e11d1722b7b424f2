"""How ranks divide the rows of a matrix product: each claims pieces of its own share, then of what others have left.

Cores of one speed would finish equal shares together.  They do not have one speed: other work, interrupts and other
virtual machines slow each of them for moments, and at the next barrier all ranks wait for the slowest.  So a rank takes
small pieces from the start of its share, one after the other, as one stream of memory; when nothing is left of it, it
takes a quarter of what is left of another share, from its end.  One rank computes a piece, in an order that does not
depend on the pieces, so which rank it is changes no byte.

    word of a rank's claims line   bits 32 to 63: the product; 16 to 31: start, and 0 to 15: end, of what is unclaimed

The product is `4 * (barriers that the ranks have passed) + place`, modulo 2^32; `place`, from 1 to 3, numbers the
products between two barriers, all of which are divided in the same way.  A word of an earlier product stands for the
whole share.  A rank ends a product only when all shares of its neighbourhood are claimed, so no claim is lost when the
first rank in the next product writes the words of others.

Pieces are counted in units (row groups, or pairs of these).  Ranks claim from a neighbourhood of at most NEIGHBOURS,
all of one memory node, so that to find nothing left costs little with many ranks.
"""

from __future__ import annotations

from numba import njit

from shm.atomics import compare_exchange, load_acquire, store_release
from stages.worker.kernels import parameter_block as pb
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.parameter_access import param

NEIGHBOURS = 4
TAKEN = 4  # part of what another rank has left: a rank that is slowed after that delays the others by less
_MAX_UNITS = 0xFFFF
_LINE_BYTES = 64


@njit(**INNER)
def units_at_once(params, unit_bytes, tokens):
    """Units that a rank claims at once, of weights of `unit_bytes` each; 0: every rank computes its share."""
    if param(params, pb.NODE_RANKS) == 1 or tokens > param(params, pb.CLAIM_TOKENS):
        return 0
    n = max(1, param(params, pb.CLAIM_BYTES) // unit_bytes)
    return n if tokens == 1 else n + n % 2


@njit(**INNER)
def _product(params, place):
    own = param(params, pb.LINES) + _LINE_BYTES * param(params, pb.RANK)
    return 4 * load_acquire(own) + place


@njit(**INNER)
def _unclaimed(params, rank, n, word, product):
    """Start and end of what is left of a rank's share of n units in a product, by the word of its line."""
    age = (product - (word >> 32)) << 32
    if age == 0:
        return (word >> 16) & _MAX_UNITS, word & _MAX_UNITS
    if age < 0:
        return 0, 0  # the rank is in a later product
    ranks = param(params, pb.RANKS)
    return n * rank // ranks, n * (rank + 1) // ranks


@njit(**INNER)
def next_piece(params, n, place, at_once):
    """The piece of n units that this rank computes next, start << 32 | end; 0: nothing is left."""
    if at_once == 0 or n > _MAX_UNITS:
        return 0
    rank, product = param(params, pb.RANK), _product(params, place)
    node_rank = param(params, pb.NODE_RANK)
    first = rank - node_rank % NEIGHBOURS
    neighbours = min(NEIGHBOURS, param(params, pb.NODE_RANKS) - (first - rank + node_rank))
    for i in range(neighbours):
        other = first + (rank - first + i) % neighbours
        line = param(params, pb.CLAIMS) + _LINE_BYTES * other
        while True:
            word = load_acquire(line)
            start, end = _unclaimed(params, other, n, word, product)
            if start >= end:
                break
            if other == rank:
                middle = min(start + at_once, end)
                left, piece = (middle << 16) | end, (start << 32) | middle
            else:
                taken = max(at_once, (end - start) // TAKEN)
                if at_once > 1:
                    taken += taken % 2  # with several tokens, two row groups are multiplied together
                middle = max(start, end - taken)
                left, piece = (start << 16) | middle, (middle << 32) | end
            if compare_exchange(line, word, (product << 32) | left) == word:
                return piece
    return 0


@njit(**INNER)
def first_piece(params, n, place, at_once):
    """As `next_piece`, of a product that this rank begins."""
    if at_once != 0 and n <= _MAX_UNITS:
        return next_piece(params, n, place, at_once)
    rank, ranks = param(params, pb.RANK), param(params, pb.RANKS)
    if ranks > 1:  # so that the word is never older than half of the numbers of products
        store_release(param(params, pb.CLAIMS) + _LINE_BYTES * rank, _product(params, place) << 32)
    start, end = n * rank // ranks, n * (rank + 1) // ranks
    return (start << 32) | end if start < end else 0


@njit(**INNER)
def piece_start(piece):
    """The first unit of a piece."""
    return piece >> 32


@njit(**INNER)
def piece_end(piece):
    """The unit behind the last of a piece."""
    return piece & 0xFFFFFFFF
