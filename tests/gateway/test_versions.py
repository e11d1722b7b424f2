"""A request ends on the version it began on, or on one of the same file, for any sequence of loads and crashes.

The gateway's service, version table, journal and loader are real, without sockets; the stages are simulated.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import shm.pages
from pipeline.api.keys import Caller
from pipeline.api.requests import generate
from pipeline.config.load import resolve
from pipeline.config.schema import Config
from pipeline.errors import StarlingError
from pipeline.models import versions
from pipeline.models.versions import ModelVersion, Outcome
from pipeline.protocol import messages as m
from stages.gateway.admission import admit
from stages.gateway.requests import recovery
from stages.gateway.requests.journal import Journal
from stages.gateway.requests.readers import FanOutSink
from stages.gateway.requests.state_writer import StateWriter
from stages.gateway.service import Service
from stages.gateway.versions.catalog import VersionCatalog

NAME = "model"
DIGESTS = ("aa" * 32, "bb" * 32)
TOKENS = 4
CALLER = Caller("tenant", 0, False)


def make_config(home: Path) -> Config:
    return resolve(
        {
            "models": [{"name": NAME, "path": "/model.gguf"}],
            "server": {"run_dir": str(home), "state_dir": str(home.with_name(home.name + "-state"))},
        },
        {},
    )


class Versions(RuleBasedStateMachine):
    """`files` has the file digest of each version, as a stage would find it."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="versions"))
        self.config = make_config(self.home)
        self.loop = asyncio.new_event_loop()
        self.now = 0.0
        self.files: dict[str, str] = {}
        self.numerics = recovery.NUMERICS
        self.begun_on: dict[str, tuple[str, int]] = {}  # sequence -> (file, numerics) of its first submission
        self.running: dict[str, tuple[str, int]] = {}  # at the scheduler: sequence -> (version, tokens generated)
        self.ended: set[str] = set()
        self.changes = 0

    @initialize(digest=st.sampled_from(DIGESTS))
    def start(self, digest: str) -> None:
        self.files[NAME] = digest
        self._gateway()
        self._report_versions()

    def teardown(self) -> None:
        recovery.NUMERICS = admit.NUMERICS = shm.pages.NUMERICS
        self.writer.close()
        self.loop.close()
        shutil.rmtree(self.home)

    # ---------------------------------------------------------------- the simulated server

    def _gateway(self) -> None:
        """Start a gateway from the state on disk, connected to every stage."""
        self.writer = StateWriter(Journal(self.home, 1 << 20, lambda: 1e9 + self.now))
        self.catalog = VersionCatalog(
            self.config, versions.read(self.config), lambda fresh: versions.write(self.config, fresh)
        )
        self.service = Service(
            self.config,
            self._to_scheduler,
            lambda frame: True,
            clock=lambda: self.now,
            state_writer=self.writer,
            wall=lambda: 1e9 + self.now,
            catalog=self.catalog,
        )
        self.loader = self.service.loader
        for stage in ("tokenizer", "scheduler"):
            hello = m.Hello(stage, 1, 1, 1)
            getattr(self.service, f"on_{stage}_up")(hello)

    def _report_versions(self) -> None:
        """Report every version to the gateway, except loading ones, as tokenizer and scheduler do."""
        states = []
        for one in self.catalog.all:
            digest = self.files[one.id]
            described = m.Described(
                "",
                one.id,
                digest,
                9,
                4096,
                (),
                True,
                pieces=b"abcdefghi",
                piece_ends=array("I", range(1, 10)).tobytes(),
            )
            self.service.loaded.on_description(one.id, described)
            states.append(m.ModelState(one.id, digest, True, "", 0, 0, 8))
        self.service.on_scheduler(m.SchedulerState(states))
        beat = m.Heartbeat("x", 1, int(self.now * 10), False, True)
        self.service.readiness.tokenizer.observe(beat)
        self.service.readiness.scheduler.observe(beat)

    def _to_scheduler(self, frame: m.Frame) -> bool:
        if isinstance(frame, m.Submit):
            assert self.catalog.get(frame.model) is not None, "submitted to a version that is gone"
            version = self.files[frame.model], self.numerics
            assert self.begun_on.setdefault(frame.sequence, version) == version, "went on on another version"
            self.running[frame.sequence] = (frame.model, len(frame.forced) // 4)
        elif isinstance(frame, m.Cancel):
            self.running.pop(frame.sequence, None)
        return True

    def _run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    async def _ticks(self) -> None:
        self.service.tick(None, None)
        self.loader.tick()
        await asyncio.sleep(0)

    # ---------------------------------------------------------------- rules

    @rule(seed=st.integers(0, 9))
    def ask(self, seed: int) -> None:
        async def admit() -> None:
            ask = generate.read({"prompt": [1, 2, 3], "max_tokens": TOKENS, "seed": seed, "stream": True})
            try:
                request = await self.service.admission.admit(ask, CALLER, self.now)
            except StarlingError as error:
                refusals.append(error.code)
                return
            serving = self.catalog.serving(NAME)
            assert serving is not None
            assert request.spec.version == serving.id
            request.sink = FanOutSink()
            await self.service.lifecycle.start(request)

        refusals: list[str] = []
        self._report_versions()
        if self.catalog.serving(NAME) is not None:
            self._run(admit())
            assert refusals == []
        elif not self.catalog.loading(NAME):
            self._run(admit())
            assert refusals == [("DRAINING" if self.catalog.all else "MODEL_NOT_FOUND")]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Generate a token of one sequence; the last token ends it."""
        name = list(self.running)[data.draw(st.integers(0, len(self.running) - 1))]
        instance, out = self.running[name]
        finish = "length" if out + 1 == TOKENS else ""
        self.service.on_scheduler(m.Tokens(instance, 1, [m.SequenceTokens(name, out, (7,), finish=finish)]))
        self.running[name] = (instance, out + 1)
        if finish:
            del self.running[name]
            self.ended.add(name)

    @precondition(lambda self: len(self.catalog.all) < 4)
    @rule(digest=st.sampled_from(DIGESTS))
    def load(self, digest: str) -> None:
        """Start loading a version."""
        self.changes += 1
        model = self.config.models[0]
        op: Any = "reload" if self.catalog.serving(NAME) else "load"
        new = self.catalog.begin(model, f"c{self.changes}", op, 2e9)
        self.files[new.id] = digest
        # The test takes the next steps itself, so the loader must not continue the load.
        self.loader._changes[new.change] = None  # type: ignore[assignment]

    @precondition(lambda self: self.catalog.loading())
    @rule(passes=st.booleans(), data=st.data())
    def judge(self, passes: bool, data: st.DataObject) -> None:
        new = data.draw(st.sampled_from(self.catalog.loading()))
        before = self.catalog.serving(NAME)
        if passes:
            self.catalog.pin(new.id, self.files[new.id])
            old = self.catalog.switch(new.id)
            assert old == before
            serving = self.catalog.serving(NAME)
            assert serving is not None
            assert serving.id == new.id
        else:
            self.catalog.drop(new.id, Outcome(new.change, new.op, NAME, code="INFERENCE"))
            self.service.loaded.forget(new.id)
            assert self.catalog.serving(NAME) == before
        assert self.catalog.outcome(new.change) is not None

    @precondition(lambda self: self.catalog.serving(NAME) and not self.catalog.loading())
    @rule()
    def unload(self) -> None:
        self.changes += 1
        self.loader.unload(NAME, f"c{self.changes}", 1000.0)

    @rule(seconds=st.floats(0.1, 5.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self._report_versions()
        self._run(self._ticks())

    @rule()
    def the_scheduler_dies(self) -> None:
        self.running.clear()
        self.service.on_scheduler_down(m.Hello("scheduler", 1, 1, 1))
        self.service.on_scheduler_up(m.Hello("scheduler", 2, 2, 2))
        self._report_versions()

    @rule(late=st.booleans())
    def the_gateway_dies(self, late: bool) -> None:
        """The next gateway has the journal and the version table; `late`: the stages have not reported yet."""
        self.writer.close()
        self.running.clear()
        self._gateway()
        for one in self.catalog.loading():
            self.loader._changes[one.change] = None  # type: ignore[assignment]
        if not late:
            self._report_versions()
        self._run(self._ticks())

    @rule(digest=st.sampled_from(DIGESTS), numerics=st.sampled_from((1, 2)), late=st.booleans())
    def the_server_is_replaced(self, digest: str, numerics: int, late: bool) -> None:
        """An orderly restart removes the version table and keeps the journal; the model's file and the server's
        numerics may have changed."""
        self.writer.close()
        self.running.clear()
        versions.table_path(self.config).unlink(missing_ok=True)
        self.files = {NAME: digest}
        self.numerics = recovery.NUMERICS = admit.NUMERICS = numerics
        self._gateway()
        if not late:
            self._report_versions()
        self._run(self._ticks())

    # ---------------------------------------------------------------- invariants

    @invariant()
    def one_serves(self) -> None:
        if hasattr(self, "catalog"):
            states = [one.state for one in self.catalog.all if one.name == NAME]
            assert states.count("serving") <= 1
            assert versions.read(self.config) == self.catalog.version_table

    @invariant()
    def who_is_in_use_is_there(self) -> None:
        if hasattr(self, "catalog"):
            for request in self.service.relay.requests.values():
                assert self.catalog.get(request.spec.version) is not None
            for name, (instance, _) in self.running.items():
                assert (self.files[instance], self.numerics) == self.begun_on[name]


Versions.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestVersions = Versions.TestCase


def test_the_table_survives_its_writer(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    catalog = VersionCatalog(config, versions.read(config), lambda fresh: versions.write(config, fresh))
    follower = versions.VersionFollower(config)
    assert follower.table == versions.initial(config)
    assert [one.id for one in follower.table.versions] == [NAME]
    new = catalog.begin(config.models[0], "c", "reload", 5.0)
    assert follower.poll()
    assert not follower.poll()
    assert follower.table.find(new.id) == new
    assert (new.id, new.model.name, new.stage) == ("model@1", "model@1", "worker-model@1")
    catalog.switch(new.id)
    assert versions.read(config).names == [NAME]
    # With other configured models the table is ignored.
    other = resolve({**_plain(config), "models": [{"name": "x", "path": "/x"}]}, {})
    assert [one.id for one in versions.read(other).versions] == ["x"]
    # So is a table that cannot be decoded.
    versions.table_path(config).write_bytes(b'{"versions": 1}')
    assert versions.read(config) == versions.initial(config)


def _plain(config: Config) -> dict[str, Any]:
    return {"server": {"run_dir": config.server.run_dir, "state_dir": config.server.state_dir}}


def test_a_failed_write_of_the_table_changes_nothing(tmp_path: Path) -> None:
    config = make_config(tmp_path)

    def full(fresh: versions.VersionTable) -> None:
        raise OSError(28, "No space left on device")

    catalog = VersionCatalog(config, versions.initial(config), full)
    with pytest.raises(StarlingError, match="No space left on device") as raised:
        catalog.begin(config.models[0], "c", "reload", 5.0)
    assert raised.value.code == "INSUFFICIENT_RESOURCES"
    assert catalog.version_table == versions.initial(config)


def test_a_new_version_keeps_the_position_of_the_old_one(tmp_path: Path) -> None:
    config = resolve({"models": [{"name": "a", "path": "/a"}, {"name": "b", "path": "/b"}]}, {})
    catalog = VersionCatalog(config, versions.initial(config), lambda fresh: None)
    new = catalog.begin(config.models[0], "c", "reload", 5.0)
    assert catalog.names == ["a", "b"]
    assert catalog.switch(new.id) == ModelVersion(name="a", serial=0, settings=config.models[0])
    assert catalog.names == ["a", "b"]
    assert [one.id for one in catalog.versions("a")] == ["a@1", "a"]
    catalog.drop("a")
    catalog.retire("a@1", "d", 1.0)
    assert (catalog.names, catalog.is_unloading("a"), catalog.is_unloading("b")) == (["b"], True, False)
