r"""Pre-tokenizers: how text is split before byte-pair merges, for each value of `tokenizer.ggml.pre`.

A GGUF file names its pre-tokenizer.  The patterns split as llama.cpp does, which reads the same files; where that
differs from the model's own `tokenizer.json`, it is because llama.cpp has one class of letters: `\p{Lu}` and `\p{Ll}`
are any letter there, and combining marks are no letters in the patterns of Mistral's Tekken and GPT-4o.  Syntax:
Oniguruma, as in the `tokenizers` library.  The patterns of a pre-tokenizer are applied in order, each to the pieces of
the one before; text between matches is a piece of its own.
"""

from __future__ import annotations

from typing import NamedTuple


class PreTokenizer(NamedTuple):
    """Patterns in the order in which they split a text, and what else a family has in common."""

    patterns: tuple[str, ...]
    # A piece that is itself a token is not merged from smaller ones.
    whole_pieces: bool = False
    # Prompts begin with the BOS token, unless the file says otherwise.
    adds_bos: bool = False
    # Digits are grouped from the right: a group depends on all digits after it.
    groups_from_right: bool = False
    # One pattern that cuts as all of `patterns` do one after the other, in less time; "": there is none.
    at_once: str = ""


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_LLAMA3 = _CONTRACTION + "|" + _WORD + r"\p{N}{1,3}|" + _SYMBOLS + _SPACES
_QWEN2 = _CONTRACTION + "|" + _WORD + r"\p{N}|" + _SYMBOLS + _SPACES
_QWEN35 = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _two_cases(upper: str, lower: str, suffix: str, digits: str) -> str:
    """Return the pattern of words in which capitals begin a piece; `upper` and `lower` are classes of letters."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{suffix}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{suffix}|"
        rf"{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_NOT_SMALL, _NOT_CAPITAL = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_MARKED_NOT_SMALL, _MARKED_NOT_CAPITAL = r"[\p{L}\p{M}&&[^a-z]]", r"[\p{L}\p{M}&&[^A-Z]]"
_MARKED = r"[\p{L}\p{M}]"
_OPTIONAL = _CONTRACTION + "?"
_TEKKEN = _two_cases(_NOT_SMALL, _NOT_CAPITAL, "", r"\p{N}")
_GPT4O = _two_cases(_NOT_SMALL, _NOT_CAPITAL, _OPTIONAL, r"\p{N}{1,3}")
_GRANITE_EMBEDDING = _two_cases(_MARKED_NOT_SMALL, _MARKED_NOT_CAPITAL, _OPTIONAL, r"\p{N}{1,3}")
_YOUTU_WORDS = _two_cases(_MARKED, _MARKED, _OPTIONAL, r"\p{N}")
_AYA_WORDS = _two_cases(_MARKED, _MARKED, _OPTIONAL, r"\p{N}{1,3}")

# DeepSeek: cased letters, in the Unicode version of the model's `tokenizer.json`.
_CASED = """
41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 3A3-3F5
3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15
1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3
1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139
213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787
A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2
118A0-118DF 1E900-1E943
"""


def _characters(ranges: str) -> str:
    """Return hexadecimal ranges as the inside of a character class."""
    return "".join("-".join(rf"\x{{{end}}}" for end in one.split("-")) for one in ranges.split())


# Not white space, of which the range U+0800 to U+4E00 has some.
_CJK = r"[" + _characters("4E00-9FA5 800-4E00 AC00-D7FF") + r"&&[^\s]]+"
_KANA_AND_HAN = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
_DEEPSEEK_PUNCTUATION = _characters("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3001-3002")
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_characters(_CASED)}]+",
    rf"\s?[{_DEEPSEEK_PUNCTUATION}]+",
    r"\s+\z",
    _CJK,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")


def _deepseek_at_once(words: str, marks: str, digits: str, has_gaps: bool) -> str:
    """Return one pattern for DeepSeek's, which are applied one after the other.

    words, marks: the insides of two classes; runs of each begin with the white space in front, and the second class
    also cuts the runs of the first.  Characters of `_CJK` and numbers are cut out of all pieces, so that white space
    in front of them is a piece of its own.  digits: how many numbers are a piece.  has_gaps: white space at the end of
    what no run of words or marks has is a piece.

    Alternatives begin with a class, which Python's `re` compares before it tries one, and no run is given up to try a
    shorter one: a long run of white space takes time in proportion to its length.
    """
    cjk = _CJK[1:-2].partition("&&")[0]
    space, number = r"[\s&&[^\r\n]]", r"\p{N}"
    sets = f"[{words}]&&[{marks}]", f"[{words}]&&[^{marks}]", f"[{marks}]&&[^{words}]"
    runs = [f"[[{one}]&&[^{cjk}]]" for one in sets]
    cjk_runs = [f"[[{one}]&&[{cjk}]]" for one in sets]
    behind_space = "|".join([*(f"{run}++" for run in runs), *(f"(?={run})" for run in cjk_runs)])
    parts = [r"[\r\n]", *(f"{run}{run}*+" for run in runs), f"{space}(?:{behind_space})"]
    parts += [f"{run}{run}*+" for run in cjk_runs]
    if has_gaps:
        both = f"[{words}{marks}]"
        parts.append(rf"{space}{space}*+(?=[\r\n]|\z)|{space}(?={space}*+{both}){space}*(?={space})")
        # What no pattern matches: other characters, and white space in front of them or of what has none in front.
        other = rf"[^\s{words}{marks}{number}{cjk}]"
        parts.append(rf"(?:{other}++|{space}++(?=[^\s{words}{marks}]))++")
    others = [rf"[{cjk}&&[^\s{words}{marks}{number}]]", rf"[{number}&&[{cjk}]]", rf"[{number}&&[^{cjk}]]"]
    parts += [f"{others[0]}{others[0]}*+", *(f"{one}{digits}" for one in others[1:])]
    return "|".join(parts)


_ASCII_PUNCTUATION = r"""[!"#$%\&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_MARKED_WORDS = _ASCII_PUNCTUATION + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
_DEEPSEEK3 = (r"\p{N}{1,3}", _KANA_AND_HAN, _MARKED_WORDS + r"[\r\n]*|" + _SPACES)
_SPARK = (r"\p{N}{1,3}", _KANA_AND_HAN, _MARKED_WORDS + r"|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")
_YOUTU_SCRIPTS = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}"
    r"\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+|" + _KANA_AND_HAN
)
_HAN = "[" + _characters("4E00-9FFF 3400-4DBF 20000-2A6DF 2A700-2EBEF F900-FAFF 2F800-2FA1F") + "]"
_KIMI = rf"{_HAN}+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN[1:-1]}]]+{_OPTIONAL}|\p{{N}}{{1,3}}|" + _SYMBOLS + _SPACES


def _ungrouped(digit: str) -> str:
    """Return the pattern of one or two digits before groups of three, or alone."""
    return rf"{digit}{{1,2}}(?=(?:{digit}{digit}{digit})*+(?!{digit}))"


# Groups of three digits from the right. A pattern first takes all groups of a run at once, because counting the digits
# behind each group takes time in proportion to the square of their number; the next one cuts them.
# Text before a run of digits stays with the digits' first group.
_RIGHT_GROUPS = (
    r"\P{N}*+(?:\p{N}\p{N}\p{N})++(?!\p{N})|\P{N}*+" + _ungrouped(r"\p{N}") + r"|\P{N}+",
    r"\P{N}*+\p{N}{1,3}|\P{N}+",
)
# ASCII digits alone are grouped. Other numbers, and what is ungrouped behind them, stay with the group before them.
_OTHERS = rf"(?:[\p{{N}}&&[^0-9]]++(?:{_ungrouped('[0-9]')})?)"
_SUPERBPE = (
    r"\p{N}+",
    rf"(?:[0-9][0-9][0-9])++(?![0-9]){_OTHERS}*|{_ungrouped('[0-9]')}{_OTHERS}*|{_OTHERS}+",
    r"[0-9][0-9][0-9](?=[0-9])",
)
_AFMOE_SCRIPTS = (
    "["
    + _characters(
        "4E00-9FFF 3400-4DBF 8C48-FAFF 3040-309F 30A0-30FF FF65-FF9F 2F00-2FDF E40-E7F E80-EFF 1780-17FF 1000-109F "
        "AA60-AA7F A9E0-A9FF AC00-D7AF 1100-11FF"
    )
    + "]+"
)
_EXAONE_MOE = (
    _CONTRACTION
    + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|"
    r"\s+(?!\S)|\s+"
)
_SEED_CODER = _CONTRACTION + "|" + _WORD + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES
_JAIS2 = (
    _CONTRACTION
    + "|"
    + _WORD
    + r"\p{N}{1,3}|"
    + _SYMBOLS
    + r"\s*[\r\n]+|"
    + "|".join(rf"\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
    + r"|\s"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DIGIT_TRIPLES = "[0-9][0-9][0-9]"
_MARKS = r"\p{P}$+<=>^~|"


def _digits_at_once() -> str:
    """Return one pattern for single numbers, then GPT-2's: white space in front of a number is all of a piece."""
    return _GPT2.replace(r" ?\p{N}+", r"\p{N}").replace(r"|\s+", r"|\s++(?=\p{N})|\s+")


def _marks_at_once(marks: str, before_triple: str, before_number: str) -> str:
    """Return one pattern for runs of `marks`, then GPT-2's, then groups of three digits from the left.

    marks: the inside of a class, with the apostrophe, so that GPT-2's contractions match nowhere.  before_triple,
    before_number: patterns of the space that is a piece of its own before three digits, and that is part of a piece
    of other numbers.
    """
    number = rf"{before_triple}|{_DIGIT_TRIPLES}|{before_number}(?:(?!{_DIGIT_TRIPLES})\p{{N}})+"
    others = rf" ?[^\s\p{{L}}\p{{N}}{marks}]+"
    return rf"[{marks}]+| ?\p{{L}}+|{number}|{others}|\s++(?=[{marks}])|\s+(?!\S)"


_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"IMGIMG[A-I]{1,4}Z",
    r"[\t\n]|    |  ",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)

_GROUPS: dict[PreTokenizer, str] = {
    PreTokenizer(
        (rf"[{_MARKS}]+", _GPT2, r"\p{N}+", _DIGIT_TRIPLES), at_once=_marks_at_once(_MARKS, r" (?=\p{N})", "")
    ): "default",
    PreTokenizer((_GPT2,)): (
        "gpt-2 phi-2 mpt olmo jais jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code gigachat roberta-bpe "
        "trillion a.x-4.0 mellum modern-bert exaone4 granite-docling"
    ),
    PreTokenizer(
        (r"\p{N}", _GPT2), at_once=_digits_at_once()
    ): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    PreTokenizer(
        (rf"[{_MARKS}`]+", _GPT2, _DIGIT_TRIPLES), at_once=_marks_at_once(_MARKS + "`", rf" (?={_DIGIT_TRIPLES})", " ?")
    ): "falcon",
    PreTokenizer((_LLAMA3,), whole_pieces=True, adds_bos=True): (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
    ),
    PreTokenizer((_LLAMA3,), whole_pieces=True): "glm4 glm5",
    PreTokenizer((_LLAMA3,)): "dbrx smaug-bpe chatglm-bpe",
    PreTokenizer((_QWEN2,)): ("qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan megrez solar-open grok-2"),
    PreTokenizer((_QWEN35,)): "qwen35",
    PreTokenizer((_WORD + r"\p{N}|" + _SYMBOLS + _SPACES,)): "ufakzeka",
    PreTokenizer((r"[^\n]+|\n+", _QWEN2)): "laguna",
    PreTokenizer((r"\p{N}{1,3}", _QWEN2.replace(r"\p{N}|", r"\p{N}+|")), whole_pieces=True): "minicpm5",
    PreTokenizer(
        _DEEPSEEK_LLM, at_once=_deepseek_at_once(_characters(_CASED), _DEEPSEEK_PUNCTUATION, "+", True)
    ): "deepseek-llm",
    PreTokenizer(_DEEPSEEK_CODER, at_once=_deepseek_at_once(r"\p{L}", r"\p{P}", "", False)): "deepseek-coder",
    PreTokenizer(_DEEPSEEK3): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    PreTokenizer(_SPARK): "spark2_5",
    PreTokenizer((_YOUTU_SCRIPTS, _YOUTU_WORDS), whole_pieces=True): "youtu",
    PreTokenizer((_KIMI,)): "kimi-k2",
    PreTokenizer((_TEKKEN,), whole_pieces=True, adds_bos=True): "tekken",
    PreTokenizer((_GPT4O,)): "gpt-4o llama4 kanana2 talkie minimax-m2",
    PreTokenizer((_GRANITE_EMBEDDING,), whole_pieces=True): "granite-embed-multi-97m",
    PreTokenizer((*_RIGHT_GROUPS, _AYA_WORDS), groups_from_right=True): "tiny_aya cohere2moe",
    PreTokenizer(
        (*_RIGHT_GROUPS, _AFMOE_SCRIPTS, _MARKED_WORDS + r"[\r\n]*|" + _SPACES), groups_from_right=True
    ): "afmoe",
    PreTokenizer(_SUPERBPE, groups_from_right=True): "superbpe",
    PreTokenizer((_BLOOM,)): "bloom poro-chat gpt3-finnish",
    PreTokenizer((_BLOOM, r"\p{N}")): "viking",
    PreTokenizer((_EXAONE_MOE,)): "exaone-moe",
    PreTokenizer((_BAILING,)): "bailingmoe bailingmoe2 llada-moe",
    PreTokenizer((_SEED_CODER,)): "seed-coder",
    PreTokenizer((_JAIS2,)): "jais-2",
    PreTokenizer(_CHAMELEON, adds_bos=True): "chameleon",
}

PRETOKENIZERS: dict[str, PreTokenizer] = {name: pre for pre, names in _GROUPS.items() for name in names.split()}

# Of files whose tokens consist of characters, with merges across words: llama.cpp has these names beside those above,
# and none of those can stand in.
NOT_BYTE_LEVEL = ("gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace")
