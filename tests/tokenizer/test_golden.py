"""Token ids of every kind of vocabulary against llama.cpp.

`golden.json` has, for each vocabulary and line, the first bytes of a digest of llama.cpp's ids.  With the wheel that
`make peers` installs, the ids themselves are compared on more lines, and the file is checked.  To write it again:

    python -m tests.tokenizer.test_golden
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pipeline.models.pretokenizers import _GROUPS, PRETOKENIZERS
from stages.tokenizer.vocabulary import TokenizerSpec, Vocabulary
from tests.tokenizer.trained import byte_level_spec, sentencepiece_spec, unigram_spec, wordpiece_spec
from tools.reference.lines import make_lines
from tools.reference.peer_vocabulary import PeerVocabulary, is_installed
from tools.vocabulary_gguf import write_vocabulary

GOLDEN = Path(__file__).parent / "golden.json"
N_GOLDEN, N_COMPARED = 250, 2000  # lines
Encode = Callable[[str, bool], list[int]]

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
}


def digests(encode: Encode) -> list[str]:
    """A digest of the ids of each line, with and without special tokens."""
    return [
        hashlib.sha256(array("i", [*encode(line, False), -1, *encode(line, True)]).tobytes()).hexdigest()[:6]
        for line in make_lines(N_GOLDEN)
    ]


def peer(spec: TokenizerSpec, directory: Path) -> PeerVocabulary:
    return PeerVocabulary(write_vocabulary(directory / "vocabulary.gguf", spec))


@pytest.mark.parametrize("name", SPECS)
def test_ids_have_the_digests_of_llama_cpp(name: str) -> None:
    vocabulary = Vocabulary(SPECS[name]())
    expected = json.loads(GOLDEN.read_text())[name].split()
    wrong = [
        line for line, *pair in zip(make_lines(N_GOLDEN), digests(vocabulary.encode), expected) if pair[0] != pair[1]
    ]
    assert wrong == []


@pytest.mark.skipif(not is_installed(), reason="needs xllamacpp: make peers")
@pytest.mark.parametrize("name", SPECS)
def test_ids_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    spec = SPECS[name]()
    vocabulary, other = Vocabulary(spec), peer(spec, tmp_path)
    try:
        for line in make_lines(N_COMPARED, 7):
            for parse in (False, True):
                assert vocabulary.encode(line, parse) == other.encode(line, parse), line
        assert json.loads(GOLDEN.read_text())[name].split() == digests(other.encode)
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
            other = peer(make(), Path(directory))
            golden[name] = " ".join(digests(other.encode))
            other.close()
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
