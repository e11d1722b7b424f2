"""Whatever comes and goes, and whoever dies: a request ends on the version it began on, or on one of the same file.

The gateway's own service, record, journal and loader, without sockets; stages are numbers in a dictionary.
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
from pipeline.config.load import resolve
from pipeline.config.schema import Config
from pipeline.errors import StarlingError
from pipeline.models import versions
from pipeline.models.versions import ModelVersion, Outcome
from pipeline.protocol import messages as m
from stages.gateway.admission import admit
from stages.gateway.endpoints import generate
from stages.gateway.requests import recovery
from stages.gateway.requests.journal import Journal
from stages.gateway.requests.readers import FanOutSink
from stages.gateway.service import Service
from stages.gateway.versions.catalog import VersionCatalog
from stages.gateway.versions.loader import Loader

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
    """`files` says which file an instance is of: what a stage would find in it."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="versions"))
        self.config = make_config(self.home)
        self.loop = asyncio.new_event_loop()
        self.now = 0.0
        self.files: dict[str, str] = {}
        self.numerics = recovery.NUMERICS
        self.begun_on: dict[str, tuple[str, int]] = {}  # sequence -> (file, numerics) that it was submitted to first
        self.running: dict[str, tuple[str, int]] = {}  # at the scheduler: sequence -> (instance, tokens out)
        self.ended: set[str] = set()
        self.changes = 0

    @initialize(digest=st.sampled_from(DIGESTS))
    def start(self, digest: str) -> None:
        self.files[NAME] = digest
        self._gateway()
        self._tell()

    def teardown(self) -> None:
        recovery.NUMERICS = admit.NUMERICS = shm.pages.NUMERICS
        self.journal.close()
        self.loop.close()
        shutil.rmtree(self.home)

    # ---------------------------------------------------------------- the world

    def _gateway(self) -> None:
        """A gateway that knows what is on disk, and hears of every stage."""
        self.journal = Journal(self.home, 1 << 20, lambda: 1e9 + self.now)
        self.instances = VersionCatalog(
            self.config, versions.read(self.config), lambda fresh: versions.write(self.config, fresh)
        )
        self.service = Service(
            self.config,
            self._to_scheduler,
            lambda frame: True,
            clock=lambda: self.now,
            journal=self.journal,
            wall=lambda: 1e9 + self.now,
            catalog=self.instances,
        )
        self.loader = Loader(self.service, wall=lambda: 1e9 + self.now)
        for stage in ("tokenizer", "scheduler"):
            hello = m.Hello(stage, 1, 1, 1)
            getattr(self.service, f"on_{stage}_up")(hello)

    def _tell(self) -> None:
        """What tokenizer and scheduler say of every version that is not just being loaded."""
        states = []
        for one in self.instances.all:
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
        self.service.readiness.tokenizer.beat(beat)
        self.service.readiness.scheduler.beat(beat)

    def _to_scheduler(self, frame: m.Frame) -> bool:
        if isinstance(frame, m.Submit):
            assert self.instances.get(frame.model) is not None, "submitted to a version that is gone"
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

    # ---------------------------------------------------------------- what can happen

    @rule(seed=st.integers(0, 9))
    def ask(self, seed: int) -> None:
        async def admit() -> None:
            ask = generate.read({"prompt": [1, 2, 3], "max_tokens": TOKENS, "seed": seed, "stream": True})
            try:
                request = await self.service.admission.admit(ask, CALLER, self.now)
            except StarlingError as error:
                refusals.append(error.code)
                return
            serving = self.instances.serving(NAME)
            assert serving is not None
            assert request.spec.version == serving.id
            request.sink = FanOutSink()
            self.service.lifecycle.start(request)

        refusals: list[str] = []
        self._tell()
        if self.instances.serving(NAME) is not None:
            self._run(admit())
            assert refusals == []
        elif not self.instances.loading(NAME):
            self._run(admit())
            assert refusals == [("DRAINING" if self.instances.all else "MODEL_NOT_FOUND")]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """A token of one sequence; the last one ends it."""
        name = list(self.running)[data.draw(st.integers(0, len(self.running) - 1))]
        instance, out = self.running[name]
        finish = "length" if out + 1 == TOKENS else ""
        self.service.on_scheduler(m.Tokens(instance, 1, [m.SequenceTokens(name, out, (7,), finish=finish)]))
        self.running[name] = (instance, out + 1)
        if finish:
            del self.running[name]
            self.ended.add(name)

    @precondition(lambda self: len(self.instances.all) < 4)
    @rule(digest=st.sampled_from(DIGESTS))
    def load(self, digest: str) -> None:
        """A version begins beside what is there."""
        self.changes += 1
        model = self.config.models[0]
        op: Any = "reload" if self.instances.serving(NAME) else "load"
        new = self.instances.begin(model, f"c{self.changes}", op, 2e9)
        self.files[new.id] = digest
        # What follows is done by hand here: the loader must not go on with it by itself.
        self.loader._changes[new.change] = None  # type: ignore[assignment]

    @precondition(lambda self: self.instances.loading())
    @rule(passes=st.booleans(), data=st.data())
    def judge(self, passes: bool, data: st.DataObject) -> None:
        new = data.draw(st.sampled_from(self.instances.loading()))
        before = self.instances.serving(NAME)
        if passes:
            self.instances.pin(new.id, self.files[new.id])
            old = self.instances.switch(new.id)
            assert old == before
            serving = self.instances.serving(NAME)
            assert serving is not None
            assert serving.id == new.id
        else:
            self.instances.drop(new.id, Outcome(new.change, new.op, NAME, code="INFERENCE"))
            self.service.loaded.forget(new.id)
            assert self.instances.serving(NAME) == before
        assert self.instances.outcome(new.change) is not None

    @precondition(lambda self: self.instances.serving(NAME) and not self.instances.loading())
    @rule()
    def unload(self) -> None:
        self.changes += 1
        self.loader.unload(NAME, f"c{self.changes}", 1000.0)

    @rule(seconds=st.floats(0.1, 5.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self._tell()
        self._run(self._ticks())

    @rule()
    def the_scheduler_dies(self) -> None:
        self.running.clear()
        self.service.on_scheduler_down(m.Hello("scheduler", 1, 1, 1))
        self.service.on_scheduler_up(m.Hello("scheduler", 2, 2, 2))
        self._tell()

    @rule(late=st.booleans())
    def the_gateway_dies(self, late: bool) -> None:
        """Its successor has the journal and the record; what the stages say may come `late`."""
        self.journal.close()
        self.running.clear()
        self._gateway()
        for one in self.instances.loading():
            self.loader._changes[one.change] = None  # type: ignore[assignment]
        if not late:
            self._tell()
        self._run(self._ticks())

    @rule(digest=st.sampled_from(DIGESTS), numerics=st.sampled_from((1, 2)), late=st.booleans())
    def the_server_is_replaced(self, digest: str, numerics: int, late: bool) -> None:
        """All of it ends in order, so that the record goes and the journal stays; the model's file may be another
        one when it starts again, and so may the server."""
        self.journal.close()
        self.running.clear()
        versions.table_path(self.config).unlink(missing_ok=True)
        self.files = {NAME: digest}
        self.numerics = recovery.NUMERICS = admit.NUMERICS = numerics
        self._gateway()
        if not late:
            self._tell()
        self._run(self._ticks())

    # ---------------------------------------------------------------- what must hold

    @invariant()
    def one_serves(self) -> None:
        if hasattr(self, "instances"):
            states = [one.state for one in self.instances.all if one.name == NAME]
            assert states.count("serving") <= 1
            assert versions.read(self.config) == self.instances.version_table

    @invariant()
    def who_is_in_use_is_there(self) -> None:
        if hasattr(self, "instances"):
            for request in self.service.relay.requests.values():
                assert self.instances.get(request.spec.version) is not None
            for name, (instance, _) in self.running.items():
                assert (self.files[instance], self.numerics) == self.begun_on[name]


Versions.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestVersions = Versions.TestCase


def test_the_record_outlives_whoever_wrote_it(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    instances = VersionCatalog(config, versions.read(config), lambda fresh: versions.write(config, fresh))
    follower = versions.VersionFollower(config)
    assert follower.table == versions.initial(config)
    assert [one.id for one in follower.table.versions] == [NAME]
    new = instances.begin(config.models[0], "c", "reload", 5.0)
    assert follower.poll()
    assert not follower.poll()
    assert follower.table.find(new.id) == new
    assert (new.id, new.model.name, new.stage) == ("model@1", "model@1", "worker-model@1")
    instances.switch(new.id)
    assert versions.read(config).names == [NAME]
    # Other models are configured: what was loaded before counts for nothing.
    other = resolve({**_plain(config), "models": [{"name": "x", "path": "/x"}]}, {})
    assert [one.id for one in versions.read(other).versions] == ["x"]
    # Nor does a record that is not understood.
    versions.table_path(config).write_bytes(b'{"versions": 1}')
    assert versions.read(config) == versions.initial(config)


def _plain(config: Config) -> dict[str, Any]:
    return {"server": {"run_dir": config.server.run_dir, "state_dir": config.server.state_dir}}


def test_a_record_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    config = make_config(tmp_path)

    def full(fresh: versions.VersionTable) -> None:
        raise OSError(28, "No space left on device")

    instances = VersionCatalog(config, versions.initial(config), full)
    with pytest.raises(StarlingError, match="No space left on device") as raised:
        instances.begin(config.models[0], "c", "reload", 5.0)
    assert raised.value.code == "INSUFFICIENT_RESOURCES"
    assert instances.version_table == versions.initial(config)


def test_a_new_version_takes_the_place_of_the_old_one_in_the_order(tmp_path: Path) -> None:
    config = resolve({"models": [{"name": "a", "path": "/a"}, {"name": "b", "path": "/b"}]}, {})
    instances = VersionCatalog(config, versions.initial(config), lambda fresh: None)
    new = instances.begin(config.models[0], "c", "reload", 5.0)
    assert instances.names == ["a", "b"]
    assert instances.switch(new.id) == ModelVersion(name="a", serial=0, settings=config.models[0])
    assert instances.names == ["a", "b"]
    assert [one.id for one in instances.versions("a")] == ["a@1", "a"]
    instances.drop("a")
    instances.retire("a@1", "d", 1.0)
    assert (instances.names, instances.is_unloading("a"), instances.is_unloading("b")) == (["b"], True, False)
