"""Mutated GGUF files: each is read, or refused with a reason, in bounded time and memory."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ConfigError
from shm.checkpoint import load_index
from stages.worker.checkpoint.gguf import GgufError, GgufFile
from stages.worker.checkpoint.ingest import SourceChanged, ingest
from tools.tiny_gguf import SHAPES, write_model

DIGEST = "ab" * 32
MOST_BYTES = 24 << 20  # of Python and NumPy objects at once, for files of under 1 MB
MOST_S = 20.0  # of a processor, for one file
EXTREMES = (
    0,
    1,
    2,
    31,
    1 << 8,
    1 << 16,
    (1 << 20) + 1,
    1 << 24,
    1 << 31,
    (1 << 32) - 1,
    1 << 33,
    1 << 63,
    (1 << 64) - 1,
)


@functools.cache
def seed_file(directory: Path) -> bytes:
    return write_model(directory / "seed.gguf", SHAPES["small"], "Q4_1", 0).read_bytes()


def header_bytes(directory: Path) -> int:
    seed_file(directory)
    return min(info.start for info in GgufFile(directory / "seed.gguf").tensors.values())


@st.composite
def mutations(draw: st.DrawFn) -> tuple[int, list[tuple[str, float, int]]]:
    """A seed, and changes of the header: kind, relative place, value."""
    kinds = st.sampled_from(["bit", "byte", "u32", "u64", "cut", "double", "delete"])
    change = st.tuples(kinds, st.floats(0, 1, exclude_max=True), st.sampled_from(EXTREMES))
    return draw(st.integers(0, 2**32)), draw(st.lists(change, min_size=1, max_size=6))


def mutate(raw: bytes, header: int, seed: int, changes: list[tuple[str, float, int]]) -> bytes:
    rng, changed = random.Random(seed), bytearray(raw)
    for kind, where, value in changes:
        at = int(where * min(header, len(changed)))
        if kind == "bit":
            changed[at : at + 1] = bytes([changed[at] ^ 1 << rng.randrange(8)]) if at < len(changed) else b""
        elif kind == "byte":
            changed[at : at + 1] = bytes([rng.randrange(256)])
        elif kind in ("u32", "u64"):
            # Where such a number is: fields follow a name without padding, so every place is one.
            size = 4 if kind == "u32" else 8
            changed[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
        elif kind == "cut":
            del changed[at:]
        elif kind == "double":
            changed[at:at] = changed[at : at + rng.randrange(1, 4096)]
        else:
            del changed[at : at + rng.randrange(1, 64)]
    return bytes(changed)


def convert(path: Path) -> None:
    """Ingest the file. Either works, or a reason; nothing is left behind, and nothing large is made."""
    before, reason = {one.name for one in path.parent.iterdir()}, str(path)
    index_path = path.with_suffix(".idx")
    tracemalloc.start()
    begun = time.process_time()
    try:
        ingest(path, index_path, DIGEST)
    except SourceChanged:
        pass  # all of it was converted; only its digest is not the one given here
    except ConfigError as error:
        reason = error.message
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert str(path) in reason
    assert len(reason) < 2000
    assert peak < MOST_BYTES, peak
    assert time.process_time() - begun < MOST_S
    assert {one.name for one in path.parent.iterdir()} == before


@given(mutation=mutations())
@settings(max_examples=120, deadline=None)
def test_a_mutated_file_is_converted_or_refused(
    mutation: tuple[int, list[tuple[str, float, int]]], fuzz_directory: Path
) -> None:
    directory = fuzz_directory
    path = directory / "fuzz.gguf"
    path.write_bytes(mutate(seed_file(directory), header_bytes(directory), *mutation))
    convert(path)


@pytest.fixture(scope="module")
def fuzz_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def test_every_count_and_length_may_be_extreme(tmp_path: Path) -> None:
    """Each 8 bytes of the head, and of the tensor table, in turn."""
    raw, path = seed_file(tmp_path), tmp_path / "fuzz.gguf"
    header = header_bytes(tmp_path)
    places = [*range(8, 400), *range(header - 400, header)]
    for at, value in zip(places, EXTREMES * len(places), strict=False):
        changed = bytearray(raw)
        struct.pack_into("<Q", changed, at, value)
        path.write_bytes(changed)
        with contextlib.suppress(GgufError):
            GgufFile(path)


# ------------------------------------------------------------------ files that ask for much


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def head(*entries: bytes, n_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, len(entries)) + b"".join(entries)


def array(kind: int, count: int, data: bytes, key: str = "a") -> bytes:
    return text(key) + struct.pack("<IIQ", 9, kind, count) + data


def peak_of(path: Path, raw: bytes, expected: str = "") -> int:
    """Most memory that reading the file takes, in bytes; `expected`: part of the reason why it is refused."""
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        if expected:
            with pytest.raises(GgufError) as caught:
                GgufFile(path)
            assert expected in str(caught.value)
            assert str(caught.value).endswith("fetch or convert the file again")
        else:
            GgufFile(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [0, 7, 4, 6, 12])
def test_an_array_of_numbers_takes_no_memory(tmp_path: Path, kind: int) -> None:
    """Python objects would take 8 to 32 times the bytes of the file."""
    width = {0: 1, 7: 1, 4: 4, 6: 4, 12: 8}[kind]
    assert peak_of(tmp_path / "m.gguf", head(array(kind, 1 << 20, bytes(width << 20)))) < 1 << 20


@pytest.mark.parametrize(
    ("raw", "expected", "most"),
    [
        (lambda: head(array(8, 3 << 20, bytes(24 << 20))), "array entries up to here is 3145728, expected at most", 1),
        (lambda: head(array(9, 1 << 18, struct.pack("<IQ", 0, 0))), "array length is 262144, and only", 1),
        (
            lambda: head(array(9, 1 << 18, struct.pack("<IQ", 0, 0) * (1 << 18))),
            "array entries up to here is 4194304, expected at most",
            1,
        ),
        (
            lambda: head(*(text(str(i)) + struct.pack("<IB", 0, 0) for i in range(5000))),
            "metadata_kv_count is 5000, expected at most 4096",
            1,
        ),
        (
            lambda: head(text("a") + struct.pack("<I", 8) + struct.pack("<Q", 65 << 20) + bytes(65 << 20)),
            "'a': string length is 68157440, expected at most 67108864",
            1,
        ),
        (
            lambda: head(text("k" * 65_536) + bytes(5)),
            "metadata key 0: string length is 65536, expected at most 65535",
            1,
        ),
        (lambda: head(n_tensors=1 << 18) + bytes(24 << 18), "tensor_count is 262144, expected at most 131072", 1),
    ],
)
def test_what_becomes_python_objects_is_bounded(
    tmp_path: Path, raw: Callable[[], bytes], expected: str, most: int
) -> None:
    """`most`: MiB."""
    assert peak_of(tmp_path / "m.gguf", raw(), expected) < most << 20


def test_entries_of_all_arrays_count_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.worker.checkpoint.gguf._MAX_ENTRIES", 5000)
    raw = head(*(array(8, 2000, bytes(16_000), str(i)) for i in range(3)))
    peak_of(tmp_path / "m.gguf", raw, "'2': number of array entries up to here is 6000, expected at most 5000")


@pytest.mark.parametrize("context", [(1 << 20) + 1, 1 << 24, (1 << 32) - 1])
def test_a_huge_context_length_is_refused_before_anything_is_made(tiny_gguf, tmp_path: Path, context: int) -> None:  # type: ignore[no-untyped-def]
    raw = bytearray(tiny_gguf("small", "Q8_0").read_bytes())
    key = b"llama.context_length"
    struct.pack_into("<I", raw, raw.index(key) + len(key) + 4, context)
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(
            ConfigError,
            match=rf"m.gguf: llama.context_length is {context}, expected 1 to 1048576; .*use another one$",
        ):
            ingest(path, tmp_path / "m.idx", DIGEST)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert [one.name for one in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize(
    ("key", "count", "message"),
    [
        ("token_type", 10_000, "token_type has 10000 entries, expected at most"),
        ("scores", 10_000, "scores has 10000 entries, expected at most"),
    ],
)
def test_lists_longer_than_the_vocabulary_are_refused(
    tiny_gguf, tmp_path: Path, key: str, count: int, message: str
) -> None:  # type: ignore[no-untyped-def]
    raw = tiny_gguf("small", "Q8_0").read_bytes()
    version, n_tensors, n_keys = struct.unpack_from("<IQQ", raw, 4)
    kind = 5 if key == "token_type" else 6
    added = array(kind, count, bytes(4 * count), f"tokenizer.ggml.{key}")
    # Metadata may stand in any order, and a later key replaces an earlier one: append it to the others.
    names = [text(info.name) for info in GgufFile(tiny_gguf("small", "Q8_0")).tensors.values()]
    at = min(raw.index(name) for name in names)
    path = tmp_path / "m.gguf"
    grown = len(added) + -len(added) % 32
    table = raw[at:]
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys + 1) + raw[24:at] + added + table + bytes(grown)
    )
    with pytest.raises(ConfigError, match=message):
        ingest(path, tmp_path / "m.idx", DIGEST)


def test_the_seed_itself_is_converted(tmp_path: Path) -> None:
    """Else the fuzz test would test refusals alone."""
    seed_file(tmp_path)
    source = tmp_path / "seed.gguf"
    ingest(source, tmp_path / "m.idx", hashlib.sha256(source.read_bytes()).hexdigest())
    assert load_index(tmp_path / "m.idx").hyper.n_layers == SHAPES["small"].n_layers
