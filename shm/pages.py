"""Layout of the KV arena: page headers, and the bytes of each position within a page.

A page holds `page_tokens` positions of all layers, or of the layers of one group where only some layers have a window
(shm/layer_groups.py), contiguous, so that it is spilled, checked and moved as one run of bytes.  For each layer and kv
head, in this order (kv_type f16 or f32):

    K  [head_dim][page_tokens]   tokens innermost: a score needs no horizontal sum
    V  [page_tokens][head_dim]   head_dim innermost: the weighted sum needs none either

and for int8:  K codes [head_dim][page_tokens], K scales f16 [head_dim/32][page_tokens],
V codes [page_tokens][head_dim], V scales f16 [page_tokens][head_dim/32].  A scale covers 32 values
of one position, so appending a position changes no other.

The arena:  [page headers: n_pages x PAGE_HEADER bytes] [pages, 4096-aligned].  The worker writes the contents of a
page, only while the page is leased to a sequence of a published step.  A header:

    offset  size  field       writer: the kv stage
    0       16    root        root hash: model, geometry, kv type, salt (shm/prefix_hash.py)
    16      16    parent      hash of the previous page; `root` for the first page of a prefix
    32      16    hash        hash of all tokens up to the end of this page
    48      8     checksum    XXH3-64 of the page's bytes
    56      4     ordinal     place of the page in its prefix: its first position is place * page_tokens; and in the
                              highest 8 bits the layer group
    60      4     tokens      filled positions: page_tokens
    64      8     check       XXH3-64 of bytes 0..64
    72      4     state       0 free, 1 leased (the worker writes the contents), 2 full (contents are final)
    76      4     refs        sequences that hold the page; a restarted kv stage does not trust it
    80      8     last_use    ns since 1970
    88      8     born        ns since 1970: admission of the sequence that computed the page
    96      4     uses        sequences that have held the page
    100     4     residency   copies elsewhere: 1 in the spill file, 2 in the state directory
    104     8     serial      of the row whose sequence leases the page (shm/step_ring.py): from `root` and `serial` a
                              restarted kv stage recognises the lease; 0: damage was found while the page was
                              leased, and no lease may continue with it
    112     16    zero
    128     128   zero        reserved for the worker, in cache lines of its own

Bytes 0..72 are valid only while `state` is 2; `root` and `serial` also while it is 1.  The writer may die between any
two stores, so it changes `state` from 2 before it changes these bytes, and to 2 after they are complete.  A reader that
finds `state` 2 and a wrong `check` has found a torn header.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from shm.arena import Arena, ArenaError, align
from shm.checkpoint import Hyper
from shm.layer_groups import LayerGroups, divide_layers

KIND = "kv"
LAYOUT = 1
NUMERICS = 1  # version of docs/numerics.md; another version computes other bytes from the same tokens
PAGE_HEADER = 256
KV_TYPES = {"f16": 2, "f32": 4, "int8": 1}
PAGE_FREE, PAGE_LEASED, PAGE_FULL = range(3)
PAGE_RECORD = 128  # bytes of a header that the kv stage writes, and of a page's record on disk
MAX_LAYERS = 4096
KV_SPLIT = 256  # positions of a KV split: attention combines splits in order; page_tokens divides it

# The fields of a header, as strided views over all headers: `headers.view(HEADER)[:, 0]["state"]`.
HEADER = np.dtype(
    {
        "names": [
            "root",
            "parent",
            "hash",
            "checksum",
            "ordinal",
            "tokens",
            "check",
            "state",
            "refs",
            "last_use",
            "born",
            "uses",
            "residency",
            "serial",
        ],
        "formats": [
            "V16",
            "V16",
            "V16",
            "<u8",
            "<u4",
            "<u4",
            "<u8",
            "<u4",
            "<u4",
            "<u8",
            "<u8",
            "<u4",
            "<u4",
            "<u8",
        ],
        "offsets": [0, 16, 32, 48, 56, 60, 64, 72, 76, 80, 88, 96, 100, 104],
        "itemsize": PAGE_HEADER,
    }
)
IDENTITY = struct.Struct("<16s16s16sQII")  # root, parent, hash, checksum, ordinal, tokens
_GROUP_SHIFT = 24
_Ordinal = TypeVar("_Ordinal", int, np.ndarray)
assert HEADER.itemsize == PAGE_HEADER == 256
assert IDENTITY.size == HEADER.fields["check"][1] == 64  # type: ignore[index]
assert HEADER.fields["state"][1] == 72  # type: ignore[index]
assert HEADER.fields["serial"][1] + 8 <= PAGE_RECORD  # type: ignore[index]


_LATER_FIELDS = ("n_windowed", "revision")  # of `KvGeometry`


class KvGeometry(NamedTuple):
    """The geometry that the kv stage and the ranks must agree on; stored in the arena's header."""

    n_layers: int
    n_kv_heads: int
    head_dim: int  # multiple of 16; with int8 of 32
    page_tokens: int  # 16, 32, 64, 128 or 256
    kv_type: str
    n_windowed: int = 0  # layers with a window, in groups of their own; 0: all layers are in one group
    revision: int = 0  # `Hyper.kv_revision`: pages of another one have other bytes for the same tokens

    @classmethod
    def of(cls, hyper: Hyper, page_tokens: int, kv_type: str) -> KvGeometry:
        """The geometry of a model's arena."""
        shape = hyper.n_layers, hyper.n_kv_heads, hyper.head_dim
        return cls(*shape, page_tokens, kv_type, hyper.n_windowed, hyper.kv_revision)

    def as_meta(self) -> dict[str, int | str]:
        """The fields by name; without those that older releases did not have where they are 0."""
        return {name: value for name, value in self._asdict().items() if value or name not in _LATER_FIELDS}

    def check(self) -> None:
        """Raises `ArenaError` naming the field that the kernels do not support."""
        if self.kv_type not in KV_TYPES:
            raise ArenaError(f"kv_type is {self.kv_type!r}, expected one of {sorted(KV_TYPES)}")
        if self.page_tokens not in (16, 32, 64, 128, 256):
            raise ArenaError(f"page_tokens is {self.page_tokens}, expected 16, 32, 64, 128 or 256")
        if self.n_windowed and not (0 < self.n_windowed < self.n_layers <= MAX_LAYERS and self.groups.full):
            raise ArenaError(f"n_windowed is {self.n_windowed} of {self.n_layers} layers, expected 0")
        if self.head_dim % 16:
            raise ArenaError(f"head_dim is {self.head_dim}, expected a multiple of 16; use another model")
        if self.kv_type == "int8" and self.head_dim % 32:
            raise ArenaError(
                f"kv_type is 'int8', and the model's heads have {self.head_dim} values, expected a multiple of 32; set "
                f"models[].kv_type to f16 or f32"
            )

    @property
    def head_bytes(self) -> int:
        """Bytes of K and V of one (layer, kv head) in a page."""
        values = self.head_dim * self.page_tokens
        size = 2 * values * KV_TYPES[self.kv_type]
        if self.kv_type == "int8":
            size += 2 * (values // 32) * 2
        return size

    @property
    def groups(self) -> LayerGroups:
        """The layer groups, each of which has pages of its own."""
        return divide_layers(self.n_layers, self.n_windowed)[1]

    @property
    def page_layers(self) -> int:
        """Layers in a page."""
        return divide_layers(self.n_layers, self.n_windowed)[0]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, a multiple of 4096."""
        return align(self.page_layers * self.n_kv_heads * self.head_bytes, 4096)


def pack_ordinal(place: int, group: int) -> int:
    """A header's `ordinal`."""
    return group << _GROUP_SHIFT | place


def unpack_ordinal(ordinal: _Ordinal) -> tuple[_Ordinal, _Ordinal]:
    """(place, layer group) of a header's `ordinal`, or of each one in an array."""
    return ordinal & (1 << _GROUP_SHIFT) - 1, ordinal >> _GROUP_SHIFT


class KvArena(NamedTuple):
    """headers (n_pages, PAGE_HEADER) u8; pages (n_pages, page_bytes) u8."""

    headers: np.ndarray
    pages: np.ndarray


def kv_arena_bytes(g: KvGeometry, n_pages: int) -> int:
    """Size of the arena's contents: headers and pages."""
    return pages_offset(n_pages) + n_pages * g.page_bytes


def pages_offset(n_pages: int) -> int:
    """Where the pages begin in the arena's contents, behind the headers."""
    return align(n_pages * PAGE_HEADER, 4096)


def pages_that_fit(g: KvGeometry, budget_bytes: int) -> int:
    """Number of pages in an arena file of at most `budget_bytes`, headers included."""
    return max(0, (budget_bytes - 8192) // (g.page_bytes + PAGE_HEADER))


def first_read(position: int, window: int) -> int:
    """The first position that attention reads for a query at `position`; with `window` 0 it reads all.

    Whole KV splits are read, so it is the first one of the split in which the window begins.
    """
    return max(0, position + 1 - window) // KV_SPLIT * KV_SPLIT if window else 0


def kv_views(arena: Arena, g: KvGeometry, n_pages: int) -> KvArena:
    """Views of the headers and pages of a mapped arena."""
    pages_at = pages_offset(n_pages)
    return KvArena(
        arena.view(0, (n_pages, PAGE_HEADER), np.uint8),
        arena.view(pages_at, (n_pages, g.page_bytes), np.uint8),
    )


def create_kv(
    path: Path, g: KvGeometry, n_pages: int, digest: bytes, generation: int, grows: bool = False
) -> tuple[Arena, KvArena]:
    """Create the arena with all pages free; for the kv stage. Raises `ArenaError` when it does not fit.

    `grows`: only the headers get memory now (stages/kv/pool/extents.py).
    """
    g.check()
    meta = {**g.as_meta(), "pages": n_pages, "numerics": NUMERICS}
    reserved = pages_offset(n_pages) if grows else None
    arena = Arena.create(path, KIND, LAYOUT, kv_arena_bytes(g, n_pages), meta, digest, generation, reserved)
    return arena, kv_views(arena, g, n_pages)


def attach_kv(path: Path, digest: bytes | None = None, own: bool = False) -> tuple[Arena, KvArena, KvGeometry]:
    """Attach to the arena; for all other stages and, with `own`, a restarted kv stage. Raises as `Arena.attach`."""
    arena = Arena.attach(path, KIND, LAYOUT, digest=digest, own=own)
    try:
        known = {name: arena.meta[name] for name in KvGeometry._fields if name not in _LATER_FIELDS}
        g = KvGeometry(**known, **{name: arena.meta.get(name, 0) for name in _LATER_FIELDS})
        g.check()
        if arena.meta["numerics"] != NUMERICS:
            raise ValueError(f"numerics {arena.meta['numerics']}, expected {NUMERICS}")
        return arena, kv_views(arena, g, int(arena.meta["pages"])), g
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        arena.close()
        raise ArenaError(f"{path}: geometry in the header is unusable: {error!r}") from None
    except ArenaError:
        arena.close()
        raise
