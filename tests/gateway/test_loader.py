"""The files and names that `starling load` and `reload` accept; the gateway must not block on any file."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from pipeline.catalog import pulled
from pipeline.catalog.entry import PART_BYTES
from pipeline.catalog.publish import describe
from pipeline.config import paths
from pipeline.config.load import resolve
from pipeline.config.schema import ModelConfig
from pipeline.errors import Conflict, InvalidRequest, ModelNotFound, ModelUnavailable
from pipeline.models import digests, registry, versions
from pipeline.models.pull import pull
from pipeline.models.sources import FileSource
from pipeline.models.versions import Op
from pipeline.protocol import messages as m
from stages.gateway.service import Service
from stages.gateway.versions import load_steps
from stages.gateway.versions.catalog import VersionCatalog
from stages.gateway.versions.load_settings import adapter_settings, demand_settings, known_digest, load_settings
from stages.gateway.versions.loader import Loader
from stages.worker.checkpoint.prepare import prepare_checkpoint
from tools.tiny_gguf import SHAPES, write_model

NAME = "model"
SECONDS = 60.0


def make_loader(
    home: Path,
    path: str,
    names: tuple[str, ...] = (NAME,),
    send_tokenizer: Callable[[m.Frame], bool] = lambda frame: True,
) -> Loader:
    """Return the loader of a gateway without peers, whose models are configured with `path`."""
    (home / "run").mkdir(mode=0o700)
    models = [{"name": name, "path": path} for name in names]
    config = resolve({"models": models, "server": {"run_dir": str(home / "run")}}, {})
    instances = VersionCatalog(config, versions.read(config), lambda fresh: versions.write(config, fresh))
    return Service(config, lambda frame: True, send_tokenizer, catalog=instances).loader


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF and so on")
    return path


@pytest.mark.timeout(120)  # a blocking open of the FIFO would wait for its writer
def test_a_file_that_is_not_regular_is_rejected_without_blocking(tmp_path: Path, file: Path) -> None:
    loader = make_loader(tmp_path, str(file))
    os.mkfifo(tmp_path / "pipe.gguf")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "sock.gguf"))
    (tmp_path / "dir.gguf").mkdir()
    for path, reason in (
        (tmp_path / "pipe.gguf", "is not a regular file"),
        (tmp_path / "sock.gguf", "cannot be read"),
        (tmp_path / "dir.gguf", "is not a regular file"),
        (Path("/dev/zero"), "is not a regular file"),
        (tmp_path / "none.gguf", "No such file"),
    ):
        for begin in (loader.reload, loader.load):
            name = NAME if begin == loader.reload else "other"
            with pytest.raises(InvalidRequest, match=reason) as refused:
                begin(name, str(path), "change", SECONDS)
            assert refused.value.param == "path"
            assert str(path) in refused.value.message


@pytest.mark.parametrize("path", ["/a\0b.gguf", "/not-utf8-\udcff.gguf", "model.gguf", "~/model.gguf"])
def test_an_unusable_path_is_rejected(tmp_path: Path, file: Path, path: str) -> None:
    loader = make_loader(tmp_path, str(file))
    with pytest.raises(InvalidRequest, match="absolute path") as refused:
        loader.reload(NAME, path, "change", SECONDS)
    assert refused.value.param == "path"


@pytest.mark.parametrize("configured", ["~/model.gguf", "model.gguf", "file://{home}/model.gguf"])
def test_without_a_path_the_configured_file_is_loaded_again(
    tmp_path: Path, file: Path, configured: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every form in which the configuration can name it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    loader = make_loader(tmp_path, configured.format(home=tmp_path))

    async def reload() -> str:
        loader.reload(NAME, "", "change", SECONDS)
        while not (loading := loader._catalog.loading(NAME)):
            assert loader.report("change")["done"] is False
            await asyncio.sleep(0)
        return loading[0].settings.path

    assert asyncio.run(reload()) == str(file)


def test_a_pulled_name_leads_to_the_file_that_was_pulled_only(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to another one in its place: every load demands the digest of the record."""
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    loader = make_loader(tmp_path, str(file))
    record = pull(FileSource(file), paths.models_dir(), "mine")
    for settings in (load_settings(loader._catalog, "mine", ""), demand_settings(loader._catalog, "mine")):
        assert settings.path == str(registry.blob_path(paths.models_dir(), record.digest))
        assert settings.sha256 == record.digest
    assert load_settings(loader._catalog, "mine", str(file)).sha256 == ""  # the operator's own file


@pytest.mark.parametrize("op", ["demand", "load"])
def test_a_reload_takes_the_file_that_was_pulled_last(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch, op: Op
) -> None:
    """Though the version that serves was loaded from an earlier one, which its settings name."""
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    catalog = make_loader(tmp_path, str(file))._catalog
    old = pull(FileSource(file), paths.models_dir(), "mine")
    loaded = demand_settings(catalog, "mine") if op == "demand" else load_settings(catalog, "mine", "", 7)
    catalog.switch(catalog.begin(loaded, "change", op, SECONDS).id)
    assert load_settings(catalog, "mine", "") == loaded
    file.write_bytes(b"GGUF and another model")
    new = pull(FileSource(file), paths.models_dir(), "mine")
    assert new.digest != old.digest
    reloaded = load_settings(catalog, "mine", "")
    assert reloaded.path == str(registry.blob_path(paths.models_dir(), new.digest))
    assert reloaded.sha256 == new.digest
    assert reloaded.kv_cache_mb == loaded.kv_cache_mb
    # A change of an adapter keeps the weights, and a version of an operator's own file that file.
    (tmp_path / "adapter.gguf").write_bytes(b"GGUF")
    with_adapter = adapter_settings(catalog, "load", "mine:a", str(tmp_path / "adapter.gguf"))
    assert (with_adapter.path, with_adapter.sha256) == (loaded.path, old.digest)
    own = load_settings(catalog, "mine", str(file))
    catalog.switch(catalog.begin(own, "another", op, SECONDS).id)
    assert load_settings(catalog, "mine", "") == own


def test_a_reload_takes_what_was_published_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a model of the catalog, once `starling pull` has brought another one under its name."""
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    folder = paths.models_dir()
    folder.mkdir()
    catalog = make_loader(tmp_path, "catalog:mine")._catalog
    for seed in (1, 2):
        source = write_model(tmp_path / f"{seed}.gguf", SHAPES["small"], seed=seed)
        index_path = prepare_checkpoint(ModelConfig(name="x", path=str(source)), folder)
        pulled.write(folder, pulled.Pulled(entry=describe(index_path, "mine", "x", 1, PART_BYTES)[0], is_owned=True))
        settings = load_settings(catalog, NAME, "")
        assert settings.path == str(index_path)
        catalog.switch(catalog.begin(settings, f"change-{seed}", "reload", SECONDS).id)


@pytest.mark.parametrize("by", ["operator", "room"])
def test_the_next_tick_comes_soon_when_a_version_retires(tmp_path: Path, file: Path, by: str) -> None:
    """It drops the version, and a load may wait for its memory: a gateway at rest ticks every half second."""
    loader = make_loader(tmp_path, str(file))
    begun: list[list[str]] = []
    loader.on_begun = lambda: begun.append([one.id for one in loader._catalog.retiring()])
    if by == "operator":
        loader.unload(NAME, "change", SECONDS)
    else:
        loader._eviction._unload(loader._catalog.serving(NAME), "room for another")  # type: ignore[arg-type]
    assert begun == [[NAME]]


def test_the_name_all_is_rejected(tmp_path: Path, file: Path) -> None:
    with pytest.raises(InvalidRequest, match="'all' cannot be used: reserved: commands use it for all models"):
        make_loader(tmp_path, str(file)).load("all", str(file), "change", SECONDS)


def test_two_models_with_the_same_file_names_are_not_loaded_together(tmp_path: Path, file: Path) -> None:
    loader = make_loader(tmp_path, str(file), ("mine/model", "other"))
    taken = "'mine--model' is too much like 'mine/model'"
    with pytest.raises(InvalidRequest, match=taken):
        loader.load("mine--model", str(file), "c1", SECONDS)
    # Nor the other way round, after the configured one has been unloaded.
    loader._catalog.drop("mine/model")

    async def load_both() -> None:
        loader.load("mine--model", str(file), "c2", SECONDS)
        loader.load("mine/model", "", "c3", 0.0)  # waits for the first load
        while not loader._catalog.loading("mine--model"):
            await asyncio.sleep(0)
        with pytest.raises(InvalidRequest, match="'mine/model' is too much like 'mine--model'") as refused:
            loader.load("mine/model", "", "c4", SECONDS)
        assert refused.value.param == "target"
        loader._catalog.switch(loader._catalog.loading("mine--model")[0].id)
        waiting = loader._changes["c3"].task
        loader._changes["c2"].task.cancel()  # type: ignore[union-attr]
        await waiting  # type: ignore[misc]
        with pytest.raises(InvalidRequest, match="too much like"):
            loader.report("c3")

    asyncio.run(load_both())


def test_a_load_goes_on_when_a_stage_reports(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a tick nor the next check for failures is awaited between the worker's report and the self-test."""
    monkeypatch.setattr(load_steps, "READY_POLL_S", 3600.0)
    asked: list[str] = []  # the ids of requests to the tokenizer

    def send_tokenizer(frame: m.Frame) -> bool:
        asked.append(frame.id)  # type: ignore[attr-defined]
        return True

    loader = make_loader(tmp_path, str(file), send_tokenizer=send_tokenizer)
    loaded, readiness = loader._loaded, loader._readiness
    readiness.tokenizer.up()
    readiness.tokenizer.observe(m.Heartbeat("tokenizer", 1, 0, False, True))

    async def reached(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():
                await asyncio.sleep(0)

    async def load() -> None:
        loader.load("other", str(file), "change", SECONDS)
        await reached(lambda: bool(loader._catalog.loading("other")))
        (new,) = loader._catalog.loading("other")
        describe = f"describe/{new.id}"
        await reached(lambda: asked.count(describe) == 1)
        # The tokenizer needs the digest, which the worker finds.
        loaded._tokenizer.on_reply(describe, ModelUnavailable("not prepared yet"))
        state = m.ModelState(new.id, "d" * 64, False, "attaching", 0, 0, 4)
        await reached(lambda: new.id in loaded.refused)
        loaded.on_scheduler_state(m.SchedulerState([state]))
        await reached(lambda: loader._catalog.loading("other")[0].digest == state.digest)
        await reached(lambda: asked.count(describe) == 2)
        loaded.on_scheduler_state(m.SchedulerState([msgspec.structs.replace(state, ready=True, reason="")]))
        ends = array("I", [1]).tobytes()
        described = m.Described(describe, new.id, state.digest, 1, 64, (0,), False, pieces=b"a", piece_ends=ends)
        loaded._tokenizer.on_reply(describe, described)
        await reached(lambda: loader.report("change")["phase"] == "self-test")

    asyncio.run(load())


def test_a_load_of_a_prepared_file_has_its_digest_from_the_start(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no stage waits for the worker; not after a change of the file, or if another digest is expected."""
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    models_dir = tmp_path / "models"
    models_dir.mkdir()
    stamp = digests.compute(file, lambda phase, done, total: None)
    digests.remember("other", file, stamp, models_dir)
    digest = stamp.sha256
    (models_dir / f"{digest}.idx").write_bytes(b"its index")
    settings = ModelConfig(name="other", path=str(file))
    assert known_digest(settings) == digest
    assert known_digest(msgspec.structs.replace(settings, sha256=digest.upper())) == digest
    assert known_digest(msgspec.structs.replace(settings, sha256="e" * 64)) == ""

    async def begun(name: str) -> str:
        loader = make_loader(tmp_path / name, str(file))
        loader.load("other", str(file), "change", SECONDS)
        async with asyncio.timeout(SECONDS):
            while not (loading := loader._catalog.loading("other")):
                await asyncio.sleep(0)
        return loading[0].digest

    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    monkeypatch.setattr(load_steps.LoadSteps, "check_memory", lambda self, settings: None)  # there is no real index
    assert asyncio.run(begun("one")) == digest
    file.write_bytes(b"GGUF and something else")
    assert asyncio.run(begun("two")) == ""


# ------------------------------------------------------------------ adapters


def adapter_catalog(path: Path, adapters: tuple[str, ...]) -> VersionCatalog:
    model = {"name": NAME, "path": str(path), "adapters": [{"name": one, "path": f"/{one}.gguf"} for one in adapters]}
    config = resolve({"models": [model]}, {})
    return VersionCatalog(config, versions.initial(config), lambda fresh: None)


@pytest.mark.timeout(120)  # a blocking open of the FIFO would wait for its writer
@pytest.mark.parametrize(
    ("op", "name", "path", "error", "reason"),
    [
        ("load", "other:x", "adapter.gguf", ModelNotFound, "model 'other' is not loaded"),
        ("load", f"{NAME}:a", "adapter.gguf", Conflict, "model:a is loaded already; `starling reload model:a`"),
        ("load", f"{NAME}:-x", "adapter.gguf", InvalidRequest, "the adapter's name '-x' cannot be used"),
        ("load", f"{NAME}:", "adapter.gguf", InvalidRequest, "the adapter's name '' cannot be used"),
        ("load", f"{NAME}:x:y", "adapter.gguf", InvalidRequest, "the adapter's name 'x:y' cannot be used"),
        ("load", f"{NAME}:x", "", InvalidRequest, "path is ''; it must be the absolute path of a GGUF file, or of a"),
        ("load", f"{NAME}:x", "none.gguf", InvalidRequest, "it must be the absolute path of a GGUF file"),
        ("load", f"{NAME}:x", "pipe", InvalidRequest, "it must be the absolute path of a GGUF file"),
        ("reload", f"{NAME}:x", "adapter.gguf", ModelNotFound, "has no adapter 'x'; it has: model:a, model:b"),
        ("unload", f"{NAME}:x", "", ModelNotFound, "has no adapter 'x'; it has: model:a, model:b"),
    ],
)
def test_adapters_that_cannot_be_changed(
    tmp_path: Path, file: Path, op: str, name: str, path: str, error: type[Exception], reason: str
) -> None:
    (tmp_path / "adapter.gguf").write_bytes(b"GGUF")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(error, match=re.escape(reason)):
        adapter_settings(adapter_catalog(file, ("a", "b")), op, name, str(tmp_path / path) if path else "")


def test_the_settings_of_a_model_with_other_adapters(tmp_path: Path, file: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()  # a PEFT directory
    catalog = adapter_catalog(file, ("a", "b"))

    def adapters(op: str, name: str, path: str = "") -> list[tuple[str, str]]:
        settings = adapter_settings(catalog, op, f"{NAME}:{name}", path)
        assert (settings.name, settings.path) == (NAME, str(file))
        return [(one.name, one.path) for one in settings.adapters]

    assert adapters("load", "c", str(adapter)) == [("a", "/a.gguf"), ("b", "/b.gguf"), ("c", str(adapter))]
    assert adapters("reload", "a", str(adapter)) == [("a", str(adapter)), ("b", "/b.gguf")]
    assert adapters("unload", "a") == [("b", "/b.gguf")]
    full = adapter_catalog(file, tuple(f"a{i}" for i in range(64)))
    with pytest.raises(InvalidRequest, match="has 64 adapters, the most that it can have"):
        adapter_settings(full, "load", f"{NAME}:c", str(adapter))


def test_a_version_serves_with_the_adapters_that_its_stages_have_opened(tmp_path: Path, file: Path) -> None:
    """From its first moment on: a worker group that starts again must not open another file in the place of one."""
    catalog = adapter_catalog(file, ("a", "b"))
    catalog.pin(NAME, "cd" * 32, (("a", "aa" * 32), ("b", "bb" * 32)))
    serving = catalog.serving(NAME)
    new = catalog.begin(serving.settings, "", "demand", 9.0, serving, "b")
    opened = (("a", "aa" * 32), ("b", "99" * 32))
    loaded = SimpleNamespace(
        states={new.id: SimpleNamespace(digest="cd" * 32, adapters=opened)}, is_ready=lambda version: True
    )
    readiness = SimpleNamespace(notify=lambda: None)
    steps = load_steps.LoadSteps(None, catalog, loaded, readiness, None, None, lambda: 1.0, None, None)
    asyncio.run(steps.finish(new))
    served = catalog.serving(NAME)
    assert (served.id, served.digest, served.adapters) == (new.id, "cd" * 32, opened)


def test_a_version_with_other_adapters_keeps_what_does_not_change(tmp_path: Path, file: Path) -> None:
    catalog = adapter_catalog(file, ("a", "b"))
    pins = (("a", "aa" * 32), ("b", "bb" * 32))
    catalog.pin(NAME, "cd" * 32, pins)
    serving = catalog.serving(NAME)
    assert serving is not None
    new = catalog.begin(serving.settings, "1", "reload", 9.0, serving, "b")
    assert (new.digest, new.adapters) == ("cd" * 32, pins[:1])
    assert catalog.begin(serving.settings, "2", "reload", 9.0).adapters == ()
