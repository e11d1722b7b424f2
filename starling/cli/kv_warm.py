"""`starling kv warm FILE`: send prompts to a running server, so that later requests find their prefixes in the cache.

A line of FILE is a prompt: plain text, or JSON: a string, an array of token ids, an array of chat messages, or the
body of a request. Of a body only the fields that determine its pages are sent (model, prompt, messages, cache_salt),
so that no session gets a turn and no cached response is returned. The prompts are sent one after the other, each with
`max_tokens` 1.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from pipeline.config.load import load
from pipeline.runtime.process import EXIT_FATAL, EXIT_OK
from starling.cli.options import exit_codes
from starling.cli.terminal import print_wrapped, visible
from starling.client import address as addresses
from starling.client.address import ServerAddress

TIMEOUT_S = 600.0
_SENT_FIELDS = ("model", "prompt", "messages", "cache_salt")  # of a request's body


class Warmed(NamedTuple):
    """The result of one prompt: its line in the file, its tokens, or the server's error."""

    line: int
    tokens: int = 0
    cached: int = 0  # of these, tokens that were in the cache already
    error: str = ""


def read_requests(text: str, model: str, default: str = "") -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(line number, URL path, body) of each line that is not empty.

    `model` overrides the model of every line; without it a line's own model counts, then `default`. Only a newline ends
    a line: JSON may contain U+2028 and other ends of lines of Unicode. Raises `ValueError` for a body that is not JSON.
    """
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if not line:
            continue
        try:
            value = json.loads(line) if line[0] in '{["' else line
        except json.JSONDecodeError as error:
            if line[0] == "{":
                reason = f"{error.msg} at column {error.colno}"
                raise ValueError(f"line {number} begins with {{ and is not JSON: {reason}") from None
            value = line
        path, body = _request(value)
        name = model or body.get("model", default)
        yield number, path, {**body, "max_tokens": 1, "model": name}


def _request(value: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(value, dict):
        body = {k: v for k, v in value.items() if k in _SENT_FIELDS}
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        body = {"messages": value}
    else:
        body = {"prompt": value}
    if "messages" in body:
        return "/v1/chat/completions", body
    several = isinstance(body.get("prompt"), list) and bool(body["prompt"]) and not isinstance(body["prompt"][0], int)
    return ("/v1/completions" if several else "/v1/generate"), body


def warm_one(address: ServerAddress, key: str, line: int, path: str, body: dict[str, Any]) -> Warmed:
    """Send one request. An error response is part of the result. Raises `OSError` if there is no server."""
    connection = address.connection(TIMEOUT_S)
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    try:
        connection.request("POST", address.target(path), json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
    except (http.client.HTTPException, json.JSONDecodeError) as error:
        return Warmed(line, error=f"no answer: {error!r}")
    finally:
        connection.close()
    if response.status != 200:
        return Warmed(line, error=str(answer.get("error", {}).get("message", answer)))
    usage = answer["usage"]
    return Warmed(line, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


@click.command(epilog=exit_codes({0: "every prompt was computed", 1: "a prompt was refused, or no server answers"}))
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--model",
    default="",
    metavar="NAME",
    help="For every prompt; default: the line's own, or the first configured one.",
)
@click.option(
    "--key",
    envvar="STARLING_API_KEY",
    default="",
    metavar="KEY",
    help="API key, if the server requires one; default: $STARLING_API_KEY.",
)
def warm(file: Path, model: str, key: str) -> int:
    """Compute the prompts in FILE so that the cache holds them.

    Each line of FILE (UTF-8) is a prompt: plain text, or JSON (a string, token ids, chat messages, or a request body).
    """
    config = load()
    address = addresses.of_config(config)
    try:
        requests = list(read_requests(file.read_text(encoding="utf-8"), model, config.models[0].name))
    except UnicodeDecodeError as error:
        raise click.ClickException(f"{file} is not UTF-8: {error}") from None
    except ValueError as error:
        raise click.ClickException(f"{file}: {error}; nothing was sent") from None
    done: list[Warmed] = []
    console = Console(highlight=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")
        for line, path, body in requests:
            progress.update(task, description=f"prompt {len(done) + 1} of {len(requests)}")
            try:
                done.append(warm_one(address, key, line, path, body))
            except OSError as error:
                raise click.ClickException(f"no server answers at {address}: {error}") from None
    for warmed in done:
        if warmed.error:
            print_wrapped(visible(f"{file}:{warmed.line}: {warmed.error}"), 4)
    good = [warmed for warmed in done if not warmed.error]
    tokens, cached = sum(w.tokens for w in good), sum(w.cached for w in good)
    print_wrapped(f"{len(good)} of {len(done)} prompts, {tokens:,} tokens, {cached:,} of them in the cache already", 4)
    return EXIT_OK if len(good) == len(done) else EXIT_FATAL
