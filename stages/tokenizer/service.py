"""Frames in, frames out: what the tokenizer stage answers. No sockets, no threads, no clock, no state.

Streams are turned into text by the gateway, of the pieces that a model's description has.
"""

from __future__ import annotations

import codecs
import logging
from array import array
from collections.abc import Callable, Collection, Generator
from typing import Any, NamedTuple, TypeGuard

import msgspec

from pipeline.errors import InternalError, InvalidRequest, ModelUnavailable, StarlingError
from pipeline.protocol import messages as m
from stages.tokenizer.chunked_encode import RunTooLong
from stages.tokenizer.template import ChatTemplate
from stages.tokenizer.vocabulary import TooManyTokens, Vocabulary

log = logging.getLogger("starling.tokenizer")

DECODED_AT_ONCE = 16384  # tokens: about 15 ms
MAX_TEXT_BYTES = 32 << 20  # of decoded tokens, of a vocabulary: an answer is one frame

_decoder = codecs.getincrementaldecoder("utf-8")

Work = m.Encode | m.Render | m.Detokenize


class TokenizerModel(NamedTuple):
    """What the stage holds of a model. `described` has an empty id."""

    vocabulary: Vocabulary
    template: ChatTemplate | None
    described: m.Described


class TokenizerService:
    """`load(name)` opens a model or raises `StarlingError`; called once for each name that works."""

    def __init__(self, load: Callable[[str], TokenizerModel]) -> None:
        self._load = load
        self._models: dict[str, TokenizerModel] = {}
        self.tokens_encoded = 0
        self.tokens_decoded = 0

    def model(self, name: str) -> TokenizerModel:
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = self._load(name)
        return model

    def keep_models(self, names: Collection[str]) -> None:
        """Let go of all others."""
        for name in [name for name in self._models if name not in names]:
            self._models.pop(name, None)

    def answer(self, frame: Any) -> m.Frame | None:
        """The reply to one frame, None where there is none. Never raises for what a client sent."""
        if self.can_wait(frame):
            steps = self.work(frame)
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    return end.value
        try:
            if isinstance(frame, m.Describe):
                return self._describe(frame)
        except StarlingError as error:
            return m.TokenizerFailed(frame.id, error.code, error.message, error.param)
        return None

    @staticmethod
    def can_wait(frame: Any) -> TypeGuard[Work]:
        """May it take long?"""
        return isinstance(frame, Work)

    def work(self, frame: Work) -> Generator[None, None, m.Frame]:
        """Returns the reply; yields every some tens of ms until it has it. Never raises for what a client sent."""
        try:
            try:
                match frame:
                    case m.Encode():
                        return (yield from self._encode(frame))
                    case m.Render():
                        return (yield from self._render(frame))
                    case m.Detokenize():
                        return (yield from self._decode(frame))
            except RunTooLong as error:
                param = "prompt" if isinstance(frame, m.Encode) else "messages"
                raise InvalidRequest(f"{param} has {error}: break them up", param=param) from None
            except TooManyTokens as many:
                return m.Encoded(frame.id, (), b"", many.count, many.is_exact)
        except StarlingError as error:
            return m.TokenizerFailed(frame.id, error.code, error.message, error.param)
        except Exception as error:
            # Not fatal: the gateway would ask the next process the same, and the next.
            log.exception("a text cannot be tokenized", extra={"model": frame.model})
            failed = InternalError(f"the text cannot be tokenized: {type(error).__name__}: {error}")
            return m.TokenizerFailed(frame.id, failed.code, failed.message)

    def _encode(self, frame: m.Encode) -> Generator[None, None, m.Encoded]:
        vocabulary = self.model(frame.model).vocabulary
        text = _utf8(frame.text, "prompt")
        tokens = yield from vocabulary.within(text, frame.parse_special, frame.add_bos, frame.token_limit)
        self.tokens_encoded += len(tokens)
        offsets = vocabulary.offsets(text, tokens).astype("<u4").tobytes() if frame.offsets else b""
        return m.Encoded(frame.id, tuple(tokens), offsets)

    def _render(self, frame: m.Render) -> Generator[None, None, m.Encoded]:
        model = self.model(frame.model)
        if model.template is None:
            raise InvalidRequest(f"model {frame.model!r} has no chat template; use /v1/completions", param="model")
        text = model.template.render(frame.messages, frame.add_generation_prompt, frame.tools, frame.template_vars)
        tokens = yield from model.vocabulary.within(
            _utf8(text, "messages"), parse_special=True, add_bos=True, most=frame.token_limit
        )
        self.tokens_encoded += len(tokens)
        return m.Encoded(frame.id, tuple(tokens))

    def _decode(self, frame: m.Detokenize) -> Generator[None, None, m.Detokenized]:
        vocabulary, decoder = self.model(frame.model).vocabulary, _decoder("replace")
        hidden = vocabulary.control if frame.skip_special else frozenset()
        texts: list[str] = []
        size = 0  # bytes
        for at in range(0, len(frame.tokens), DECODED_AT_ONCE):
            tokens = frame.tokens[at : at + DECODED_AT_ONCE]
            texts.append(decoder.decode(b"".join(vocabulary.token_bytes(t) for t in tokens if t not in hidden)))
            size += len(texts[-1].encode())
            if size > MAX_TEXT_BYTES:
                raise InvalidRequest(
                    f"tokens has {len(frame.tokens)} ids that read as more than {MAX_TEXT_BYTES} bytes of text, "
                    f"the most that is decoded at once: send them in parts",
                    param="tokens",
                )
            yield
        texts.append(decoder.decode(b"", True))
        self.tokens_decoded += len(frame.tokens)
        return m.Detokenized(frame.id, "".join(texts))

    def _describe(self, frame: m.Describe) -> m.Described:
        vocabulary, _, described = self.model(frame.model)
        described = msgspec.structs.replace(described, id=frame.id)
        if described.tokenizer and described.tokenizer in frame.known:
            return described
        pieces, ends = vocabulary.pieces
        if len(pieces) > MAX_TEXT_BYTES:
            raise ModelUnavailable(
                f"the tokens of model {frame.model!r} read as {len(pieces)} bytes, more than the {MAX_TEXT_BYTES} "
                f"that a vocabulary may have",
                param="model",
            )
        control = array("i", sorted(vocabulary.control)).tobytes()
        return msgspec.structs.replace(described, pieces=pieces, piece_ends=ends, control=control)


def _utf8(text: str, param: str) -> str:
    """Refuse lone surrogates: JSON can carry them, UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{param} is not valid Unicode text: lone surrogate {error.object[error.start]!r} at "
            f"character {error.start}; send whole characters",
            param=param,
        ) from None
    return text
