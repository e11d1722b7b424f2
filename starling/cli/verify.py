"""`starling verify`: read every byte of the models' files and compare it with its checksum."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import msgspec

from pipeline.config import paths
from pipeline.config.load import load
from pipeline.config.schema import ModelConfig
from pipeline.errors import StarlingError
from pipeline.files import drop_cached
from pipeline.models import digests, store
from pipeline.runtime.process import EXIT_CONFIG
from shm.checkpoint import VERSION, Checkpoint, CheckpointError
from starling import model_list
from starling.cli import completion
from starling.cli.options import exit_codes, json_option
from starling.cli.prepare import chosen_models
from starling.cli.progress import shown
from starling.cli.terminal import print_wrapped


@click.command(
    epilog=exit_codes(
        {
            0: "every file has the bytes that it should have",
            2: "no such model is configured",
            78: "a file is damaged, or has not been prepared",
        }
    )
)
@click.argument("name", required=False, shell_complete=completion.model_names)
@json_option()
def verify(name: str | None, as_json: bool) -> int:
    """Verify the files of models, GGUF and prepared.

    Reads every byte from the disk, whatever was verified before, except what a running server has in memory.
    NAME is a configured or pulled model; the default is all configured and pulled ones. A damaged checkpoint is
    refused at the next start of its workers.
    """
    config = load()
    chosen = chosen_models(config, name) if name else model_list.known(config)
    rows = [row for model in chosen for row in _verify(model, as_json)]
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
    else:
        for row in rows:
            print_wrapped(f"{row['model']}: {row['problem'] or _intact(row)}", 2)
    return EXIT_CONFIG if any(row["problem"] for row in rows) else 0


def _intact(row: dict[str, Any]) -> str:
    return f"{row['path']} is intact ({row['bytes'] / 1e6:.0f} MB, {row['bytes'] / 1e9 / row['seconds']:.1f} GB/s)"


def _verify(model: ModelConfig, is_quiet: bool) -> list[dict[str, Any]]:
    """A row for each file of the model."""
    folder = paths.models_dir()
    source = store.gguf_path(model, folder)
    located = store.find(model, folder)
    expected = store.expected_digest(model, folder)
    if located is not None and expected and located.digest != expected:
        reason = f"{source}: SHA-256 is {located.digest}, expected {expected}: it is another file; fetch it again"
        return [_row(model, source, located.nbytes, 0.0, reason)]
    if located is None and expected and source.is_file():  # it has changed, or only its times have
        located = store.LocalModel(model.name, source, expected, source.stat().st_size)
    if located is None:
        reason = f"{source} is missing or has changed since it was prepared; run `starling prepare {model.name}`"
        return [_row(model, source, 0, 0.0, reason)]
    index_path = folder / f"{located.digest}.idx"
    with nullcontext(store.no_progress) if is_quiet else shown(model.name) as progress:
        if store.is_checkpoint(model, folder):  # the GGUF file is not here
            return [_verify_checkpoint(model, index_path, progress)]
        return [_verify_source(model, located, progress), _verify_checkpoint(model, index_path, progress)]


def _verify_source(model: ModelConfig, located: store.LocalModel, progress: store.Progress) -> dict[str, Any]:
    begun, problem = time.monotonic(), ""
    try:
        drop_cached(located.path)
        found = digests.compute(located.path, progress).sha256
        if found != located.digest:
            problem = (
                f"{located.path}: SHA-256 is {found}, expected {located.digest}: the file is damaged; check the disk, "
                f"then fetch the file again"
            )
    except OSError as error:
        problem = f"{located.path} cannot be read: {error.strerror}; check the disk"
    except StarlingError as error:
        problem = error.message
    return _row(model, located.path, located.nbytes, time.monotonic() - begun, problem)


def _verify_checkpoint(model: ModelConfig, index_path: Path, progress: store.Progress) -> dict[str, Any]:
    from stages.worker.checkpoint import verify as checks

    path = index_path.with_suffix(".bin")
    begun, problem, nbytes = time.monotonic(), "", 0
    try:
        checkpoint = Checkpoint(index_path)
        nbytes = checkpoint.index.bin_bytes
        if checkpoint.index.version == VERSION:
            drop_cached(path)
            checks.verify(checkpoint, progress)
        else:
            problem = f"{index_path} is of an older version; run `starling prepare {model.name}`"
    except FileNotFoundError:
        problem = f"{path} is missing; run `starling prepare {model.name}`"
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror}; check the disk"
    except CheckpointError as error:
        problem = str(error)
    return _row(model, path, nbytes, time.monotonic() - begun, problem)


def _row(model: ModelConfig, path: Path, nbytes: int, seconds: float, problem: str) -> dict[str, Any]:
    return {"model": model.name, "path": str(path), "bytes": nbytes, "seconds": seconds, "problem": problem}
