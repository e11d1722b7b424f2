"""`starling keys`: make, list, revoke and replace API keys. A running server follows the key file without a restart."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any, get_args

import click
import msgspec

from pipeline.api import key_file
from pipeline.api.key_file import KeyLimits, Scope, StoredKey
from pipeline.config import paths
from pipeline.config.load import load
from pipeline.errors import ConfigError
from starling.cli import completion
from starling.cli.options import Seconds, exit_codes, json_option
from starling.cli.status import duration
from starling.cli.tables import print_table
from starling.cli.terminal import note

DAMAGED = "the key file is damaged or cannot be written, or the configuration is wrong"
CODES = exit_codes({0: "done", 2: "no such key, or one of that name exists", 78: DAMAGED})
MOST = 1_000_000_000_000  # of a limit

LIMITS = {
    "requests-per-minute": "Requests per minute.",
    "tokens-per-minute": "Tokens per minute, of prompts and answers.",
    "max-concurrent": "Requests in flight.",
    "requests-per-day": "Requests per day (from 00:00 UTC).",
    "tokens-per-day": "Tokens per day.",
    "requests-total": "Requests in all; then the key is used up.",
    "tokens-total": "Tokens in all; then the key is used up.",
}


def _limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, text in reversed(LIMITS.items()):
        most = 1_000_000 if name == "max-concurrent" else MOST
        option = click.option(f"--{name}", type=click.IntRange(0, most), metavar="N", help=text)
        command = option(command)
    return command


@click.group(epilog=exit_codes({0: "done", 78: DAMAGED}))
def keys() -> None:
    """Make, list, revoke and replace API keys.

    The keys are stored as digests in the state directory. A running server follows every change at once. As soon as
    one key was made, requests need a key; those of the configuration (auth.api_keys) stay valid.
    """


@keys.command(epilog=CODES)
@click.argument("name")
@click.option("--tenant", metavar="TENANT", help="Whose requests they are; default: NAME.")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(get_args(Scope)),
    multiple=True,
    default=("models",),
    show_default=True,
    help="What the key may do; give it several times for several scopes.",
)
@click.option(
    "--priority",
    type=click.IntRange(-100, 100),
    default=0,
    show_default=True,
    help="Among requests of the tenant, higher first.",
)
@_limit_options
@json_option("Print the key and what is stored of it as JSON.")
def add(
    name: str, tenant: str | None, scopes: tuple[Scope, ...], priority: int, as_json: bool, **limits: int | None
) -> None:
    """Make the key NAME and print it, once.

    \b
    models    all of /v1 except administration
    admin     /v1/admin: drain, load, reload and unload models
    metrics   /metrics with the names of tenants

    A limit that is not given is the tenant's (rate_limits in the configuration); 0 is no limit. A given limit counts
    this key's requests alone.
    """
    config = load()
    plain = key_file.generate()
    ordered = tuple(scope for scope in key_file.SCOPES if scope in scopes)
    with key_file.edited(paths.state_dir(config)) as stored:
        if any(key.name == name for key in stored):
            raise click.UsageError(f"there is a key {name!r}; `starling keys rotate {name}` replaces it")
        if len(stored) >= key_file.MAX_KEYS:
            raise ConfigError(f"there are {len(stored)} keys, the most that are possible; revoke some", "name")
        key = _checked(
            {
                "name": name,
                "id": secrets.token_hex(8),
                "tenant": tenant or name,
                "sha256": key_file.digest_of(plain),
                "created": round(time.time(), 3),
                "scopes": ordered,
                "priority": priority,
                "limits": {field: value for field, value in limits.items() if value is not None},
            }
        )
        is_first = not stored and not config.auth.api_keys
        stored.append(key)
    _print_new(key, plain, as_json)
    if is_first:
        note("requests need a key from now on")


@keys.command("list", epilog=exit_codes({0: "done", 78: DAMAGED}))
@json_option()
def list_keys(as_json: bool) -> None:
    """List the keys that `starling keys add` has made.

    Those of the configuration are in `starling config`. The keys themselves are not stored.
    """
    stored = key_file.read_keys(paths.state_dir(load()))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode([_shown(key) for key in stored])).decode())
        return
    now = time.time()
    rows = [
        [key.name, key.tenant, ",".join(key.scopes), duration(max(0.0, now - key.created)), _limits_text(key.limits)]
        for key in stored
    ]
    print_table(("NAME", "TENANT", "SCOPES", "AGE", "LIMITS"), rows, right=("AGE",))


@keys.command(epilog=CODES)
@click.argument("names", metavar="NAME", nargs=-1, required=True, shell_complete=completion.key_names)
def revoke(names: tuple[str, ...]) -> None:
    """Remove the keys of every NAME, or none of them.

    A key's next request gets 401. Requests in flight finish.
    """
    with key_file.edited(paths.state_dir(load())) as stored:
        found = [_find(stored, name) for name in dict.fromkeys(names)]
        stored[:] = [key for key in stored if key not in found]
    for name in names:
        click.echo(f"{name}: revoked")


@keys.command(epilog=CODES)
@click.argument("name", shell_complete=completion.key_names)
@click.option(
    "--overlap",
    type=Seconds(),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the key that is replaced stays valid.",
)
@json_option("Print the key and what is stored of it as JSON.")
def rotate(name: str, overlap: float, as_json: bool) -> None:
    """Replace the key NAME and print the new one, once.

    Tenant, scopes, limits and what is used of them stay.
    """
    plain = key_file.generate()
    state_dir = paths.state_dir(load())
    with key_file.edited(state_dir) as stored:
        old = _find(stored, name)
        now = round(key_file.time_of(state_dir), 3)  # servers compare it with their clocks
        key = msgspec.structs.replace(
            old,
            sha256=key_file.digest_of(plain),
            rotated=now,
            previous=old.sha256 if overlap else "",
            previous_until=now + overlap if overlap else 0.0,
        )
        stored[stored.index(old)] = key
    _print_new(key, plain, as_json)


def _checked(fields: dict[str, Any]) -> StoredKey:
    """The record. Raises `click.UsageError` that names the field."""
    try:
        return msgspec.convert(fields, StoredKey)
    except msgspec.ValidationError as error:
        reason = str(error)
        if "`$.name`" in reason or "`$.tenant`" in reason:
            what = "NAME" if "`$.name`" in reason else "--tenant"
            value = fields["name" if what == "NAME" else "tenant"]
            reason = f"{what} is {value!r}; expected 1 to 64 letters, digits and . _ @ -"
        raise click.UsageError(reason) from None


def _find(stored: list[StoredKey], name: str) -> StoredKey:
    found = next((key for key in stored if key.name == name), None)
    if found is None:
        names = ", ".join(key.name for key in stored[:20]) or "none"
        raise click.UsageError(f"no key {name!r}; there are {names}")
    return found


def _shown(key: StoredKey) -> dict[str, Any]:
    """What is printed of a key: no digest, which only the server needs."""
    return {
        "name": key.name,
        "id": key.id,
        "tenant": key.tenant,
        "scopes": list(key.scopes),
        "priority": key.priority,
        "limits": key.limits.given(),
        "created": key.created,
        "rotated": key.rotated,
        "previous_until": key.previous_until,
    }


def _print_new(key: StoredKey, plain: str, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode({"key": plain, **_shown(key)})).decode())
        return
    click.echo(plain)
    note(f"{key.name}: tenant {key.tenant}, {', '.join(key.scopes)}. The key is not shown again: store it now")


_SHORT = {"minute": "min", "day": "day"}


def _limits_text(limits: KeyLimits) -> str:
    """For example `60 requests/min, 1000000 tokens total`; "-": as configured."""
    parts = []
    for name, value in limits.given().items():
        unit, _, period = name.partition("_")
        amount = "unlimited" if not value else str(value)
        if unit == "max":
            parts.append(f"{amount} at once")
        elif period == "total":
            parts.append(f"{amount} {unit} total")
        else:
            parts.append(f"{amount} {unit}/{_SHORT[period.removeprefix('per_')]}")
    return ", ".join(parts) or "-"
