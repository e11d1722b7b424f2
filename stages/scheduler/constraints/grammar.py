"""Grammars of constraints, by `llguidance`: a token may be sampled exactly if its bytes continue the grammar's text.

Limits are in steps of work, not in time: the same tokens give the same masks on every machine.
"""

from __future__ import annotations

import json
import re
from array import array
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from pipeline.api.guidance_options import with_options
from pipeline.api.plain_schema import plain_schema
from pipeline.api.plain_times import plain_times
from pipeline.protocol.messages import Constraint, ReasoningPrefix
from stages.scheduler.constraints.frames import VocabularyFile

# Without it, text that the grammar forces would be forced token by token, in a tokenization that need not be the
# model's own.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'  # at the end, so that errors count the client's lines
# Between the tokens of JSON: at most a space, or a line break with its indentation.  Unbounded white space would let a
# model fill its whole output with it.
_JSON_OPTIONS = {"whitespace_pattern": r"[ ]?|\n[ \t]{0,40}"}
_OWN_OPTIONS = re.compile(r"(?m)^\s*%llguidance\b")
_LISTING = re.compile(r"<state>|<non-verbose/>|\n +[0-9]+ \|")
_MISFIT = "doesn't satisfy the grammar"
_POSITION = re.compile(r"^at [0-9]+\([0-9]+\): ")  # in the grammar: of use only to who wrote one
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")  # characters with a meaning in a regular expression of a grammar
MAX_ERROR = 400  # characters of a message
# What the library says of a reference that leads to itself without anything between.
_ENDLESS, _ENDLESS_REASON = "NoExtensionBias", "a $ref leads back to itself, and no value is in between"

# A mask within the limits takes at most about 15 ms of an idle core, and compiling about 100 ms.
_LIMITS = {
    "max_items_in_row": 1000,
    "initial_lexer_fuel": 2_000_000,
    "step_lexer_fuel": 150_000,
    "step_max_items": 30_000,
    "max_lexer_states": 50_000,  # 1 to 2 KB each
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


class GrammarError(ValueError):
    """The constraint cannot be used; the message says why, without naming the field."""


class _Tokens:
    """What `llguidance` reads of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], eos_id: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos_id
        self.tokenizer: Any = None

    def __call__(self, text: bytes | str) -> list[int]:
        """Used for nothing that has an effect on masks."""
        tokens: list[int] = self.tokenizer.greedy_tokenize(text if isinstance(text, str) else text.decode())
        return tokens


def make_tokenizer(file: VocabularyFile, size: int = 0) -> Any:
    """The tokenizer for `new_matcher`. Raises `GrammarError` if the model has no end token.

    `size`: tokens of a mask; ids without a token are never allowed. 0: as many as the vocabulary has.
    """
    ends, control = array("I"), array("i")
    ends.frombytes(file.piece_ends)
    control.frombytes(file.control)
    size = size or len(ends)
    tokens, begin = [], 0
    for end in ends[:size]:
        tokens.append(file.pieces[begin:end])
        begin = end
    special = {token for token in control if 0 <= token < size}
    for token in range(len(tokens), size):  # logits without a token
        tokens.append(b"<[no token %d]>" % token)
        special.add(token)
    # A control token is written by its name and never part of the text.
    eos_ids = sorted({token for token in file.eos_ids if 0 <= token < size})
    if not eos_ids:
        raise GrammarError("the model has no end token")
    special.update(eos_ids)
    wrapper = _Tokens(tokens, sorted(special), eos_ids[0])
    wrapper.tokenizer = llguidance.LLTokenizer(wrapper, eos_token=eos_ids)
    return wrapper.tokenizer


def to_lark(constraint: Constraint) -> str:
    """The constraint as a Lark grammar in llguidance's dialect. Raises `GrammarError`."""
    kind, text = constraint.kind, constraint.text
    try:
        if kind == "json_schema":
            schema = json.loads(text)
            if not isinstance(schema, dict):
                raise GrammarError("the schema must be an object")
            made = with_options(plain_times(plain_schema(schema)), _JSON_OPTIONS)
            return f"start: %json {json.dumps(made)}{_OPTIONS}"
        if kind == "choice":
            # A terminal: a rule would have as many items at a time as texts that begin alike, more than the limit.
            return f"start: TEXT\nTEXT: {' | '.join(map(_literal, json.loads(text)))}{_OPTIONS}"
        if kind == "regex":
            return f"start: /{llguidance.regex_to_lark(text, 'dw')}/{_OPTIONS}"
        if kind == "gbnf":
            return _OWN_OPTIONS.sub("//", gbnf_to_lark(text), count=1) + _OPTIONS
        if kind == "lark":
            return text if _OWN_OPTIONS.search(text) else text + _OPTIONS
    except GrammarError:
        raise
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    except Exception as error:  # the converter raises plain exceptions
        raise GrammarError(str(error)[:MAX_ERROR]) from None
    raise GrammarError(f"constraints of kind {kind[:40]!r} are unknown")


def _literal(text: str) -> str:
    """The text in a Lark grammar: as in JSON, but the library wants U+007F escaped, too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def after_reasoning(prefix: ReasoningPrefix, answer: str) -> str:
    """The grammars of a text that may have reasoning before what the Lark grammar `answer` describes.

    The reasoning ends with the first end mark, whatever the answer may contain.
    """
    begin = _literal(prefix.begin) if prefix.begin_id < 0 else f"<[{prefix.begin_id}]>"
    if prefix.end_id < 0:
        rules = f"thinking: text\ntext[lazy]: /(?s:.*){_META.sub(_escaped, prefix.end)}/"
    else:  # the text before a control token ends by itself
        rules = f"thinking: text <[{prefix.end_id}]>\ntext: /(?s:.*)/"
    start = "thinking @answer" if prefix.is_open else f"({begin} thinking)? @answer"
    whole = f"start: {start}\n{rules}{_OPTIONS}"
    return json.dumps({"grammars": [{"lark_grammar": whole}, {"name": "answer", "lark_grammar": answer}]})


def _escaped(found: re.Match[str]) -> str:
    return f"\\{found[0]}"


def new_matcher(tokenizer: Any, constraint: Constraint) -> Any:
    """An `LLMatcher` before its first token; `deep_copy` it for each sequence. Raises `GrammarError`."""
    limits = llguidance.LLParserLimits(**_LIMITS)
    text = to_lark(constraint)
    if constraint.after is not None:
        text = after_reasoning(constraint.after, text)
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
    try:
        check(matcher)
    except GrammarError as error:
        if constraint.kind == "lark":
            raise
        raise GrammarError(_POSITION.sub("", str(error))) from None
    return matcher


def check(matcher: Any) -> None:
    """Raises `GrammarError` if the matcher has failed, `RuntimeError` if it was given a token that is not allowed."""
    if matcher.is_error():
        message = first_line(matcher.get_error())
        if _MISFIT in message:
            raise RuntimeError(message)
        raise GrammarError(_ENDLESS_REASON if message.startswith(_ENDLESS) else message)


def first_line(message: str) -> str:
    """The part of an error message that is of use to a client: without the library's state and its listing."""
    return " ".join(_LISTING.split(message, maxsplit=1)[0].split())[:MAX_ERROR] or "no reason given"
