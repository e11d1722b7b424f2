"""Converts a GGUF file to a checkpoint, once: checks all of it, then writes the tensors in the order of use.

The file is opened once: a thread hashes the same mapped bytes meanwhile, and the checkpoint is placed only if they have
the SHA-256 that names it and the file has not changed in between.

Supported graphs: `llama` (and Mistral, which is the same) and `qwen2` (biases on q, k, v).  Everything
that the forward pass relies on is checked here; a rank that maps a checkpoint checks nothing again.  Errors name the
key or tensor, its value, the bound and a remedy.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np

from pipeline.errors import ConfigError, ResourceError
from shm.checkpoint import CheckpointWriter, Hyper, Index, TokenizerData
from stages.worker.checkpoint.gguf import AGAIN, GgufError, GgufFile, TensorInfo
from stages.worker.checkpoint.layout import pack
from stages.worker.rope import rope_tables

Progress = Callable[[str, int, int], None]  # phase, done, total (bytes)
NEIGHBOURS, HALVES = "neighbours", "halves"
_PAIRING = {"llama": NEIGHBOURS, "qwen2": HALVES}
_MAX_DIMENSION = 1 << 24
_MAX_CONTEXT = 1 << 20  # as `max_sequence_length`; step arena and RoPE tables grow with it
_HASHED_BYTES = 8 << 20  # at a time
UNSUPPORTED = "this model cannot be served; use another one"
_ROPE = ("rope.cos_lo", "rope.sin_lo", "rope.cos_hi", "rope.sin_hi")


class SourceChanged(ConfigError):
    """The bytes of the source are not those that its digest was computed from."""


def ingest(source: Path, index_path: Path, digest: str, progress: Progress = lambda phase, done, total: None) -> Index:
    """Write `index_path` and its `.bin` from the GGUF `source`, whose SHA-256 is `digest` (hex).

    Raises `ConfigError` when the file cannot be used, `SourceChanged` when it has another digest, `ResourceError` when
    the disk is too small for the checkpoint.  After an error no file is left.
    """
    try:
        return _ingest(source, index_path, digest, progress)
    except GgufError as error:
        raise ConfigError(str(error), param="model") from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(index_path.parent).free
        raise ResourceError(
            f"{index_path.parent}: no room for the checkpoint of {source} ({source.stat().st_size:,} bytes needed, "
            f"{free:,} free); free space there, or set STARLING_HOME to another disk"
        ) from None


def _ingest(source: Path, index_path: Path, digest: str, progress: Progress) -> Index:
    file = GgufFile(source)
    reader = _Reader(file)
    hyper, tokenizer = reader.hyper(), reader.tokenizer()
    plan = list(_plan(file, hyper))
    tables = reader.rope(hyper)
    total = sum(info.nbytes for info in plan)
    done = 0
    with CheckpointWriter(index_path) as writer, _SourceCheck(file, digest) as check:
        for name, table in zip(_ROPE, tables, strict=True):
            writer.add(name, (table.shape[0], table.shape[1]), "F32", "rows", [table])
        for info in plan:
            if len(info.shape) == 1:
                values = _vector(file, info)
                writer.add(info.name, (1, info.shape[0]), "F32", "rows", [values])
            else:
                pieces = pack(file.rows(info), info.format)
                writer.add(info.name, (info.shape[0], info.shape[1]), info.format.name, "groups", pieces)
            done += info.nbytes
            progress("ingest", done, total)
        check.finish()
        return writer.finish(
            digest=digest,
            architecture=reader.architecture,
            name=reader.name(source.stem),
            parameters=sum(int(np.prod(info.shape, dtype=np.int64)) for info in plan),
            source_bytes=file.size,
            hyper=hyper,
            tokenizer=tokenizer,
        )


class _SourceCheck:
    """Hashes an opened file in a thread, while it is ingested."""

    def __init__(self, file: GgufFile, digest: str) -> None:
        self._file, self._expected = file, digest
        self._identity = file.identity()
        self._found = ""
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._hash, name="sha256", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_abandoned = True
        self._thread.join()

    def _hash(self) -> None:
        sha256 = hashlib.sha256()
        for at in range(0, self._file.size, _HASHED_BYTES):
            if self._is_abandoned:
                return
            sha256.update(self._file.data[at : at + _HASHED_BYTES].data)
        self._found = sha256.hexdigest()

    def finish(self) -> None:
        """Wait for the digest. Raises `SourceChanged`."""
        self._thread.join()
        path = self._file.path
        if self._file.identity() != self._identity:
            raise SourceChanged(f"{path} was changed while it was read; run this again when it is complete", "model")
        if self._found != self._expected:
            raise SourceChanged(
                f"{path}: the bytes that were read have SHA-256 {self._found}, expected {self._expected}: the file has "
                f"changed since it was hashed; run this again, or fetch the file again",
                "model",
            )


def _vector(file: GgufFile, info: TensorInfo) -> np.ndarray:
    raw = file.data[info.start : info.start + info.nbytes]
    if info.format.name == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view("<f4" if info.format.name == "F32" else "<f2").astype(np.float32)


# ------------------------------------------------------------------ tensors


def _shapes(h: Hyper) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """(name, shape, required) of every tensor of the graph, in the order of use."""
    q_rows, kv_rows = h.n_heads * h.head_dim, h.n_kv_heads * h.head_dim
    yield "token_embd.weight", (h.vocab_size, h.width), True
    for layer in range(h.n_layers):
        parts: list[tuple[str, tuple[int, ...]]] = [("attn_norm.weight", (h.width,))]
        for letter, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            parts.append((f"attn_{letter}.weight", (rows, h.width)))
        if h.attention_bias:
            parts += [("attn_q.bias", (q_rows,)), ("attn_k.bias", (kv_rows,)), ("attn_v.bias", (kv_rows,))]
        parts += [
            ("attn_output.weight", (h.width, q_rows)),
            ("ffn_norm.weight", (h.width,)),
            ("ffn_gate.weight", (h.ffn_width, h.width)),
            ("ffn_up.weight", (h.ffn_width, h.width)),
            ("ffn_down.weight", (h.width, h.ffn_width)),
        ]
        for name, shape in parts:
            yield f"blk.{layer}.{name}", shape, True
    yield "output_norm.weight", (h.width,), True
    yield "output.weight", (h.vocab_size, h.width), False


def _plan(file: GgufFile, h: Hyper) -> Iterator[TensorInfo]:
    known = {"rope_freqs.weight"}
    for name, shape, required in _shapes(h):
        known.add(name)
        info = file.tensors.get(name)
        if info is None:
            if required:
                raise GgufError(
                    f"{file.path}: tensor {name!r} is missing, expected {list(shape)} (rows first); {AGAIN}"
                )
            continue
        if info.shape != shape:
            raise GgufError(
                f"{file.path}: tensor {name!r} has shape {list(info.shape)}, expected {list(shape)} (rows first); "
                f"{AGAIN}"
            )
        if len(shape) == 1 and not info.format.dense:
            raise GgufError(f"{file.path}: tensor {name!r} is {info.format.name}, expected F32, F16 or BF16; {AGAIN}")
        yield info
    extra = sorted(file.tensors.keys() - known)
    if extra:
        raise GgufError(
            f"{file.path}: tensor {extra[0]!r} is not part of this architecture's graph ({len(extra)} such tensors), "
            "and outputs would be wrong without it; use another model"
        )


# ------------------------------------------------------------------ metadata


class _Reader:
    """Typed access to the metadata of one file."""

    def __init__(self, file: GgufFile) -> None:
        self.file, self.metadata = file, file.metadata
        self.architecture = self._get("general.architecture", str)
        if self.architecture not in _PAIRING:
            raise GgufError(
                f"{file.path}: general.architecture is {self.architecture[:60]!r}; supported: "
                f"{', '.join(sorted(_PAIRING))}; use another model"
            )

    def _get(self, key: str, kind: Any, default: Any = None) -> Any:
        value = self.metadata.get(key, default)
        if value is None:
            raise GgufError(f"{self.file.path}: metadata key {key!r} is missing; {AGAIN}")
        kinds = (int, float) if kind is float else kind
        if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
            raise GgufError(f"{self.file.path}: {key} is {str(value)[:60]!r}, expected {kind.__name__}; {AGAIN}")
        return value

    def name(self, default: str) -> str:
        value = self.metadata.get("general.name")
        return value if isinstance(value, str) else default

    def _int(self, key: str, low: int, high: int = _MAX_DIMENSION, default: int | None = None) -> int:
        key = f"{self.architecture}.{key}"
        value: int = self._get(key, int, default)
        if not low <= value <= high:
            raise GgufError(f"{self.file.path}: {key} is {value}, expected {low} to {high}; {UNSUPPORTED}")
        return value

    def _multiple(self, key: str, value: int, of: int) -> None:
        if value % of:
            raise GgufError(
                f"{self.file.path}: {self.architecture}.{key} is {value}, expected a multiple of {of}; {UNSUPPORTED}"
            )

    def hyper(self) -> Hyper:
        path, arch = self.file.path, self.architecture
        experts = self._int("expert_count", 0, default=0)
        if experts:
            raise GgufError(
                f"{path}: {arch}.expert_count is {experts}, expected 0 (no mixture of experts); {UNSUPPORTED}"
            )
        width = self._int("embedding_length", 32)
        n_heads = self._int("attention.head_count", 1, 4096)
        n_kv_heads = self._int("attention.head_count_kv", 1, n_heads, default=n_heads)
        if n_heads % n_kv_heads:
            raise GgufError(
                f"{path}: {arch}.attention.head_count is {n_heads}, expected a multiple of head_count_kv "
                f"({n_kv_heads}); {UNSUPPORTED}"
            )
        head_dim = self._int("attention.key_length", 1, 1024, default=width // n_heads)
        if self._int("attention.value_length", 1, 1024, default=head_dim) != head_dim:
            raise GgufError(
                f"{path}: {arch}.attention.value_length differs from key_length, expected {head_dim}; {UNSUPPORTED}"
            )
        n_rot = self._int("rope.dimension_count", 2, head_dim, default=head_dim)
        ffn_width = self._int("feed_forward_length", 32)
        self._multiple("embedding_length", width, 32)
        self._multiple("feed_forward_length", ffn_width, 32)
        self._multiple("attention.key_length", head_dim, 16)
        self._multiple("rope.dimension_count", n_rot, 2)
        if (n_heads * head_dim) % 32:
            raise GgufError(
                f"{path}: {n_heads} heads of {head_dim} values are {n_heads * head_dim}, expected a multiple of 32; "
                f"{UNSUPPORTED}"
            )
        window = self._int("attention.sliding_window", 0, 1 << 31, default=0)
        context = self._int("context_length", 1, _MAX_CONTEXT)
        if 0 < window < context:
            raise GgufError(
                f"{path}: {arch}.attention.sliding_window is {window}, expected 0 or at least the context length "
                f"({context}); {UNSUPPORTED}"
            )
        eps = float(self._get(f"{arch}.attention.layer_norm_rms_epsilon", float))
        if not 0 <= eps < 1:
            raise GgufError(f"{path}: {arch}.attention.layer_norm_rms_epsilon is {eps}, expected 0 to below 1; {AGAIN}")
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise GgufError(f"{path}: tensor 'token_embd.weight' is missing or not a matrix; {AGAIN}")
        return Hyper(
            n_layers=self._int("block_count", 1, 4096),
            width=width,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            ffn_width=ffn_width,
            vocab_size=embedding.shape[0],
            context_length=context,
            norm_eps=float(np.float32(eps)),
            n_rot=n_rot,
            rope_pairing=_PAIRING[arch],
            activation="silu",
            rope_base=float(self._get(f"{arch}.rope.freq_base", float, 10000.0)),
            rope_scale=self._rope_scale(),
            attention_bias="blk.0.attn_q.bias" in self.file.tensors,
        )

    def _rope_scale(self) -> float:
        arch = self.architecture
        kind = self._get(f"{arch}.rope.scaling.type", str, "none")
        if kind not in ("none", "linear"):
            raise GgufError(
                f"{self.file.path}: {arch}.rope.scaling.type is {kind[:60]!r}; supported: 'none', 'linear' "
                f"and rope_freqs factors; {UNSUPPORTED}"
            )
        old = self.metadata.get(f"{arch}.rope.scale_linear")
        if old is not None and kind == "none":
            return float(self._get(f"{arch}.rope.scale_linear", float))
        return float(self._get(f"{arch}.rope.scaling.factor", float, 1.0)) if kind == "linear" else 1.0

    def rope(self, h: Hyper) -> tuple[np.ndarray, ...]:
        """The four RoPE tables, in the order of `_ROPE`."""
        factors = None
        info = self.file.tensors.get("rope_freqs.weight")
        if info is not None:
            if info.shape != (h.n_rot // 2,) or not info.format.dense:
                raise GgufError(
                    f"{self.file.path}: tensor 'rope_freqs.weight' is {info.format.name} {list(info.shape)}, "
                    f"expected F32 [{h.n_rot // 2}]; {AGAIN}"
                )
            factors = _vector(self.file, info)
        try:
            tables = rope_tables(h.rope_base, h.n_rot, h.context_length, factors, h.rope_scale)
        except ValueError as error:
            raise GgufError(f"{self.file.path}: {error}; {UNSUPPORTED}") from None
        return tables.cos_lo, tables.sin_lo, tables.cos_hi, tables.sin_hi

    def tokenizer(self) -> TokenizerData:
        def texts(key: str) -> list[str]:
            value = self.metadata.get(f"tokenizer.ggml.{key}", [])
            if isinstance(value, np.ndarray) and not value.size:
                return []
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise GgufError(f"{self.file.path}: tokenizer.ggml.{key} is not a list of texts; {AGAIN}")
            return value

        def numbers(key: str, kinds: str) -> list[Any]:
            value = self.metadata.get(f"tokenizer.ggml.{key}")
            if value is None:
                return []
            if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds:
                raise GgufError(
                    f"{self.file.path}: tokenizer.ggml.{key} is not a list of "
                    f"{'whole numbers' if 'i' in kinds else 'numbers'}; {AGAIN}"
                )
            if len(value) > embedding:
                raise GgufError(
                    f"{self.file.path}: tokenizer.ggml.{key} has {len(value)} entries, expected at most {embedding} "
                    f"(rows of 'token_embd.weight'); {AGAIN}"
                )
            return value.tolist()

        def number(key: str) -> int:
            return int(self._get(f"tokenizer.ggml.{key}_token_id", int, -1))

        embedding = self.file.tensors["token_embd.weight"].shape[0]
        tokens = texts("tokens")
        if len(tokens) > embedding:
            raise GgufError(
                f"{self.file.path}: tokenizer.ggml.tokens has {len(tokens)} entries, expected at most {embedding} "
                f"(rows of 'token_embd.weight'); {AGAIN}"
            )
        for key in ("bos", "eos", "eot", "unknown", "padding"):
            # Published files write "none" as -1 or as its unsigned form.
            if number(key) >= embedding and number(key) != 0xFFFFFFFF:
                raise GgufError(
                    f"{self.file.path}: tokenizer.ggml.{key}_token_id is {number(key)}, expected less than "
                    f"{embedding}; {AGAIN}"
                )
        bos, eos, eot, unknown, padding = (
            -1 if number(key) == 0xFFFFFFFF else number(key) for key in ("bos", "eos", "eot", "unknown", "padding")
        )
        return TokenizerData(
            model=self._get("tokenizer.ggml.model", str, "none"),
            pre=self._get("tokenizer.ggml.pre", str, "default"),
            tokens=tokens,
            types=numbers("token_type", "iu"),
            merges=texts("merges"),
            scores=numbers("scores", "f"),
            bos=bos,
            eos=eos,
            eot=eot,
            unknown=unknown,
            padding=padding,
            add_bos=self._get("tokenizer.ggml.add_bos_token", bool, False),
            add_space_prefix=self._get("tokenizer.ggml.add_space_prefix", bool, False),
            chat_template=self._get("tokenizer.chat_template", str, ""),
        )
