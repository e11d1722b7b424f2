"""`starling ingest PATH`: convert a GGUF file or a Hugging Face directory, and give the result a name."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path

import click
import msgspec

from pipeline.config import paths
from pipeline.config.rules import check_name
from pipeline.config.user_home import expand_user
from pipeline.models import registry, store
from pipeline.models.locks import lock
from pipeline.models.model_directory import QUANTS
from shm.checkpoint import Hyper, Index
from starling.cli import terminal
from starling.cli.options import exit_codes, json_option
from starling.cli.progress import shown


@click.command(
    epilog=exit_codes(
        {
            0: "the model is here and has its name",
            1: "failure that a retry may cure, for example of reading the files",
            2: "wrong usage: no such option or file, or a name that cannot be used",
            78: "the files are refused or invalid, or the disk is too small",
        }
    )
)
@click.argument("path", metavar="PATH", type=click.Path(path_type=Path, exists=True))
@click.option("--quant", type=click.Choice(tuple(QUANTS)), help="Weight type; default: as they are.")
@click.option("--name", metavar="NAME", help="The model's name; default: that of PATH, with the weight type.")
@click.option("--pretokenizer", metavar="NAME", default="", help="How a byte-level vocabulary splits text.")
@json_option("Print the model as JSON, without progress.")
def ingest(path: Path, quant: str | None, name: str | None, pretokenizer: str, as_json: bool) -> None:
    """Convert a model of this machine, and give it a name.

    PATH is a GGUF file, or a Hugging Face directory: config.json, model.safetensors (or several files with their
    index), tokenizer.json or tokenizer.model. Only the result is stored.

    An interrupted conversion goes on where it was when the command is repeated. `starling run NAME` answers with a
    model that generates text, and `name: NAME` in the configuration serves it.
    """
    from stages.worker.checkpoint.prepare_source import prepare_source
    from starling.vocabulary_check import check_vocabulary

    path = expand_user(path).absolute()
    name = name or _default_name(path, quant)
    if reason := check_name(name):
        raise click.BadParameter(f"{name!r} cannot be a model's name: {reason}", param_hint="--name")
    folder = paths.models_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with nullcontext(store.no_progress) if as_json else shown(name) as progress:
        index = prepare_source(path, folder, quant or "", pretokenizer, progress, check_vocabulary)
    record = _record(name, path, index)
    with lock(folder, "names"):
        registry.write(folder, name.replace("/", "--"), record)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(record)).decode())
        return
    click.echo(f"{name}: {record.nbytes / 1e6:,.0f} MB, {record.architecture}, {record.quantization}")
    terminal.note(use_of(name, index.hyper))


def use_of(name: str, hyper: Hyper) -> str:
    """What a model can do, as a remark for its user."""
    if hyper.is_causal:
        return f"`starling run {name} PROMPT` answers with it"
    endpoint = "/v1/rerank" if hyper.scores_pairs else "/v1/embeddings"
    return f"it generates no text: name {name} in requests to {endpoint}"


def _default_name(path: Path, quant: str | None) -> str:
    name = path.resolve().name if path.is_dir() else path.name.removesuffix(".gguf")
    return f"{name}-{quant}" if quant else name


def _record(name: str, path: Path, index: Index) -> registry.Record:
    return registry.Record(
        name,
        index.digest,
        index.bin_bytes,
        str(path),
        path.name,
        pulled=time.time(),
        architecture=index.architecture,
        quantization=index.quantization,
        context_length=index.hyper.context_length,
        is_checkpoint=True,
    )
