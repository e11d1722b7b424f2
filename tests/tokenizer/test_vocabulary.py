"""The demo model's vocabulary against an independent engine, and properties of encoding."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ModelUnavailable
from pipeline.models.vocabularies import vocabulary_problem
from stages.tokenizer.vocabulary import Vocabulary
from tests.tokenizer.byte_vocabulary import ALPHABET, byte_spec

CASES = json.loads((Path(__file__).parent.parent / "data" / "tokenize.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[repr(c["text"])[:24] for c in CASES])
def test_demo_model_tokenizes_as_the_reference(case: dict, demo_vocabulary: Vocabulary) -> None:
    assert demo_vocabulary.encode(case["text"], parse_special=False) == case["ids_plain"]
    assert demo_vocabulary.encode(case["text"], parse_special=True) == case["ids_parse_special"]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), st.booleans())
def test_round_trip_and_offsets(text: str, parse: bool) -> None:
    vocabulary = Vocabulary(byte_spec())
    tokens = vocabulary.encode(text, parse)
    assert vocabulary.decode(tokens) == text
    data, at = text.encode(), 0
    for token, (begin, end) in zip(tokens, vocabulary.offsets(text, tokens).tolist(), strict=True):
        assert begin == at and data[begin:end] == vocabulary.token_bytes(token)
        at = end
    assert at == len(data)


def test_merges_follow_their_rank() -> None:
    vocabulary = Vocabulary(byte_spec())
    assert [vocabulary.token_bytes(t) for t in vocabulary.encode("hello", False)] == [b"hell", b"o"]


@pytest.mark.slow
def test_the_window_size_does_not_change_the_tokens(
    demo_vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(case["text"] for case in CASES) * 20
    for parse in (False, True):
        whole = demo_vocabulary.encode(text, parse)
        monkeypatch.setattr("stages.tokenizer.vocabulary.WINDOW", 256)
        assert demo_vocabulary.encode(text, parse) == whole
        monkeypatch.undo()


def test_special_names_are_text_unless_parsed_but_user_defined_tokens_always_count() -> None:
    vocabulary = Vocabulary(byte_spec())
    assert vocabulary.encode("<s>", True) == [0]
    assert 0 not in vocabulary.encode("<s>", False)
    assert vocabulary.encode("a<tool>", False)[-1] == 2
    assert vocabulary.decode(vocabulary.encode("a<s>b", True), skip_special=True) == "ab"


def test_start_token_is_added_once_and_has_an_empty_range() -> None:
    vocabulary = Vocabulary(byte_spec(add_bos=True))
    tokens = vocabulary.encode("he", False, add_bos=True)
    assert tokens[0] == 0 and vocabulary.offsets("he", tokens).tolist() == [[0, 0], [0, 2]]
    assert vocabulary.encode("<s>he", True, add_bos=True)[:2] != [0, 0]


def test_offsets_skip_bytes_without_a_token() -> None:
    words = [w for w in byte_spec().tokens if w != ALPHABET[0x04]]
    vocabulary = Vocabulary(byte_spec(tokens=words, types=[3, 3, 4] + [1] * 258))
    tokens = vocabulary.encode("a\x04b", False)
    assert vocabulary.holes == {0x04}
    assert vocabulary.offsets("a\x04b", tokens).tolist() == [[0, 1], [2, 3]]


def test_unsupported_vocabularies_are_rejected_by_name() -> None:
    with pytest.raises(ModelUnavailable, match="tokenizer.ggml.model is 'rwkv'; supported: 'gpt2'"):
        Vocabulary(byte_spec(model="rwkv"))
    with pytest.raises(ModelUnavailable, match="tokenizer.ggml.pre is 'absent'"):
        Vocabulary(byte_spec(pre="absent"))
    with pytest.raises(ModelUnavailable, match="token_type has 3 entries for 262"):
        Vocabulary(byte_spec(types=[1, 1, 1]))
    with pytest.raises(ModelUnavailable, match="tokenizer.ggml.model is 'gemma4'"):
        Vocabulary(byte_spec(model="gemma4"))


@pytest.mark.parametrize("pre", ["gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace"])
def test_no_pretokenizer_stands_in_where_tokens_are_no_bytes(pre: str) -> None:
    for named in ("", "qwen2", "superbpe"):
        problem = vocabulary_problem(byte_spec(pre=pre), named)
        assert problem.startswith(f"tokenizer.ggml.pre is '{pre}': its tokens consist of characters, expected bytes")


def test_the_end_of_a_message_with_a_tool_call_ends_the_output() -> None:
    words = ["<|eom_id|>" if word == "he" else word for word in byte_spec().tokens]
    types = [3 if word == "<|eom_id|>" else 3 if i < 2 else 1 for i, word in enumerate(words)]
    merges = ["l l"]
    vocabulary = Vocabulary(byte_spec(tokens=words, types=types, merges=merges))
    assert vocabulary.eos_ids == (1, words.index("<|eom_id|>"))
    types[words.index("<|eom_id|>")] = 1  # an ordinary token of that text
    assert Vocabulary(byte_spec(tokens=words, types=types, merges=merges)).eos_ids == (1,)
