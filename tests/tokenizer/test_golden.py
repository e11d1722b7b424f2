"""Token ids of every kind of vocabulary against llama.cpp.

`golden.json` has, for each vocabulary and line, the first bytes of a digest of llama.cpp's ids.  With the wheel that
`make peers` installs, the ids themselves are compared on more lines, and the file is checked.  To write it again:

    python -m tests.tokenizer.test_golden
"""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pipeline.models.pretokenizers import _GROUPS, PRETOKENIZERS
from shm.named_stripping import named_stripping
from stages.tokenizer.vocabulary import TokenizerSpec, Vocabulary
from tests.tokenizer.trained import byte_level_spec, sentencepiece_spec, unigram_spec, wordpiece_spec
from tools.reference.lines import make_lines
from tools.reference.peer_vocabulary import PeerVocabulary, is_installed
from tools.vocabulary_gguf import write_vocabulary

GOLDEN = Path(__file__).parent / "golden.json"
N_GOLDEN, N_COMPARED = 250, 2000  # lines
Encode = Callable[[str, bool], list[int]]


def named(spec: TokenizerSpec, name: str, **others: str) -> TokenizerSpec:
    """A vocabulary some of whose special tokens have other names, and take white space as those of a model's name."""
    tokens = [others.get(token, token) for token in spec.tokens]
    special = [(token, i) for i, (token, kind) in enumerate(zip(tokens, spec.types)) if kind in (2, 3, 4)]
    right, left = named_stripping(name, spec.pre, special)
    assert right or left
    return spec._replace(tokens=tokens, strips_right=right, strips_left=left)


PHI3, BERT = "Phi-3 Mini", "Modern-BERT"  # `general.name` of vocabularies below
# One of each group: the others have the same patterns.
SPECS: dict[str, Callable[[], TokenizerSpec]] = {
    **{name: partial(byte_level_spec, name) for name in (names.split()[0] for names in _GROUPS.values())},
    "llama": partial(sentencepiece_spec, True),
    "llama without a prefix": partial(sentencepiece_spec, False),
    "t5": unigram_spec,
    "t5 with all spaces": partial(unigram_spec, True, False),
    "t5 without a prefix": partial(unigram_spec, False, False, False),
    "t5 as by default": partial(unigram_spec, None, None),
    "t5 with inner spaces": partial(unigram_spec, True, True, True, True),
    "t5 with inner and all spaces": partial(unigram_spec, False, False, True, True),
    "bert": wordpiece_spec,
    f"llama of {PHI3}": lambda: named(sentencepiece_spec(), PHI3, **{"<|im_end|>": "<|endoftext|>"}),
    f"t5 of {PHI3}": lambda: named(unigram_spec(True, False), PHI3, **{"<|im_end|>": "<|endoftext|>"}),
    f"gpt-2 of {PHI3}": lambda: named(
        byte_level_spec(), PHI3, **{"<|im_end|>": "<|endoftext|>", "<|im_start|>": "<unk>"}
    ),
    "gpt-2 of jina-v2-de": lambda: named(byte_level_spec("jina-v2-de"), "", **{"<|im_end|>": "<mask>"}),
    f"llama of {BERT}": lambda: named(sentencepiece_spec(False), BERT, **{"<|im_end|>": "[MASK]"}),
}


def lines_for(name: str, n: int, seed: int = 0) -> list[str]:
    """Lines; for a vocabulary whose special tokens take white space, with some of these between white space."""
    lines = make_lines(n, seed) if seed else make_lines(n)
    spec = SPECS[name]()
    if not (spec.strips_right or spec.strips_left):
        return lines
    special = [token for token, kind in zip(spec.tokens, spec.types) if kind in (2, 3, 4)]
    rng = random.Random(seed)
    space = ["", " ", "\n", "\t\n ", "\v\f\r", "\u3000", "\u00a0 ", "\x1c", "\x85"]
    parts = [[rng.choice([*space, *space, line, *special]) for _ in range(9)] for line in lines]
    return ["".join(part) for part in parts]


def digests(name: str, encode: Encode) -> list[str]:
    """A digest of the ids of each line, with and without special tokens."""
    return [
        hashlib.sha256(array("i", [*encode(line, False), -1, *encode(line, True)]).tobytes()).hexdigest()[:6]
        for line in lines_for(name, N_GOLDEN)
    ]


def peer(spec: TokenizerSpec, directory: Path, name: str = "") -> PeerVocabulary:
    """`name`: a key of `SPECS`."""
    return PeerVocabulary(write_vocabulary(directory / "vocabulary.gguf", spec, name.partition(" of ")[2]))


@pytest.mark.parametrize("name", SPECS)
def test_ids_have_the_digests_of_llama_cpp(name: str) -> None:
    vocabulary = Vocabulary(SPECS[name]())
    expected = json.loads(GOLDEN.read_text())[name].split()
    wrong = [
        line
        for line, *pair in zip(lines_for(name, N_GOLDEN), digests(name, vocabulary.encode), expected)
        if pair[0] != pair[1]
    ]
    assert wrong == []


@pytest.mark.skipif(not is_installed(), reason="needs xllamacpp: make peers")
@pytest.mark.parametrize("name", SPECS)
def test_ids_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    spec = SPECS[name]()
    vocabulary, other = Vocabulary(spec), peer(spec, tmp_path, name)
    try:
        for line in lines_for(name, N_COMPARED, 7):
            for parse in (False, True):
                assert vocabulary.encode(line, parse) == other.encode(line, parse), line
        assert json.loads(GOLDEN.read_text())[name].split() == digests(name, other.encode)
    finally:
        other.close()


@pytest.mark.skipif(not is_installed(), reason="needs xllamacpp: make peers")
def test_llama_cpp_has_the_same_groups(tmp_path: Path) -> None:
    """All names of a group split alike, and take BOS alike, there as well."""
    lines = make_lines(150, 3)
    expected: dict[object, list[list[int]]] = {}
    for name, pre in PRETOKENIZERS.items():
        other = peer(byte_level_spec(name)._replace(add_bos=None), tmp_path)
        found = [other.encode(line, False, add_bos=True) for line in lines]
        other.close()
        assert expected.setdefault(pre, found) == found, name
        assert (found[0][0] == 0) == pre.adds_bos, name


def main() -> None:
    """Write `golden.json` with llama.cpp's ids."""
    golden = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, make in SPECS.items():
            other = peer(make(), Path(directory), name)
            golden[name] = " ".join(digests(name, other.encode))
            other.close()
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
