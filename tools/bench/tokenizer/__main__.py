"""Measures vocabularies: opening, encoding a long text, and decoding its tokens.

    python -m tools.bench.tokenizer model.gguf ggml-vocab-qwen2.gguf [--text FILE]

The vocabulary of each GGUF file is compiled into an index in a directory of its own, which is removed; files without
weights will do.  The default texts are this repository's code and documents, sentences of 32 languages in random order,
and random mixtures of their words, code, numbers and characters; `--text` adds others.  Times are CPU time of one
thread, the best of `--runs`; "first" is of a vocabulary that has encoded nothing yet.  The last line is one JSON
object.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import msgspec

from pipeline.models.vocabulary_tables import make_tables
from shm.checkpoint import VERSION, Hyper, Index, TokenizerData, load_index, load_tables, write_index
from stages.tokenizer.kernels.compiled import compiling
from stages.tokenizer.opened_models import spec_of
from stages.tokenizer.vocabulary import Vocabulary
from stages.worker.checkpoint.gguf import GgufFile
from stages.worker.checkpoint.vocabulary import read_vocabulary
from tools.reference.lines import LANGUAGES, make_lines

ROOT = Path(__file__).parents[3]
_STEP = 16_384  # tokens that the stage decodes at once


def _texts(files: tuple[Path, ...], nbytes: int) -> Iterator[tuple[str, str]]:
    code = "".join(path.read_text() for path in sorted(ROOT.glob("stages/**/*.py")))
    documents = "".join(path.read_text() for path in sorted(ROOT.glob("docs/*.md")))
    rng = random.Random(3)
    languages = "\n".join(rng.choice(LANGUAGES) for _ in range(3_000))
    texts = [
        ("code", code),
        ("documents", documents),
        ("languages", languages),
        ("mixtures", "\n".join(make_lines(4_000))),
    ]
    for name, text in [*texts, *((path.stem, path.read_text()) for path in files)]:
        yield name, (text * (nbytes // len(text.encode()) + 1)).encode()[:nbytes].decode(errors="ignore")


def _data(path: Path) -> TokenizerData:
    file = GgufFile(path)
    rows = len(file.metadata["tokenizer.ggml.tokens"])
    tensors = {"token_embd.weight": SimpleNamespace(shape=(rows, 1))}
    source: Any = SimpleNamespace(path=path, metadata=file.metadata, tensors=tensors)
    return read_vocabulary(source)


def _best(work: Callable[[], object], runs: int) -> float:
    """CPU time of this thread, s."""
    times = []
    for _ in range(runs):
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return min(times)


def _index(data: TokenizerData, folder: Path) -> Path:
    hyper = Hyper(1, 32, 2, 1, 16, 32, len(data.tokens), 64, 1e-5, 16, "neighbours", "silu")
    path = folder / "model.idx"
    index = Index(VERSION, "00" * 32, "llama", "m", 0, 0, 0, hyper, msgspec.Raw(data.packed()), [])
    write_index(path, index, make_tables(data))
    return path


def _open(path: Path) -> Vocabulary:
    index, tables = load_index(path), load_tables(path)
    vocabulary = Vocabulary(spec_of(index.tokenizer_head if tables else index.tokenizer), tables or None)
    vocabulary.encode("<|im_start|>", True)  # with the pattern of special tokens
    return vocabulary


def _decode(vocabulary: Vocabulary, ids: list[int]) -> None:
    decoder = vocabulary.decoder()
    for at in range(0, len(ids), _STEP):
        b"".join(decoder.push(ids[at : at + _STEP])).decode(errors="replace")


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--text", "texts", multiple=True, type=click.Path(exists=True, path_type=Path))
@click.option("--megabytes", default=2.0, show_default=True, help="of each text")
@click.option("--runs", default=3, show_default=True)
def main(files: tuple[Path, ...], texts: tuple[Path, ...], megabytes: float, runs: int) -> None:
    """Measure the vocabularies of GGUF files."""
    with compiling():  # as before a start
        pass
    rows: list[dict[str, object]] = []
    for file in files:
        data = _data(file)
        with tempfile.TemporaryDirectory() as folder:
            begin = time.thread_time()
            path = _index(data, Path(folder))
            compile_s = time.thread_time() - begin
            open_s = _best(lambda path=path: _open(path), runs)  # type: ignore[misc]
            click.echo(
                f"{file.stem}: {data.model}, {len(data.tokens):,} tokens; compiled in {compile_s:.2f} s, open in "
                f"{1e3 * open_s:.1f} ms, {path.stat().st_size / 1e6:.1f} MB"
            )
            row: dict[str, object] = {
                "file": file.stem,
                "kind": data.model,
                "tokens": len(data.tokens),
                "open_ms": round(1e3 * open_s, 1),
            }
            for name, text in _texts(texts, int(megabytes * 1e6)):
                vocabulary, size = _open(path), len(text.encode()) / 1e6
                first = _best(lambda: vocabulary.encode(text, False), 1)  # noqa: B023
                again = _best(lambda: vocabulary.encode(text, False), runs)  # noqa: B023
                ids = vocabulary.encode(text, False)
                decode_us = 1e6 * _best(lambda: _decode(vocabulary, ids), runs) / len(ids)  # noqa: B023
                click.echo(
                    f"  {name:12} {len(ids):9,} tokens first {size / first:5.1f} MB/s  again {size / again:5.1f} MB/s  "
                    f"decode {decode_us:.2f} us a token"
                )
                row[name] = {"first_mb_s": size / first, "mb_s": size / again, "decode_us": decode_us}
        rows.append(row)
    click.echo(json.dumps({"vocabularies": rows}))


if __name__ == "__main__":
    main()
