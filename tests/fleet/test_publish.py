"""A model is published as a whole or not at all, once, and only with the bytes that were prepared."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from pipeline.blobs.folder import FolderStore
from pipeline.blobs.http import HttpStore
from pipeline.blobs.interface import Data
from pipeline.catalog import contents
from pipeline.catalog.entry import FOLDER, LISTING, Entry, decode, encode, manifest_key
from pipeline.catalog.publish import Published, publish
from pipeline.errors import ConfigError, Conflict, ModelNotFound, ResourceError, StorageUnavailable
from starling.cli import cli
from tests.fleet.checkpoints import write_checkpoint
from tests.fleet.range_server import served
from tools.tiny_gguf import SHAPES, write_model

PART_BYTES = 1 << 23
NBYTES = 2 * PART_BYTES + 50_000  # three parts


class Recording(FolderStore):
    """Counts what is put, and fails when asked to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.keys: list[str] = []
        self.failures: list[Exception] = []  # of the next puts

    async def put(self, key: str, data: Data, *, replace: bool = False) -> None:
        if self.failures:
            raise self.failures.pop()
        await super().put(key, data, replace=replace)
        self.keys.append(key)


@pytest.fixture(scope="module")
def index_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("prepared"), NBYTES)[0]


async def put(store: FolderStore, index_path: Path, name: str = "tiny", **options: bool) -> Published:
    def progress(phase: str, done: int, total: int) -> None:
        assert 0 <= done <= total

    replace = options.get("replace", False)
    return await publish(store, index_path, name, "tiny.gguf", 1000, progress, replace=replace, part_bytes=PART_BYTES)


async def test_a_published_model_is_in_the_catalog_and_again_sends_nothing(tmp_path: Path, index_path: Path) -> None:
    store = Recording(tmp_path)
    first = await put(store, index_path)
    assert (first.sent, first.kept) == (first.entry.nbytes, 0)
    assert await contents.entries(store) == [first.entry]
    assert await contents.find(store, "tiny") == first.entry
    parts = [store.path(first.entry.part_key(part)).read_bytes() for part in range(first.entry.n_parts)]
    assert len(parts) == 3
    assert b"".join(parts) == index_path.with_suffix(".bin").read_bytes()
    before = list(store.keys)
    again = await put(store, index_path)
    assert (again.sent, again.kept) == (0, first.entry.nbytes)
    assert [key for key in store.keys[len(before) :] if key != LISTING] == []


async def test_the_manifest_comes_last(tmp_path: Path, index_path: Path) -> None:
    store = Recording(tmp_path)
    entry = (await put(store, index_path)).entry
    assert store.keys[-3:] == [entry.index_key, manifest_key("tiny"), LISTING]


@pytest.mark.parametrize("after", [0, 1, 3, 4])
async def test_an_interrupted_publication_is_invisible_and_is_continued(
    tmp_path: Path, index_path: Path, after: int
) -> None:
    class Ending(Recording):
        begun = 0

        async def put(self, key: str, data: Data, *, replace: bool = False) -> None:
            self.begun += 1
            if self.begun > after:
                raise ResourceError("the store is full")
            await super().put(key, data, replace=replace)

    store = Ending(tmp_path)
    with pytest.raises(ResourceError):
        await put(store, index_path)
    assert await contents.entries(store) == []
    arrived = sum(blob.nbytes for blob in await store.scan("models"))
    done = await put(Recording(tmp_path), index_path)
    assert done.sent == done.entry.nbytes - arrived
    assert await contents.entries(store) == [done.entry]


async def test_a_store_that_fails_for_a_while_is_tried_again(
    tmp_path: Path, index_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.blobs.retry.FIRST_S", 0.0)
    store = Recording(tmp_path)
    store.failures = [StorageUnavailable("503")] * 4
    assert (await put(store, index_path)).entry in await contents.entries(store)


async def test_damaged_weights_are_not_published(tmp_path: Path) -> None:
    path, _ = write_checkpoint(tmp_path / "models", 20_000_000)
    with path.with_suffix(".bin").open("r+b") as file:
        file.seek(9_000_000)  # of piece 1
        file.write(b"damage")
    store = FolderStore(tmp_path / "blobs")
    with pytest.raises(ConfigError, match="piece 1 differs from its checksum"):
        await put(store, path)
    assert await contents.entries(store) == []


@pytest.mark.parametrize("readers", [1, 2, 3])
async def test_weights_that_end_early_are_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readers: int
) -> None:
    monkeypatch.setattr("pipeline.catalog.publish.PARTS_AT_ONCE", readers)
    path, _ = write_checkpoint(tmp_path / "models", 20_000_000)
    store = FolderStore(tmp_path / "blobs")
    os.truncate(path.with_suffix(".bin"), PART_BYTES + 100)  # part 1 holds the end, part 2 nothing
    with pytest.raises(ConfigError, match="ends at 8,388,708"):
        await put(store, path)
    assert await contents.entries(store) == []


async def test_a_name_is_not_given_to_another_model_silently(tmp_path: Path, index_path: Path) -> None:
    other, _ = write_checkpoint(tmp_path / "models", 100_000, seed=2)
    store = FolderStore(tmp_path / "blobs")
    old = (await put(store, index_path)).entry
    with pytest.raises(Conflict, match="--replace"):
        await put(store, other)
    assert await contents.find(store, "tiny") == old
    new = (await put(store, other, replace=True)).entry
    assert await contents.entries(store) == [new]


async def test_of_two_publishers_of_one_name_one_gets_the_conflict(tmp_path: Path) -> None:
    paths = [write_checkpoint(tmp_path / "models", 100_000, seed)[0] for seed in range(4)]
    store = FolderStore(tmp_path / "blobs")
    results = await asyncio.gather(*(put(store, path) for path in paths), return_exceptions=True)
    done = [one for one in results if isinstance(one, Published)]
    assert len(done) == 1
    assert [type(one) for one in results if one not in done] == [Conflict] * 3
    assert await contents.entries(store) == [done[0].entry]


async def test_publishers_at_once_are_all_in_the_listing(tmp_path: Path) -> None:
    paths = [write_checkpoint(tmp_path / "models", 100_000, seed)[0] for seed in range(5)]
    store = FolderStore(tmp_path / "blobs")
    await asyncio.gather(*(put(store, path, f"model-{number}") for number, path in enumerate(paths)))
    with served(tmp_path / "blobs") as server:
        async with HttpStore(server.url) as mirror:
            assert await contents.entries(mirror) == await contents.entries(store)
            assert len(await contents.entries(mirror)) == 5


async def test_removal_keeps_what_another_name_uses(tmp_path: Path, index_path: Path) -> None:
    store = FolderStore(tmp_path)
    entry = (await put(store, index_path)).entry
    await put(store, index_path, "other/name")
    assert await contents.remove(store, "tiny") == (entry, 0)
    assert [one.name for one in await contents.entries(store)] == ["other/name"]
    _, freed = await contents.remove(store, "other/name")
    assert freed == entry.nbytes
    assert await store.scan("models") == []
    with pytest.raises(ModelNotFound, match="published models: none"):
        await contents.find(store, "tiny")


async def test_a_damaged_manifest_hides_only_its_own_model(tmp_path: Path, index_path: Path) -> None:
    store = FolderStore(tmp_path)
    entry = (await put(store, index_path)).entry
    for name, raw in (("a", b"{"), ("b", b"[]"), ("c", encode(entry)), ("d", b"x" * 100_000)):
        await store.put(manifest_key(name), raw)
    os.unlink(tmp_path / FOLDER / "d.json")
    assert await contents.entries(store) == [entry]
    with pytest.raises(ConfigError, match="is not a manifest"):
        await contents.find(store, "a")
    with pytest.raises(ConfigError, match="--replace"):
        await put(store, index_path, "a")
    await put(store, index_path, "a", replace=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("digest", "../../../etc/passwd"),
        ("digest", "A" * 64),
        ("index_sha256", "0" * 64 + "\n"),
        ("weights_checksum", ""),
        ("weights_bytes", -1),
        ("weights_bytes", 1 << 60),
        ("part_bytes", 1),
        ("part_bytes", (8 << 20) + 1),
        ("index_bytes", 1 << 40),
        ("name", "../x"),
        ("name", ""),
        ("format", 2),
    ],
)
async def test_a_hostile_manifest_is_refused(tmp_path: Path, index_path: Path, field: str, value: object) -> None:
    entry = (await put(FolderStore(tmp_path), index_path)).entry
    raw = msgspec.json.encode({**msgspec.to_builtins(entry), field: value})
    with pytest.raises(ConfigError):
        decode(raw, "here")
    assert isinstance(decode(encode(entry), "here"), Entry)


# ------------------------------------------------------------------ the commands


def test_publish_catalog_and_unpublish(home: Path, tmp_path: Path) -> None:
    gguf = tmp_path / "My Model.Q8_0.gguf"
    write_model(gguf, SHAPES["small"], "Q8_0", seed=1)
    run = CliRunner().invoke
    result = run(cli, ["publish", str(gguf)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "my-model.q8_0: published as" in result.output
    (row,) = json.loads(run(cli, ["catalog", "--json"]).output)
    assert (row["name"], row["source"]["file"]) == ("my-model.q8_0", "My Model.Q8_0.gguf")
    assert "my-model.q8_0" in run(cli, ["catalog"]).output
    again = json.loads(run(cli, ["publish", str(gguf), "--json"]).output)
    assert (again["sent_bytes"], again["kept_bytes"]) == (0, again["bytes"])
    assert run(cli, ["unpublish", "my-model.q8_0"]).exit_code == 0
    assert json.loads(run(cli, ["catalog", "--json"]).output) == []
    assert run(cli, ["publish", "nothing.gguf"]).exit_code == 2
    assert run(cli, ["publish", str(gguf), "--name", "../up"]).exit_code == 2


@pytest.mark.slow
def test_a_killed_publisher_leaves_no_entry_and_its_successor_continues(home: Path, tmp_path: Path) -> None:
    """SIGKILL between two parts: the pipe of the progress is closed, so that the publisher stops at a known place."""
    path, _ = write_checkpoint(tmp_path / "models", 3 * PART_BYTES)
    program = f"""
import asyncio, sys
from pathlib import Path
from pipeline.blobs.folder import FolderStore
from pipeline.catalog import publish as module
module.PARTS_AT_ONCE = 1
class Slow(FolderStore):
    async def put(self, key, data, *, replace=False):
        await super().put(key, data, replace=replace)
        print(key, flush=True)
        sys.stdin.readline()
store = Slow(Path({str(tmp_path / "blobs")!r}))
path = Path({str(path)!r})
asyncio.run(module.publish(store, path, "tiny", "f", 0, lambda *a: None, part_bytes={PART_BYTES}))
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline().endswith(b"-00000.bin\n")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()

    async def check() -> None:
        store = FolderStore(tmp_path / "blobs")
        assert await contents.entries(store) == []
        done = await put(store, path)
        assert done.kept == PART_BYTES
        assert await contents.entries(store) == [done.entry]

    asyncio.run(check())
