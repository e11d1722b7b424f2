"""What `run` and `chat` share: the options of a request, the choice of the model and of the server, the exit codes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

import click

from pipeline.config import paths
from pipeline.config.schema import DEMO_MODEL, Config, ModelConfig
from pipeline.config.user_home import expand_user
from pipeline.errors import InvalidRequest, ModelNotFound
from pipeline.models import sources
from starling.cli import terminal
from starling.cli.options import Number, cacert_option, exit_codes
from starling.cli.server_use import ServerUse, is_running
from starling.client import address as addresses
from starling.client.address import ServerAddress
from starling.client.answer import get_json

CODES = exit_codes(
    {
        0: "every answer is complete",
        1: "the server failed, or did not answer in time",
        2: "no such model, or the server refused a parameter or the length of the prompt",
        78: "the configuration, the key or the machine must be changed first",
    }
)

# Fields of the API by option, and the least and the largest value.
_NUMBERS: dict[str, tuple[click.ParamType, str, str]] = {
    "max_tokens": (click.IntRange(1), "N", "Most tokens of an answer; default: what the context leaves."),
    "temperature": (Number(0, 2), "T", "0 is greedy, higher is more varied; default: 1."),
    "top_p": (Number(0, 1, min_open=True), "P", "Sample from the most likely tokens of this probability."),
    "top_k": (click.IntRange(0), "K", "Sample from this number of the most likely tokens."),
    "repetition_penalty": (Number(0.01, 10), "R", "Above 1: repeat less."),
    "seed": (click.IntRange(0, (1 << 63) - 1), "N", "The same request with the same seed gives the same answer."),
}


def generation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The decorator of the options of a request and of the server."""
    decorators: list[Callable[..., Any]] = [
        click.option("--system", metavar="TEXT", help="Instructions for the model, before the first message."),
        *(
            click.option("--" + name.replace("_", "-"), type=kind, metavar=metavar, help=help)
            for name, (kind, metavar, help) in _NUMBERS.items()
        ),
        click.option("--url", metavar="URL", help="Another server: http://HOST:PORT, https://... or unix:/PATH."),
        cacert_option,
        click.option(
            "--key",
            envvar="STARLING_API_KEY",
            metavar="KEY",
            help="API key; default: $STARLING_API_KEY; without --url one of the configuration.",
        ),
    ]
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


def check_setting(name: str, text: str) -> Any:
    """The value of a generation setting. Raises `InvalidRequest` that names the bound."""
    if name not in _NUMBERS:
        raise InvalidRequest(f"no setting {name!r}; there are {', '.join(_NUMBERS)}", name)
    try:
        return _NUMBERS[name][0].convert(text, None, None)
    except click.BadParameter as error:
        raise InvalidRequest(f"{name} {text}: {error.message}", name) from None


def generation_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request for the options that were given."""
    return {name: options[name] for name in _NUMBERS if options.get(name) is not None}


# ------------------------------------------------------------------ the model and the server


class Choice(NamedTuple):
    """A model, and the settings of a server that does not run yet and must serve it."""

    name: str
    environment: Mapping[str, str]


def choose_model(config: Config, given: str) -> Choice:
    """The configured model, or a GGUF file. Raises `ModelNotFound` if no server runs that may know the name."""
    if config.model(given) is not None:
        return Choice(given, {})
    file = expand_user(given)
    key = f"STARLING_MODELS__{0 if config.models == (ModelConfig(name=DEMO_MODEL),) else len(config.models)}"
    if given.replace("/", "--") in paths.pulled_names():
        return Choice(given, {f"{key}__NAME": given})  # without a path: its file must have the digest of its record
    if file.is_file():
        name = file.name.removesuffix(".gguf")
        return Choice(name, {f"{key}__NAME": name, f"{key}__PATH": str(file.absolute())})
    if not is_running(paths.run_dir(config)):
        known = ", ".join(model.name for model in config.models)
        remedy = f"; `starling pull {given}` fetches it" if sources.is_remote(given) else ""
        raise ModelNotFound(
            f"no model {given!r} is configured or pulled, and there is no such file{remedy}; the configured models are "
            f"{known}",
            "model",
        )
    return Choice(given, {})


def find_model(address: ServerAddress, choice: Choice, key: str) -> dict[str, Any]:
    """The server's description of the model. Raises `ModelNotFound`, with a remedy for a model that is here."""
    try:
        return dict(get_json(address, f"/v1/models/{quote(choice.name)}", key))
    except ModelNotFound as error:
        if not choice.environment:
            raise
        files = [f" --path {value}" for name, value in choice.environment.items() if name.endswith("__PATH")]
        command = f"starling load {choice.name}{''.join(files)}"
        raise ModelNotFound(f"{error.message}; `{command}` adds it to the running server", "model") from None


def choose_key(config: Config, key: str | None, url: str | None) -> str:
    """The API key: as given, otherwise one of the configuration, which no other server gets to see."""
    return key or ("" if url else addresses.key_of_config(config))


@contextlib.contextmanager
def server_for(config: Config, choice: Choice, url: str | None, cacert: str = "") -> Iterator[ServerAddress]:
    """The address of a server for the model: `url`, this home's, or one that is started and ended here."""
    if url:
        yield addresses.parse(url, cacert=cacert)
        return
    with terminal.progress() as progress:
        use = ServerUse(config, choice.name, choice.environment, progress.show)
        use.__enter__()
    try:
        yield addresses.of_config(config)
    finally:
        use.__exit__(*sys.exc_info())
