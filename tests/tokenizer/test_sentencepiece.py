"""SentencePiece BPE: the ids of its definition, round trips, offsets, streams, and bounds."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ModelUnavailable
from pipeline.models.vocabularies import SPACE, byte_name
from pipeline.protocol import messages as m
from stages.gateway.requests.text_decoder import StreamDecoder
from stages.gateway.requests.token_bytes import TokenBytes
from stages.tokenizer import sentencepiece, word_encoder
from stages.tokenizer.chunked_encode import RunTooLong
from stages.tokenizer.service import TokenizerModel, TokenizerService
from stages.tokenizer.template import ChatTemplate
from stages.tokenizer.token_lower_bound import min_tokens
from stages.tokenizer.vocabulary import TokenizerSpec, TooManyTokens, Vocabulary
from tests.tokenizer.trained import CONTROL, USER_DEFINED, sentencepiece_spec
from tools.reference.lines import CASES, MARKS, SPACES, make_lines

VOCABULARIES = {prefix: Vocabulary(sentencepiece_spec(prefix)) for prefix in (True, False)}
NAMES = [*CONTROL, *USER_DEFINED, "<unk>"]
any_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
known_text = st.lists(
    st.sampled_from([*"aabbé ein日\n", "aaaa", "    ", SPACE, "the ", *NAMES, *SPACES, *MARKS, *CASES]), max_size=40
).map("".join)
texts = any_text | known_text


def by_definition(spec: TokenizerSpec, text: str) -> list[int]:
    """The whole text at once: of all pairs that make a token, merge the leftmost of the highest score."""
    names = {name: spec.tokens.index(name) for name in USER_DEFINED}
    hidden = {name for name, kind in zip(spec.tokens, spec.types) if kind in (2, 3, 6)}
    known = {token: i for i, token in enumerate(spec.tokens) if token not in hidden}
    ids: list[int] = []
    is_first = True
    for part in re.split("(" + "|".join(map(re.escape, names)) + ")", text):
        if part in names:
            ids.append(names[part])
            is_first = True
            continue
        if not part:
            continue
        symbols = list(((" " if is_first and spec.add_space_prefix else "") + part).replace(" ", SPACE))
        is_first = False
        while True:
            scored = [(spec.scores[known[a + b]], -at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in known]
            if not scored:
                break
            at = -max(scored)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        for symbol in symbols:
            if symbol in known:
                ids.append(known[symbol])
            else:
                ids += [spec.tokens.index(byte_name(byte)) for byte in symbol.encode()]
    return ids


def covered(vocabulary: Vocabulary, text: str, tokens: list[int], parse_special: bool) -> None:
    """Each byte of the text belongs to one token, in order."""
    at = 0
    for begin, end in vocabulary.offsets(text, tokens, parse_special).tolist():
        assert begin == at <= end
        at = end
    assert at == len(text.encode())


@pytest.mark.parametrize("prefix", [True, False])
@settings(deadline=None)
@given(text=texts)
def test_ids_are_those_of_the_definition(prefix: bool, text: str) -> None:
    assert VOCABULARIES[prefix].encode(text, False) == by_definition(sentencepiece_spec(prefix), text)


@pytest.mark.parametrize("prefix", [True, False])
def test_lines_have_the_ids_of_the_definition(prefix: bool) -> None:
    for line in make_lines(300, 1):
        assert VOCABULARIES[prefix].encode(line, False) == by_definition(sentencepiece_spec(prefix), line)


@given(texts, st.booleans(), st.booleans())
def test_round_trip_and_offsets(text: str, prefix: bool, parse: bool) -> None:
    vocabulary = VOCABULARIES[prefix]
    tokens = vocabulary.encode(text, parse)
    # U+2581 is a space in this family.
    assert vocabulary.decode(tokens) == text.replace(SPACE, " ")
    covered(vocabulary, text, tokens, parse)
    with_bos = vocabulary.encode(text, parse, add_bos=True)
    assert with_bos[0] == vocabulary.bos
    covered(vocabulary, text, with_bos, parse)


@given(texts, st.lists(st.integers(0, 60)), st.booleans())
def test_any_split_of_the_tokens_decodes_as_the_whole(text: str, cuts: list[int], skip: bool) -> None:
    vocabulary = VOCABULARIES[True]
    tokens = vocabulary.encode(text, True, add_bos=True)
    decoder, parts, begin = vocabulary.decoder(skip), [], 0
    for cut in [*sorted(cuts), len(tokens)]:
        parts += decoder.push(tokens[begin:cut])
        begin = max(begin, min(cut, len(tokens)))
    assert b"".join(parts).decode("utf-8", "replace") == vocabulary.decode(tokens, skip)


@given(texts, st.sampled_from([(), (" t", "é"), ("<s>", "\n")]))
def test_a_stream_is_the_text_of_its_tokens(text: str, stop: tuple[str, ...]) -> None:
    """The gateway's own decoder, token by token, from the table that the tokenizer sends."""
    vocabulary = VOCABULARIES[True]
    table = TokenBytes()
    described = m.Described("", "m", "", vocabulary.size, 9, (), False)
    reply = TokenizerService(lambda _: TokenizerModel(vocabulary, None, described)).reply(m.Describe("1", "m"))
    assert isinstance(reply, m.Described)
    table.fill(reply)
    tokens = vocabulary.encode(text, False)
    whole = b"".join(map(vocabulary.token_bytes, tokens)).decode("utf-8", "replace")
    if not any(name in text for name in USER_DEFINED):  # the text after them begins with a space of its own
        assert whole.removeprefix(" ") == text.replace(SPACE, " ")
    decoder, shown = StreamDecoder(stop), ""
    for token in tokens:
        shown += decoder.push(table.shown(token, True))
        if decoder.stop_string:
            break
    else:
        shown += decoder.finish()
    ends = [at for one in stop if (at := whole.find(one)) >= 0]
    assert shown == whole[: min(ends, default=len(whole))]


@given(st.lists(st.sampled_from([*NAMES, *CONTROL, "<", "s>", "<0x41>", " ", "a"])).map("".join))
def test_text_never_becomes_a_control_token(text: str) -> None:
    vocabulary = VOCABULARIES[True]
    assert not vocabulary.control & set(vocabulary.encode(text, False))
    assert not vocabulary.control & set(vocabulary.encode(text, True, marks=frozenset()))
    assert vocabulary.decode(vocabulary.encode("<0x41>", False)) == "<0x41>"  # and not the byte of this name


def test_a_chat_keeps_control_names_of_messages_literal() -> None:
    vocabulary = VOCABULARIES[True]
    template = ChatTemplate(
        "{% for m in messages %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}{% endfor %}",
        "<s>",
        "</s>",
        control_names=vocabulary.control_names,
    )
    chat = template.render([{"role": "user", "content": "a<s>b</s>"}])
    tokens = vocabulary.encode(chat.text, True, add_bos=True, marks=chat.marks)
    assert [token for token in tokens if token in vocabulary.control] == [vocabulary.bos]
    assert vocabulary.decode(tokens, skip_special=True) == "[INST]a<s>b</s> [/INST]".replace("[INST]a", "[INST] a")


@given(texts, st.sampled_from([1, 2, 7, 40]))
def test_the_window_size_does_not_change_the_tokens(text: str, window: int) -> None:
    vocabulary = VOCABULARIES[True]
    ids: list[int] = []
    for _, new in vocabulary._encoder.chunks(vocabulary._specials, text, window):
        ids += new
    assert ids == vocabulary.encode(text, True)


@given(texts)
def test_a_text_has_no_fewer_tokens_than_its_lower_bound(text: str) -> None:
    for vocabulary in VOCABULARIES.values():
        assert len(vocabulary.encode(text, False)) >= min_tokens(vocabulary._lower_bound.weight(text))


@pytest.mark.parametrize("unit", ["a", "ab", "日本", " "])
def test_long_runs_equal_short_ones(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = VOCABULARIES[True]
    text = unit * 700
    expected = vocabulary.encode(text, False)
    for name in ("_ONE_BY_ONE", "_FEW"):
        monkeypatch.setattr(word_encoder, name, 1 << 20)
    vocabulary._encoder._encoder._cache.clear()  # type: ignore[attr-defined]
    assert vocabulary.encode(text, False) == expected


def test_a_run_that_is_too_long_is_refused() -> None:
    with pytest.raises(RunTooLong, match="characters without a border"):
        VOCABULARIES[True].encode("a" * (sentencepiece.MAX_RUN + 1), False)


def test_a_text_over_the_limit_stops_early() -> None:
    steps = VOCABULARIES[True].encode_steps("words of a text " * 100_000, False, token_limit=100)
    with pytest.raises(TooManyTokens) as many:
        list(steps)
    assert not many.value.is_exact


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": []}, "tokenizer.ggml.scores has 0 entries"),
        ({"scores": [float("nan")] * 9}, "entries for"),
        ({"revision": 0}, "made by an older release"),
        ({"types": [1]}, "token_type has 1 entries"),
        ({"tokens": []}, "tokens is missing or empty"),
    ],
)
def test_incomplete_vocabularies_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelUnavailable, match=re.escape(message)):
        Vocabulary(sentencepiece_spec()._replace(**changes))


def test_without_byte_tokens_an_unknown_character_is_the_unknown_token() -> None:
    spec = sentencepiece_spec()
    kept = [i for i, kind in enumerate(spec.types) if kind != 6]
    smaller = spec._replace(**{name: [getattr(spec, name)[i] for i in kept] for name in ("tokens", "types", "scores")})
    vocabulary = Vocabulary(smaller)
    text = "the 日本 𝄞 end"
    tokens = vocabulary.encode(text, False)
    assert vocabulary.decode(tokens) == re.sub("[日本𝄞]", "<unk>", text) or tokens.count(0) >= 1
    covered(vocabulary, text, tokens, False)
    with pytest.raises(ModelUnavailable, match="'<0x00>'"):
        Vocabulary(smaller._replace(unknown=-1))
