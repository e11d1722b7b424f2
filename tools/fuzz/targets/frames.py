"""ZeroMQ frames: through a real socket into an endpoint, and from there to the tokenizer and to sessions.

    byte 0   low four bits: the edge; bit 4: towards the connecting side, whose frames are only decoded

The rest is parts, each the payload of a frame.
"""

from __future__ import annotations

import select
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import zmq

from pipeline.errors import NotFound
from pipeline.ipc.endpoint import Hub
from pipeline.models.vocabulary_tables import byte_alphabet
from pipeline.protocol import messages as m
from pipeline.protocol.topology import EDGES
from shm.prefix_hash import PageHash
from stages.gateway.requests.token_bytes import TokenBytes
from stages.kv.sessions.model_sessions import answer
from stages.kv.sessions.session_bounds import SessionBounds
from stages.kv.sessions.session_files import SessionFiles
from stages.kv.sessions.session_store import SessionStore
from stages.tokenizer.service import TokenizerModel, TokenizerService
from stages.tokenizer.template import ChatTemplate
from stages.tokenizer.vocabulary import TokenizerSpec, Vocabulary
from tools.fuzz.parts import join, scratch, split
from tools.fuzz.target import Target

NAMES = sorted(EDGES)
DECODED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what an endpoint drops a frame for
WAIT_S = 10.0
_serial = count(1)


class _Wire:
    """The binding side of an edge, and a connection to it that sends anything."""

    def __init__(self, name: str) -> None:
        self.directory = tempfile.TemporaryDirectory(dir=scratch())
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        address = f"ipc://{self.directory.name}/x.sock"
        edge = EDGES[name]
        self.hub = Hub(edge, address, edge.binder, heartbeat_ms=100, clock=lambda: 1.0, context=self.context, epoch=1)
        self.hub.on_up = lambda peer, hello: self.up.append(hello.stage)
        self.up: list[str] = []
        self.sender = self.context.socket(zmq.DEALER)
        self.sender.setsockopt(zmq.LINGER, 0)
        self.sender.connect(address)

    def deliver(self, payloads: list[bytes]) -> list[m.Frame]:
        """Send the payloads after a greeting; returns the frames that the stage gets."""
        serial = next(_serial)
        last = f"last-{serial}"
        end = m.Hello(last, 1, 0, 0, contact=serial << 32)
        for payload in [m.encode(m.Hello("peer", 1, 0, 0)), *payloads, m.encode(end)]:
            self.sender.send(payload)
        frames: list[m.Frame] = []
        self.up.clear()
        while last not in self.up:
            readable, _, _ = select.select([self.hub.fd], [], [], WAIT_S)
            assert readable, "the endpoint has stopped reading"
            frames += [frame for _, frame in self.hub.receive()]
        self.hub.tick(m.Heartbeat(self.hub.stage, 1, 1, False, True))
        for key in list(self.hub.liveness.peers):
            self.hub.liveness.discard(key, "the input is over")
        while self.sender.poll(0):
            self.sender.recv()
        return frames


def _tokenizer() -> TokenizerService:
    words = ["<s>", "</s>", *byte_alphabet()]
    spec = TokenizerSpec("gpt2", "gpt-2", words, [3, 3] + [1] * 256, [], bos=0, eos=1)
    vocabulary = Vocabulary(spec)
    template = ChatTemplate("{{ messages[0].content }}{{ tools }}{{ x }}</s>", control_names=vocabulary.control_names)
    described = m.Described("", "m", "", vocabulary.size, 64, (1,), True)
    model = TokenizerModel(vocabulary, template, described)
    return TokenizerService(lambda name: model)


def _sessions() -> SessionStore:
    directory = Path(tempfile.mkdtemp(dir=scratch()))
    bounds = SessionBounds(8, 100)
    return SessionStore(SessionFiles(directory), lambda salt: PageHash(bytes(16)), 16, bounds, clock=lambda: 1e9)


WIRES = {name: _Wire(name) for name in NAMES}
TOKENIZER = _tokenizer()
SESSIONS = _sessions()


def run(data: bytes) -> None:
    """Deliver the frames, and answer those that have a pure answer."""
    selector, payloads = (data[:1] or b"\0")[0], split(data[1:], 16)
    name = NAMES[(selector & 15) % len(NAMES)]
    if selector & 16:
        decoder = msgspec.msgpack.Decoder(m.FRAMES[name].to_connector)
        for payload in payloads:
            try:
                frame = decoder.decode(payload)
            except DECODED:
                continue
            m.encode(frame)
            if isinstance(frame, m.Described):
                _fill(frame)
        return
    for frame in WIRES[name].deliver(payloads):
        reply = None
        if name == "gateway-tokenizer":
            reply = TOKENIZER.reply(frame)
        elif name == "gateway-kv":
            reply = answer(SESSIONS, b"peer", frame)
        m.encode(frame if reply is None else reply)
    if name == "gateway-kv":
        SESSIONS.check()
        SESSIONS.drop_holder(b"peer")
        for session in SESSIONS.all():
            with suppress(NotFound):  # it has expired
                SESSIONS.close(session.tenant, session.id)
        SESSIONS.freed.clear()


def _fill(described: m.Described) -> None:
    table = TokenBytes()
    try:
        table.fill(described)
    except ValueError:  # documented
        return
    for token in (-1, 0, 1, 1 << 40):
        table.shown(token, True)


def seeds() -> Iterator[bytes]:
    """Every frame of every edge and direction, with one value of each field."""
    for index, name in enumerate(NAMES):
        for bit, union in ((0, m.FRAMES[name].to_binder), (16, m.FRAMES[name].to_connector)):
            frames = [m.encode(_example(kind)) for kind in union.__args__]
            for frame in frames:
                yield bytes([index | bit]) + join([frame])
            yield bytes([index | bit]) + join(frames)


_EXAMPLES: dict[Any, Any] = {int: 1, float: 0.5, str: "m", bytes: b"\1\0\0\0", bool: True}


def _example(kind: Any) -> Any:
    """A frame whose required fields have an example of their type; for others their defaults."""
    fields = msgspec.structs.fields(kind)
    values = {}
    for field in fields:
        if field.required:
            values[field.name] = _EXAMPLES.get(field.type, [])
    if kind is m.Hello:
        values["pid"] = 0
    if kind is m.Render:
        values["messages"] = [{"role": "user", "content": "hi"}]
    return kind(**values)


TARGET = Target(
    run,
    seeds,
    errors=(),
    modules=(
        "pipeline.ipc.endpoint",
        "pipeline.ipc.liveness",
        "stages.kv.sessions.model_sessions",
        "stages.kv.sessions.session_store",
        "stages.tokenizer.chunked_encode",
        "stages.tokenizer.service",
    ),
    memory_mb=64,
)
