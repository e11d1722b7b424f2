"""The token ids of texts that are pooled: each alone, or two of them as a pair that the model scores.

A text begins and ends with the tokens that the model wants.  A pair begins with those of its first text, has the
separator between the texts, and ends like a text: `[CLS] a [SEP] b [SEP]` of BERT, `<s> a </s></s> b </s>` of RoBERTa.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

from pipeline.api.requests.generation_request import TextOrIds
from pipeline.errors import InvalidRequest
from pipeline.protocol import messages as m
from shm.step_ring import MAX_POOLED_POSITIONS
from stages.gateway.admission.lengths import CONTEXT_EXCEEDED, Bounds
from stages.gateway.admission.prompts import check_range
from stages.gateway.endpoints.embedding_response import with_end
from stages.gateway.tokenizer_client import TextOwner, TokenizerClient

ENCODED_AT_ONCE = 64  # inputs of a request at the tokenizer
MAX_PAIR_TOKENS = 1 << 22  # of all pairs of a request, which repeat the query: 16 MB


class PooledPrompts:
    """The encoder of one request's texts.

    `in_one_step`: positions that a step computes, which bound a model that reads a whole text at once.
    """

    def __init__(
        self,
        tokenizer: TokenizerClient,
        version_id: str,
        described: m.Described,
        bounds: Bounds,
        in_one_step: int,
        owner: TextOwner,
    ) -> None:
        self._tokenizer = tokenizer
        self._version_id = version_id
        self._described = described
        self._owner = owner
        self._longest = min(bounds.context, bounds.max_prompt_tokens or bounds.context, MAX_POOLED_POSITIONS)
        self._bound = "the model's context, or scheduler.max_prompt_tokens"
        if not described.generates and in_one_step < self._longest:
            self._longest = in_one_step
            self._bound = "which the model computes in one step: scheduler.max_step_tokens"

    async def alone(self, inputs: Sequence[TextOrIds], names: Sequence[str]) -> list[bytes]:
        """Return the token ids of each input, i32 little-endian. `names`: of the inputs, for error messages.

        Raises `InvalidRequest`.
        """
        described = self._described

        async def encoded(text: str, index: int) -> bytes:
            tokens = with_end(await self._encode(text, names[index], add_bos=True), described.end_id)
            return self._checked(tokens, names[index])

        prompts: list[bytes] = []
        for begin in range(0, len(inputs), ENCODED_AT_ONCE):
            some = inputs[begin : begin + ENCODED_AT_ONCE]
            texts = [encoded(one, begin + i) for i, one in enumerate(some) if isinstance(one, str)]
            replies = iter(await asyncio.gather(*texts))
            prompts += [
                next(replies) if isinstance(one, str) else self._checked(one, names[begin + i])
                for i, one in enumerate(some)
            ]
        return prompts

    async def pairs(self, texts: Sequence[str], names: Sequence[str], pairs: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the token ids of each of `pairs` of texts (their indices). Raises `InvalidRequest`."""
        described, firsts = self._described, {first for first, _ in pairs}
        parts: list[tuple[int, ...]] = []
        for begin in range(0, len(texts), ENCODED_AT_ONCE):
            some = range(begin, min(begin + ENCODED_AT_ONCE, len(texts)))
            parts += await asyncio.gather(
                *(self._encode(texts[i], names[i], add_bos=i in firsts) for i in some),
            )
        prompts, total = [], 0
        end = (described.end_id,) if described.end_id >= 0 else ()
        for first, second in pairs:
            total += len(parts[first]) + len(described.pair_separator) + len(parts[second]) + len(end)
            if total > MAX_PAIR_TOKENS:
                raise InvalidRequest(
                    f"the pairs up to {names[second]} have {total} tokens; at most {MAX_PAIR_TOKENS} are allowed: send "
                    f"several requests",
                    _field(names[second]),
                )
            tokens = (*parts[first], *described.pair_separator, *parts[second], *end)
            prompts.append(self._checked(tokens, f"{names[second]} after {names[first]}", _field(names[second])))
            await asyncio.sleep(0)  # streams of others go on between two pairs
        return prompts

    async def _encode(self, text: str, name: str, add_bos: bool) -> tuple[int, ...]:
        reply = await self._tokenizer.encode(
            self._version_id, text, add_bos=add_bos, token_limit=self._longest, owner=self._owner, field=name
        )
        if reply.too_many:
            raise self._too_long(name, _field(name), reply.too_many, reply.is_exact)
        return reply.tokens

    def _checked(self, tokens: Sequence[int], name: str, field: str = "") -> bytes:
        field = field or _field(name)
        if len(tokens) > self._longest:
            raise self._too_long(name, field, len(tokens))
        if not tokens:
            raise InvalidRequest(f"{name} has no tokens; send some text", field)
        check_range(tokens, name + "[{}]", field, self._described.vocab_size)
        return array("i", tokens).tobytes()

    def _too_long(self, name: str, field: str, n: int, is_exact: bool = True) -> InvalidRequest:
        count = n if is_exact else f"at least {n}"
        return InvalidRequest(
            f"{name} has {count} tokens; at most {self._longest} are allowed ({self._bound}): shorten it",
            field,
            code=CONTEXT_EXCEEDED,
        )


def _field(name: str) -> str:
    """The field of an input's name: "documents" of "documents[3]"."""
    return name.partition("[")[0]
