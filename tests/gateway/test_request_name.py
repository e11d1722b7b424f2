"""A request that its client names has the same answer on every server, to the byte, and on one server only once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.api.request_name import RequestName, read_request_name
from pipeline.errors import InvalidRequest
from tests.gateway.server import MakeServer, Server

ID = "req-0123456789abcdef01234567"
NAME = f"{ID}; created=1700000000; seed=18446744073709551615; salt=tenantA"
OTHER = "req-fedcba9876543210fedcba98; salt=tenantA"
UNSEEDED: dict[str, Any] = {"prompt": "by chance", "max_tokens": 20, "ignore_eos": True}


@given(
    st.builds(
        RequestName,
        st.from_regex("req-[0-9a-f]{24}", fullmatch=True),
        st.integers(1, 1 << 33),
        st.none() | st.integers(0, (1 << 64) - 1),
        st.from_regex("[0-9A-Za-z]{0,64}", fullmatch=True),
    )
)
def test_a_name_is_read_as_it_was_written(name: RequestName) -> None:
    written = f"{name.id}; created={name.created}"
    written += f"; seed={name.seed}" if name.seed is not None else ""
    written += f"; salt={name.salt}" if name.salt else ""
    assert read_request_name(written) == name


@pytest.mark.parametrize(
    "given", ["req-1", ID + "0", ID.upper(), ID + "; seed=1; created=2", ID + "; created=99999999999"]
)
def test_other_names_are_refused(given: str) -> None:
    with pytest.raises(InvalidRequest, match="X-Starling-Request"):
        read_request_name(given)


def test_no_header_is_no_name() -> None:
    assert read_request_name(None) is None
    assert read_request_name(ID) == RequestName(ID)


def raw(server: Server, body: dict[str, Any], name: str) -> tuple[int, bytes, str | None]:
    answer = server.post("/v1/generate", body, {"X-Starling-Request": name})
    return answer.status, answer.body, answer.headers.get("X-Starling-Request")


def test_the_same_name_gives_the_same_bytes_on_another_server(server: Server, make_server: MakeServer) -> None:
    one, other = server, make_server()
    for body in (UNSEEDED, {**UNSEEDED, "stream": True}):
        name = NAME if "stream" not in body else NAME.replace("0123", "4567")
        first, second = raw(one, body, name), raw(other, body, name)
        assert first[0] == 200, first
        assert first == second
        assert first[2] == name.partition(";")[0]
        assert b'"created":1700000000' in first[1] and b"18446744073709551615" in first[1]
        # It is answered there: a second request of that name is refused, and the answer can be read.
        again = one.post("/v1/generate", body, {"X-Starling-Request": name})
        assert (again.status, again.error["param"]) == (409, "X-Starling-Request")
        assert one.get(f"/v1/requests/{name.partition(';')[0]}").status == 200
    assert one.post("/v1/generate", UNSEEDED, {"X-Starling-Request": "mine"}).status == 400
    answer = one.post("/v1/generate", {**UNSEEDED, "seed": 5, "cache_salt": "mine"}, {"X-Starling-Request": OTHER})
    assert answer.json["seed"] == 5
    assert one.peers.generator.submitted[-1].cache_salt == "tenantA mine"
