"""`starling fleet token`: the token of one agent."""

from __future__ import annotations

import asyncio

import click
import msgspec

from pipeline.config import paths
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.coordination.address import open_store
from pipeline.errors import Conflict
from pipeline.fleet import host_token
from pipeline.fleet import token as fleet_token
from pipeline.fleet.host_token import TOKENS, IssuedToken
from shm.decoding import DECODE_ERRORS
from starling.cli.options import exit_codes, json_option

TRIES = 8
CODES = exit_codes(
    {
        0: "success",
        1: "the coordination store does not answer",
        2: "wrong usage",
        78: "the configuration or the machine must be changed first",
    }
)


async def _number(config: Config, agent: str, renew: bool) -> int:
    """The number of the agent's valid token, which is made or replaced. Raises `StarlingError`."""
    async with open_store(config) as store:
        for _ in range(TRIES):
            item = await store.get(TOKENS + agent)
            number = 0
            if item is not None:
                try:
                    number = msgspec.json.decode(item.value, type=IssuedToken).number
                except DECODE_ERRORS:
                    raise Conflict(f"{TOKENS}{agent} of the coordination store is not the record of a token") from None
            if number and not renew:
                return number
            value = msgspec.json.encode(IssuedToken(number + 1))
            if await store.swap(TOKENS + agent, item.revision if item is not None else 0, value) is not None:
                return number + 1
    raise Conflict(f"the token of {agent} is being changed by others; try again")


@click.command(epilog=CODES)
@click.argument("agent")
@click.option("--renew", is_flag=True, help="Make a new token; the old one is refused from then on.")
@json_option()
def token(agent: str, renew: bool, as_json: bool) -> None:
    """Print the token of AGENT, for the file fleet.token of its host.

    With it the agent serves under this id only, and cannot operate the fleet.
    """
    config = load()
    secret = fleet_token.load_or_create(paths.fleet_token(config))
    host_token.make(secret, agent, 1)  # refuses what is no agent's id, before the store is changed
    number = asyncio.run(_number(config, agent, renew))
    made = host_token.make(secret, agent, number)
    if as_json:
        click.echo(msgspec.json.encode({"agent_id": agent, "number": number, "token": made}).decode())
    else:
        click.echo(made)
