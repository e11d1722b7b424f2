"""`starling fleet`: the state of a fleet, and what its operators change."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

import click
import msgspec

from pipeline.config import paths
from pipeline.config.load import load
from pipeline.errors import ConfigError, ModelUnavailable, NotFound
from pipeline.fleet import token as tokens
from starling.cli import completion
from starling.cli.fleet_certificate import certificate
from starling.cli.fleet_launchers import down, launched, logs
from starling.cli.fleet_up import up
from starling.cli.options import Number, cacert_option, exit_codes, json_option
from starling.cli.tables import print_table
from starling.cli.terminal import print_wrapped, visible
from starling.client.fleet import FleetClient

CODES = exit_codes(
    {
        0: "success",
        1: "no orchestrator answers, or its store does not",
        2: "wrong usage, or no such agent, model or request",
        78: "the configuration or the machine must be changed first",
    }
)


_CACERT = "starling.cacert"
POLL_S = 0.5  # of `drain --wait`
SETTLED_S = 3.0  # with nothing left: what engines report is up to 2 s old, and another orchestrator may send until then


def _keep_cacert(context: click.Context, parameter: click.Parameter, value: str) -> None:
    context.meta[_CACERT] = value


def _url(command: Any) -> Any:
    option = click.option("--url", default="", metavar="URL", help="An orchestrator; default: the configured one.")
    return option(cacert_option(command, expose_value=False, callback=_keep_cacert))


def _client(url: str) -> FleetClient:
    return FleetClient(load(), url, click.get_current_context().meta[_CACERT])


@click.group(epilog=CODES)
def fleet() -> None:
    """Run and operate a fleet of agents."""


for command in (up, down, launched, logs, certificate):
    fleet.add_command(command)


@fleet.command(
    "metrics-token",
    epilog=exit_codes({0: "success", 78: "the fleet's token cannot be read, or the configuration is wrong"}),
)
def metrics_token() -> None:
    """Print the token that opens only the metrics of a fleet.

    It is computed from the fleet's token (fleet.token), and changes with it.
    """
    path = paths.fleet_token(load())
    token = tokens.load(path)
    if not token:
        raise ConfigError(f"fleet.token: {path} does not exist; run this on a host of the fleet", "fleet.token")
    click.echo(tokens.for_metrics(token))


@fleet.command(epilog=CODES)
@json_option()
@_url
def status(as_json: bool, url: str) -> None:
    """Show agents, models and what is going on."""
    client = _client(url)
    state = client.get("/v1/fleet")
    if as_json:
        _print_json(state)
        return
    role = "leads" if state["leader"] else "does not lead"
    _print(f"{state['orchestrator']} at {client.address}: {role}, store {state['store']}")
    for load_ in state["loads"]:
        _print(f"loading {load_['model']} on {load_['agent']}, {load_['waiting']} requests wait")
    _print_agents(state["agents"])
    _print_models(state["models"])


@fleet.command(epilog=CODES)
@json_option()
@_url
def agents(as_json: bool, url: str) -> None:
    """List the agents."""
    found = _client(url).get("/v1/fleet")["agents"]
    _print_json(found) if as_json else _print_agents(found)


@fleet.command(epilog=CODES)
@json_option()
@_url
def models(as_json: bool, url: str) -> None:
    """List the models that requests may name."""
    found = _client(url).get("/v1/fleet")["models"]
    _print_json(found) if as_json else _print_models(found)


@fleet.command(epilog=CODES)
@click.argument("model", shell_complete=completion.fleet_models)
@click.option("--replicas", type=click.IntRange(0, 1000), default=1, show_default=True, metavar="N", help="Agents.")
@json_option()
@_url
def place(model: str, replicas: int, as_json: bool, url: str) -> None:
    """Keep MODEL loaded on N agents.

    With 0 replicas nothing is kept: the model stays where it is until another one needs its place.
    """
    done = _client(url).post("/v1/fleet/place", model=model, replicas=replicas)
    _print_json(done) if as_json else click.echo(f"{model}: {replicas} replicas wanted, {done['ready']} ready")


def _cordon(
    agent: str, as_json: bool, url: str, *, cordoned: bool, drain: bool, text: str, is_silent: bool = False
) -> None:
    done = _client(url).post("/v1/fleet/cordon", agent=agent, cordoned=cordoned, drain=drain)
    if not is_silent:
        _print_json(done) if as_json else click.echo(f"{agent}: {text}")


@fleet.command(epilog=CODES)
@click.argument("agent", shell_complete=completion.fleet_agents)
@click.option("--wait", is_flag=True, help="Return when the agent may be stopped.")
@click.option("--timeout", type=Number(0), default=0.0, metavar="S", help="Of --wait, then exit code 1; 0: none.")
@json_option()
@_url
def drain(agent: str, wait: bool, timeout: float, as_json: bool, url: str) -> None:
    """Move what AGENT serves to other agents, and give it nothing new.

    Streams and sessions move where another agent has their model ready; other streams finish where they are, and other
    sessions stay. Then the prefixes that most requests shared are sent there. With --wait, what is left is printed as
    it changes; the agent goes on draining if the command ends before.
    """
    text = "draining" if wait else "draining; `starling fleet agents` shows what is left"
    _cordon(agent, as_json and not wait, url, cordoned=True, drain=True, text=text, is_silent=as_json and wait)
    if wait:
        found = _wait_until_idle(agent, timeout, url, is_silent=as_json)
        _print_json(found) if as_json else click.echo(f"{agent}: may be stopped")


def _wait_until_idle(agent: str, timeout_s: float, url: str, *, is_silent: bool) -> dict[str, Any]:
    """The agent as soon as it may be stopped. Raises `NotFound`, `ModelUnavailable` after `timeout_s`."""
    client, begun, shown_last = _client(url), time.monotonic(), ""
    idle_since: float | None = None
    while True:
        found = next((one for one in client.get("/v1/fleet")["agents"] if one["agent_id"] == agent), None)
        if found is None:
            raise NotFound(f"agent {agent!r} has left the fleet")
        now, reason = time.monotonic(), str(found["stop_waits_for"])
        idle_since = None if reason else idle_since or now
        if idle_since is not None and now - idle_since >= SETTLED_S:
            return dict(found)
        if reason and reason != shown_last and not is_silent:
            _print(f"{agent}: waits for {reason}")
        shown_last = reason
        if timeout_s and now - begun >= timeout_s:
            raise ModelUnavailable(
                f"{agent} cannot be stopped after {timeout_s:g} s: it waits for {reason or 'requests'}"
            )
        time.sleep(POLL_S)


@fleet.command(epilog=CODES)
@click.argument("agent", shell_complete=completion.fleet_agents)
@json_option()
@_url
def cordon(agent: str, as_json: bool, url: str) -> None:
    """Give AGENT no new requests and models. Its streams finish there."""
    _cordon(agent, as_json, url, cordoned=True, drain=False, text="cordoned")


@fleet.command(epilog=CODES)
@click.argument("agent", shell_complete=completion.fleet_agents)
@json_option()
@_url
def uncordon(agent: str, as_json: bool, url: str) -> None:
    """Give AGENT requests and models again after `drain` or `cordon`."""
    _cordon(agent, as_json, url, cordoned=False, drain=False, text="takes requests")


@fleet.command(epilog=CODES)
@click.option("--after", type=click.IntRange(0), default=0, metavar="NUMBER", help="Only later events.")
@json_option()
@_url
def events(after: int, as_json: bool, url: str) -> None:
    """Show what has happened, as the orchestrator has seen it."""
    found = _client(url).get(f"/v1/fleet/events?after={after}")["events"]
    if as_json:
        _print_json(found)
        return
    now = time.time()
    rows = [
        [
            str(one["number"]),
            _time(one["at"], now),
            one["kind"],
            one["agent"],
            one["model"],
            one["text"],
        ]
        for one in found
    ]
    print_table(
        ("number", "time", "event", "agent", "model", "details"),
        rows,
        right=("number",),
        leave=("number",),
        fold=("model", "details"),
    )


def _time(at: float, now: float) -> str:
    """Local time of an event, s since 1970; of one of another day with the date."""
    day, today = time.localtime(at), time.localtime(now)
    return time.strftime("%H:%M:%S" if day[:3] == today[:3] else "%m-%d %H:%M", day)


@fleet.command(epilog=CODES)
@click.argument("request_id")
@json_option()
@_url
def why(request_id: str, as_json: bool, url: str) -> None:
    """Show why a request went to its agents: each agent's score and terms.

    REQUEST_ID is X-Starling-Request of the answer. With the id of an agent that drains, or did: what was done with the
    prefixes that most of its requests shared; the elected orchestrator (`leader` in `starling fleet status`) knows it.
    """
    found = _client(url).get(f"/v1/fleet/why/{quote(request_id, safe='')}")
    if as_json:
        _print_json(found)
        return
    if "prefixes" in found:
        _print_prefixes(found)
        return
    first = (
        f"first token after {found['first_token_s']:.3f} s"
        if found["first_token_s"]
        else "time to the first token not known"
    )
    _print(f"{found['request_id']}: model {found['model']}, {first}")
    for choice in found["choices"]:
        _print(f"{choice['cause']}: {choice['agent_id']}, expected after {choice['predicted_s']:.3f} s")
        rows = []
        for one in sorted(choice["scores"], key=lambda score: float(score["score_s"])):
            terms = [f"{one['terms'][name]:.3f}" for name in ("cache_level_s", "kv_hit_s", "queue_s", "transfer_s")]
            rows.append([one["agent_id"], f"{one['score_s']:.3f}", *terms, one["level"], one["reason"] or one["state"]])
        print_table(
            ("agent", "score", "start", "- kv hit", "queue", "transfer", "level", "state"),
            rows,
            right=("score", "start", "- kv hit", "queue", "transfer"),
            leave=("level",),
            fold=("state",),
        )
    for one in found.get("transfers", ()):
        _print(_transfer(one))


def _print_prefixes(found: dict[str, Any]) -> None:
    """What the drain of an agent did with each prefix."""
    _print(f"{found['agent_id']}: {len(found['prefixes'])} prefixes that several requests shared")
    rows = []
    for one in found["prefixes"]:
        counts = [str(one[name]) for name in ("pages", "uses")]
        rows.append([one["model"], one["tail"][:16], *counts, one["outcome"], one["target"], one["reason"]])
    head = ("model", "last page", "pages", "uses", "outcome", "agent", "reason")
    print_table(head, rows, right=("pages", "uses"), fold=("reason",))


def _transfer(one: dict[str, Any]) -> str:
    """What was done with the KV pages of a stream that moved."""
    sending = f", sending them {one['sending_s']:.3f} s" if one["sending_s"] else ""
    reason = f": {one['reason']}" if one["reason"] else ""
    return (
        f"KV pages from {one['source']} to {one['target']}: {one['outcome']}{reason}; {one['pages']} pages, "
        f"{one['bytes'] / 1e6:.1f} MB; computing was expected to take {one['computing_s']:.3f} s{sending}"
    )


def _print_agents(found: list[dict[str, Any]]) -> None:
    """A table, and a line for each agent that has models, or a reason for its health."""
    rows = []
    for one in found:
        state = (
            "may be stopped"
            if one["may_stop"]
            else "draining"
            if one["draining"]
            else "cordoned"
            if one["cordoned"]
            else one.get("state", "")
        )
        rows.append([one["agent_id"], one["health"], state, str(one["under_way"]), one["url"]])
    print_table(("agent", "health", "state", "requests", "url"), rows, right=("requests",), fold=("url",))
    for one in found:
        left = ", ".join(f"{count} {what}" for what, count in one["left"].items() if count)
        left = f"{left} left" if left and one["draining"] else ""
        texts = [one["reason"], left, *one.get("reasons", ()), *map(_loaded, one.get("loaded_models", ()))]
        if known := ", ".join(dict.fromkeys(text for text in texts if text)):
            _print(f"{one['agent_id']}: {known}")


def _loaded(model: dict[str, Any]) -> str:
    """A model of an agent: its name and state, of one that failed the reason."""
    reason = f": {model['error']}" if model["cache_state"] != "READY" and model.get("error") else ""
    return f"{model['model_id']} ({model['cache_state']}{reason})"


def _print_models(found: list[dict[str, Any]]) -> None:
    rows = [
        [
            one["id"],
            "ready" if one["ready"] else "loading" if one["loading"] else "cold",
            str(one["replicas"]),
            f"{one['bytes'] / 1e6:.0f} MB",
            ", ".join(one["agents"]),
        ]
        for one in found
    ]
    print_table(("model", "state", "replicas", "size", "agents"), rows, right=("replicas", "size"), fold=("agents",))


def _print(line: str) -> None:
    """A line whose texts may come from other hosts."""
    print_wrapped(visible(line.replace("\n", " ")), 2)


def _print_json(value: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value)).decode())
