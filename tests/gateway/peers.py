"""Scripted peers for the gateway's tests: a vocabulary of bytes, a scheduler with deterministic output.

`Tokenizer` is the real service of the tokenizer stage over a vocabulary in which every byte is a token.
`Generator` answers submissions as the scheduler does; what it generates depends on prompt, seed,
choice and position alone, so that a recovery must not change a byte.
"""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime
from itertools import accumulate

import msgspec
import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ModelNotFound
from pipeline.protocol import messages as m
from stages.gateway.requests.token_bytes import TokenBytes
from stages.tokenizer.chat_messages import RenderedChat
from stages.tokenizer.fill_in_middle import FillInMiddle
from stages.tokenizer.service import TokenizerModel, TokenizerService
from stages.tokenizer.vocabulary import TooManyTokens

EOS, BOS = 256, 257
VOCAB_SIZE = 258
WIDTH = 12  # values of an embedding
POOLED_AT_ONCE = 8
CONTEXT = 4096
LONG = 100_000  # tokens up to which a text over the limit is counted exactly
MODEL = "bytes"
SAY = b"please say "
END_MARK, OTHERWISE = b"</think>", b"\n\nIn short: \xc3\xa4."  # what is generated after an end mark that was forced
TEXT = "Ein Käfig ging, 一只鸟 zu suchen 🐦. "


class ByteDecoder:
    def __init__(self, hidden: Collection[int]) -> None:
        self._hidden = hidden

    def push(self, tokens: Sequence[int]) -> list[bytes]:
        return [ByteVocabulary().token_bytes(token) for token in tokens if token not in self._hidden]


class ByteVocabulary:
    control = frozenset((EOS, BOS))
    size = VOCAB_SIZE
    bos, add_bos = BOS, False
    fill_in_middle = FillInMiddle(1, 2, 3, (4,))

    def token_bytes(self, token: int) -> bytes:
        return {EOS: b"<|end|>", BOS: b"<|begin|>"}.get(token) or bytes([token])

    def decoder(self, skip_special: bool) -> ByteDecoder:
        return ByteDecoder(self.control if skip_special else frozenset())

    @property
    def pieces(self) -> tuple[bytes, bytes]:
        pieces = [self.token_bytes(token) for token in range(VOCAB_SIZE)]
        return b"".join(pieces), array("I", accumulate(map(len, pieces))).tobytes()

    def encode_steps(
        self,
        text: str,
        parse_special: bool,
        add_bos: bool,
        token_limit: int = 0,
        marks: Collection[int] | None = None,
    ) -> Iterator[None]:
        yield
        n = len(text.encode())
        if 0 < token_limit < n:
            raise TooManyTokens(n, is_exact=n <= LONG)
        return list(text.encode())

    def offset_steps(self, text: str, tokens: list[int], parse_special: bool) -> Iterator[None]:
        yield
        return np.arange(len(tokens))[:, None] + np.arange(2)


class JoiningTemplate:
    """A template that writes the date where a message has {now}, and its arguments where a message has {arguments}."""

    def render(
        self,
        messages: list[dict],
        generate: bool,
        tools: object,
        variables: dict,
        now: datetime | None,
        *,
        documents: object,
        continue_final_message: bool,
    ) -> RenderedChat:
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        text = text.replace("{now}", f"{now:%A %d %B %Y %H:%M}" if now is not None else "")
        given = [generate, tools, documents, variables, continue_final_message]
        return RenderedChat(text.replace("{arguments}", json.dumps(given)), frozenset())


def make_tokenizer(template: JoiningTemplate | None = None, **changes: object) -> TokenizerService:
    """`changes`: of the description."""
    described = m.Described(
        "",
        MODEL,
        "ab" * 32,
        VOCAB_SIZE,
        CONTEXT,
        (EOS,),
        True,
        "bytes",
        258,
        1_700_000_000,
        tokenizer="cd" * 32,
        width=WIDTH,
        fim_ends=ByteVocabulary.fill_in_middle.ends,
        quantization="Q4_K",
    )

    def load(name: str) -> TokenizerModel:
        if name != MODEL:
            raise ModelNotFound(f"there is no model {name!r}", "model")
        replaced = msgspec.structs.replace(described, **changes)
        return TokenizerModel(ByteVocabulary(), template or JoiningTemplate(), replaced)  # type: ignore[arg-type]

    return TokenizerService(load)


def make_token_bytes() -> TokenBytes:
    described = make_tokenizer().reply(m.Describe("", MODEL))
    assert isinstance(described, m.Described)
    pieces = TokenBytes()
    pieces.fill(described)
    return pieces


def output(prompt: bytes, seed: int, choice: int, n: int, stop_ids: tuple[int, ...] = ()) -> list[int]:
    """Return the tokens that a submission generates: bytes of TEXT from a random position, sometimes EOS.

    What stands after `SAY` in the prompt, up to the end of its line, is generated as it is; there \\n is a newline.
    """
    _, say, said = bytes(token for token in array("i", prompt) if token < 256).rpartition(SAY)
    if say:
        tokens = [*said.partition(b"\n")[0].replace(b"\\n", b"\n"), EOS]
        return tokens[:n]
    digest = hashlib.sha256(prompt + seed.to_bytes(8, "little") + bytes([choice])).digest()
    text = TEXT.encode()
    start, ends_at = digest[0] % len(text), 5 + digest[1]
    tokens = []
    for i in range(n):
        if EOS in stop_ids and i == ends_at:
            return [*tokens, EOS]
        tokens.append(text[(start + i) % len(text)])
    return tokens


class Generator:
    """A scheduler: handles `Submit` and `Cancel`; `step(n)` generates up to n tokens of each running sequence."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[m.Submit, int]] = {}  # tokens sent
        self.submitted: list[m.Submit] = []
        self.cancelled: list[m.Cancel] = []
        self.outbox: list[m.Frame] = []
        self.pooling: dict[str, m.Submit] = {}  # prompts whose vectors are wanted
        self.most_pooling = 0
        self.steps = 0
        self.is_starting = False  # whether sequences leave the queue before their first token
        self._expected: dict[str, list[int]] = {}
        self._scored: dict[str, int] = {}  # prompt tokens whose scores were sent
        self.refuse: Callable[[m.Submit], m.Rejected | None] = lambda frame: None

    def receive(self, frame: m.Frame) -> None:
        match frame:
            case m.Submit():
                self.submitted.append(frame)
                refused = self.refuse(frame)
                if refused is not None:
                    self.outbox.append(refused)
                    return
                if frame.sequence in self.running:
                    self._check_again(frame)
                self._expected.pop(frame.sequence, None)
                if frame.pooling:
                    self.pooling[frame.sequence] = frame
                    self.most_pooling = max(self.most_pooling, len(self.pooling))
                    return
                self.running[frame.sequence] = (frame, len(frame.forced) // 4)
                if frame.prompt_logprobs >= 0:
                    self._scored[frame.sequence] = frame.scored
                if self.is_starting:
                    self.outbox.append(m.Tokens(MODEL, self.steps, [], (frame.sequence,)))
            case m.Cancel():
                self.cancelled.append(frame)
                self.pooling.pop(frame.sequence, None)
                if frame.sequence in self.running:
                    cancelled, sent = self.running.pop(frame.sequence)
                    self._expected.pop(frame.sequence, None)
                    revision = cancelled.revision
                    over = m.SequenceTokens(frame.sequence, sent, (), finish="cancelled", revision=revision)
                    self.outbox.append(m.Tokens(MODEL, self.steps, [over]))

    def _check_again(self, frame: m.Submit) -> None:
        """A gateway that was restarted sends what it has; only output that is replaced needs a higher revision."""
        before, sent = self.running[frame.sequence]
        assert frame.prompt == before.prompt
        if frame.revision <= before.revision and not frame.pooling:
            known = (self._expected.get(frame.sequence) or expected_tokens(before))[:sent]
            forced = array("i", frame.forced).tolist()
            assert forced == known[: len(forced)]

    def step(self, n: int = 1) -> None:
        self.steps += 1
        for sequence in list(self.pooling)[:POOLED_AT_ONCE]:
            pooled = self.pooling.pop(sequence)
            self.outbox.append(m.Pooled(sequence, hidden(pooled.prompt, pooled.pooling).tobytes()))
        moved = []
        for sequence, (frame, sent) in list(self.running.items()):
            everything = self._expected.get(sequence) or expected_tokens(frame)
            self._expected[sequence] = everything
            if frame.prompt_logprobs >= 0 and (scores := self._scores(frame, 4 * n)) is not None:
                moved.append(scores)
                continue
            if sent:
                assert array("i", frame.forced).tolist() == everything[: len(frame.forced) // 4]
            new = tuple(everything[sent : sent + n])
            over = sent + len(new) == len(everything)
            finish = ("stop" if everything[-1:] == [EOS] else "length") if over else ""
            logprobs = ()
            top = frame.sampling.logprobs
            if top >= 0:
                logprobs = tuple(m.Logprob(-0.5, ((t, -0.5), (65, -1.5), (66, -2.5))[: top or 0]) for t in new)
            cached = 3 if sent == 0 else 0
            part = m.SequenceTokens(sequence, sent, new, logprobs, finish, cached_tokens=cached)
            moved.append(msgspec.structs.replace(part, revision=frame.revision))
            if over:
                del self.running[sequence]
                self._expected.pop(sequence, None)
            else:
                self.running[sequence] = (frame, sent + len(new))
        if moved:
            self.outbox.append(m.Tokens(MODEL, self.steps, moved))

    def _scores(self, frame: m.Submit, n: int) -> m.SequenceTokens | None:
        """The next `n` scores of the prompt; None: all were sent."""
        first, end = self._scored[frame.sequence], len(frame.prompt) // 4
        if first >= end:
            return None
        last = self._scored[frame.sequence] = min(end, first + n)
        scores = b"".join(score_words(frame.prompt, index, frame.prompt_logprobs) for index in range(first, last))
        return m.SequenceTokens(frame.sequence, 0, (), score_start=first, scores=scores)


def score_words(prompt: bytes, index: int, top: int) -> bytes:
    """The score of a token of a prompt."""
    rank = 1 + hashlib.sha256(prompt + bytes([index % 251])).digest()[0]
    others = ((65 + i, -0.25 * (i + rank)) for i in range(top))
    return struct.pack("<" + "if" * (1 + top), rank, -0.5 * rank, *(value for pair in others for value in pair))


def hidden(prompt: bytes, pooling: str) -> NDArray[np.float32]:
    """The vector of a prompt, which depends on nothing else."""
    digest = hashlib.sha256(prompt + pooling.encode()).digest()
    return np.frombuffer(digest[:WIDTH], np.int8).astype("<f4") / 7


def expected_tokens(frame: m.Submit) -> list[int]:
    if not frame.max_tokens:
        return []
    tokens = output(frame.prompt, frame.sampling.seed, frame.choice, frame.max_tokens, frame.stop_ids)
    forced = array("i", frame.forced).tolist()
    if tokens[: len(forced)] == forced:
        return tokens
    return replaced(forced)[: frame.max_tokens]


def replaced(forced: list[int]) -> list[int]:
    """The output after forced tokens that are not its own: the end of a replaced text, or `OTHERWISE`."""
    behind = bytes(token for token in forced if token < 256).rpartition(END_MARK)[2]
    assert OTHERWISE.startswith(behind)
    return [*forced, *OTHERWISE[len(behind) :], EOS]


def text_of(tokens: list[int], stop: str = "") -> str:
    """Return the text that a client must receive."""
    text = bytes(t for t in tokens if t < 256).decode("utf-8", "replace")
    return text[: text.index(stop)] if stop and stop in text else text
