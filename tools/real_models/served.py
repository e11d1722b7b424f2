"""Answers of a running server: chats through `/v1/chat/completions`, and the token ids of the same texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from stages.tokenizer.service import TokenizerModel
from tools.bench.http.server_under_test import ServerUnderTest

TIMEOUT_S = 600


class Chat(NamedTuple):
    """A greedy answer: the prompt's ids, the answer's ids, and its text."""

    prompt: list[int]
    tokens: list[int]
    text: str


def post(server: ServerUnderTest, path: str, body: dict[str, Any]) -> Any:
    """The JSON of the response. Raises `RuntimeError` with the body of an error."""
    url = f"http://{server.address[0]}:{server.address[1]}{path}"
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=TIMEOUT_S) as response:
            return json.load(response)
    except HTTPError as error:
        raise RuntimeError(f"{path} answered {error.code}: {error.read().decode(errors='replace')}") from None


def chat(server: ServerUnderTest, opened: TokenizerModel, question: str, n: int) -> Chat:
    """The greedy answer to a question, of at most `n` tokens.

    Two requests: `/v1/chat/completions` gives the text, `/v1/generate` with the ids of the same prompt the ids.  Raises
    `RuntimeError` if the two texts, or the numbers of tokens of the two prompts, differ.
    """
    messages = [{"role": "user", "content": question}]
    settings = {"max_tokens": n, "temperature": 0, "seed": 1}
    answer = post(server, "/v1/chat/completions", {"model": server.model, "messages": messages, **settings})
    text = answer["choices"][0]["message"]["content"]
    prompt = render(opened, messages)
    raw = post(server, "/v1/generate", {"model": server.model, "prompt": prompt, **settings})
    if len(prompt) != answer["usage"]["prompt_tokens"]:
        raise RuntimeError(
            f"the prompt has {answer['usage']['prompt_tokens']} tokens at the server, {len(prompt)} here"
        )
    if raw["choices"][0]["text"].strip() != text.strip():
        raise RuntimeError(f"the endpoints answer differently: {raw['choices'][0]['text']!r} and {text!r}")
    tokens = [token for token in raw["choices"][0]["tokens"] if token not in opened.vocabulary.eos_ids]
    return Chat(prompt, tokens, text)


def render(opened: TokenizerModel, messages: Sequence[dict[str, str]]) -> list[int]:
    """The ids of the prompt that the server makes of a chat."""
    if opened.template is None:
        raise RuntimeError("the model has no chat template")
    rendered = opened.template.render(messages)
    return opened.vocabulary.encode(rendered.text, parse_special=True, add_bos=True, marks=rendered.marks)
