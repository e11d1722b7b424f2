"""The tokenizer process: its memory for long texts, its latency for short requests, and a reply for each request."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pipeline.files import replace_file
from pipeline.models import store, versions
from pipeline.models.versions import ModelVersion
from pipeline.protocol import messages as m
from tests.kv.process import MODEL, load_config
from tests.tokenizer.process import TokenizerProcess, configure, write_model

pytestmark = pytest.mark.slow


@pytest.fixture
def tokenizer(tmp_path: Path) -> Iterator[TokenizerProcess]:
    configure(tmp_path, [MODEL])
    write_model(tmp_path)
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


def test_a_version_that_is_being_loaded_is_described_when_its_vocabulary_is_built(
    tokenizer: TokenizerProcess, tmp_path: Path
) -> None:
    """Not refused meanwhile: the gateway would ask again only later."""
    config = load_config(tmp_path)
    settings = msgspec.structs.replace(config.models[0], chat_template="{{ messages }}")  # a vocabulary of its own
    index = store.find_index(settings, tmp_path / "models")
    assert index is not None
    known = versions.initial(config)
    new = ModelVersion(name=MODEL, serial=1, settings=settings, digest=index.stem, state="loading")
    table = msgspec.structs.replace(known, versions=(*known.versions, new), serial=1)
    replace_file(tmp_path / "run" / versions.TABLE_FILE, msgspec.json.encode(table))
    assert isinstance(tokenizer.request(m.Describe("described", f"{MODEL}@1")), m.Described)
    missing = tokenizer.request(m.Describe("missing", f"{MODEL}@2"))
    assert isinstance(missing, m.TokenizerFailed)
    assert missing.code == "MODEL_NOT_FOUND"


def test_short_requests_are_answered_while_many_texts_are_encoded(tokenizer: TokenizerProcess) -> None:
    texts = [m.Encode(f"t{i}", MODEL, "12 a" * 4000) for i in range(300)]
    tokenizer.process.send_signal(signal.SIGSTOP)  # it gets all of them at once
    for frame in (*texts, m.Detokenize("short", MODEL, (70, 71))):
        assert tokenizer.link.send(frame)
    tokenizer.process.send_signal(signal.SIGCONT)
    tokenizer.until(lambda: bool(tokenizer.of("short")))
    before = tokenizer.replies[: tokenizer.replies.index(tokenizer.of("short")[0])]
    done = sum(isinstance(frame, m.Encoded) for frame in before)
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
