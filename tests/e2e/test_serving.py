"""The determinism guarantee, streaming, and refusals over HTTP, through every stage."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from pipeline.config.schema import DEMO_MODEL
from tests.e2e.server import Server, poll_until

pytestmark = pytest.mark.slow

PROMPTS = [
    "The lighthouse keeper climbed the stairs and",
    "Write one sentence about copper.",
    "1, 2, 3, 4,",
    "def add(a, b):\n    return",
]


def ask(server: Server, i: int, **more: Any) -> dict[str, Any]:
    """One of sixteen different requests: lengths, seeds, sampling, logprobs, stop strings."""
    body: dict[str, Any] = {
        "prompt": PROMPTS[i % 4] * (1 + i % 3),
        "max_tokens": 12 + 3 * (i % 5),
        "seed": i,
        "temperature": (0, 0.8, 1.2)[i % 3],
        "logprobs": 2 if i % 4 == 1 else 0,
    }
    if i % 2:
        body |= {"top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.2}
    if i % 7 == 3:
        body |= {"min_p": 0.05, "typical_p": 0.9, "dry_multiplier": 0.8, "dry_allowed_length": 1}
    if i % 7 == 4:
        body |= {"top_n_sigma": 2.0, "xtc_probability": 0.5, "xtc_threshold": 0.05}
    if i % 5 == 4:
        body |= {"top_k": 20, "stop": [". ", "\n\n"]}
    return dict(server.post("/v1/generate", **body, **more))


def wait_ready(server: Server) -> None:
    """A stage that had no core for a second is unready for a moment, whatever it was asked."""
    poll_until(lambda: server.request("GET", "/ready")[0] == 200, lambda: server.request("GET", "/ready")[1])


def same(answer: dict[str, Any]) -> str:
    """The part of an answer that must not depend on other requests."""
    usage = {k: v for k, v in answer["usage"].items() if k != "prompt_tokens_details"}
    return json.dumps([answer["choices"], usage], sort_keys=True)


def test_sixteen_requests_at_once_give_the_bytes_of_each_alone(demo_server: Server) -> None:
    alone = [same(ask(demo_server, i)) for i in range(16)]
    for _ in range(2):
        found: list[str] = [""] * 16

        def client(i: int, into: list[str] = found) -> None:
            into[i] = same(ask(demo_server, i))

        threads = [threading.Thread(target=client, args=(i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == alone


def test_speculation_changes_no_byte_of_a_text_of_all_samplers(demo_server: Server) -> None:
    sampler = {"min_p": 0.02, "top_n_sigma": 4.0, "dry_multiplier": 0.4, "xtc_probability": 0.3, "xtc_threshold": 0.2}
    for seed in range(3):
        body = {"prompt": "one two three " * 8, "max_tokens": 40, "temperature": 0.3, "seed": seed, **sampler}
        texts = {same(demo_server.post("/v1/generate", **body, speculate=most)) for most in (0, 4)}
        assert len(texts) == 1


def test_dry_ends_a_repetition(demo_server: Server) -> None:
    body = {"prompt": "The cat sat down. " * 6 + "The cat", "max_tokens": 4, "temperature": 0}
    texts = [
        demo_server.post("/v1/generate", **body, dry_multiplier=multiplier)["choices"][0]["text"]
        for multiplier in (0, 5)
    ]
    assert texts[0].startswith(" sat down")
    assert not texts[1].startswith(" sat")


def test_streamed_text_arrives_in_pieces_that_add_up(demo_server: Server) -> None:
    body = {
        "model": DEMO_MODEL,
        "messages": [{"role": "user", "content": "Say hello."}],
        "temperature": 0,
        "max_tokens": 64,
        "ignore_eos": True,
    }
    whole = demo_server.post("/v1/chat/completions", **body)
    chunks = list(demo_server.stream("/v1/chat/completions", stream_options={"include_usage": True}, **body))
    pieces = [c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]]
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]
    assert sum(1 for piece in pieces if piece) > 5, "an event has the tokens of up to seven steps on a busy machine"
    reasons = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
    assert [r for r in reasons if r] == [whole["choices"][0]["finish_reason"]]
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_text_and_ids_are_the_same_prompt(demo_server: Server) -> None:
    tokens = demo_server.post("/v1/tokenize", text="The sky is")["tokens"]
    assert demo_server.post("/v1/detokenize", tokens=tokens)["text"] == "The sky is"
    by_text = demo_server.post("/v1/generate", prompt="The sky is", max_tokens=8, temperature=0)
    by_ids = demo_server.post("/v1/generate", prompt=tokens, max_tokens=8, temperature=0)
    assert same(by_text) == same(by_ids)


def test_a_client_that_disconnects_frees_its_row(demo_server: Server) -> None:
    stream = demo_server.stream("/v1/generate", prompt="Once", max_tokens=4000, ignore_eos=True, seed=1)
    next(stream)
    stream.close()
    # The next request is served, and the server stays ready.
    demo_server.post("/v1/generate", prompt="Twice", max_tokens=2)
    wait_ready(demo_server)


@pytest.mark.parametrize(
    ("body", "status", "names"),
    [
        (b"{", 400, "JSON"),
        (b'{"prompt": "a", "temperature": NaN}', 400, "NaN"),
        (b'{"prompt": "\xff"}', 400, "UTF-8"),
        (b'{"prompt": "a", "temprature": 1}', 400, "temprature"),
        (b'{"prompt": "a", "max_tokens": -1}', 400, "max_tokens"),
        (b'{"prompt": "a", "temperature": 3}', 400, "temperature"),
        (json.dumps({"prompt": [5] * 200_000}).encode(), 400, "prompt"),
        (json.dumps({"prompt": "a" * 10_500_000}).encode(), 413, "max_body_mb"),
        (b'{"prompt": "a", "model": "absent"}', 404, "absent"),
    ],
    ids=["syntax", "nan", "utf-8", "typo", "negative", "range", "long", "large", "model"],
)
def test_invalid_input_is_refused_by_name_and_the_server_stays_ready(
    demo_server: Server, body: bytes, status: int, names: str
) -> None:
    found, answer, _ = demo_server.request("POST", "/v1/generate", body)
    assert found == status, answer
    assert set(answer["error"]) >= {"message", "type", "code"}
    assert names in answer["error"]["message"]
    wait_ready(demo_server)


def test_all_processes_are_measured(demo_server: Server) -> None:
    demo_server.post("/v1/generate", prompt=[1, 2, 3], max_tokens=2)
    worker = f"worker-{DEMO_MODEL}"
    stages = {"gateway", "tokenizer", "scheduler", "kv"}
    names = {*stages, worker, f"{worker}/1", f"{worker}/supervisor", *(f"{name}/supervisor" for name in stages)}
    labels = {f'stage="{name}"' for name in names}
    demo_server.wait_metrics("starling_process_resident_bytes", lambda found: labels <= set(found))

    def is_whole() -> bool:
        """Of one process all are measured; those of ended ones keep their CPU time. Two scrapes may differ."""
        resident = set(demo_server.metrics("starling_process_resident_bytes"))
        is_same = set(demo_server.metrics("starling_process_open_fds")) == resident
        return is_same and set(demo_server.metrics("starling_process_cpu_seconds_total")) >= resident

    poll_until(is_whole)
    _, health, _ = demo_server.request("GET", "/health")
    assert health["memory_usage_mb"] > 128, "the arena alone has 128 MiB"
    for family in ("discarded_samples", "quarantined", "sequences_submitted", "sequences_refused", "late_frames"):
        demo_server.wait_metrics(f"starling_{family}_total", bool)
    for family in ("kv_cache_expired_pages", "kv_cache_unread_rows", "token_gaps", "idempotency_attached"):
        demo_server.wait_metrics(f"starling_{family}_total", bool)
