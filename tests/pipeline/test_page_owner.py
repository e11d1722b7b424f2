"""Whose KV pages a cache salt names: the tenant that an orchestrator forwards for, however the request is salted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.api.adapter_salt import with_adapter
from pipeline.api.keys import Caller
from pipeline.api.page_owner import forwarded_salt, key_owner, owner_of, payer_of
from pipeline.api.request_name import read_request_name
from shm.prefix_hash import PageHash
from stages.kv.pool.root_owners import RootOwners
from stages.orchestrator.request_ids import RequestIds

IDS = RequestIds("s" * 32, lambda: 1_700_000_000.0)
FLEET = "\x01fleet"  # of the one key of an agent's engine
SALTS = st.text(st.characters(exclude_characters="\0"), max_size=6)
TENANTS = st.text(st.characters(exclude_characters="\0"), min_size=1, max_size=6).map(lambda name: f"\x01{name}")


def forwarded(tenant: str, request: str = "", key: str = FLEET, digest: str = "") -> str:
    """The salt of a sequence at an engine, for a request that came by an orchestrator."""
    name = read_request_name(IDS.name(IDS.new("t"), is_keyed=False, salt=tenant))
    assert name is not None
    return with_adapter(Caller("fleet", salt=key).salted(name.salted(request)), digest)


@given(TENANTS, TENANTS, SALTS, SALTS, st.sampled_from([FLEET, ""]), st.sampled_from(["", "ab" * 32]))
def test_a_tenant_is_one_owner_with_all_its_salts(
    one: str, other: str, salt: str, another: str, key: str, digest: str
) -> None:
    owner = owner_of(forwarded(one, salt, key, digest))
    assert owner == owner_of(forwarded(one, another, key))
    assert (owner == owner_of(forwarded(other, salt, key))) is (one == other)
    assert key_owner(owner) == key and forwarded_salt(owner) == IDS.salt(one) != ""


@given(st.text(" 0a", max_size=80), st.text(" 0a", max_size=80))
def test_a_tenant_that_shares_its_pages_passes_as_no_other(one: str, other: str) -> None:
    name = read_request_name(IDS.name(IDS.new("t"), is_keyed=False, salt=""))
    assert name is not None
    for salt in (one, other, f"{'0' * 32} {one}", f"  {'a' * 32} {other}"):
        assert owner_of(Caller("fleet", salt=FLEET).salted(name.salted(salt))) == FLEET
        assert owner_of(name.salted(salt)) == ""
    assert (name.salted(one) == name.salted(other)) is (one == other)
    assert name.salted(f"{'0' * 32} {one}") != name.salted(f" {'0' * 32} {one}")


def test_owners_of_no_known_tenant_pay_together() -> None:
    owners = [owner_of(forwarded("\x01a", key=key)) for key in ("", FLEET)]
    assert [payer_of(one) for one in (*owners, "", FLEET)] == ["\0", FLEET, "", FLEET]


@pytest.mark.parametrize("request_salt", ["", "x", "chosen by a client", "ab " * 20, "\x01other"])
@pytest.mark.parametrize("key", [FLEET, "\x01mine", "a group", ""])
def test_a_salt_without_a_name_belongs_to_its_key(key: str, request_salt: str) -> None:
    owner = owner_of(Caller("t", salt=key).salted(request_salt))
    assert (owner, key_owner(owner), forwarded_salt(owner)) == (key, key, "")


def test_pages_of_all_tenants_of_a_key_are_cleared_with_it() -> None:
    owners = RootOwners()
    roots = [PageHash(bytes([n]) * 16) for n in range(4)]
    for root, salt in zip(roots, (forwarded("\x01a"), forwarded("\x01b"), f"{FLEET}\0", "\x01else\0")):
        owners.learn(root, salt)
    hasher = {"": roots[0], f"{FLEET}\0": roots[2], "\x01else\0": roots[3]}.__getitem__
    assert roots[3] in owners.others(FLEET, hasher, ["\x01else"])
    assert owners.others(FLEET, lambda salt: PageHash(b"x" * 16), []).isdisjoint(roots[:3])


def test_a_sequence_corrects_what_another_engine_has_said() -> None:
    owners = RootOwners()
    root, other = PageHash(b"r" * 16), PageHash(b"o" * 16)
    owners.learn_owner(root, FLEET)  # by an engine of an older release
    owners.learn(root, forwarded("\x01a"))
    owners.learn_owner(root, "\x01b")
    assert owners.owner(root, lambda salt: other) == owner_of(forwarded("\x01a"))
