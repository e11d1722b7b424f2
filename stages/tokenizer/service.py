"""Frames in, frames out: what the tokenizer stage answers. No sockets, no threads, no clock.

Decoders of streams are soft state: bounded, forgotten on request, and lost with the process.  A frame
that continues a stream whose decoder is not here is answered with `lost`, and the gateway sends the
stream again from its first token; the text comes out the same.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator
from typing import Any, NamedTuple, TypeGuard

import msgspec

from pipeline import messages as m
from pipeline.errors import InternalError, InvalidRequest, StarlingError
from stages.tokenizer.incremental import StreamDecoder
from stages.tokenizer.stretches import RunTooLong
from stages.tokenizer.template import ChatTemplate
from stages.tokenizer.vocabulary import TooManyTokens, Vocabulary

log = logging.getLogger("starling.tokenizer")

DECODED_AT_ONCE = 16384  # tokens: about 15 ms
MAX_TEXT_BYTES = 32 << 20  # of tokens that are decoded for themselves: an answer is one frame
MAX_STREAMS = 16384  # decoders kept; the stream longest unused is lost first

Work = m.Encode | m.Render | m.Detokenize


class TokenizerModel(NamedTuple):
    """What the stage holds of a model. `described` has an empty id."""

    vocabulary: Vocabulary
    template: ChatTemplate | None
    described: m.Described


class TokenizerService:
    """`load(name)` opens a model or raises `StarlingError`; called once for each name that works."""

    def __init__(self, load: Callable[[str], TokenizerModel], max_streams: int = MAX_STREAMS) -> None:
        self._load = load
        self._models: dict[str, TokenizerModel] = {}
        self._streams: OrderedDict[str, StreamDecoder] = OrderedDict()
        self._max_streams = max_streams
        self.tokens_encoded = 0
        self.tokens_decoded = 0

    @property
    def streams(self) -> int:
        return len(self._streams)

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
        if isinstance(frame, m.Forget):
            for sequence in frame.sequences:
                self._streams.pop(sequence, None)
            return None
        if self.can_wait(frame):
            steps = self.work(frame)
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    return end.value
        try:
            match frame:
                case m.Detokenize():
                    return self._detokenize(frame)
                case m.Describe():
                    described = self.model(frame.model).described
                    return m.Described(**{**{f: getattr(described, f) for f in described.__struct_fields__},
                                          "id": frame.id})  # fmt: skip
        except StarlingError as error:
            return m.TokenizerFailed(frame.id, error.code, error.message, error.param)
        return None

    @staticmethod
    def can_wait(frame: Any) -> TypeGuard[Work]:
        """Is it a question for itself, and no news of a stream?"""
        if isinstance(frame, m.Detokenize):
            return len(frame.streams) == 1 and _is_whole(frame.streams[0])
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
        tokens = yield from vocabulary.within(text, frame.parse_special, frame.add_bos, frame.most)
        self.tokens_encoded += len(tokens)
        offsets = vocabulary.offsets(text, tokens).astype("<u4").tobytes() if frame.offsets else b""
        return m.Encoded(frame.id, tuple(tokens), offsets)

    def _render(self, frame: m.Render) -> Generator[None, None, m.Encoded]:
        model = self.model(frame.model)
        if model.template is None:
            raise InvalidRequest(
                f"model {frame.model!r} has no chat template; use /v1/completions", param="model"
            )
        text = model.template.render(
            frame.messages, frame.add_generation_prompt, frame.tools, frame.template_vars
        )
        tokens = yield from model.vocabulary.within(
            _utf8(text, "messages"), parse_special=True, add_bos=True, most=frame.most
        )
        self.tokens_encoded += len(tokens)
        return m.Encoded(frame.id, tuple(tokens))

    def _decode(self, frame: m.Detokenize) -> Generator[None, None, m.Detokenized]:
        """As `_detokenize` for one stream that begins and ends here, in parts."""
        vocabulary = self.model(frame.model).vocabulary
        (whole,) = frame.streams
        decoder, length, size = StreamDecoder(), 0, 0  # characters, bytes
        texts: list[str] = []
        cuts: list[int] = []
        for at in range(0, len(whole.tokens), DECODED_AT_ONCE):
            tokens = whole.tokens[at : at + DECODED_AT_ONCE]
            part = msgspec.structs.replace(whole, tokens=tokens, final=at + len(tokens) == len(whole.tokens))
            shown = self._shown(vocabulary, decoder, part)
            cuts += [length + cut for cut in shown.cuts]
            texts.append(shown.text)
            length += len(shown.text)
            size += len(shown.text.encode())
            if size > MAX_TEXT_BYTES:
                raise InvalidRequest(
                    f"tokens has {len(whole.tokens)} ids that read as more than {MAX_TEXT_BYTES} bytes of text, "
                    f"the most that is decoded at once: send them in parts",
                    param="tokens",
                )
            if not part.final:
                cuts.append(length)
            yield
        text = m.StreamText(whole.sequence, decoder.consumed, "".join(texts), cuts=tuple(cuts))
        return m.Detokenized(frame.id, [text])

    def _detokenize(self, frame: m.Detokenize) -> m.Detokenized:
        vocabulary = self.model(frame.model).vocabulary
        return m.Detokenized(frame.id, [self._advance(vocabulary, s) for s in frame.streams])

    def _advance(self, vocabulary: Vocabulary, new: m.StreamTokens) -> m.StreamText:
        streams = self._streams
        decoder = None if new.start == 0 else streams.pop(new.sequence, None)
        if new.start == 0:
            streams.pop(new.sequence, None)
            decoder = StreamDecoder(new.stop, new.include_stop)
        if decoder is None or decoder.consumed != new.start:
            return m.StreamText(new.sequence, 0, "", lost=True)
        text = self._shown(vocabulary, decoder, new)
        if not new.final and not text.stopped:
            streams[new.sequence] = decoder
            if len(streams) > self._max_streams:
                streams.popitem(last=False)
        return text

    def _shown(self, vocabulary: Vocabulary, decoder: StreamDecoder, new: m.StreamTokens) -> m.StreamText:
        pieces: list[str] = []
        length, cuts = 0, []
        for token in new.tokens:
            shown = not (new.skip_special and token in vocabulary.control)
            pieces.append(decoder.push(vocabulary.token_bytes(token) if shown else b""))
            length += len(pieces[-1])
            cuts.append(length)
            if decoder.stop_string:
                break
        self.tokens_decoded += len(new.tokens)
        if new.final and not decoder.stop_string:
            pieces.append(decoder.finish())
        stopped = bool(decoder.stop_string)
        return m.StreamText(
            new.sequence,
            decoder.consumed,
            "".join(pieces),
            stopped,
            decoder.stop_string,
            decoder.consumed if stopped else 0,
            False,
            tuple(map(vocabulary.token_bytes, new.tokens)) if new.want_bytes else (),
            tuple(map(vocabulary.token_bytes, new.extra)),
            tuple(cuts[:-1]),
        )


def _is_whole(new: m.StreamTokens) -> bool:
    """Are these all of its tokens, and is only their text wanted?"""
    return new.final and not (new.start or new.stop or new.want_bytes or new.extra)


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
