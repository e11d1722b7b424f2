"""The prefix cache serves repeated prompts, and no fault of it changes a byte."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.api import page_names
from pipeline.api.output_tokens import RELAY
from pipeline.api.page_names import decode
from pipeline.config.schema import DEMO_MODEL
from shm.pages import HEADER, PAGE_FULL, attach_kv
from stages.agent.held_prefixes import read_names
from tests.e2e.command import starling
from tests.e2e.conftest import share_caches
from tests.e2e.server import Server, poll_until

pytestmark = pytest.mark.slow

PAGE_TOKENS = 32
ATTEMPTS = 4  # a page that the disk takes long to write or read, as on a busy machine, is not waited for


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(100, 40_000), k=length)


def ask(server: Server, tokens: list[int]) -> tuple[int, str]:
    """Generate 12 tokens: the number of cached prompt tokens, and the text."""
    answer: dict[str, Any] = server.post("/v1/generate", prompt=tokens, max_tokens=12, temperature=0)
    usage = answer["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["text"]


def full_pages(tokens: list[int]) -> int:
    return (len(tokens) - 1) // PAGE_TOKENS * PAGE_TOKENS


def test_a_shared_prefix_is_computed_once(demo_server: Server) -> None:
    system = prompt(1, 400)
    cached, _ = ask(demo_server, system + prompt(2, 10))
    assert cached == 0
    for user in range(3, 6):
        tokens = system + prompt(user, 10)
        cached, text = ask(demo_server, tokens)
        assert cached == 400 // PAGE_TOKENS * PAGE_TOKENS
        again, same = ask(demo_server, tokens)
        assert again == full_pages(tokens)
        assert same == text


def test_the_pages_of_a_prompt_are_named_to_an_orchestrator(demo_server: Server) -> None:
    """By the names that an agent reads in the arena, soon after the answer: the kv stage publishes pages on its own."""
    tokens = prompt(30, 3 * PAGE_TOKENS + 5)
    body = {"prompt": tokens, "max_tokens": 1}
    _, _, headers = demo_server.request("POST", "/v1/generate", body, {RELAY: "1"})
    named = decode(headers[page_names.HEADER])
    assert named is not None and named.n_tokens == len(tokens)
    assert [end for end, _ in named.pages] == [PAGE_TOKENS, 2 * PAGE_TOKENS, 3 * PAGE_TOKENS]
    (arena,) = demo_server.arenas.rglob("*.kv")
    expected = {name for _, name in named.pages}
    poll_until(lambda: expected <= read_names(arena.parent), lambda: f"{expected - read_names(arena.parent)} not held")
    _, _, headers = demo_server.request("POST", "/v1/generate", body)
    assert page_names.HEADER not in headers


def test_page_table_and_headers_agree_under_load(demo_server: Server) -> None:
    """Pages change state all the time; the kv stage counts them between two frames."""
    starling(demo_server, "kv", "check", "--json")  # imports what the command needs
    # It outlasts the command, and is then left.
    body = {"prompt": prompt(20, 300), "max_tokens": 4000, "temperature": 0, "ignore_eos": True}
    events = demo_server.stream("/v1/generate", **body)
    next(events)
    (model,) = json.loads(starling(demo_server, "kv", "check", "--json"))["models"]
    audit = model["audit"]
    assert audit["page_table"] == audit["headers"]
    assert sum(audit["page_table"]) == model["total"]
    assert audit["page_table"][2] >= 300 // PAGE_TOKENS, "leased: the stream runs"
    next(events)  # it still does
    events.close()


@pytest.fixture
def config(tmp_path: Path) -> Mapping[str, Any]:
    share_caches(tmp_path, models=True)
    model = {"name": DEMO_MODEL, "kv_cache_mb": 32, "spill_path": str(tmp_path / "spill"), "spill_mb": 256}
    return {"models": [model]}


def damage_cached_pages(server: Server) -> int:
    """Change one bit of each full page without references. Returns the number of pages."""
    (path,) = [Path(p) for p in server.leftovers() if p.endswith(".kv")]
    arena, views, _ = attach_kv(path)
    fields = views.headers.view(HEADER)[:, 0]
    # A request releases its pages soon after its answer.
    poll_until(lambda: not ((fields["state"] == PAGE_FULL) & (fields["refs"] > 0)).any(), lambda: "pages are held")
    pages = [
        page for page in range(len(views.pages)) if fields["state"][page] == PAGE_FULL and fields["refs"][page] == 0
    ]
    for page in pages:
        views.pages[page, 1000 + page] ^= 4
    arena.close()
    return len(pages)


def test_the_cache_survives_a_crash_and_a_clean_stop(tmp_path: Path, config: Mapping[str, Any]) -> None:
    tokens = prompt(7, 500)
    with Server(tmp_path, config) as server:
        cached, text = ask(server, tokens)
        assert cached == 0
        (arena,) = server.arenas.rglob("*.kv")
        n_pages = full_pages(tokens) // PAGE_TOKENS
        # The kv stage publishes them on its own.
        poll_until(lambda: len(read_names(arena.parent)) >= n_pages, lambda: f"{n_pages} pages are not held")
        server.kill_all()
    with Server(tmp_path, config) as server:
        assert ask(server, tokens) == (full_pages(tokens), text)  # from the arena
        server.stop()
        assert server.leftovers() == []
    for _ in range(ATTEMPTS):
        with Server(tmp_path, config) as server:
            cached, again = ask(server, tokens)
            assert again == text
            server.stop()
            assert server.leftovers() == []
        if cached == full_pages(tokens):
            break
    assert cached == full_pages(tokens)  # from the state directory


def test_damaged_pages_and_evictions_change_no_byte(tmp_path: Path, config: Mapping[str, Any]) -> None:
    first, second = prompt(8, 350), prompt(9, 350)
    with Server(tmp_path, config) as server:
        texts = [ask(server, tokens)[1] for tokens in (first, second)]
        # 32 MiB are 45 pages of 32 tokens: the first two prompts and these four do not fit.
        seeds = itertools.count(10)
        for _ in range(ATTEMPTS):
            for seed in itertools.islice(seeds, 4):
                ask(server, prompt(seed, 350))
            cached, again = ask(server, first)
            assert again == texts[0]
            if cached == full_pages(first):
                break
        assert cached == full_pages(first)  # from the spill file
        assert damage_cached_pages(server) > 0
        for file in (tmp_path / "spill").glob("*.pages"):
            with open(file, "r+b") as pages:
                for offset in range(5000, file.stat().st_size, 300_000):
                    os.pwrite(pages.fileno(), b"\x55", offset)
        assert ask(server, first)[1] == texts[0]
        assert ask(server, second)[1] == texts[1]
        server.wait_metrics("starling_kv_cache_checksum_failures_total", lambda found: sum(found.values()) > 0)
        server.stop()
