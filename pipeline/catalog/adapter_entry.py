"""One published LoRA adapter, and the keys of its blobs.

    adapters/BASE/NAME.json     the manifest, `AdapterEntry` as JSON: placed last, replaced atomically
    adapters.json               all of them, for stores that cannot list (adapters.py)
    lora/DIGEST.lora            the adapter as workers load it, named by the SHA-256 of its bytes

BASE is the name of the published model that it belongs to, with "--" for "/".  The adapter was compared with the
matrices of one version of that model, whose digest the manifest names: with another one it is not used.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pipeline.catalog.entry import Natural, Sha256, Text
from pipeline.config.rules import check_adapter_name, check_name
from pipeline.errors import ConfigError
from shm.decoding import DECODE_ERRORS

FORMAT = 1  # of a manifest
FOLDER = "adapters"
LISTING = "adapters.json"
FILES = "lora"
MAX_ADAPTER_BYTES = 1 << 30
MAX_RANK = 512  # as models.max_adapter_rank allows


class AdapterEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest."""

    format: int = FORMAT
    base: str  # name of the published model
    adapter: str  # requests ask for BASE:ADAPTER
    base_digest: Sha256  # of the GGUF file of that model
    digest: Sha256  # of the adapter's file
    bytes: Annotated[int, Meta(ge=1, le=MAX_ADAPTER_BYTES)]
    rank: Annotated[int, Meta(ge=1, le=MAX_RANK)]  # the largest one of its matrices
    source: Text = ""  # name of the file or directory that it was made of
    published: Natural = 0  # s since 1970

    @property
    def name(self) -> str:
        """What requests ask for."""
        return f"{self.base}:{self.adapter}"

    @property
    def key(self) -> str:
        """Key of its file."""
        return f"{FILES}/{self.digest}.lora"

    def same_adapter(self, other: AdapterEntry) -> bool:
        """Whether both name the same bytes, for the same model."""
        return (self.digest, self.bytes, self.base_digest) == (other.digest, other.bytes, other.base_digest)


def manifest_key(name: str) -> str:
    """Key of the manifest of BASE:ADAPTER."""
    base, _, adapter = name.partition(":")
    return f"{FOLDER}/{base.replace('/', '--')}/{adapter}.json"


def decode(raw: bytes, where: str) -> AdapterEntry:
    """The manifest. Raises `ConfigError`, which begins with `where`."""
    try:
        entry = msgspec.json.decode(raw, type=AdapterEntry)
    except DECODE_ERRORS as error:
        raise ConfigError(
            f"{where} is not a manifest of an adapter ({error}); publish the adapter again with --replace"
        ) from None
    return checked(entry, where)


def checked(entry: AdapterEntry, where: str) -> AdapterEntry:
    """The entry, if this release can use it. Raises `ConfigError`."""
    if entry.format != FORMAT:
        raise ConfigError(f"{where}: format is {entry.format}, expected {FORMAT}; use the release that published it")
    if reason := check_adapter_names(entry.name):
        raise ConfigError(f"{where}: the name {entry.name[:200]!r} cannot be used: {reason}")
    return entry


def check_adapter_names(name: str) -> str:
    """Why `name` is no valid BASE:ADAPTER; "" when it is."""
    base, colon, adapter = name.partition(":")
    if not colon:
        return "expected MODEL:ADAPTER"
    return check_name(base) or check_adapter_name(adapter)
