"""The tokenizer process: its memory for long texts, its latency for short requests, and a reply for each request."""

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
    """Write an index with a vocabulary of bytes; the tokenizer needs no weights."""
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


class TokenizerProcess:
    """A tokenizer process and a minimal gateway that sends it requests."""

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

    def request(self, frame: m.Frame) -> m.Frame:
        """Send `frame` and return its reply."""
        assert self.link.send(frame)
        self.until(lambda: bool(self.of(frame.id)))  # type: ignore[attr-defined]
        return self.of(frame.id)[0]  # type: ignore[attr-defined]

    def of(self, key: str) -> list[m.Frame]:
        return [frame for frame in self.replies if getattr(frame, "id", "") == key]

    def peak_mb(self) -> float:
        """Return the peak of the resident memory since the last call, in MB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (kb,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return int(kb) / 1024


@pytest.fixture
def tokenizer(tmp_path: Path) -> Iterator[TokenizerProcess]:
    tokenizer = TokenizerProcess(tmp_path)
    try:
        tokenizer.until(lambda: tokenizer.link.peer is not None)
        tokenizer.until(lambda: isinstance(tokenizer.request(m.Describe("d", MODEL)), m.Described))
        yield tokenizer
    finally:
        tokenizer.close()


@pytest.mark.parametrize("text", ["Hello, world. ", "a", "日本語", "\n", "👨\u200d👩\u200d👧 "])
def test_a_text_over_the_token_limit_needs_no_memory(tokenizer: TokenizerProcess, text: str) -> None:
    text = (text * (4 << 20))[: (4 << 20) // len(text[:1].encode())]
    tokenizer.request(m.Encode("small", MODEL, text[:20_000], token_limit=8191))
    before = tokenizer.peak_mb()
    reply = tokenizer.request(m.Encode("1", MODEL, text, token_limit=8191))
    assert isinstance(reply, m.Encoded)
    assert (reply.tokens, reply.is_exact) == ((), False)
    assert 8191 < reply.too_many <= len(text.encode())
    # The frame as bytes, and as text of up to four bytes per character.
    assert tokenizer.peak_mb() - before < 48


def test_short_requests_are_answered_while_many_texts_are_encoded(tokenizer: TokenizerProcess) -> None:
    texts = [m.Encode(f"t{i}", MODEL, "12 a" * 4000) for i in range(300)]
    for frame in texts:
        assert tokenizer.link.send(frame)
    tokenizer.request(m.Detokenize("short", MODEL, (70, 71)))
    done = sum(isinstance(frame, m.Encoded) for frame in tokenizer.replies)
    assert done < len(texts) / 2
    tokenizer.until(lambda: all(tokenizer.of(frame.id) for frame in texts))
    assert all(isinstance(frame, m.Encoded) for text in texts for frame in tokenizer.of(text.id))


def test_a_gateway_that_reconnects_gets_replies_to_its_long_texts(tokenizer: TokenizerProcess) -> None:
    """The connection is the same; the tokenizer was stopped for a while."""
    ups: list[m.Hello] = []
    tokenizer.link.on_up = ups.append
    tokenizer.process.send_signal(signal.SIGSTOP)
    try:
        tokenizer.until(lambda: tokenizer.link.peer is None)
    finally:
        tokenizer.process.send_signal(signal.SIGCONT)
    tokenizer.until(lambda: bool(ups))
    reply = tokenizer.request(m.Encode("1", MODEL, "ab" * 20_000))
    assert isinstance(reply, m.Encoded)
    assert len(reply.tokens) == 40_000
