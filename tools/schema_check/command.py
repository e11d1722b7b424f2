"""`python -m tools.schema_check`: sends every schema several times at temperature 1 and validates the answers.

Fails if an answer is not valid, if a refusal does not name what is refused, or if a request fails.  The last line is
one JSON object.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from tools.schema_check import corpus
from tools.schema_check.answers import Judgement, Kind, judge

AT_ONCE = 16
TIMEOUT_S = 600.0
MAX_SHOWN = 20  # faults

Send = Callable[[dict[str, Any]], tuple[int, Any]]


class Client:
    """Sends chats to a server."""

    def __init__(self, url: str, key: str = "") -> None:
        self._address = urlsplit(url).netloc
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    def model(self) -> str:
        """The first model of the server."""
        return str(self._request("GET", "/v1/models", None)[1]["data"][0]["id"])

    def chat(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and body of an answer. Sends again what the server has no room for now."""
        while True:
            status, answer = self._request("POST", "/v1/chat/completions", body)
            if status not in (429, 503):
                return status, answer
            time.sleep(1.0)

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        with contextlib.closing(http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)) as connection:
            connection.request(method, path, json.dumps(body) if body is not None else None, self._headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())


def body_of(model: str, schema: dict[str, Any], seed: int, max_tokens: int) -> dict[str, Any]:
    """The request for an answer of that schema."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": "Invent an example, as short JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "example", "schema": schema}},
        "temperature": 1.0,
        "seed": seed,
        "max_tokens": max_tokens,
    }


def check(
    schemas: dict[str, dict[str, Any]],
    send: Send,
    model: str,
    seeds: Iterable[int],
    max_tokens: int,
    on_judged: Callable[[str, Judgement], None] = lambda name, judgement: None,
) -> dict[str, list[Judgement]]:
    """The judgements of all answers, by schema. A schema that is refused is sent once."""

    def one(name: str) -> list[Judgement]:
        judgements: list[Judgement] = []
        for seed in seeds:
            status, answer = send(body_of(model, schemas[name], seed, max_tokens))
            judgements.append(judge(schemas[name], status, answer))
            on_judged(name, judgements[-1])
            if judgements[-1].kind in (Kind.REFUSED, Kind.TOO_LARGE, Kind.UNNAMED):
                break
        return judgements

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(schemas, pool.map(one, schemas), strict=True))


def report(found: dict[str, list[Judgement]]) -> dict[str, Any]:
    """Counts of schemas and answers, and why schemas are refused."""
    answers = Counter(one.kind.value for judgements in found.values() for one in judgements)
    is_refusal = (Kind.REFUSED, Kind.TOO_LARGE)
    refused = Counter(
        (js[0].reason.partition(": ")[2] or js[0].reason)[:90] for js in found.values() if js[0].kind in is_refusal
    )
    by_schema: Counter[str] = Counter()
    for judgements in found.values():
        kinds = {one.kind for one in judgements}
        faults = [kind for kind in kinds if kind.is_fault]
        for kind in (*faults, *is_refusal, Kind.VALID, Kind.UNCHECKED, Kind.CUT):
            if kind in kinds:
                by_schema[kind.value] += 1
                break
    return {
        "schemas": len(found),
        "by_schema": dict(by_schema),
        "answers": dict(answers),
        "refused": dict(refused.most_common()),
    }


@click.command()
@click.option("--url", default="http://127.0.0.1:8080", show_default=True, help="The server.")
@click.option("--key", default="", help="Its API key.")
@click.option("--schemas", "folder", type=click.Path(path_type=Path, exists=True), help="A folder with JSON files.")
@click.option("--most", default=300, show_default=True, help="Schemas of the folder, or generated ones.")
@click.option("--skip", default=0, show_default=True, help="So many of them, those of an earlier run.")
@click.option("--seeds", default=2, show_default=True, help="Answers of each schema.")
@click.option("--max-tokens", default=256, show_default=True, help="Of each answer.")
def main(url: str, key: str, folder: Path | None, most: int, skip: int, seeds: int, max_tokens: int) -> None:
    """Validate structured output of a running server against hundreds of JSON Schemas."""
    schemas = corpus.from_folder(folder, most) if folder is not None else corpus.made(most)
    schemas = dict(list(schemas.items())[skip:])
    client = Client(url, key)
    shown = 0

    def on_judged(name: str, judgement: Judgement) -> None:
        nonlocal shown
        if judgement.kind.is_fault and shown < MAX_SHOWN:
            shown += 1
            click.echo(f"{name}: {judgement.kind.value}: {judgement.reason}")

    found = check(schemas, client.chat, client.model(), range(seeds), max_tokens, on_judged)
    click.echo(json.dumps(report(found), ensure_ascii=False))
    sys.exit(any(one.kind.is_fault for judgements in found.values() for one in judgements))
