"""The thread of a model's sessions executes frames in their order, also while no version of the model is loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pipeline.protocol import messages as m
from stages.kv.stage import KvStage
from tests.kv.test_sessions import ME, raw


def test_a_turn_begins_with_the_version_that_computes_it() -> None:
    """A reload may serve another version, of another tokenizer, when the frame is read: its ids mean something else."""
    tokenizers = {"m@2": "b" * 64, "": "c" * 64}  # "": of the version that serves
    handled: list[str] = []
    versions = SimpleNamespace(
        poll_record=lambda: None,
        open_missing=lambda now: [],
        sessions={"m": SimpleNamespace(handle=lambda peer, frame, tokenizer: handled.append(tokenizer))},
        find=lambda name, version: SimpleNamespace(pages=SimpleNamespace(tokenizer=tokenizers[version])),
    )
    stage: Any = SimpleNamespace(loop=SimpleNamespace(progress=0), versions=versions)
    KvStage._on_gateway_frame(stage, ME, m.SessionBegin(1, "m", "t", "s", create=True, version="m@2"))
    KvStage._on_gateway_frame(stage, ME, m.SessionCommit(2, "m", "t", "s", 1, 0, raw(1)))
    assert handled == ["b" * 64, "c" * 64]
