"""The tokenizer's process: what long texts take of its memory, of others' time, and that each is answered."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from pipeline.config import addresses
from pipeline.ipc.endpoint import Link
from pipeline.models import store
from pipeline.protocol import messages as m
from pipeline.protocol.topology import EDGES
from shm import checkpoint
from tests.kv.process import MODEL, ROOT, WAIT_S, configure, load_config
from tests.tokenizer.byte_vocabulary import byte_spec

pytestmark = pytest.mark.slow


def write_model(home: Path) -> None:
    """An index with a vocabulary of bytes: the tokenizer needs no weights."""
    gguf = home / f"{MODEL}.gguf"
    gguf.write_bytes(b"GGUF" + bytes(64))
    model = load_config(home).model(MODEL)
    assert model is not None
    digest = store.fetch(model, home / "models").digest
    spec = byte_spec(pre="llama3")
    tokenizer = checkpoint.TokenizerData(
        spec.kind,
        spec.pre,
        list(spec.tokens),
        list(spec.types),
        list(spec.merges),
        [],
        0,
        1,
        -1,
        -1,
        -1,
        False,
        False,
        "",
    )
    hyper = checkpoint.Hyper(2, 64, 2, 2, 32, 64, 128, 4096, 1e-5, 32, "halves", "silu")
    index = checkpoint.Index(
        checkpoint.VERSION, digest, "llama", MODEL, 1, 68, 0, hyper, msgspec.Raw(msgspec.msgpack.encode(tokenizer)), []
    )
    (home / "models" / f"{digest}.idx").write_bytes(msgspec.msgpack.encode(index))


class Asker:
    """A tokenizer process, and as much of a gateway as asks it."""

    def __init__(self, home: Path) -> None:
        configure(home)
        write_model(home)
        environment = {
            **os.environ,
            "STARLING_HOME": str(home),
            "PYTHONPATH": str(ROOT),
            "STARLING_CONFIG": str(home / "starling.yaml"),
        }
        with open(home / "tokenizer.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "starling", "stage", "tokenizer"],
                env=environment,
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        address = addresses.edge_address(load_config(home), "gateway-tokenizer", {"STARLING_HOME": str(home)})
        self.link = Link(EDGES["gateway-tokenizer"], address, "gateway", heartbeat_ms=50)
        self.replies: list[m.Frame] = []

    def close(self) -> None:
        self.link.close()
        self.process.kill()
        self.process.wait(WAIT_S)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline
            self.link.tick(m.Heartbeat("gateway", self.link.epoch, 1, False, True))
            select.select([self.link.fd], [], [], 0.02)
            self.replies += self.link.receive()

    def ask(self, frame: m.Frame) -> m.Frame:
        """Its reply, in the order of arrival after all that came before."""
        assert self.link.send(frame)
        self.until(lambda: bool(self.of(frame.id)))  # type: ignore[attr-defined]
        return self.of(frame.id)[0]  # type: ignore[attr-defined]

    def of(self, key: str) -> list[m.Frame]:
        return [frame for frame in self.replies if getattr(frame, "id", "") == key]

    def peak_mb(self) -> float:
        """Resident memory at its highest since the last look."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (kb,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return int(kb) / 1024


@pytest.fixture
def asker(tmp_path: Path) -> Iterator[Asker]:
    asker = Asker(tmp_path)
    try:
        asker.until(lambda: asker.link.peer is not None)
        asker.until(lambda: isinstance(asker.ask(m.Describe("d", MODEL)), m.Described))
        yield asker
    finally:
        asker.close()


@pytest.mark.parametrize("text", ["Hello, world. ", "a", "日本語", "\n", "👨\u200d👩\u200d👧 "])
def test_a_text_with_too_many_tokens_costs_no_memory(asker: Asker, text: str) -> None:
    text = (text * (4 << 20))[: (4 << 20) // len(text[:1].encode())]
    asker.ask(m.Encode("small", MODEL, text[:20_000], token_limit=8191))
    before = asker.peak_mb()
    reply = asker.ask(m.Encode("1", MODEL, text, token_limit=8191))
    assert isinstance(reply, m.Encoded)
    assert (reply.tokens, reply.is_exact) == ((), False)
    assert 8191 < reply.too_many <= len(text.encode())
    # The frame as it comes, as bytes and as text, whose characters can take four bytes each.
    assert asker.peak_mb() - before < 48


def test_short_questions_are_answered_while_many_texts_are_tokenized(asker: Asker) -> None:
    texts = [m.Encode(f"t{i}", MODEL, "12 a" * 4000) for i in range(300)]
    for frame in texts:
        assert asker.link.send(frame)
    asker.ask(m.Detokenize("short", MODEL, (70, 71)))
    done = sum(isinstance(frame, m.Encoded) for frame in asker.replies)
    assert done < len(texts) / 2
    asker.until(lambda: all(asker.of(frame.id) for frame in texts))
    assert all(isinstance(frame, m.Encoded) for text in texts for frame in asker.of(text.id))


def test_a_gateway_that_is_met_again_gets_its_long_texts_answered(asker: Asker) -> None:
    """Over the same connection, after one of the two had been stopped for a while."""
    ups: list[m.Hello] = []
    asker.link.on_up = ups.append
    asker.process.send_signal(signal.SIGSTOP)
    try:
        asker.until(lambda: asker.link.peer is None)
    finally:
        asker.process.send_signal(signal.SIGCONT)
    asker.until(lambda: bool(ups))
    reply = asker.ask(m.Encode("1", MODEL, "ab" * 20_000))
    assert isinstance(reply, m.Encoded)
    assert len(reply.tokens) == 40_000
