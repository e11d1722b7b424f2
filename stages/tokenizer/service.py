"""The tokenizer's replies: a frame in, a frame out. Without sockets, threads or a clock.

The gateway itself turns streamed tokens into text, with the token bytes in a model's description.
"""

from __future__ import annotations

import codecs
import logging
import time
from array import array
from collections.abc import Callable, Collection, Generator
from datetime import datetime
from typing import Any, NamedTuple, TypeGuard

import msgspec

from pipeline.errors import InternalError, InvalidRequest, ModelUnavailable, StarlingError
from pipeline.observe.log_names import log_names
from pipeline.protocol import messages as m
from stages.tokenizer.chunked_encode import RunTooLong
from stages.tokenizer.steps import result_of
from stages.tokenizer.template import ChatTemplate
from stages.tokenizer.vocabulary import TooManyTokens, Vocabulary

log = logging.getLogger("starling.tokenizer")

TOKENS_PER_STEP = 16384  # decoded in a step: about 15 ms
MAX_TEXT_BYTES = 32 << 20  # of decoded tokens, or of a vocabulary: a reply is one frame

_decoder = codecs.getincrementaldecoder("utf-8")

TextRequest = m.Encode | m.Render | m.Detokenize  # may take long


class TokenizerModel(NamedTuple):
    """A loaded model. `described` is the reply to `Describe`, with an empty id."""

    vocabulary: Vocabulary
    template: ChatTemplate | None
    described: m.Described


class TokenizerService:
    """Replies to frames. `load(name)` opens a model or raises `StarlingError`; a loaded model is kept."""

    def __init__(self, load: Callable[[str], TokenizerModel]) -> None:
        self._load = load
        self._models: dict[str, TokenizerModel] = {}
        self.tokens_encoded = 0
        self.tokens_decoded = 0

    def model(self, name: str) -> TokenizerModel:
        """Return the model, loading it if necessary. Raises `StarlingError`."""
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = self._load(name)
        return model

    def keep_models(self, names: Collection[str]) -> None:
        """Unload all other models."""
        for name in [name for name in self._models if name not in names]:
            self._models.pop(name, None)

    def reply(self, frame: Any) -> m.Frame | None:
        """Return the reply to a frame, None if it needs none. Does not raise for any content of a frame."""
        if self.is_text_request(frame):
            return result_of(self.reply_steps(frame))
        try:
            if isinstance(frame, m.Describe):
                return self._describe(frame)
        except StarlingError as error:
            return m.TokenizerFailed(frame.id, error.code, error.message, error.param)
        return None

    @staticmethod
    def is_text_request(frame: Any) -> TypeGuard[TextRequest]:
        """True for a request whose reply may take long; `reply_steps` makes it in steps."""
        return isinstance(frame, TextRequest)

    def reply_steps(self, frame: TextRequest) -> Generator[None, None, m.Frame]:
        """Make the reply in steps of some tens of ms: a generator that returns it. Does not raise, like `reply`.

        This call opens the model.  The steps do not, so that another thread may run them while models change.
        """
        opened: TokenizerModel | Exception
        try:
            opened = self.model(frame.model)
        except Exception as error:
            opened = error  # the reply
        return self._logged_steps(frame, opened)

    def _logged_steps(self, frame: TextRequest, opened: TokenizerModel | Exception) -> Generator[None, None, m.Frame]:
        began = time.monotonic()
        reply = yield from self._reply_steps(frame, opened)
        if log.isEnabledFor(logging.DEBUG):
            made = len(reply.tokens) if isinstance(reply, m.Encoded) else None
            took_ms = round((time.monotonic() - began) * 1000, 3)
            log.debug("a text is converted", extra={**_of(frame), "tokens": made, "duration_ms": took_ms})
        return reply

    def _reply_steps(self, frame: TextRequest, opened: TokenizerModel | Exception) -> Generator[None, None, m.Frame]:
        try:
            if isinstance(opened, Exception):
                raise opened
            try:
                match frame:
                    case m.Encode():
                        return (yield from self._encode(frame, opened.vocabulary))
                    case m.Render():
                        return (yield from self._render(frame, opened))
                    case m.Detokenize():
                        return (yield from self._decode(frame, opened.vocabulary))
            except RunTooLong as error:
                param = "prompt" if isinstance(frame, m.Encode) else "messages"
                raise InvalidRequest(
                    f"{param} has {error}: split them with spaces or line breaks", param=param
                ) from None
            except TooManyTokens as many:
                return m.Encoded(frame.id, (), b"", many.count, many.is_exact)
        except StarlingError as error:
            return m.TokenizerFailed(frame.id, error.code, error.message, error.param)
        except Exception as error:
            # Not fatal for the stage: the gateway would send the same request to each successor.
            log.exception("cannot tokenize a text", extra=_of(frame))
            failed = InternalError(f"cannot tokenize the text: {type(error).__name__}: {error}")
            return m.TokenizerFailed(frame.id, failed.code, failed.message)

    def _encode(self, frame: m.Encode, vocabulary: Vocabulary) -> Generator[None, None, m.Encoded]:
        if frame.suffix:
            return (yield from self._encode_middle(frame, vocabulary))
        text = _utf8(frame.text, "prompt")
        tokens = yield from vocabulary.encode_steps(text, frame.parse_special, frame.add_bos, frame.token_limit)
        self.tokens_encoded += len(tokens)
        offsets = b""
        if frame.offsets:
            ranges = yield from vocabulary.offset_steps(text, tokens, frame.parse_special)
            offsets = ranges.astype("<u4").tobytes()
        return m.Encoded(frame.id, tuple(tokens), offsets)

    def _encode_middle(self, frame: m.Encode, vocabulary: Vocabulary) -> Generator[None, None, m.Encoded]:
        """The prompt for what stands between two texts."""
        marks = vocabulary.fill_in_middle
        if marks is None:
            raise InvalidRequest(
                f"suffix is given, and model {frame.model!r} has no tokens to fill in the middle of a text; leave it "
                "out, or use a model that has them, such as one for code",
                "suffix",
            )
        limit = frame.token_limit
        try:
            before = yield from vocabulary.encode_steps(_utf8(frame.text, "prompt"), False, False, limit)
            after = yield from vocabulary.encode_steps(_utf8(frame.suffix, "suffix"), False, False, limit)
        except TooManyTokens as many:
            raise TooManyTokens(many.count, False) from None  # of one of the two texts
        tokens = marks.prompt(before, after, vocabulary.bos if frame.add_bos and vocabulary.add_bos else -1)
        if 0 < limit < len(tokens):
            raise TooManyTokens(len(tokens), True)
        self.tokens_encoded += len(tokens)
        return m.Encoded(frame.id, tuple(tokens))

    def _render(self, frame: m.Render, model: TokenizerModel) -> Generator[None, None, m.Encoded]:
        if model.template is None:
            raise InvalidRequest(
                f"model {frame.model!r} has no chat template; set its chat_template, or use /v1/completions",
                param="model",
            )
        try:
            now = datetime.fromisoformat(frame.now) if frame.now else None
        except ValueError:
            raise InvalidRequest(f"the time {frame.now[:40]!r} is not in ISO 8601", param="template_date") from None
        chat = model.template.render(
            frame.messages,
            frame.add_generation_prompt,
            frame.tools,
            frame.template_vars,
            now,
            documents=frame.documents,
            continue_final_message=frame.continue_final_message,
        )
        tokens = yield from model.vocabulary.encode_steps(
            chat.text, parse_special=True, add_bos=True, token_limit=frame.token_limit, marks=chat.marks
        )
        self.tokens_encoded += len(tokens)
        return m.Encoded(frame.id, tuple(tokens))

    def _decode(self, frame: m.Detokenize, vocabulary: Vocabulary) -> Generator[None, None, m.Detokenized]:
        pieces, decoder = vocabulary.decoder(frame.skip_special), _decoder("replace")
        texts: list[str] = []
        size = 0  # bytes
        for at in range(0, len(frame.tokens), TOKENS_PER_STEP):
            tokens = frame.tokens[at : at + TOKENS_PER_STEP]
            texts.append(decoder.decode(b"".join(pieces.push(tokens))))
            size += len(texts[-1].encode())
            if size > MAX_TEXT_BYTES:
                raise InvalidRequest(
                    f"tokens has {len(frame.tokens)} ids that decode to more than {MAX_TEXT_BYTES} bytes of text, "
                    f"the limit for one request: send them in parts",
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
                f"the tokens of model {frame.model!r} have {len(pieces)} bytes; a vocabulary may have at most "
                f"{MAX_TEXT_BYTES}",
                param="model",
            )
        control = array("i", sorted(vocabulary.control)).tobytes()
        return msgspec.structs.replace(described, pieces=pieces, piece_ends=ends, control=control)


def _of(frame: TextRequest) -> dict[str, str | None]:
    """Fields of a log line about a frame."""
    return log_names(frame.request, frame.model, frame.tenant, frame.session)


def _utf8(text: str, param: str) -> str:
    """Return `text`. Raises `InvalidRequest` for lone surrogates, which JSON can encode and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{param} is not valid Unicode text: lone surrogate {error.object[error.start]!r} at "
            f"character {error.start}; send whole characters",
            param=param,
        ) from None
    return text
