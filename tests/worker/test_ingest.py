"""Checkpoints of tiny models hold the source's values; bad files get one error that says what is wrong."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import struct
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pipeline.errors import ConfigError, ResourceError
from pipeline.models.store import no_progress
from shm.checkpoint import Checkpoint, bin_path
from shm.partial_checkpoint import PartialCheckpoint
from stages.worker.checkpoint import ingest as ingest_module
from stages.worker.checkpoint.bit_program import pack_rows
from stages.worker.checkpoint.gguf import GgufFile
from stages.worker.checkpoint.ingest import SourceChanged, ingest
from stages.worker.checkpoint.layout import unpack
from stages.worker.checkpoint.verify import verify
from stages.worker.kernels.formats import FORMATS, Format
from stages.worker.rope import rope_tables
from tests.worker.conftest import TinyGguf

DIGEST = "ab" * 32  # of files that are refused before it matters


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_tensors_keep_their_values(tiny_gguf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for shape, recipe in (("odd", "Q4_1"), ("super", "Q4_K_M"), ("grouped", "BF16")):
        source = tiny_gguf(shape, recipe)
        seen: list[tuple[int, int]] = []
        ingest(
            source,
            tmp_path / "m.idx",
            sha256(source),
            lambda phase, done, total, seen=seen: seen.append((done, total)),
        )
        model = Checkpoint(tmp_path / "m.idx")
        verify(model, no_progress)
        reader = gguf.GGUFReader(source)
        tensors = [t for t in reader.tensors if t.name != "rope_freqs.weight"]
        for tensor in tensors:
            entry = model.index.tensor(tensor.name)
            expected = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            expected = expected.reshape(entry.rows, entry.columns)
            found = model.view(tensor.name)
            if entry.layout == "groups":
                found = unpack(found, FORMATS[entry.format], entry.rows, entry.columns)
            assert found.tobytes() == expected.tobytes(), tensor.name
            assert entry.offset % 64 == 0
        assert len(model.index.tensors) == len(tensors) + 4
        assert seen[-1] == (sum(t.n_bytes for t in tensors), sum(t.n_bytes for t in tensors))
        assert model.index.parameters == sum(t.n_elements for t in tensors)


def test_index_describes_the_model(tiny_gguf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    source = tiny_gguf("super", "Q4_K_M")
    index = ingest(source, tmp_path / "m.idx", sha256(source))
    h, fields = index.hyper, gguf.GGUFReader(source).fields
    assert (h.n_layers, h.width, h.n_heads, h.n_kv_heads, h.head_dim) == (2, 256, 4, 2, 64)
    assert (h.ffn_width, h.vocab_size, h.rope_pairing, h.activation) == (512, 307, "neighbours", "silu")
    assert index.digest == sha256(source)
    assert index.source_bytes == source.stat().st_size
    assert index.bin_bytes == bin_path(tmp_path / "m.idx").stat().st_size
    assert index.tokenizer.tokens == fields["tokenizer.ggml.tokens"].contents()
    assert index.tokenizer.merges == fields["tokenizer.ggml.merges"].contents()
    assert index.tokenizer.chat_template == fields["tokenizer.chat_template"].contents()
    assert index.head_name == "output.weight"
    factors = next(t for t in gguf.GGUFReader(source).tensors if t.name == "rope_freqs.weight").data
    expected = rope_tables(h.rope_base, h.n_rot, h.context_length, factors)
    model = Checkpoint(tmp_path / "m.idx")
    for name, table in expected._asdict().items():
        assert model.view(f"rope.{name}").tobytes() == table.tobytes()


def test_tied_embeddings_are_stored_once(tiny_gguf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    source = tiny_gguf("small", "Q8_0")
    index = ingest(source, tmp_path / "m.idx", sha256(source))
    assert index.head_name == "token_embd.weight"
    assert not index.has("output.weight")


def test_demo_model(demo_gguf: Path, tmp_path: Path) -> None:
    index = ingest(demo_gguf, tmp_path / "m.idx", sha256(demo_gguf))
    assert index.bin_bytes <= 1.05 * index.source_bytes
    assert index.parameters == 134_515_008
    order = [t.name for t in index.tensors if t.name.startswith("blk.3.")]
    assert order == [
        f"blk.3.{n}.weight"
        for n in (
            "attn_norm",
            "attn_q",
            "attn_k",
            "attn_v",
            "attn_output",
            "ffn_norm",
            "ffn_gate",
            "ffn_up",
            "ffn_down",
        )
    ]


def test_qwen2_pairs_halves(tiny_gguf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    renamed = tmp_path / "qwen2.gguf"
    renamed.write_bytes(tiny_gguf("small", "Q8_0").read_bytes().replace(b"llama", b"qwen2"))
    index = ingest(renamed, tmp_path / "m.idx", sha256(renamed))
    assert (index.architecture, index.hyper.rope_pairing, index.hyper.attention_bias) == ("qwen2", "halves", False)


def test_a_full_disk_is_reported(tiny_gguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shm.checkpoint.os.fsync", full)
    source = tiny_gguf("small", "Q8_0")
    with pytest.raises(ResourceError, match="no room for the checkpoint"):
        ingest(source, tmp_path / "m.idx", sha256(source))
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ files that change


def test_a_file_of_another_digest_is_refused(tiny_gguf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    source = tiny_gguf("small", "Q8_0")
    with pytest.raises(SourceChanged, match=f"have SHA-256 {sha256(source)}, expected {DIGEST}"):
        ingest(source, tmp_path / "m.idx", DIGEST)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_written_while_it_is_ingested_is_refused(tiny_gguf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    source = tmp_path / "m.gguf"
    source.write_bytes(tiny_gguf("small", "Q8_0").read_bytes())

    def write(phase: str, done: int, total: int) -> None:
        if done == total:
            with source.open("r+b") as file:  # the same bytes, at the end of the ingest
                file.write(b"GGUF")

    with pytest.raises(SourceChanged, match=r"m.gguf was changed while it was read; run this again"):
        ingest(source, tmp_path / "m.idx", sha256(source), write)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_file_that_cannot_be_hashed_has_no_checkpoint(
    tiny_gguf: TinyGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that hashes it reads it by itself. Without an expected digest any other one would do."""

    def fail(file: GgufFile, at: int, nbytes: int) -> bytes:
        raise OSError(errno.EIO, "cannot be read")

    source, found = tiny_gguf("small", "Q8_0"), list[str]()
    part = PartialCheckpoint(tmp_path / "part", "")
    monkeypatch.setattr(GgufFile, "read", fail)
    with pytest.raises(OSError, match="cannot be read"):
        ingest(source, tmp_path / "m.idx", sha256(source))
    with pytest.raises(OSError, match="cannot be read"):
        ingest_module.convert_and_hash(GgufFile(source), tmp_path, no_progress, "", part, found.append)
    assert not found
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".idx", ".bin") or path.name == ".idx"]


def test_a_path_that_names_another_file_meanwhile_changes_nothing(tiny_gguf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The opened file is hashed and ingested, whatever file takes its name."""
    first, second = tiny_gguf("small", "Q8_0", 1), tiny_gguf("small", "Q8_0", 2)
    source = tmp_path / "m.gguf"
    source.write_bytes(first.read_bytes())

    def replace(phase: str, done: int, total: int) -> None:
        other = tmp_path / "other"
        other.write_bytes(second.read_bytes())
        other.rename(source)

    ingest(source, tmp_path / "m.idx", sha256(first), replace)
    expected = tmp_path / "expected.idx"
    ingest(first, expected, sha256(first))
    assert bin_path(tmp_path / "m.idx").read_bytes() == bin_path(expected).read_bytes()


# ------------------------------------------------------------------ bad files


def edited(source: Path, to: Path, edit) -> Path:  # type: ignore[no-untyped-def]
    raw = bytearray(source.read_bytes())
    to.write_bytes(edit(raw) or raw)
    return to


def replaced(old: bytes, new: bytes):  # type: ignore[no-untyped-def]
    def edit(raw: bytearray) -> bytes:
        assert raw.count(old) >= 1
        return bytes(raw).replace(old, new, 1)

    return edit


def number(key: str, value: int) -> object:
    """Overwrite a u32 metadata value."""

    def edit(raw: bytearray) -> None:
        at = raw.index(key.encode()) + len(key)
        assert struct.unpack_from("<I", raw, at)[0] == 4, "a u32"
        struct.pack_into("<I", raw, at + 4, value)

    return edit


def numbers(key: str, values: list[int]) -> object:
    """Put a list of u32 in the place of a u32 metadata value. Tensors stay aligned with 6, 14 ... values."""

    def edit(raw: bytearray) -> None:
        at = raw.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key)
        assert struct.unpack_from("<I", raw, at)[0] == 4, "a u32"
        raw[at : at + 8] = struct.pack(f"<IIQ{len(values)}I", 9, 4, len(values), *values)

    return edit


def tensor_field(name: str, field: int, value: int) -> object:
    """Overwrite dimension 0 or 1 (GGUF order), the format (2) or the offset (3) of a matrix."""

    def edit(raw: bytearray) -> None:
        at = raw.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name) + 4
        struct.pack_into("<I" if field == 2 else "<Q", raw, at + (0, 8, 16, 20)[field], value)

    return edit


# How every message ends.
REMEDY = re.compile(r"; (fetch|convert|quantize|this model cannot be served|use another model)[\w ,;]*$")

BAD = {
    "magic": (lambda raw: b"GGML" + raw[4:], "magic is not b'GGUF'"),
    "empty": (lambda raw: b"GGUF", "file size is 4 bytes, expected at least 24"),
    "version": (lambda raw: raw[:4] + struct.pack("<I", 9) + raw[8:], "version is 9, expected 2 or 3"),
    "big-endian": (lambda raw: raw[:4] + struct.pack(">I", 3) + raw[8:], "big-endian"),
    "half-of-it": (lambda raw: raw[: len(raw) // 2], ": truncated or corrupt; fetch or convert"),
    "metadata-cut": (lambda raw: raw[:200], "tensor_count is 20, and only 176 bytes follow: truncated"),
    "tensor-count": (lambda raw: raw[:8] + b"\xff" * 8 + raw[16:], "tensor_count is 18446744073709551615"),
    "key-count": (lambda raw: raw[:16] + b"\xff" * 7 + b"\0" + raw[24:], "metadata_kv_count is"),
    "architecture": (replaced(b"llama", b"mamba"), "general.architecture is 'mamba'; supported: llama, qwen2"),
    "heads": (number("llama.attention.head_count", 0), "head_count is 0, expected 1 to 4096"),
    "kv-heads": (number("llama.attention.head_count_kv", 9), "head_count_kv is 9, expected 1 to 6"),
    "heads-of-layers": (
        numbers("llama.attention.head_count", [6] * 14),
        "llama.attention.head_count is a list of 14 (6, 6, 6, 6, 6, 6, 6, 6, ...), expected one number for all layers",
    ),
    "kv-heads-of-layers": (
        numbers("llama.attention.head_count_kv", [3, 0, 3, 2, 3, 1]),
        "head_count_kv is a list of 6 (3, 0, 3, 2, 3, 1), expected one number for all layers: counts for each layer, ",
    ),
    "blocks": (number("llama.block_count", 3), "tensor 'blk.2.attn_norm.weight' is missing"),
    "fewer-blocks": (number("llama.block_count", 1), "'blk.1.attn_k.weight' is not part of"),
    "width": (
        number("llama.embedding_length", 192),
        "token_embd.weight' has shape [515, 160], expected [515, 192]",
    ),
    "rotation": (number("llama.rope.dimension_count", 80), "dimension_count is 80, expected 2 to 64"),
    "format": (
        tensor_field("blk.1.ffn_up.weight", 2, 99),
        "'blk.1.ffn_up.weight': format is 99; supported: F32 (0)",
    ),
    "offset": (tensor_field("blk.1.ffn_up.weight", 3, 1 << 40), "tensor 'blk.1.ffn_up.weight' needs bytes"),
    "columns": (tensor_field("blk.1.ffn_up.weight", 0, 161), "row length is 161, expected a multiple of 32"),
    "rows": (tensor_field("blk.1.ffn_up.weight", 1, 96), "has shape [96, 160], expected [224, 160]"),
    "huge": (tensor_field("blk.1.ffn_up.weight", 1, 1 << 60), "expected 1 to 2^48 values"),
    "nothing": (tensor_field("blk.1.ffn_up.weight", 1, 0), "shape is [0, 160], expected 1 to 2^48"),
    "overlap": (
        tensor_field("blk.1.ffn_up.weight", 3, 0),
        "begins at byte",
    ),
    "duplicate": (
        replaced(b"blk.1.ffn_up", b"blk.0.ffn_up"),
        "tensor 'blk.0.ffn_up.weight' is listed twice, expected once",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_files_are_refused_with_the_reason(what: str, tiny_gguf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    edit, message = BAD[what]
    bad = edited(tiny_gguf("grouped", "Q4_1"), tmp_path / "bad.gguf", edit)
    with pytest.raises(ConfigError) as caught:
        ingest(bad, tmp_path / "bad.idx", DIGEST)
    assert message in str(caught.value)
    assert "bad.gguf" in str(caught.value)
    assert REMEDY.search(str(caught.value))
    assert [p.name for p in tmp_path.iterdir()] == ["bad.gguf"]


def test_any_cut_is_noticed(tiny_gguf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    raw = tiny_gguf("small", "Q4_0").read_bytes()
    rng = np.random.default_rng(0)
    bad = tmp_path / "cut.gguf"
    for size in (0, 1, 23, 24, *rng.integers(25, len(raw) - 64, 60).tolist()):
        bad.write_bytes(raw[:size])
        with pytest.raises(ConfigError):
            ingest(bad, tmp_path / "cut.idx", DIGEST)


def test_noise_in_the_header_never_crashes(tiny_gguf, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Flipped bytes give a file that reads or a GgufError, nothing else."""
    from stages.worker.checkpoint.gguf import GgufError

    raw = tiny_gguf("small", "Q4_0").read_bytes()
    header = min(t.start for t in GgufFile(tiny_gguf("small", "Q4_0")).tensors.values())
    rng = np.random.default_rng(1)
    bad = tmp_path / "noise.gguf"
    for _ in range(300):
        changed = bytearray(raw)
        for at in rng.integers(0, header, 3):
            changed[at] = int(rng.integers(0, 256))
        bad.write_bytes(changed)
        with contextlib.suppress(GgufError):
            GgufFile(bad)


class Affinities:
    """Packs as `pack_rows` does: the first call before the file is hashed, and the others when it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.while_hashing: list[set[int]] = []
        self.later: list[set[int]] = []
        self.writers: list[set[int]] = []
        self._packs, self._hashed, self._lock = threading.Event(), threading.Event(), threading.Lock()
        hash_file, write = ingest_module._SourceCheck._hash, ingest_module._write

        def hash_when_packing(check: ingest_module._SourceCheck) -> None:
            assert self._packs.wait(60)
            self.hashing = os.sched_getaffinity(0)
            hash_file(check)
            self._hashed.set()

        def record_and_write(*arguments: Any) -> None:
            self.writers.append(os.sched_getaffinity(0))
            write(*arguments)

        monkeypatch.setattr(ingest_module, "choose_packer", lambda weights_bytes, progress: self.pack)
        monkeypatch.setattr(ingest_module._SourceCheck, "_hash", hash_when_packing)
        monkeypatch.setattr(ingest_module, "_write", record_and_write)

    def pack(self, rows: np.ndarray, fmt: Format) -> list[np.ndarray]:
        with self._lock:
            is_first = not self._packs.is_set()
            if is_first:
                self.while_hashing.append(os.sched_getaffinity(0))
                self._packs.set()
        assert is_first or self._hashed.wait(60)
        if not is_first:
            self.later.append(os.sched_getaffinity(0))
        return pack_rows(rows, fmt)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="needs two cores")
def test_a_core_is_left_to_the_hash_until_it_has_finished(
    tiny_gguf: TinyGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cores, seen = tiny_gguf("odd", "Q4_1"), os.sched_getaffinity(0), Affinities(monkeypatch)
    ingest(source, tmp_path / "m.idx", sha256(source))
    assert seen.hashing == cores
    assert seen.while_hashing == [cores - {max(cores)}]
    assert len(seen.later) > 1 and all(found == cores for found in seen.later)
    assert seen.writers[0] == cores - {max(cores)}
    assert seen.writers[-1] == os.sched_getaffinity(0) == cores
    verify(Checkpoint(tmp_path / "m.idx"), no_progress)


@pytest.mark.parametrize("error", [None, PermissionError("not allowed")])
def test_one_core_is_for_all(
    tiny_gguf: TinyGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    """Where there is one, and where the system lets no thread choose its cores."""
    source, cores = tiny_gguf("odd", "Q4_1"), os.sched_getaffinity(0)
    expected = {min(cores)} if error is None else cores
    os.sched_setaffinity(0, expected)

    def refuse(thread: int, cores: set[int]) -> None:
        assert error is not None
        raise error

    try:
        with monkeypatch.context() as patches:
            seen = Affinities(patches)
            if error is not None:
                patches.setattr(os, "sched_setaffinity", refuse)
            ingest(source, tmp_path / "m.idx", sha256(source))
        assert all(found == expected for found in (*seen.while_hashing, *seen.later, *seen.writers))
        assert os.sched_getaffinity(0) == expected
    finally:
        os.sched_setaffinity(0, cores)
    verify(Checkpoint(tmp_path / "m.idx"), no_progress)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="needs two cores")
def test_a_thread_that_starts_when_the_hash_ends_has_all_cores() -> None:
    """It was started by one that had left a core, and has its cores until it leaves one itself."""
    core, cores, found = ingest_module._HashingCore(True), os.sched_getaffinity(0), []

    def start() -> None:
        found.append(os.sched_getaffinity(0))
        core.release()
        core.leave()
        found.append(os.sched_getaffinity(0))

    core.leave()
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert found == [cores - {max(cores)}, cores]
    assert os.sched_getaffinity(0) == cores


@pytest.mark.parametrize("fails", ["hash", "write"])
def test_all_cores_are_back_after_an_error(
    tiny_gguf: TinyGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.EIO, "cannot be read")

    source, cores = tiny_gguf("odd", "Q4_1"), os.sched_getaffinity(0)
    if fails == "write":
        monkeypatch.setattr(ingest_module, "_write", fail)
        with pytest.raises(OSError, match="cannot be read"):
            ingest(source, tmp_path / "m.idx", sha256(source))
    else:
        with pytest.raises(SourceChanged):
            ingest(source, tmp_path / "m.idx", DIGEST)
    assert os.sched_getaffinity(0) == cores
