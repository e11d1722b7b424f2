"""A model with a SentencePiece vocabulary through every stage: chats, streams, stop strings, tokens and back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.e2e.conftest import share_caches
from tests.e2e.server import Server
from tests.tokenizer.trained import sentencepiece_spec
from tools.tiny_gguf import SHAPES, write_model
from tools.vocabulary_gguf import add_vocabulary

pytestmark = pytest.mark.slow

TEXT = "the  quick é 日本 🐦\n\ta"
# As TinyLlama's: turns are plain text, and a turn ends with the EOS token.
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("sentencepiece")
    share_caches(home)
    spec = sentencepiece_spec()
    # Without ChatML's tokens, by which the family would be recognized.
    spec = spec._replace(tokens=[token.replace("<|im_", "<extra_") for token in spec.tokens])
    shape = SHAPES["grouped"]._replace(vocab_size=len(spec.tokens))
    path = str(write_model(home / "m.gguf", shape, seed=3, add_vocabulary=partial(add_vocabulary, spec=spec)))
    common = {"path": path, "kv_cache_mb": 8, "max_batch_size": 4}
    models = [{"name": "fallback", **common}, {"name": "own", "chat_template": TEMPLATE, **common}]
    with Server(home, {"models": models}) as server:
        yield server


def ask(server: Server, path: str, **body: Any) -> dict[str, Any]:
    return dict(server.post(path, **{"model": "own", **body}))


def chat(server: Server, model: str = "own", content: str = "hello <s>", **more: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": content}], "seed": 5, "max_tokens": 48, **more}
    return ask(server, "/v1/chat/completions", **body)


def test_tokens_and_back(server: Server) -> None:
    for parse in (False, True):
        for text in (TEXT, "a<s>b", " ", "[INST] x"):
            found = ask(server, "/v1/tokenize", text=text, parse_special=parse)
            begins = [0, *(end for _, end in found["offsets"])]
            assert [begin for begin, _ in found["offsets"]] == begins[:-1]
            assert begins[-1] == len(text.encode())
            assert ask(server, "/v1/detokenize", tokens=found["tokens"])["text"] == text
    with_bos = ask(server, "/v1/tokenize", text="a", add_special_tokens=True)
    assert (with_bos["tokens"][0], with_bos["offsets"][0]) == (1, [0, 0])


def test_an_answer_is_the_text_of_its_tokens_streamed_or_not(server: Server) -> None:
    """Sampled at random, so that bytes of characters follow each other in any order."""
    body = {"prompt": "the quick", "seed": 4, "max_tokens": 160, "temperature": 1.5, "ignore_eos": True}
    whole = ask(server, "/v1/generate", **body)["choices"][0]
    vocabulary = sentencepiece_spec()
    assert len(whole["tokens"]) == 160
    assert any(vocabulary.types[token] == 6 for token in whole["tokens"])
    begun = ask(server, "/v1/tokenize", text="the quick")["tokens"]
    continued = ask(server, "/v1/detokenize", tokens=[*begun, *whole["tokens"]], skip_special_tokens=True)["text"]
    # After a special token, detokenizing drops the space that tokenizing would add.
    assert continued.removeprefix("the quick").replace(" ", "") == whole["text"].replace(" ", "")
    streamed = [event for event in server.stream("/v1/generate", model="own", **body) if "text" in event]
    assert "".join(event["text"] for event in streamed) == whole["text"]
    assert len(streamed) > 20


def test_a_stop_string_across_tokens_ends_the_answer(server: Server) -> None:
    body = {"prompt": "the quick", "seed": 4, "max_tokens": 120, "temperature": 1.2, "ignore_eos": True}
    text = ask(server, "/v1/generate", **body)["choices"][0]["text"]
    stop = text[30:35]
    found = ask(server, "/v1/generate", **body, stop=[stop])["choices"][0]
    assert (found["text"], found["finish_reason"]) == (text[: text.index(stop)], "stop")


def test_chats_with_the_configured_and_the_fallback_template(server: Server) -> None:
    own, fallback = chat(server), chat(server, "fallback")
    assert own["choices"] != fallback["choices"]
    assert own["choices"] == chat(server)["choices"]
    prompt = "<|user|>\nhello <s>"  # with the EOS token, a line break and the next turn's head
    tokens = ask(server, "/v1/tokenize", text=prompt)["tokens"]
    assert own["usage"]["prompt_tokens"] > len(tokens) + 2
    system = {"role": "system", "content": "S"}
    user = {"role": "user", "content": "U"}
    assert ask(server, "/v1/chat/completions", model="fallback", messages=[system, user], max_tokens=4)["choices"]
    server.wait_output("built-in", "llama-2")
