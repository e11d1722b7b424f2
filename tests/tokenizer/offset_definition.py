"""What offsets are by definition: of the whole text at once, character by character and word by word."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from pipeline.models.vocabularies import SPACE
from stages.tokenizer.byte_level import ByteLevelEncoder
from stages.tokenizer.normalizer import Normalizer, Spaces
from stages.tokenizer.sentencepiece import SentencePieceEncoder
from stages.tokenizer.steps import result_of
from stages.tokenizer.unigram import UnigramEncoder
from stages.tokenizer.vocabulary import Vocabulary
from stages.tokenizer.wordpiece import WordPieceEncoder
from stages.tokenizer.wordpiece_characters import normalized

Ints = NDArray[np.int64]


def offsets(vocabulary: Vocabulary, text: str, tokens: list[int], parse_special: bool) -> list[list[int]]:
    """The byte range of each token; a token that was added has an empty one."""
    encoder, names = vocabulary._encoder, vocabulary._names(parse_special)
    ids = np.array(tokens, np.int64)
    n_added = 0
    if tokens and tokens[0] == vocabulary.bos:
        first = names.find(text, 0, len(text))
        before = text[: first[0]] if first is not None else ""
        is_written = first is not None and first[2] == vocabulary.bos
        if before and is_written:
            is_written = encoder.may_drop and not _lengths(vocabulary, before, ids, parse_special).any()
        n_added = 0 if is_written else 1
    lengths = np.zeros(len(ids), np.int64)
    lengths[n_added:] = _lengths(vocabulary, text, ids[n_added:], parse_special)
    ends = np.cumsum(lengths)
    ranges = np.stack([ends - lengths, ends], axis=1)
    kept = [at for at, byte in enumerate(text.encode()) if byte not in encoder.holes]
    return [[kept[begin], kept[end - 1] + 1] if begin < end else [begin, end] for begin, end in ranges.tolist()]


def _lengths(vocabulary: Vocabulary, text: str, tokens: Ints, parse_special: bool) -> Ints:
    encoder = vocabulary._encoder
    if isinstance(encoder, SentencePieceEncoder):
        return _counted(vocabulary, encoder, text, tokens, parse_special)
    if isinstance(encoder, ByteLevelEncoder):
        return _of_bytes(vocabulary, encoder, text, tokens, parse_special)
    assert isinstance(encoder, UnigramEncoder | WordPieceEncoder)
    names, ends, at = vocabulary._names(parse_special), list[int](), 0
    while at < len(text):
        name = names.find(text, at, len(text))
        part = text[at : name[0]] if name is not None else text[at:]
        found = _word_ends(encoder, part) if isinstance(encoder, WordPieceEncoder) else _best_ends(encoder, part)
        ends += [at + n for n in found]
        at += len(part)
        if name is not None:
            at = name[1]
            ends.append(at)
    lengths = np.zeros(len(tokens), np.int64)
    if ends:
        ends[-1] = len(text)
        covered = [len(text[:end].encode()) for end in ends]
        lengths[: len(ends)] = np.diff([0, *covered])[: len(tokens)]
    return lengths


def _word_ends(encoder: WordPieceEncoder, text: str) -> list[int]:
    """Where the tokens of words end, one word after the other."""
    ends: list[int] = []
    word: list[int] = []
    letters: list[str] = []

    def finish() -> None:
        if letters:
            (cut,) = encoder._cut(["".join(letters)])
            ends.extend([word[end - 2] if end > 1 else word[0] - 1 for _, end in cut] or [word[-1]])
        word.clear()
        letters.clear()

    for place, character in enumerate(text):
        became = normalized(character)
        if became[:1] == " ":
            finish()
        if letter := became.strip(" "):
            letters.append(letter)
            word.append(place + 1)
        if len(became) == 3:
            finish()
    finish()
    return ends


def _best_ends(encoder: UnigramEncoder, text: str) -> list[int]:
    """Where the best tokens of the whole text end."""
    spaces, parts, source = Spaces(encoder._rules), list[str](), list[int]()
    for begin, end, to in _aligned(encoder._rules, text):
        new = spaces.push(to)
        parts.append(new)
        n_added = max(0, len(new) - len(to))
        source += [begin] * n_added + [end] * (len(new) - n_added)
    (cut,) = result_of(encoder._lattice.cut(["".join(parts)]))
    return [source[end - 1] for _, end in cut]


def _aligned(rules: Normalizer, text: str) -> Iterable[tuple[int, int, str]]:
    at = 0
    for begin, end, to in [*rules._matches(text, rules._candidates(text)), (len(text), len(text), "")]:
        for place in range(at, begin):
            yield place, place + 1, text[place].translate(rules._single)
        if end > begin:
            yield begin, end, to
        at = end


def _counted(
    vocabulary: Vocabulary, encoder: SentencePieceEncoder, text: str, tokens: Ints, parse_special: bool
) -> Ints:
    """The characters of each token, which tokens of bytes share."""
    names, at, index = vocabulary._names(parse_special), 0, 0
    lengths = encoder._lengths[tokens]
    while at < len(text):
        name = names.find(text, at, len(text))
        end = name[0] if name is not None else len(text)
        if end > at:
            if name is None and SPACE not in text and not encoder._is_special[tokens[index:]].any():
                lengths[index] -= len(encoder._prefix)
                return lengths
            index = _measure(encoder, text[at:end], tokens, index, lengths)
        at = end
        if name is not None:
            at = name[1]
            lengths[index] = len(text[end:at].encode())
            index += 1
    return lengths


def _measure(encoder: SentencePieceEncoder, text: str, tokens: Ints, index: int, lengths: Ints) -> int:
    sizes = [0] * len(encoder._prefix) + [len(character.encode()) for character in text]
    at, part = 0, 0
    while at < len(sizes):
        token = int(tokens[index])
        if token in encoder._byte_ids and encoder._has_bytes:
            lengths[index] = 1
            part += 1
            if part == sizes[at]:
                at, part = at + 1, 0
        else:
            n = 1 if token == encoder._unknown else int(encoder._n_characters[token])
            lengths[index] = sum(sizes[at : at + n])
            at += n
        index += 1
    return index


def _of_bytes(vocabulary: Vocabulary, encoder: ByteLevelEncoder, text: str, tokens: Ints, parse_special: bool) -> Ints:
    """The bytes of tokens, and the white space that names have taken."""
    names, lengths, at, index = vocabulary._names(parse_special), encoder._lengths[tokens], 0, 0
    while names.stripping and (name := names.find(text, at, len(text))) is not None:
        begin, at, token = name
        index = tokens.tolist().index(token, index)
        beside = b"".join(text[begin:at].encode().split(encoder.token_bytes[token], 1))
        lengths[index] += sum(byte not in encoder.holes for byte in beside)
        index += 1
    return lengths
