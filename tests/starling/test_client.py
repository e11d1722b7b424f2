"""Addresses, events and the terminal: the pure parts of `starling run`."""

from __future__ import annotations

import http.server
import io
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.schema import ApiKey, AuthConfig, Config
from pipeline.errors import ConfigError, InvalidRequest, ModelNotFound, ResourceError, StarlingError
from starling.cli.generation_options import choose_key
from starling.cli.terminal import visible
from starling.client.address import key_of_config, parse
from starling.client.answer import failure, get_json, read_failure
from starling.client.events import read_events


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080/v1/models"),
        ("http://[::1]:9000/v1/", "http://[::1]:9000/v1/models"),
        ("https://example.org/llm/v1", "https://example.org:443/llm/v1/models"),
    ],
)
def test_a_url_may_be_the_base_url_of_other_clients(text: str, target: str) -> None:
    address = parse(text)
    assert str(address._replace(path="")) + address.target("/v1/models") == target


@pytest.mark.parametrize(
    "text", ["", "127.0.0.1:8080", "ftp://h", "http://", "http://h:99999", "unix:a", "http://h/?q"]
)
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="expected http://HOST:PORT"):
        parse(text)


def test_a_unix_socket() -> None:
    assert parse("unix:///run/s") == parse("unix:/run/s")
    assert parse("unix:/run/s").target("/v1/models") == "/v1/models"


def test_a_tenants_key_is_used_rather_than_an_administrators() -> None:
    keys = (ApiKey(key="sk-admin", admin=True), ApiKey(key="sk-one"))
    assert key_of_config(Config(auth=AuthConfig(api_keys=keys))) == "sk-one"
    assert key_of_config(Config()) == ""
    config = Config(auth=AuthConfig(api_keys=keys))
    assert choose_key(config, None, None) == "sk-one"
    assert choose_key(config, None, "http://elsewhere") == ""  # no other server gets to see it
    assert choose_key(config, "sk-given", "http://elsewhere") == "sk-given"


LINE = st.text(st.characters(exclude_characters="\r\n", exclude_categories=("Cs",)), min_size=1)


@given(st.lists(st.tuples(LINE, st.text("0123456789:.", min_size=1))), st.integers(0, 30))
def test_events_are_read_and_a_cut_one_does_not_count(events: list[tuple[str, str]], cut: int) -> None:
    body = "".join(f": comment\nid: {where}\ndata: {data}\n\n" for data, where in events).encode()
    assert [(e.data, e.id) for e in read_events(io.BytesIO(body).readline)] == events
    found = [(e.data, e.id) for e in read_events(io.BytesIO(body[: max(0, len(body) - cut)]).readline)] if cut else []
    assert found == events[: len(found)]
    assert len(found) < len(events) or not cut or not events


@given(st.text())
def test_a_model_cannot_control_the_terminal(text: str) -> None:
    shown = visible(text)
    assert len(shown) == len(text)
    assert all(character in "\t\n" or ord(character) >= 32 for character in shown)
    assert not set(shown) & {chr(code) for code in range(0x7F, 0xA0)}
    assert visible("\x1b]52;c;aGk=\x07") == "␛]52;c;aGk=␇"


def test_errors_without_the_apis_shape_are_reported() -> None:
    assert "HTTP status 502: <html>" in read_failure(502, b"<html>").message
    assert failure({"code": "CONTEXT_LENGTH_EXCEEDED", "message": "too long"}).code == "CONTEXT_LENGTH_EXCEEDED"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("MODEL_NOT_FOUND", ModelNotFound),
        ("INVALID_REQUEST", InvalidRequest),
        ("REFUSED_BY_PLUGIN", InvalidRequest),
        ("INVALID_API_KEY", ConfigError),
        ("QUOTA_EXHAUSTED", ConfigError),
        ("MODEL_DAMAGED", ConfigError),
        ("INSUFFICIENT_RESOURCES", ResourceError),
        ("RATE_LIMITED", StarlingError),
        ("PLUGIN_FAILED", StarlingError),
    ],
)
def test_an_error_of_the_server_is_of_the_class_of_its_exit_code(code: str, kind: type[StarlingError]) -> None:
    """InvalidRequest and NotFound end a command with 2, ConfigError and ResourceError with 78, others with 1."""
    found = failure({"code": code, "message": "why", "param": None})
    assert type(found) is kind
    assert found.code == code
    assert found.message.startswith("why")


class _Web(http.server.BaseHTTPRequestHandler):
    """Answers each request with a page; counts the requests."""

    n_requests = 0

    def do_GET(self) -> None:
        type(self).n_requests += 1
        self.send_response(200)
        self.send_header("Content-Length", "6")
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def test_a_body_that_is_no_json_is_reported_at_once() -> None:
    """It was retried for a minute, as a lost connection."""
    _Web.n_requests = 0
    with http.server.HTTPServer(("127.0.0.1", 0), _Web) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            with pytest.raises(StarlingError, match="/v1/models with HTTP status 200.*no JSON.*<html>"):
                get_json(parse(f"http://127.0.0.1:{server.server_port}"), "/v1/models")
        finally:
            server.shutdown()
            thread.join()
    assert _Web.n_requests == 1
