"""Frames carry what log lines name, and stages of another release, whose frames lack it, are understood."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pipeline.observe.log_names import log_names
from pipeline.protocol import messages as m

SAMPLING = m.Sampling(seed=3)
FRAMES: list[tuple[m.Frame, str, tuple[str, ...]]] = [
    (m.Encode("1", "m", "x", request="r", tenant="t", session="s"), "gateway-tokenizer", ("tenant", "session")),
    (m.Render("1", "m", [], request="r", tenant="t", session="s"), "gateway-tokenizer", ("tenant", "session")),
    (
        m.Detokenize("1", "m", (1,), request="r", tenant="t", session="s"),
        "gateway-tokenizer",
        ("request", "tenant", "session"),
    ),
    (
        m.Submit("r/0", "r", "m", "t", b"", 1, SAMPLING, session="s", following=2),
        "gateway-scheduler",
        ("session", "following"),
    ),
    (m.Acquire(1, "m", "r/0", 0, 3, 9, tenant="t", session="s"), "scheduler-kv", ("tenant", "session")),
    (m.Reconcile("m", [("r/0", 0, 3, (1,))], (("t", "s"),)), "scheduler-kv", ("owners",)),
]


def older(kind: type[m.Frame], new: tuple[str, ...]) -> Any:
    """The frame as a release without the fields `new` defines it: its last ones."""
    fields = msgspec.structs.fields(kind)
    assert tuple(field.name for field in fields[-len(new) :]) == new  # appended: the others keep their places
    kept: list[Any] = []
    for field in fields[: -len(new)]:
        default: Any = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = msgspec.field(default_factory=field.default_factory)
        kept.append((field.name, field.type) if field.required else (field.name, field.type, default))
    tag = kind.__struct_config__.tag
    return msgspec.defstruct(kind.__name__, kept, array_like=True, omit_defaults=True, tag=tag, frozen=True)


@pytest.mark.parametrize(("frame", "edge", "new"), FRAMES, ids=[type(frame).__name__ for frame, *_ in FRAMES])
def test_stages_of_two_releases_understand_each_other(frame: m.Frame, edge: str, new: tuple[str, ...]) -> None:
    union, raw = m.FRAMES[edge].to_binder, m.encode(frame)
    assert msgspec.msgpack.decode(raw, type=union) == frame
    kind = older(type(frame), new)
    received = msgspec.msgpack.decode(raw, type=kind)  # by a stage of the older release
    names = [name for name in type(frame).__struct_fields__ if name not in new]
    assert [getattr(received, name) for name in names] == [getattr(frame, name) for name in names]
    sent = msgspec.msgpack.encode(received)
    defaults = {field.name: field.default for field in msgspec.structs.fields(type(frame))}
    expected = msgspec.structs.replace(frame, **{name: defaults[name] for name in new})
    assert msgspec.msgpack.decode(sent, type=union) == expected


def test_what_is_not_known_is_null() -> None:
    assert log_names("req-1", "m", "t", "") == {"request_id": "req-1", "model": "m", "tenant": "t", "session_id": None}
    assert set(log_names("", "", "", "").values()) == {None}
