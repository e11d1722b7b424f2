"""Finds the name of a byte-level vocabulary's pre-tokenizer: the one that splits texts as the file's own does.

GGUF files name a pre-tokenizer, `tokenizer.json` describes it.  Descriptions of the same one differ, so that both split
texts here and the pieces are compared: words, digits, contractions, punctuation, spaces and several scripts.  The
named patterns have one class of letters, as llama.cpp has; texts in which that could show only decide between
pre-tokenizers that agree on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Chain

from pipeline.models.pretokenizers import PRETOKENIZERS, PreTokenizer
from stages.worker.huggingface.config import CheckpointDirectoryError

# Names that published files use come first among those that split equally.
_USUAL = ("gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o", "deepseek-llm", "smollm", "starcoder", "falcon", "default")

_TEXTS = (
    "Hello world, it's 3 o'clock and we'll've seen I'D, YOU'RE, they'Re HERE'S",
    "a  b   c\td\t\te\n\nf \n g\r\nh\r\n\r\n  i \n",
    "1 12 123 1234 12345 123456 1234567 3.14159 1,000,000.00 2024-01-31 v1.2.3 0x1F",
    "(x) [y] {z} <w> !! ?? ... --- *** === ::: a-b a_b a/b a//b //\n/* c */ #d @e $f %g ^h &i ~j `k` |l| \\m",
    "def f(x):\n    return x + 1\n\n\tif x:\n\t\tpass\n        deep\n",
    "foo.bar(baz)!=qux;\n  x=>y  \n\n\n   z",
    "größer naïve café Ångström über straße",
    "Привет мир как дела 42 года",
    "你好世界 今天天气很好 123 個 カタカナ ひらがな 漢字",
    "안녕하세요 세계 한국어 문장",
    "مرحبا بالعالم ١٢٣ שלום עולם 12",
    "emoji 😀😀 👩‍👩‍👧 ☃ → ≠ ½ ² ①",
    "trailing spaces   ",
    "   leading spaces",
    "MixedCase camelCase HTTPServer XMLHttpRequest iPhone",
)
# Letters whose case or marks the named patterns do not tell apart.
_EDGE_TEXTS = ("ПРИВЕТ МирДом", "ÀÉÎ Éa aÉ ßẞ", "e\u0301a n\u0303o", "नमस्ते", "ǅ ʰ ª º")


def find_pretokenizer(path: Path, tokenizer: Tokenizer, whole_pieces: bool) -> str:
    """The name. Raises `CheckpointDirectoryError` if there is none.

    whole_pieces: the file's BPE takes a piece that is itself a token as it is.
    """
    own = tokenizer.pre_tokenizer
    wanted, wanted_edge = _split(own, _TEXTS), _split(own, _EDGE_TEXTS)
    best, best_name = -1, ""
    for pre, names in _groups().items():
        if pre.whole_pieces != whole_pieces or pre.groups_from_right:
            continue
        chain = _chain(pre)
        if _split(chain, _TEXTS) != wanted:
            continue
        same = sum(a == b for a, b in zip(_split(chain, _EDGE_TEXTS), wanted_edge, strict=True))
        if same > best:
            best, best_name = same, next((name for name in _USUAL if name in names), names[0])
    if not best_name:
        raise CheckpointDirectoryError(
            f"{path}: pre_tokenizer splits texts as none of the known ones does; if you know which one is meant, give "
            f"its name with --pretokenizer: {', '.join(sorted(PRETOKENIZERS))}"
        )
    return best_name


def _groups() -> dict[PreTokenizer, list[str]]:
    """The names of each pre-tokenizer, without regard to the BOS token."""
    found: dict[PreTokenizer, list[str]] = {}
    for name, pre in PRETOKENIZERS.items():
        found.setdefault(pre._replace(adds_bos=False), []).append(name)
    return found


def _chain(pre: PreTokenizer) -> Chain:
    return Chain(
        [Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        + [ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _split(pre: Chain | None, texts: Sequence[str]) -> list[list[str]]:
    """The pieces of each text; a text is one piece without a pre-tokenizer."""
    return [[piece for piece, _ in pre.pre_tokenize_str(text)] if pre is not None else [text] for text in texts]
