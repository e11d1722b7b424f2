"""The requests that `starling chaos` sends, drawn from a seed.

They share prefixes, are greedy or sampled, and use log-probabilities, several choices, stop strings, draft tokens,
chats, and sessions of two turns.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

WORDS = (  # noqa: SIM905
    "river stone lantern quiet harbour copper meadow signal winter thread orchard paper mirror engine "
    "salt window garden number shadow bridge letter morning compass island feather clock market"
).split()
RESERVED_TOKENS = 192  # of the context: the second prompt of a session and the chat template
MIN_PROMPT_BYTES = 64  # enough for prompts to differ


@dataclass(frozen=True)
class ChaosRequest:
    """One request of the plan. Two turns are a session of /v1/generate that begins and ends with them."""

    path: str
    turns: tuple[dict[str, Any], ...]

    @property
    def is_session(self) -> bool:
        """Whether the request is a session of several turns."""
        return len(self.turns) > 1


class ServedModel(NamedTuple):
    """A model as GET /v1/models lists it."""

    name: str
    has_chat: bool  # it has a chat template
    context: int  # tokens

    def prompt_bytes(self, max_tokens: int, max_prompt: int) -> int:
        """The length, in bytes, of a prompt that fits in any case: a token has at least one byte.

        The context also holds two answers of a session, its second prompt and a chat template. Raises `RuntimeError`
        if the context is too small.
        """
        available = min(self.context - 2 * max_tokens - RESERVED_TOKENS, max_prompt or self.context)
        if available < MIN_PROMPT_BYTES:
            raise RuntimeError(
                f"model {self.name!r} has a context of {self.context} tokens, which is too small for answers of "
                f"{max_tokens} tokens and prompts of {MIN_PROMPT_BYTES} bytes: lower --tokens"
            )
        return available


def plan(
    count: int, seed: int, max_tokens: int, models: list[ServedModel], long_prompts: bool = False, max_prompt: int = 0
) -> list[ChaosRequest]:
    """`count` different requests over all `models`, drawn from `seed`.

    `max_prompt` bounds the prompts in tokens; 0 leaves it to the context. Raises `RuntimeError` if a model's context
    is too small for answers of `max_tokens`.
    """
    rng = random.Random(seed)
    prefix = " ".join(rng.choice(WORDS) for _ in range(80))
    requests = []
    for i in range(count):
        length = rng.choice((4, 20, 60)) * (6 if long_prompts else 1)
        words = " ".join(rng.choice(WORDS) for _ in range(length))
        model = models[i % len(models)]
        limit = model.prompt_bytes(max_tokens, max_prompt)
        shared = prefix[: limit // 2]
        body: dict[str, Any] = {
            "model": model.name,
            "prompt": (f"{shared} {words}" if i % 2 else words)[:limit],
            "max_tokens": rng.randint(max_tokens // 2, max_tokens),
            "seed": rng.randrange(1 << 32),
            "temperature": rng.choice((0, 0.7, 1.0)),
            "ignore_eos": i % 3 != 0,
        }
        if i % 4 == 1:
            body |= {"top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.3}
        if i % 4 == 2:
            body["logprobs"] = 3
        if i % 5 == 3:
            body["n"] = 2
        if i % 7 == 4:
            body["stop"] = ["\n\n", ". The"]
        if i % 6 == 2:
            # Prompt lookup finds drafts in text that repeats itself.
            body |= {"speculate": 6, "temperature": 0, "prompt": f"{body['prompt']} {words} {words}"[:limit]}
        if i % 8 == 5 and model.has_chat:
            requests.append(ChaosRequest("/v1/chat/completions", (_chat(body),)))
        elif i % 8 == 7:
            body.pop("n", None)
            turns = {**body, "session_id": ""}, {**body, "prompt": f" And then, {words[:80]}", "seed": body["seed"] ^ 1}
            requests.append(ChaosRequest("/v1/generate", turns))
        else:
            requests.append(ChaosRequest("/v1/generate", (body,)))
    return requests


def _chat(body: dict[str, Any]) -> dict[str, Any]:
    """The same request for /v1/chat/completions, with all parameters that OpenAI's API has for it."""
    kept = ("model", "max_tokens", "seed", "temperature", "top_p", "presence_penalty", "n", "stop")
    chat = {name: body[name] for name in kept if name in body}
    messages = [{"role": "system", "content": "You answer at length."}, {"role": "user", "content": body["prompt"]}]
    options = {"logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}
    return {**chat, "messages": messages, **options}
