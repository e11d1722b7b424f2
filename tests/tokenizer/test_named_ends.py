"""Answers end with the token that ends a turn and with the one that ends a text, also if the file names only one."""

from __future__ import annotations

import pytest

from stages.tokenizer.vocabulary import Vocabulary
from tests.tokenizer.byte_vocabulary import byte_spec


@pytest.mark.parametrize(
    ("names", "kind", "expected"),
    [
        (["<end_of_turn>"], 3, [0]),
        (["<end_of_turn>"], 4, [0]),
        (["<end_of_turn>"], 1, []),  # text
        (["<|end|>", "<|user|>"], 3, [0]),
        (["<|end|>", "<|return|>"], 3, []),  # parts of one answer
        (["<|eot_id|>", "<|eom_id|>"], 3, [0, 1]),
        (["<|endoftext|>"], 3, [0]),
        (["<|eot_id|>", "<|end_of_text|>"], 3, [0, 1]),
        (["<|file_sep|>"], 3, []),
    ],
)
def test_names_of_ends(names: list[str], kind: int, expected: list[int]) -> None:
    spec = byte_spec()
    vocabulary = Vocabulary(
        spec._replace(tokens=[*spec.tokens, *names], types=[*spec.types, *[kind] * len(names)], eos=1)
    )
    assert vocabulary.eos_ids == (1, *(len(spec.tokens) + i for i in expected))


def test_the_files_own_ids_come_first_and_once() -> None:
    spec = byte_spec()
    vocabulary = Vocabulary(spec._replace(tokens=[*spec.tokens, "<|im_end|>"], types=[*spec.types, 3], eot=262))
    assert vocabulary.eos_ids == (1, 262)
