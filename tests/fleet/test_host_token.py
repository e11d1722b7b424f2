"""Tokens of agents: whose they are, and proofs that no part of a request or answer was changed."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner

from pipeline.errors import ConfigError, Unauthenticated
from pipeline.fleet import host_token, proof
from starling.cli import cli
from tests.e2e.server import ROOT
from tests.fleet.agent_process import Agent

SECRET = "fleet-secret-" + "s" * 32
URL, BODY = "http://10.0.0.7:9000/heartbeat", b'{"extend_lease":true}'


def test_a_token_says_whose_it_is_and_no_two_are_equal() -> None:
    made = {
        host_token.make(secret, agent, number)
        for secret in (SECRET, SECRET + "x")
        for agent in ("a", "b", "a.1")
        for number in (1, 2, 11)
    }
    assert len(made) == 18
    for agent, number in (("a.1", 1), ("a", 11)):
        assert host_token.read(host_token.make(SECRET, agent, number)) == (agent, number)
    assert host_token.read(SECRET) is None


@pytest.mark.parametrize("agent", ["", "a/b", "a b", "-a", "a" * 64])
def test_what_is_no_agent_gets_no_token(agent: str) -> None:
    with pytest.raises(ConfigError):
        host_token.make(SECRET, agent, 1)


def test_an_agents_token_makes_no_other_ones() -> None:
    with pytest.raises(ConfigError, match="token of agent a"):
        host_token.make(host_token.make(SECRET, "a", 1), "b", 1)


TOKEN = host_token.make(SECRET, "a", 1)


def test_a_proof_is_accepted_once_for_its_nonce_and_both_ways() -> None:
    header, nonce = proof.sign_request(TOKEN, "POST", URL, BODY)
    claim = proof.check_request(header, TOKEN, "POST", URL)
    claim.check_body(BODY)
    assert claim.nonce == nonce and proof.is_signed(header) and not proof.is_signed(f"Bearer {TOKEN}")
    assert TOKEN not in header and proof.sign_request(TOKEN, "POST", URL, BODY)[1] != nonce
    assert proof.is_answer(proof.sign_answer(TOKEN, nonce, 200, b"{}"), TOKEN, nonce, 200, b"{}")


@pytest.mark.parametrize("changed", [(SECRET, "POST", URL), (TOKEN, "GET", URL), (TOKEN, "POST", URL + "x")])
def test_a_changed_request_is_refused(changed: tuple[str, str, str]) -> None:
    header, _ = proof.sign_request(TOKEN, "POST", URL, BODY)
    with pytest.raises(Unauthenticated):
        proof.check_request(header, *changed)


@pytest.mark.parametrize(
    "change", [lambda h: h[:-1], lambda h: h.replace(".", ""), lambda h: "Starling", lambda h: h + "0"]
)
def test_what_is_no_proof_is_refused(change: Callable[[str], str]) -> None:
    header, _ = proof.sign_request(TOKEN, "POST", URL, BODY)
    with pytest.raises(Unauthenticated):
        proof.check_request(change(header), TOKEN, "POST", URL)


@pytest.mark.parametrize(
    "changed",
    [
        ("", TOKEN, "n", 200, b""),
        (TOKEN, SECRET, "n", 200, b""),
        (TOKEN, TOKEN, "m", 200, b""),
        (TOKEN, TOKEN, "n", 202, b""),
        (TOKEN, TOKEN, "n", 200, b"x"),
    ],
)
def test_a_changed_answer_is_refused(changed: tuple[str, str, str, int, bytes]) -> None:
    signer, token, nonce, status, body = changed
    given = proof.sign_answer(signer, "n", 200, b"") if signer else "\udcff"
    assert not proof.is_answer(given, token, nonce, status, body)


def test_an_agents_token_issues_none(tmp_path: Path) -> None:
    path = tmp_path / "fleet-token"
    path.touch(0o600)
    path.write_text(TOKEN + "\n")
    done = CliRunner().invoke(cli, ["fleet", "token", "b"], env={"STARLING_HOME": str(tmp_path)})
    assert isinstance(done.exception, ConfigError) and "token of agent a" in str(done.exception)
    assert not (tmp_path / "fleet.db").exists()


# ------------------------------------------------------------------ a real agent


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """An agent whose host has a token of its own."""
    home = tmp_path_factory.mktemp("host")
    path = home / "fleet-token"
    path.touch(0o600)
    path.write_text(TOKEN + "\n")
    settings = {"fleet": {"blobs": str(home / "blobs"), "agent": {"id": "a", "lease_ms": 600_000}}}
    with Agent(home, settings) as running:
        yield running


def call(agent: Agent, authorization: str, body: bytes = b"{}") -> tuple[int, str, bytes]:
    """POST /heartbeat: status, proof and body."""
    connection = http.client.HTTPConnection(urlsplit(agent.url).netloc, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": authorization}
    connection.request("POST", "/heartbeat", body, headers)
    response = connection.getresponse()
    found = response.status, response.headers.get(proof.HEADER, ""), response.read()
    connection.close()
    return found


@pytest.mark.slow
def test_an_agent_and_its_caller_prove_that_they_have_its_token(agent: Agent) -> None:
    header, nonce = proof.sign_request(TOKEN, "POST", agent.url + "/heartbeat", b"{}")
    status, given, body = call(agent, header)
    assert status == 200 and proof.is_answer(given, TOKEN, nonce, 200, body)
    assert call(agent, header, b'{"extend_lease":true}')[0] == 401
    assert agent.call("/heartbeat")[0] == 200  # an operator sends the token itself
    # Errors are proved, too.
    header, nonce = proof.sign_request(TOKEN, "POST", agent.url + "/heartbeat", b"[]")
    status, given, body = call(agent, header, b"[]")
    assert status == 400 and proof.is_answer(given, TOKEN, nonce, 400, body)


@pytest.mark.slow
@pytest.mark.parametrize("token", [SECRET, host_token.make(SECRET, "b", 1), host_token.make(SECRET, "a", 2)])
def test_an_agent_refuses_other_tokens(agent: Agent, token: str) -> None:
    header, _ = proof.sign_request(token, "POST", agent.url + "/heartbeat", b"{}")
    assert [call(agent, one)[0] for one in (header, f"Bearer {token}")] == [401, 401]
    relayed, _ = proof.sign_request(TOKEN, "POST", "http://10.0.0.9:1/heartbeat", b"{}")
    assert call(agent, relayed)[0] == 401


@pytest.mark.slow
def test_an_agent_does_not_start_under_another_id(tmp_path: Path) -> None:
    path = tmp_path / "fleet-token"
    path.touch(0o600)
    path.write_text(TOKEN + "\n")
    command = [sys.executable, "-m", "starling", "agent", "--id", "b", "--port", "0"]
    environment = {**os.environ, "STARLING_HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 78 and "token of agent a" in done.stderr
