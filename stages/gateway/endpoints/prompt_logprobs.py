"""`prompt_logprobs` and OpenAI's `echo` with `logprobs`: scores of the tokens of a prompt in the forms of each API.

A prompt's scores are complete before a formatter writes the first of them.
"""

from __future__ import annotations

from array import array
from typing import Any

from stages.gateway.endpoints.response_formatter import TextOffsets, finite_logprob, token_key, token_text
from stages.gateway.requests.prompt_scores import PromptScores
from stages.gateway.requests.state import RequestState, SequenceState
from stages.gateway.requests.token_bytes import TokenBytes

TOKENS_PER_EVENT = 256  # of a prompt, in a stream


class ScoredPrompt:
    """One prompt of a request, with the score of each token."""

    def __init__(self, tokens: array[int], scores: PromptScores, vocabulary: TokenBytes) -> None:
        self.tokens = tokens
        self._scores = scores
        self._vocabulary = vocabulary

    def __len__(self) -> int:
        return len(self.tokens)

    def spans(self) -> list[tuple[int, int]]:
        """The parts of the prompt that have an event each."""
        return [(at, min(at + TOKENS_PER_EVENT, len(self))) for at in range(0, len(self), TOKENS_PER_EVENT)]

    def offsets(self, text: str) -> list[int]:
        """Where each token begins in `text`, in characters; control tokens that the text does not show have none."""
        shown = [self._vocabulary.get(token) for token in self.tokens]
        if b"".join(shown).decode("utf-8", "replace") != text:
            shown = [self._vocabulary.shown(token, True) for token in self.tokens]
        lead = b"".join(shown).startswith(b" ") and not text.startswith(" ")  # of a SentencePiece vocabulary
        offsets = TextOffsets(-int(lead))
        return [max(0, offsets.next(piece)) for piece in shown]

    def openai(self, begin: int, end: int, top: int) -> tuple[list[str], list[float | None], list[Any]]:
        """Return `tokens`, `token_logprobs` and `top_logprobs` of the tokens [begin, end)."""
        tokens, values, tops = [], list[float | None](), list[dict[str, float] | None]()
        for index in range(begin, end):
            tokens.append(self._key(self.tokens[index]))
            score = self._scores[index]
            if score is None:
                values.append(None)
                tops.append(None)
            else:
                value = finite_logprob(score.logprob)
                values.append(value)
                best = {self._key(token): finite_logprob(other) for token, other in score.top[:top]}
                tops.append(best | {tokens[-1]: value})
        return tokens, values, tops

    def vllm(self) -> list[Any]:
        """Return vLLM's `prompt_logprobs`: for each token its score and the highest ones, by token id."""
        found: list[Any] = []
        for index, token in enumerate(self.tokens):
            score = self._scores[index]
            if score is None:
                found.append(None)
                continue
            ranked = [(token, score.logprob, score.rank)]
            ranked += [(other, value, rank) for rank, (other, value) in enumerate(score.top, 1)]
            found.append(
                {
                    str(other): {
                        "logprob": finite_logprob(value),
                        "rank": rank,
                        "decoded_token": token_text(self._vocabulary.get(other)),
                    }
                    for other, value, rank in ranked
                }
            )
        return found

    def entries(self, begin: int, end: int) -> list[dict[str, Any]]:
        """Return the form of /v1/generate, of the tokens [begin, end)."""
        found = []
        for index in range(begin, end):
            score = self._scores[index]
            entry = self._named(self.tokens[index])
            if score is None:
                entry |= {"logprob": None, "rank": None, "top": []}
            else:
                top = [{**self._named(token), "logprob": finite_logprob(value)} for token, value in score.top]
                entry |= {"logprob": finite_logprob(score.logprob), "rank": score.rank, "top": top}
            found.append(entry)
        return found

    def _key(self, token: int) -> str:
        return token_key(self._vocabulary.get(token))

    def _named(self, token: int) -> dict[str, Any]:
        piece = self._vocabulary.get(token)
        return {"id": token, "token": token_text(piece), "bytes": list(piece)}


def scored_prompt(request: RequestState, sequence: SequenceState, vocabulary: TokenBytes) -> ScoredPrompt | None:
    """Return the scored prompt of a sequence; None if the request wants no scores."""
    scores = request.scores.get(sequence.spec.prompt)
    if scores is None:
        return None
    tokens = array("i")
    tokens.frombytes(request.spec.prompt_of(sequence.spec))
    return ScoredPrompt(tokens, scores, vocabulary)
