"""`starling run MODEL PROMPT`: one answer on standard output, as it is generated."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from pipeline.config.load import load
from pipeline.errors import InvalidRequest
from pipeline.runtime.process import EXIT_USAGE
from starling.cli import completion, terminal
from starling.cli.generation_options import (
    CODES,
    Choice,
    choose_key,
    choose_model,
    find_model,
    generation_fields,
    generation_options,
    server_for,
)
from starling.cli.options import json_option
from starling.client.answer import Answer

CHAT, GENERATE = "/v1/chat/completions", "/v1/generate"
MAX_INPUT = 64 << 20  # bytes of standard input; server.max_body_mb decides what the server takes


@click.command(epilog=CODES)
@click.argument("model", shell_complete=completion.model_names)
@click.argument("prompt", nargs=-1)
@generation_options
@click.option("--raw", is_flag=True, help="Continue PROMPT itself, without the model's chat template.")
@click.option("--stats", is_flag=True, help="Print token counts and speed on standard error.")
@json_option("Print one JSON object at the end, instead of the text.")
def run(model: str, prompt: tuple[str, ...], raw: bool, stats: bool, as_json: bool, **options: Any) -> int:
    """Print MODEL's answer to PROMPT as it is generated.

    MODEL is a configured model or a GGUF file. Text on standard input is appended to PROMPT, or is the prompt. If no
    server of this home runs, one is started for the command and ends with it. Ctrl-C cancels the request.
    """
    text = read_prompt(prompt)
    config = load()
    choice = Choice(model, {}) if options["url"] else choose_model(config, model)
    name = choice.name
    key = choose_key(config, options["key"], options["url"])
    try:
        with server_for(config, choice, options["url"], options["cacert"]) as address:
            is_chat = find_model(address, choice, key).get("chat", True) and not raw
            answer = ask(address, key, name, text, is_chat, options)
            with terminal.AnswerPrinter() as printer:
                for piece in answer.pieces():
                    if not as_json:
                        printer.write(piece)
    except InvalidRequest as error:
        terminal.complain(error.message)
        return EXIT_USAGE
    if as_json:
        click.echo(json.dumps(summary(answer), ensure_ascii=False, indent=2))
    if stats:
        terminal.note(speed(answer))
    return 0


def ask(address: Any, key: str, name: str, text: str, is_chat: bool, options: dict[str, Any]) -> Answer:
    """The request for one prompt: a chat if the model has a template, otherwise the text itself."""
    fields = {"model": name, **generation_fields(options)}
    if is_chat:
        system = [{"role": "system", "content": options["system"]}] if options["system"] else []
        body = {**fields, "messages": [*system, {"role": "user", "content": text}]}
        return Answer(address, CHAT, body, key, on_wait)
    if options["system"]:
        raise InvalidRequest(
            "--system needs the model's chat template, which --raw and base models go without", "system"
        )
    return Answer(address, GENERATE, {**fields, "prompt": text}, key, on_wait)


def on_wait(reason: str) -> None:
    """Say that the answer will be continued."""
    terminal.note(f"\nthe connection was lost ({reason}); waiting for the server to continue the answer")


def read_prompt(words: tuple[str, ...]) -> str:
    """The prompt: the words, then standard input unless it is a terminal. Raises `click.UsageError`."""
    parts = [" ".join(words)] if words else []
    if not sys.stdin.isatty():
        data = sys.stdin.buffer.read(MAX_INPUT + 1)
        if len(data) > MAX_INPUT:
            raise click.UsageError(f"standard input has more than {MAX_INPUT:,} bytes")
        try:
            piped = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise click.UsageError(f"standard input: byte {error.start} is not UTF-8") from None
        if piped.strip():
            parts.append(piped.rstrip("\n") if words else piped.removesuffix("\n"))
    if not parts:
        raise click.UsageError("no prompt: give PROMPT, or text on standard input; `starling chat` is interactive")
    return "\n\n".join(parts)


def summary(answer: Answer) -> dict[str, Any]:
    """The answer as --json prints it."""
    return {
        "model": answer.model,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "seed": answer.seed,
        "request": answer.request_id,
        "resumed": answer.resumed,
        "prompt_tokens": answer.usage.prompt,
        "cached_tokens": answer.usage.cached,
        "output_tokens": answer.usage.output,
        "first_token_s": round(answer.first_at - answer.begun, 3) if answer.first_at else None,
        "total_s": round(answer.ended - answer.begun, 3),
    }


def speed(answer: Answer) -> str:
    """Token counts and times in one line."""
    used = answer.usage
    line = f"{used.prompt} prompt tokens ({used.cached} cached), {used.output} output tokens"
    generated_s = answer.ended - answer.first_at
    if not answer.first_at or used.output < 2 or generated_s <= 0:
        return line
    rate = (used.output - 1) / generated_s
    return f"{line}; first after {answer.first_at - answer.begun:.2f} s, then {rate:.1f} tokens/s"
