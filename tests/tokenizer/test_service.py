"""The tokenizer's replies, frame by frame."""

from array import array
from collections.abc import Generator
from datetime import datetime
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ModelNotFound
from pipeline.protocol import messages as m
from stages.gateway.requests.token_bytes import TokenBytes
from stages.tokenizer.service import TokenizerModel, TokenizerService
from stages.tokenizer.steps import result_of
from stages.tokenizer.template import ChatTemplate
from stages.tokenizer.vocabulary import Vocabulary
from tests.tokenizer.byte_vocabulary import byte_spec

VOCABULARY = Vocabulary(byte_spec())
TEMPLATE = ChatTemplate(
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no bad roles') }}{% endif %}"
    "<s>{{ m.role }}:{{ m.content }}{% endfor %}{% if add_generation_prompt %}<s>{% endif %}",
    control_names=VOCABULARY.control_names,
)


def service(vocabulary: Vocabulary = VOCABULARY) -> TokenizerService:
    def load(name: str) -> TokenizerModel:
        if name != "m":
            raise ModelNotFound(f"no model {name!r}", param="model")
        described = m.Described("", "m", "00", vocabulary.size, 64, vocabulary.eos_ids, True, tokenizer="t")
        return TokenizerModel(vocabulary, TEMPLATE, described)

    return TokenizerService(load)


def test_the_steps_of_a_reply_open_no_model() -> None:
    """A thread may run them while the stage loads and unloads models, which is for one thread only."""
    opened: list[str] = []

    def load(name: str) -> TokenizerModel:
        opened.append(name)
        if name != "m":
            raise ModelNotFound(f"no model {name!r}", param="model")
        return TokenizerModel(VOCABULARY, TEMPLATE, m.Described("", "m", "00", 0, 64, (), True))

    tokenizer = TokenizerService(load)
    frames = m.Encode("1", "m", "a text"), m.Detokenize("2", "m", (65,)), m.Encode("3", "other", "a text")
    steps = [tokenizer.reply_steps(frame) for frame in frames]
    assert opened == ["m", "other"]
    tokenizer.keep_models(())
    encoded, decoded, failed = map(result_of, steps)
    assert opened == ["m", "other"]
    assert isinstance(encoded, m.Encoded) and encoded.tokens
    assert isinstance(decoded, m.Detokenized)
    assert isinstance(failed, m.TokenizerFailed) and failed.code == "MODEL_NOT_FOUND"


def described(*known: str) -> m.Described:
    reply = service().reply(m.Describe("1", "m", known))
    assert isinstance(reply, m.Described)
    return reply


def test_a_description_has_the_bytes_of_all_tokens() -> None:
    pieces = TokenBytes()
    assert not pieces
    pieces.fill(described("another"))
    assert pieces
    for token in range(-1, VOCABULARY.size + 1):
        assert pieces.get(token) == VOCABULARY.token_bytes(token)
    assert pieces.control == VOCABULARY.control
    assert described("another", "t") == m.Described(
        "1", "m", "00", VOCABULARY.size, 64, VOCABULARY.eos_ids, True, tokenizer="t"
    )


@pytest.mark.parametrize("change", [{"vocab_size": 7}, {"pieces": b"short"}, {"piece_ends": b"\0\0\0"}])
def test_an_inconsistent_table_of_token_bytes_is_rejected(change: dict[str, Any]) -> None:
    pieces = TokenBytes()
    with pytest.raises(ValueError):
        pieces.fill(msgspec.structs.replace(described(), **change))
    assert not pieces


def test_a_vocabulary_too_large_for_a_frame_is_rejected() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stages.tokenizer.service.MAX_TEXT_BYTES", len(described().pieces) - 1)
        reply = service().reply(m.Describe("1", "m"))
    assert isinstance(reply, m.TokenizerFailed)
    assert (reply.code, reply.param) == ("MODEL_UNAVAILABLE", "model")
    assert f"have {len(described().pieces)} bytes" in reply.message


@given(st.lists(st.integers(-1, VOCABULARY.size + 1), max_size=200), st.booleans())
def test_decoding_in_steps_equals_decoding_at_once(tokens: list[int], skip: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stages.tokenizer.service.TOKENS_PER_STEP", 7)
        reply = service().reply(m.Detokenize("1", "m", tuple(tokens), skip))
    assert reply == m.Detokenized("1", VOCABULARY.decode(tokens, skip))


def test_chat_is_rendered_and_its_markers_are_tokens() -> None:
    reply = service().reply(m.Render("7", "m", [{"role": "user", "content": "he"}]))
    assert isinstance(reply, m.Encoded) and reply.tokens[0] == 0 and reply.tokens[-1] == 0
    assert VOCABULARY.decode(reply.tokens) == "<s>user:he<s>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ strftime_now('%d %b %Y') }}",
        "{% macro day() %}{{ strftime_now('%d %b %Y') }}{% endmacro %}{{ day() }}",
        "{% if strftime_now is defined %}{% set d = strftime_now('%d %b %Y') %}{% endif %}{{ d }}",
    ],
)
def test_a_frame_says_what_the_template_takes_for_now(source: str) -> None:
    template = ChatTemplate(source, now=lambda: datetime(2020, 1, 2))
    s = TokenizerService(lambda _: TokenizerModel(VOCABULARY, template, m.Described("", "m", "", 1, 1, (), True)))

    def shown(now: str) -> str:
        reply = s.reply(m.Render("1", "m", [], now=now))
        assert isinstance(reply, m.Encoded), reply
        return VOCABULARY.decode(reply.tokens, skip_special=True)

    assert shown("2026-03-01T12:30:00") == "01 Mar 2026"
    assert shown("") == "02 Jan 2020"
    refused = s.reply(m.Render("1", "m", [], now="tomorrow"))
    assert isinstance(refused, m.TokenizerFailed)
    assert (refused.code, refused.param) == ("INVALID_REQUEST", "template_date")


def test_failures_name_the_field() -> None:
    s = service()
    for frame, code, param in (
        (m.Encode("1", "nope", "x"), "MODEL_NOT_FOUND", "model"),
        (m.Render("1", "m", [{"role": "bad", "content": ""}]), "INVALID_REQUEST", "messages"),
        (m.Encode("1", "m", "a\ud800"), "INVALID_REQUEST", "prompt"),
    ):
        reply = s.reply(frame)
        assert isinstance(reply, m.TokenizerFailed), frame
        assert (reply.id, reply.code, reply.param) == ("1", code, param)


def test_a_template_cannot_leave_its_sandbox() -> None:
    hostile = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    s = TokenizerService(lambda _: TokenizerModel(VOCABULARY, hostile, m.Described("", "m", "", 1, 1, (), True)))
    reply = s.reply(m.Render("1", "m", []))
    assert isinstance(reply, m.TokenizerFailed) and reply.code == "INVALID_REQUEST"


def test_the_reply_to_a_text_over_the_token_limit_has_only_the_count() -> None:
    s = service()
    assert s.reply(m.Encode("1", "m", "ab", token_limit=2)) == m.Encoded("1", tuple(VOCABULARY.encode("ab", False)))
    assert s.reply(m.Encode("1", "m", "abc", token_limit=2, offsets=True)) == m.Encoded("1", (), b"", 3, True)
    long = s.reply(m.Encode("1", "m", "日" * 40_000, token_limit=2))
    assert isinstance(long, m.Encoded) and long == m.Encoded("1", (), b"", 120_000, False)
    chat = m.Render("1", "m", [{"role": "user", "content": "ab"}])
    whole = s.reply(chat)
    assert isinstance(whole, m.Encoded)
    n = len(whole.tokens)
    assert s.reply(msgspec.structs.replace(chat, token_limit=n)) == whole
    assert s.reply(msgspec.structs.replace(chat, token_limit=n - 1)) == m.Encoded("1", (), b"", n, True)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content.split('x')[0].pop() }}", "pop"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ ''.join(1) }}", "TypeError"),
        ("{{ messages[0].content.encode('ascii') }}", "UnicodeEncodeError"),
    ],
)
def test_any_failure_of_a_template_rejects_the_messages(source: str, says: str) -> None:
    described = m.Described("", "m", "", 1, 1, (), True)
    s = TokenizerService(lambda _: TokenizerModel(VOCABULARY, ChatTemplate(source), described))
    reply = s.reply(m.Render("1", "m", [{"role": "user", "content": "é"}]))
    assert isinstance(reply, m.TokenizerFailed)
    assert (reply.code, reply.param) == ("INVALID_REQUEST", "messages")
    assert says in reply.message


def test_a_failure_of_the_library_fails_one_request(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Vocabulary):
        def encode_steps(self, *arguments: object, **more: object) -> Generator[None, None, array]:  # type: ignore[override]
            raise RuntimeError("it gives up")
            yield

    described = m.Described("", "m", "", 1, 1, (), True)
    s = TokenizerService(lambda _: TokenizerModel(Broken(byte_spec()), TEMPLATE, described))
    for frame in (m.Encode("1", "m", "x"), m.Render("1", "m", [])):
        reply = s.reply(frame)
        assert isinstance(reply, m.TokenizerFailed)
        assert (reply.code, reply.param) == ("INTERNAL", "")
        assert "RuntimeError: it gives up" in reply.message
    assert len(caplog.records) == 2


def test_offsets_are_pairs_of_u32() -> None:
    reply = service().reply(m.Encode("1", "m", "a日", offsets=True))
    assert isinstance(reply, m.Encoded)
    assert np.frombuffer(reply.offsets, "<u4").reshape(-1, 2).tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]


def test_a_text_too_large_for_a_frame_is_rejected() -> None:
    frame = m.Detokenize("q", "m", (261,) * 100)  # of four bytes each
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stages.tokenizer.service.MAX_TEXT_BYTES", 399)
        reply = service().reply(frame)
        assert isinstance(reply, m.TokenizerFailed)
        assert (reply.code, reply.param) == ("INVALID_REQUEST", "tokens")
        assert "100 ids that decode to more than 399 bytes" in reply.message
        patch.setattr("stages.tokenizer.service.MAX_TEXT_BYTES", 400)
        assert isinstance(service().reply(frame), m.Detokenized)


def test_a_run_that_is_too_long_is_an_invalid_request() -> None:
    vocabulary = Vocabulary(byte_spec(pre="llama3"))
    described = m.Described("", "m", "", 1, 1, (), True)
    s = TokenizerService(lambda _: TokenizerModel(vocabulary, TEMPLATE, described))
    reply = s.reply(m.Encode("1", "m", " " * 600_000))
    assert isinstance(reply, m.TokenizerFailed)
    assert (reply.code, reply.param) == ("INVALID_REQUEST", "prompt")
    assert "prompt has 524288 characters without a border" in reply.message


@pytest.mark.parametrize(
    "frame",
    [
        m.Encode("q1", "m", "x", request="req-7", tenant="t", session="s"),
        m.Render("q1", "m", [], request="req-7", tenant="t", session="s"),
        m.Encode("q1", "m", "x"),
    ],
)
def test_the_line_about_a_failed_text_names_its_request(frame: m.Frame, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def encode_steps(self, *_: object, **__: object) -> None:
            raise ZeroDivisionError

    described = m.Described("", "m", "", 1, 1, (), True)
    model = TokenizerModel(Broken(), ChatTemplate("x"), described)  # type: ignore[arg-type]
    reply = TokenizerService(lambda _: model).reply(frame)
    assert isinstance(reply, m.TokenizerFailed)
    (record,) = caplog.records
    expected = ("req-7", "m", "t", "s") if frame.request else (None, "m", None, None)  # type: ignore[attr-defined]
    assert tuple(vars(record)[name] for name in ("request_id", "model", "tenant", "session_id")) == expected
