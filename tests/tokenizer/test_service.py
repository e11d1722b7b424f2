"""What the tokenizer answers, frame by frame, and that a lost decoder changes no text."""

from array import array
from collections.abc import Generator

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import messages as m
from pipeline.errors import ModelNotFound
from stages.tokenizer.service import TokenizerModel, TokenizerService
from stages.tokenizer.template import ChatTemplate
from stages.tokenizer.vocabulary import Vocabulary
from tests.tokenizer.test_vocabulary import small

VOCABULARY = Vocabulary(small())
TEMPLATE = ChatTemplate(
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no bad roles') }}{% endif %}"
    "<s>{{ m.role }}:{{ m.content }}{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)


def service(max_streams: int = 100) -> TokenizerService:
    def load(name: str) -> TokenizerModel:
        if name != "m":
            raise ModelNotFound(f"no model {name!r}", param="model")
        described = m.Described("", "m", "00", VOCABULARY.size, 64, VOCABULARY.eos_ids, True)
        return TokenizerModel(VOCABULARY, TEMPLATE, described)

    return TokenizerService(load, max_streams)


def step(s: TokenizerService, start: int, tokens: list[int], **more: object) -> m.StreamText:
    reply = s.answer(m.Detokenize("1", "m", [m.StreamTokens("a", start, tuple(tokens), **more)]))
    assert isinstance(reply, m.Detokenized) and reply.id == "1"
    return reply.streams[0]


@given(st.text(st.sampled_from("he日😀. l"), max_size=30), st.data())
def test_a_stream_whose_decoder_dies_says_the_same_text(text: str, data: st.DataObject) -> None:
    tokens = VOCABULARY.encode(text, False)
    s, said, at = service(), "", 0
    while at < len(tokens):
        n = data.draw(st.integers(1, len(tokens) - at))
        if data.draw(st.booleans()):
            s = service()  # a new process
        reply = step(s, at, tokens[at : at + n])
        if reply.lost:
            reply = step(s, 0, tokens[: at + n])
            assert reply.text.startswith(said)
            said = reply.text
        else:
            said += reply.text
        at += n
        assert reply.end == at
    reply = step(s, at, [], final=True)
    assert said + reply.text == text
    assert s.streams == 0


def test_stop_strings_say_how_many_tokens_were_used() -> None:
    tokens = VOCABULARY.encode("x. hello. he", False)
    reply = step(service(), 0, tokens, stop=("llo",))
    assert reply.stopped and reply.stop_string == "llo" and reply.text == "x. he"
    assert VOCABULARY.decode(tokens[: reply.used]) == "x. hello"


def test_streams_are_bounded_and_the_oldest_is_lost_not_wrong() -> None:
    s = service(max_streams=2)
    for name in "abc":
        s.answer(m.Detokenize("1", "m", [m.StreamTokens(name, 0, (5,))]))
    assert s.streams == 2
    assert step(s, 1, [6]).lost


def test_bytes_of_tokens_and_of_alternatives() -> None:
    token = VOCABULARY.encode("he", False)[0]
    reply = step(service(), 0, [token], want_bytes=True, extra=(1, token))
    assert reply.token_bytes == (b"he",) and reply.extra_bytes == (b"</s>", b"he")


def test_special_tokens_are_not_shown_unless_asked() -> None:
    assert step(service(), 0, [1], final=True).text == ""
    assert step(service(), 0, [1], final=True, skip_special=False).text == "</s>"


def test_chat_is_rendered_and_its_markers_are_tokens() -> None:
    reply = service().answer(m.Render("7", "m", [{"role": "user", "content": "he"}]))
    assert isinstance(reply, m.Encoded) and reply.tokens[0] == 0 and reply.tokens[-1] == 0
    assert VOCABULARY.decode(reply.tokens) == "<s>user:he<s>"


def test_failures_name_the_field() -> None:
    s = service()
    for frame, code, param in (
        (m.Encode("1", "nope", "x"), "MODEL_NOT_FOUND", "model"),
        (m.Render("1", "m", [{"role": "bad", "content": ""}]), "INVALID_REQUEST", "messages"),
        (m.Encode("1", "m", "a\ud800"), "INVALID_REQUEST", "prompt"),
    ):
        reply = s.answer(frame)
        assert isinstance(reply, m.TokenizerFailed), frame
        assert (reply.id, reply.code, reply.param) == ("1", code, param)


def test_a_template_cannot_leave_its_sandbox() -> None:
    hostile = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    s = TokenizerService(lambda _: TokenizerModel(VOCABULARY, hostile, m.Described("", "m", "", 1, 1, (), True)))
    reply = s.answer(m.Render("1", "m", []))
    assert isinstance(reply, m.TokenizerFailed) and reply.code == "INVALID_REQUEST"


def test_of_a_text_with_too_many_tokens_only_their_number_is_answered() -> None:
    s = service()
    assert s.answer(m.Encode("1", "m", "ab", most=2)) == m.Encoded("1", tuple(VOCABULARY.encode("ab", False)))
    assert s.answer(m.Encode("1", "m", "abc", most=2, offsets=True)) == m.Encoded("1", (), b"", 3, True)
    long = s.answer(m.Encode("1", "m", "日" * 40_000, most=2))
    assert isinstance(long, m.Encoded) and long == m.Encoded("1", (), b"", 120_000, False)
    chat = m.Render("1", "m", [{"role": "user", "content": "ab"}])
    whole = s.answer(chat)
    assert isinstance(whole, m.Encoded)
    n = len(whole.tokens)
    assert s.answer(msgspec.structs.replace(chat, most=n)) == whole
    assert s.answer(msgspec.structs.replace(chat, most=n - 1)) == m.Encoded("1", (), b"", n, True)


@pytest.mark.parametrize(
    ("source", "says"),
    [("{{ 1 / 0 }}", "ZeroDivisionError"), ("{{ messages[0].content.split('x')[0].pop() }}", "pop"),
     ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
     ("{{ ''.join(1) }}", "TypeError"), ("{{ messages[0].content.encode('ascii') }}", "UnicodeEncodeError")],
)  # fmt: skip
def test_whatever_a_template_does_is_a_refusal_of_the_messages(source: str, says: str) -> None:
    described = m.Described("", "m", "", 1, 1, (), True)
    s = TokenizerService(lambda _: TokenizerModel(VOCABULARY, ChatTemplate(source), described))
    reply = s.answer(m.Render("1", "m", [{"role": "user", "content": "é"}]))
    assert isinstance(reply, m.TokenizerFailed)
    assert (reply.code, reply.param) == ("INVALID_REQUEST", "messages")
    assert says in reply.message


def test_a_text_that_fails_in_the_library_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Vocabulary):
        def within(self, *arguments: object, **more: object) -> Generator[None, None, array]:  # type: ignore[override]
            raise RuntimeError("it gives up")
            yield

    described = m.Described("", "m", "", 1, 1, (), True)
    s = TokenizerService(lambda _: TokenizerModel(Broken(small()), TEMPLATE, described))
    for frame in (m.Encode("1", "m", "x"), m.Render("1", "m", [])):
        reply = s.answer(frame)
        assert isinstance(reply, m.TokenizerFailed)
        assert (reply.code, reply.param) == ("INTERNAL", "")
        assert "RuntimeError: it gives up" in reply.message
    assert len(caplog.records) == 2


@given(st.lists(st.integers(-1, VOCABULARY.size + 1), max_size=200), st.booleans())
def test_a_whole_text_in_parts_is_the_stream_in_one(tokens: list[int], skip: bool) -> None:
    frame = m.Detokenize("1", "m", [m.StreamTokens("q1", 0, tuple(tokens), final=True, skip_special=skip)])
    s = service()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stages.tokenizer.service.DECODED_AT_ONCE", 7)
        assert s.can_wait(frame)
        assert s.answer(frame) == s._detokenize(frame)
        assert s.streams == 0


def test_news_of_streams_does_not_wait() -> None:
    new = m.StreamTokens("a", 0, (1,), final=True)
    for change in ({"final": False}, {"start": 1}, {"stop": ("x",)}, {"want_bytes": True}, {"extra": (1,)}):
        assert not TokenizerService.can_wait(m.Detokenize("1", "m", [msgspec.structs.replace(new, **change)]))
    assert not TokenizerService.can_wait(m.Detokenize("1", "m", [new, new]))
    assert not TokenizerService.can_wait(m.Describe("1", "m"))


def test_offsets_are_pairs_of_u32() -> None:
    reply = service().answer(m.Encode("1", "m", "a日", offsets=True))
    assert isinstance(reply, m.Encoded)
    assert np.frombuffer(reply.offsets, "<u4").reshape(-1, 2).tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]


def test_a_text_that_would_be_no_frame_is_refused() -> None:
    frame = m.Detokenize("q", "m", [m.StreamTokens("q", 0, (261,) * 100, final=True)])  # of four bytes each
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stages.tokenizer.service.MAX_TEXT_BYTES", 399)
        reply = service().answer(frame)
        assert isinstance(reply, m.TokenizerFailed)
        assert (reply.code, reply.param) == ("INVALID_REQUEST", "tokens")
        assert "100 ids that read as more than 399 bytes" in reply.message
        patch.setattr("stages.tokenizer.service.MAX_TEXT_BYTES", 400)
        assert isinstance(service().answer(frame), m.Detokenized)


@pytest.mark.slow
def test_a_run_that_the_library_gives_up_is_the_clients_to_break_up() -> None:
    vocabulary = Vocabulary(small(pre="llama3"))
    described = m.Described("", "m", "", 1, 1, (), True)
    s = TokenizerService(lambda _: TokenizerModel(vocabulary, TEMPLATE, described))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stages.tokenizer.vocabulary.WINDOW", 12_000_000)
        reply = s.answer(m.Encode("1", "m", " " * 12_000_000))
    assert isinstance(reply, m.TokenizerFailed)
    assert (reply.code, reply.param) == ("INVALID_REQUEST", "prompt")
    assert "prompt has 12000000 characters without a border" in reply.message
