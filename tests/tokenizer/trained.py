"""Small vocabularies that are trained on the lines of `lines.py`, without borders between words.

Merges therefore cross every place where a pre-tokenizer may split, so that a wrong split changes the ids.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import pairwise

from pipeline.models.vocabularies import SPACE, byte_name
from pipeline.models.vocabulary_tables import byte_alphabet
from stages.tokenizer.vocabulary import TokenizerSpec
from tools.charsmap_writer import write_charsmap
from tools.reference.lines import written
from tools.tiny_gguf import WORDPIECE_SPECIALS, wordpiece_tokens

CONTROL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
USER_DEFINED = ("<tool>", "[INST]")


@cache
def _merges(texts: tuple[str, ...], count: int) -> list[tuple[str, str]]:
    """Return the merges of byte-pair encoding, most frequent pairs first. Stored: many specs have the same texts."""
    words = [list(text) for text in texts]
    counts = Counter(pair for word in words for pair in pairwise(word))
    places: defaultdict[tuple[str, str], set[int]] = defaultdict(set)  # words that have, or had, a pair
    for i, word in enumerate(words):
        for pair in pairwise(word):
            places[pair].add(i)
    heap = [(-n, pair) for pair, n in counts.items()]
    heapify(heap)
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        negative, merged = heappop(heap)
        if counts[merged] != -negative:
            continue  # its count has changed, and it is in the heap with the new one
        merges.append(merged)
        changes: Counter[tuple[str, str]] = Counter()
        for i in places.pop(merged):
            word = words[i]
            changes.subtract(pairwise(word))
            at = 0
            while at + 1 < len(word):
                if word[at] == merged[0] and word[at + 1] == merged[1]:
                    word[at : at + 2] = [merged[0] + merged[1]]
                at += 1
            changes.update(pairwise(word))
            for pair in pairwise(word):
                places[pair].add(i)
        for pair, change in changes.items():
            if change:
                counts[pair] += change
                heappush(heap, (-counts[pair], pair))
    return merges


@cache
def byte_level_spec(pre: str = "gpt-2") -> TokenizerSpec:
    """A byte-level vocabulary of 256 bytes and 600 merges."""
    stand_in = {byte: character for character, byte in byte_alphabet().items()}
    # Parts of numbers, white space and capitals, which the written lines have few of.
    extra = ["12 123 1234 12345 1 22 333 4444 123,456", "a  b   c    d\n\n\n e\t\tf \n  g", "ABC aB Ab É é's 'S'LL 'll"]
    texts = tuple("".join(stand_in[byte] for byte in line.encode()) for line in [*written(), *extra * 4])
    added = [
        (one, other)
        for one in map(stand_in.get, b" 1'\nA")
        for other in map(stand_in.get, b" 12sa\n!")
        if one and other
    ]
    merges = list(dict.fromkeys([*_merges(texts, 600), *added]))
    tokens = [*CONTROL, *USER_DEFINED, *stand_in.values(), *(left + right for left, right in merges)]
    types = [3] * len(CONTROL) + [4] * len(USER_DEFINED)
    tokens = list(dict.fromkeys(tokens))
    types += [1] * (len(tokens) - len(types))
    return TokenizerSpec(
        "gpt2", pre, tokens, types, [f"{left} {right}" for left, right in merges], bos=0, eos=1, add_bos=False
    )


@cache
def sentencepiece_spec(add_space_prefix: bool = True) -> TokenizerSpec:
    """A SentencePiece vocabulary in which scores repeat, pieces overlap, and most characters are bytes."""
    texts = tuple((" " + line).replace(" ", SPACE) for line in [*written(), "aaaaaaa      bbbbb ababab"] * 2)
    merges = _merges(texts, 500)
    frequent = [c for c, n in Counter(c for text in texts for c in text).most_common(120) if n > 2 and c != "\n"]
    pieces = dict.fromkeys([*frequent, *(left + right for left, right in merges), "aaa", "aa", SPACE * 3, SPACE * 4])
    named = dict.fromkeys(["<unk>", *CONTROL, *USER_DEFINED, *(byte_name(byte) for byte in range(256))])
    tokens = [*named, *(piece for piece in pieces if piece not in named)]
    types = [2] + [3] * len(CONTROL) + [4] * len(USER_DEFINED) + [6] * 256
    types += [1] * (len(tokens) - len(types))
    scores = [0.0] * len(named) + [-float(i // 3) for i in range(len(tokens) - len(named))]  # three of each score
    return TokenizerSpec(
        "llama",
        "default",
        tokens,
        types,
        [],
        bos=1,
        eos=2,
        add_bos=True,
        scores=scores,
        unknown=0,
        add_space_prefix=add_space_prefix,
    )


# Of each sort that Unicode's table has: one character to one, to several, to none and to a space; several to one.
REPLACED = {
    **{chr(0xFF01 + i): chr(0x21 + i) for i in range(94)},
    "\t": " ",
    "\n": " ",
    "\r": " ",
    "\u3000": " ",
    "\u00a0": " ",
    "\u0085": " ",
    "\u2003": " ",
    "\u200b": "",
    "\ufeff": "",
    "\x1f": "",
    "\x7f": "",
    "ﬁ": "fi",
    "½": "1\u20442",
    "…": "...",
    "ª": "a",
    "²": "2",
    "\u00b4": " \u0301",
    "ﾊ": "ハ",
    "ﾊﾞ": "バ",
    "K": "K",
    "e\u0301": "é",
    "a\u0301": "á",
    "e\u0301\u0323": "ẹ\u0301",
    "x\u0301\u0323\u0301": "X",
    "i\u0307": "i",
}


@cache
def unigram_spec(
    add_space_prefix: bool | None = True, merges_spaces: bool | None = True, charsmap: bool = True, inner: bool = False
) -> TokenizerSpec:
    """A unigram vocabulary without most characters, in which scores repeat and tokens overlap.

    inner: with tokens that have spaces behind and between letters.
    """
    lines = [(" " + line).replace(" ", SPACE) for line in [*written(), "aaaaaaa      bbbbb ababab"] * 2]
    texts = tuple(part for line in lines for part in ([line] if inner else re.findall(f"{SPACE}?[^{SPACE}]+", line)))
    merges = _merges(texts, 500)
    frequent = [c for c, n in Counter(c for text in texts for c in text).most_common(120) if n > 2 and c != "\n"]
    pieces = dict.fromkeys([*frequent, *(left + right for left, right in merges), "aaa", "aa", "日本", "日本語", "バ"])
    spaced = [piece for piece in pieces if SPACE in piece[1:]]
    if inner:
        spaced += [SPACE * 2, SPACE * 3, f"a{SPACE}b", f"e{SPACE}t", f"{SPACE}the{SPACE}"]
    pieces = {piece: None for piece in pieces if SPACE not in piece[1:]} | (dict.fromkeys(spaced) if inner else {})
    named = dict.fromkeys([*CONTROL, "<unk>", *USER_DEFINED, "<unused>", *(byte_name(byte) for byte in range(3))])
    tokens = [*named, *(piece for piece in pieces if piece not in named)]
    types = [3] * len(CONTROL) + [2] + [4] * len(USER_DEFINED) + [5] + [6] * 3
    types += [1] * (len(tokens) - len(types))
    # Near the logarithms of probabilities; several tokens have each score, and one scores as its two parts do.
    scores = [0.0] * len(named) + [-3.0 - (i // 5) * 0.0625 for i in range(len(tokens) - len(named))]
    scores[tokens.index("aa")] = 2 * scores[tokens.index("a")]
    return TokenizerSpec(
        "t5",
        "default",
        tokens,
        types,
        [],
        bos=0,
        eos=1,
        add_bos=True,
        scores=scores,
        unknown=len(CONTROL),
        add_space_prefix=add_space_prefix,
        charsmap=write_charsmap(REPLACED) if charsmap else b"",
        merges_spaces=merges_spaces,
    )


@cache
def wordpiece_spec() -> TokenizerSpec:
    """A WordPiece vocabulary of some words and most ASCII characters."""
    tokens = wordpiece_tokens(290)
    types = [3] * len(WORDPIECE_SPECIALS) + [1] * (len(tokens) - len(WORDPIECE_SPECIALS))
    return TokenizerSpec("bert", "", tokens, types, (), bos=2, eos=3, unknown=1)
