"""A published model whose index was made again: machines that have the old one get the new one, and no weights."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import mmap
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from pipeline.blobs.folder import FolderStore
from pipeline.catalog import pulled
from pipeline.catalog.entry import Entry
from pipeline.catalog.publish import publish
from pipeline.config import paths
from pipeline.config.load import load
from pipeline.errors import ConfigError
from pipeline.files import make_directory
from pipeline.observe.status import StatusFile
from pipeline.protocol.messages import Heartbeat
from shm.checkpoint import STRIPPING_REVISION, TokenizerData, load_index, write_index
from shm.pages import KvGeometry, create_kv
from stages.agent.engines.starling_engine import engine_arena_dir, engine_run_dir
from starling.cli import cli
from starling.cli.pull_published import pull_configured
from tests.fleet.checkpoints import TOKENIZER, write_checkpoint
from tests.fleet.range_server import served
from tests.fleet.site import Site

OLD = TOKENIZER
NEW = msgspec.structs.replace(TOKENIZER, revision=STRIPPING_REVISION)
OTHER = msgspec.structs.replace(NEW, chat_template="{{ messages }}")
NBYTES = 100_000


class Fleet:
    """An operator's machine, a store, and a machine that pulls."""

    def __init__(self, site: Site, prepared: Path) -> None:
        self.site, self.prepared = site, prepared
        self.here = site.models_dir / prepared.name
        self.index = load_index(prepared)

    def write(self, path: Path, tokenizer: TokenizerData, **fields: object) -> None:
        """Write the index of a model with the name of one whose tokens take white space, as a release does."""
        raw = msgspec.Raw(tokenizer.packed())
        write_index(path, msgspec.structs.replace(self.index, name="Phi-3 Mini", tokenizer_raw=raw, **fields))

    async def publish(self, tokenizer: TokenizerData, name: str = "tiny") -> Entry:
        """Make the index again, and publish it."""
        self.write(self.prepared, tokenizer)
        store = FolderStore(self.site.root)
        done = await publish(store, self.prepared, name, "tiny.gguf", 0, lambda phase, done, total: None, replace=True)
        self.site.entry = done.entry
        return done.entry

    @property
    def is_published(self) -> bool:
        """Whether the index here has the published bytes."""
        return hashlib.sha256(self.here.read_bytes()).hexdigest() == self.site.entry.index_sha256

    @property
    def is_complete(self) -> bool:
        return pulled.is_complete(self.site.models_dir, self.site.entry)

    @property
    def weights(self) -> tuple[int, ...]:
        """What differs if the weights here are written again; not the time of the last access, as by `--verify`."""
        info = self.here.with_suffix(".bin").stat()
        return info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns

    @property
    def weights_asked(self) -> int:
        return sum(count for path, count in self.site.server.requests.items() if path.endswith(".bin"))


@pytest.fixture
def fleet(short_pauses: None, tmp_path: Path) -> Iterator[Fleet]:
    prepared, _ = write_checkpoint(tmp_path / "prepared", NBYTES)
    root = tmp_path / "blobs"
    entry = asyncio.run(
        publish(FolderStore(root), prepared, "tiny", "tiny.gguf", 0, lambda phase, done, total: None)
    ).entry
    with served(root) as server:
        yield Fleet(Site(root, entry, server, tmp_path / "models"), prepared)


@pytest.mark.parametrize("verify", [False, True])
async def test_an_index_of_an_older_release_is_replaced_by_the_published_one(fleet: Fleet, verify: bool) -> None:
    old = await fleet.publish(OLD)
    await fleet.site.pull()
    weights, asked = fleet.weights, fleet.weights_asked
    assert fleet.is_complete and not load_index(fleet.here).is_current  # the store has no other one
    with fleet.here.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        before = bytes(mapped)
        new = await fleet.publish(NEW)
        assert (new.digest, new.weights_checksum) == (old.digest, old.weights_checksum)
        assert not fleet.is_complete
        arrival = await fleet.site.pull(verify=verify)
        assert bytes(mapped) == before != fleet.here.read_bytes()  # a process that maps the old one keeps it
    assert (arrival.report, arrival.has_new_index) == (None, True)
    assert fleet.is_published and fleet.is_complete and load_index(fleet.here).is_current
    assert not fleet.here.stat().st_mode & 0o222
    assert (weights, asked) == (fleet.weights, fleet.weights_asked)
    sent = fleet.site.server.sent
    assert not (await fleet.site.pull()).has_new_index
    assert fleet.site.server.sent == sent
    assert not (await fleet.site.pull(verify=True)).has_new_index


async def test_a_record_of_the_new_index_does_not_hide_the_old_one(fleet: Fleet) -> None:
    """Older releases recorded the new entry, and kept the old index."""
    await fleet.publish(OLD)
    await fleet.site.pull()
    record = pulled.Pulled(entry=await fleet.publish(NEW), is_owned=True)
    pulled.write(fleet.site.models_dir, record)
    assert (await fleet.site.pull()).has_new_index
    assert fleet.is_published


async def test_an_index_that_this_release_can_use_stays(fleet: Fleet) -> None:
    """Until `--verify` asks for the published bytes; one that was prepared here stays also then."""
    await fleet.publish(NEW)
    await fleet.site.pull()
    await fleet.publish(OTHER)
    assert fleet.is_complete
    assert not (await fleet.site.pull()).has_new_index and not fleet.is_published
    assert (await fleet.site.pull(verify=True)).has_new_index and fleet.is_published
    for record, _ in pulled.read_all(fleet.site.models_dir):
        pulled.write(fleet.site.models_dir, msgspec.structs.replace(record, is_owned=False))
    await fleet.publish(NEW)
    assert not (await fleet.site.pull(verify=True)).has_new_index and not fleet.is_published


async def test_an_older_published_index_replaces_none_that_can_be_used(fleet: Fleet) -> None:
    await fleet.publish(NEW)
    await fleet.site.pull()
    await fleet.publish(OLD)
    assert fleet.is_complete
    for verify in (False, True):
        assert not (await fleet.site.pull(verify=verify)).has_new_index
    assert load_index(fleet.here).is_current


async def test_an_index_is_not_hashed_at_each_heartbeat(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    await fleet.publish(OLD)
    await fleet.site.pull()
    hashed: list[int] = []
    sha256 = hashlib.sha256

    def count(data: bytes) -> object:
        hashed.append(len(data))
        return sha256(data)

    pulled._sha256.cache_clear()
    monkeypatch.setattr(pulled.hashlib, "sha256", count)
    assert fleet.is_complete and fleet.is_complete and fleet.is_complete
    assert len(hashed) == 1
    fleet.write(fleet.here, OLD, parameters=7)  # another file
    assert not fleet.is_complete
    assert len(hashed) == 2


def test_the_commands_bring_the_new_index(fleet: Fleet, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pull` says so; `prepare` and `up` need no `pull` before them."""
    monkeypatch.setenv("STARLING_FLEET__BLOBS", fleet.site.server.url)
    monkeypatch.setenv("STARLING_FLEET__FREE_MB", "0")
    monkeypatch.setenv("STARLING_MODELS__0__NAME", "mine")
    monkeypatch.setenv("STARLING_MODELS__0__PATH", "catalog:tiny")
    fleet.here = home / "models" / fleet.here.name
    run = CliRunner().invoke

    def pull(*options: str) -> str:
        return run(cli, ["pull", "tiny", *options], catch_exceptions=False, standalone_mode=False).output

    asyncio.run(fleet.publish(OLD))
    pull()
    assert "(here already)" in pull()
    asyncio.run(fleet.publish(NEW))
    (row,) = json.loads(pull("--json"))
    assert (row["has_new_index"], row["received_bytes"]) == (True, 0)
    assert "(here already)" in pull() and fleet.is_published
    fleet.write(fleet.here, OLD)
    assert "here already, with an index that was replaced" in pull() and fleet.is_published
    fleet.write(fleet.here, OLD)
    config = load()
    pull_configured(config, config.models, lambda name: nullcontext(lambda phase, done, total: None))
    assert fleet.is_published


@pytest.mark.parametrize("is_engine", [False, True])
@pytest.mark.parametrize("has_other_weights", [False, True])
def test_an_index_of_another_k_and_v_replaces_none_that_a_server_has_loaded(
    fleet: Fleet,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_other_weights: bool,
    is_engine: bool,
) -> None:
    """Also not one that an engine of an agent of this home has loaded.

    Its workers read the index when they start again, and their K and V must fit into the arena that is there.

    An attention factor changes the RoPE tables, which are among the weights.
    """
    monkeypatch.setenv("STARLING_FLEET__BLOBS", fleet.site.server.url)
    monkeypatch.setenv("STARLING_FLEET__FREE_MB", "0")
    monkeypatch.setenv("STARLING_SERVER__ARENA_DIR", str(home / "shm"))
    fleet.here = home / "models" / fleet.here.name
    config = load()
    run_dir = engine_run_dir(home / "agent" / "engines" / "0123abcd") if is_engine else paths.run_dir(config)
    arenas = engine_arena_dir(config, run_dir) if is_engine else paths.arena_dir(config)
    status = StatusFile(run_dir, "kv")

    def pull() -> BaseException | None:
        options = () if has_other_weights else ("--verify",)
        return CliRunner().invoke(cli, ["pull", "tiny", *options], standalone_mode=False).exception

    asyncio.run(fleet.publish(NEW))
    assert pull() is None
    before = fleet.here.read_bytes()
    for folder in (arenas, status.path.parent):
        make_directory(folder)
    status.write(Heartbeat("kv", 0, 0, False, True))
    geometry = KvGeometry.of(fleet.index.hyper, 32, "f16")
    arena, views = create_kv(arenas / "tiny.kv", geometry, 2, bytes.fromhex(fleet.index.digest), 1)
    hyper = msgspec.structs.replace(fleet.index.hyper, kv_revision=1)
    fleet.index = msgspec.structs.replace(fleet.index, hyper=hyper)
    if has_other_weights:
        path, other = write_checkpoint(tmp_path / "other", NBYTES, seed=2)
        path.with_suffix(".bin").replace(fleet.prepared.with_suffix(".bin"))
        fleet.index = msgspec.structs.replace(fleet.index, tensors=other.tensors, pieces=other.pieces)
    asyncio.run(fleet.publish(NEW))
    error = pull()
    assert isinstance(error, ConfigError) and "`starling unload`" in error.message
    assert fleet.here.read_bytes() == before
    status.remove()  # the server has ended
    assert pull() is None and fleet.is_published
    del views
    arena.close()


async def test_a_server_that_starts_while_the_weights_come_keeps_its_index(fleet: Fleet) -> None:
    await fleet.publish(OLD)
    await fleet.site.pull()
    before, looks = fleet.here.read_bytes(), 0

    def loaded() -> set[tuple[str, int]]:
        nonlocal looks
        looks += 1
        return {(fleet.index.digest, 7)} if looks > 1 else set()

    fleet.here.with_suffix(".bin").chmod(0o644)
    with fleet.here.with_suffix(".bin").open("r+b") as weights:
        weights.write(b"damaged")
    with pytest.raises(ConfigError, match="is loaded with KV revision 7"):
        await fleet.site.pull(verify=True, loaded=loaded)
    assert (looks, fleet.here.read_bytes()) == (2, before)


async def test_a_status_directory_that_cannot_be_read_is_no_failure_of_the_disk(fleet: Fleet) -> None:
    """It belongs to another user: `starling pull` says so."""
    await fleet.publish(OLD)
    await fleet.site.pull()
    await fleet.publish(NEW)

    def loaded() -> set[tuple[str, int]]:
        raise PermissionError(errno.EACCES, "Permission denied", "/run/other")

    with pytest.raises(PermissionError) as error:
        await fleet.site.pull(loaded=loaded)
    assert error.value.filename == "/run/other"
