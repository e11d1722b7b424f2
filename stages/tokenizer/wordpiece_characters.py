"""What WordPiece makes of a character before words are cut: as llama.cpp, whose tables are of Unicode 15.0.

Python's tables are of another version of Unicode in each release, and the ids of a text must not depend on that.  Case
and decomposition of a character never change once it is assigned, and its category as good as never, so that Python's
own tables serve for what it has had since 3.11 (Unicode 14).  Lists here have what is newer, up to Unicode 16, and
what is newer still stays as it is.
"""

from __future__ import annotations

import unicodedata

import numpy as np

from stages.tokenizer.unicode_classes import CLASSES, runs

WHITE_SPACE = frozenset(
    "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
)
# Blocks of Chinese characters, as llama.cpp and Hugging Face's `tokenizers` have them.
_CHINESE = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)
_DROPPED = ("Cc", "Cf", "Co", "Cs", "Mn", "Mc", "Me")


def _codes(ranges: str) -> frozenset[int]:
    """Code points of hexadecimal ranges."""
    ends = [[int(end, 16) for end in one.split("-")] for one in ranges.split()]
    return frozenset(code for first, *last in ends for code in range(first, (last[0] if last else first) + 1))


# Unicode 15.0: marks and format characters, and punctuation. Its other characters stay as they are.
_NEW_DROPPED = _codes(
    "CF3 ECE 10EFD-10EFF 11241 11F00-11F01 11F03 11F34-11F3A 11F3E-11F42 13439-13440 13447-13455 1E08F 1E4EC-1E4EF"
)
_NEW_PUNCTUATION = _codes("11B00-11B09 11F43-11F4F")
# Unicode 15.1 and 16: marks, punctuation, and letters with another case or a decomposition.
_LATER = _codes(
    "897 1B4E-1B4F 1B7F 1C89 A7CB-A7CC A7DA A7DC 105C9 105E4 10D50-10D65 10D69-10D6E 10EFC 11383 11385 1138E 11391 "
    "113B8-113C0 113C2 113C5 113C7-113CA 113CC-113D0 113D2 113D4-113D5 113D7-113D8 113E1-113E2 11BE1 11F5A 1611E-1612F "
    "16D68-16D6A 16D6D-16D6F 1E5EE-1E5EF 1E5FF"
)


def normalized(character: str) -> str:
    """What a character becomes: a space, nothing, a lower-case character, or one between spaces."""
    code = ord(character)
    if code in _LATER or code in _NEW_DROPPED:
        return "" if code in _NEW_DROPPED else character
    if code in _NEW_PUNCTUATION:
        return f" {character} "
    base = unicodedata.normalize("NFD", character)[0]
    if base in WHITE_SPACE:
        return " "
    category, code = unicodedata.category(base), ord(base)
    if category[0] != "C" and _is_newer(code):
        return character
    if code in (0, 0xFFFD) or category in _DROPPED:
        return ""
    lower = base.lower()[0]
    is_word = category[0] == "P" or (code < 0x7F and category[0] == "S")
    if is_word or any(first <= code <= last for first, last in _CHINESE):
        return f" {lower} "
    return lower


def _is_newer(code: int) -> bool:
    """Whether a character that Python has is newer than Unicode 16, the version of `unicode_classes`."""
    begins, classes = runs()
    return int(classes[np.searchsorted(begins, code, "right") - 1]) == CLASSES["-"]
