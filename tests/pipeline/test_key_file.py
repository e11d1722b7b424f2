"""The key file: what a process that follows it accepts after every change, every damage and every death."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.api import key_file, key_follower
from pipeline.api.key_file import KeyFile, KeyLimits, StoredKey, digest_of, edited, key_path, parse, read_keys, time_of
from pipeline.api.keys import Caller, Keys
from pipeline.config.schema import ApiKey, AuthConfig, Config
from pipeline.errors import ConfigError, Forbidden, StorageUnavailable, Unauthenticated
from pipeline.runtime.steady_clock import SteadyClock, clock_path


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits for its look, whose thread gets a core late on a busy machine."""
    monkeypatch.setattr(key_follower, "WAIT_S", 60.0)


def record(name: str, key: str = "", **fields: object) -> StoredKey:
    return msgspec.convert(
        {"name": name, "id": digest_of(name)[:16], "tenant": name, "sha256": digest_of(key or f"sk-{name}")}
        | {"created": 1.0}
        | fields,
        StoredKey,
    )


def store(directory: Path, *keys: StoredKey) -> Path:
    with edited(directory) as stored:
        stored[:] = keys
    return key_path(directory)


def caller(keys: Keys, header: str | None) -> Caller:
    """The caller of a request that comes now."""
    asyncio.run(keys.follower.refresh())
    return keys.caller(header)


def tenant(keys: Keys, key: str) -> str:
    return caller(keys, f"Bearer {key}").tenant


def test_a_process_follows_the_file(tmp_path: Path) -> None:
    path = key_path(tmp_path / "state")
    keys = Keys(Config(), KeyFile(path))
    assert not keys
    assert caller(keys, None).tenant == "default"
    store(path.parent, record("a"), record("b"))
    assert tenant(keys, "sk-a") == "a"
    assert keys
    with pytest.raises(Unauthenticated):
        caller(keys, None)
    store(path.parent, record("b"))
    with pytest.raises(Unauthenticated):
        caller(keys, "Bearer sk-a")
    assert tenant(keys, "sk-b") == "b"
    store(path.parent)  # the last key has been revoked: the server stays closed
    for header in (None, "Bearer sk-b"):
        with pytest.raises(Unauthenticated):
            caller(keys, header)
    assert Keys(Config(), KeyFile(path)), "a start with the empty file"


def test_configured_keys_stay_valid_and_tenants_keep_their_salts(tmp_path: Path) -> None:
    auth = AuthConfig(
        api_keys=(ApiKey(key="sk-conf", tenant="c", cache_salt="team"), ApiKey(key="sk-root", admin=True, tenant="o"))
    )
    path = store(tmp_path, record("a"), record("c2", tenant="c", scopes=["admin"]))
    keys = Keys(Config(auth=auth), KeyFile(path))
    assert tenant(keys, "sk-conf") == "c"
    assert caller(keys, "Bearer sk-a").salt == "\x01a"
    assert caller(keys, "Bearer sk-c2").salt == caller(keys, "Bearer sk-conf").salt == "team"
    assert caller(keys, "Bearer sk-c2").is_admin
    assert keys.salts() == {"a": "\x01a", "c": "team", "o": "\x01o"}
    assert Keys(Config()).salts() == {"default": ""}
    for name in ("models", "admin", "metrics"):
        caller(keys, "Bearer sk-root").require(name)
    caller(keys, "Bearer sk-a").require("models")
    with pytest.raises(Forbidden, match="scope models; this one has admin"):
        caller(keys, "Bearer sk-c2").require("models")


def test_a_share_leaves_room_for_the_tenants_of_the_file(tmp_path: Path) -> None:
    auth = AuthConfig(api_keys=(ApiKey(key="sk-conf", tenant="c"),))
    keys = Keys(Config(auth=auth), KeyFile(key_path(tmp_path)))
    assert keys.share_of("c", 1024, 1024) == 1024
    store(tmp_path, record("a", limits={"max_concurrent": 2}), record("b", limits={"max_concurrent": 0}))
    few, many = (caller(keys, f"Bearer sk-{name}").principal for name in "ab")
    assert keys.share_of("c", 1024, 1024) == 768
    assert keys.share_of("c", 1024, 1024, is_fixed=True) == 1024
    assert (keys.share_of(few, 1024, 768), keys.share_of(many, 1024, 768)) == (2, 1024)
    assert keys.concurrent(many) == Config().server.max_concurrent_requests


def test_a_tenant_may_have_all_that_is_stored_if_there_is_no_other_one(tmp_path: Path) -> None:
    file = KeyFile(key_path(tmp_path))
    free, one, two = (
        Keys(Config(auth=AuthConfig(api_keys=tuple(ApiKey(key=f"sk-{name}", tenant=name) for name in names))), file)
        for names in ("", "c", "cd")
    )
    assert [keys.part_of("c", 16) for keys in (one, two)] == [16, 12]
    assert [free.part_of(tenant, 16) for tenant in ("default", "of-a-fleet")] == [16, 12]
    store(tmp_path, record("a"))
    caller(one, "Bearer sk-a")
    assert [one.part_of("c", 16), free.part_of("default", 16)] == [12, 12]


def test_a_key_that_was_replaced_is_valid_for_its_overlap(tmp_path: Path) -> None:
    now = 100.0
    old = digest_of("sk-old")
    store(tmp_path, record("a", "sk-new", previous=old, previous_until=150.0, rotated=90.0))
    keys = Keys(Config(), KeyFile(key_path(tmp_path), lambda: now))
    assert tenant(keys, "sk-old") == tenant(keys, "sk-new") == "a"
    now = 150.0
    assert tenant(keys, "sk-new") == "a"
    with pytest.raises(Unauthenticated):
        caller(keys, "Bearer sk-old")


def test_a_replaced_key_that_was_refused_stays_so(tmp_path: Path) -> None:
    """Whatever the clock says afterwards, and also when the file is read again."""
    now = 150.0
    store(tmp_path, record("a", "sk-new", previous=digest_of("sk-old"), previous_until=150.0, rotated=90.0))
    keys = Keys(Config(), KeyFile(key_path(tmp_path), lambda: now))
    with pytest.raises(Unauthenticated):
        caller(keys, "Bearer sk-old")
    now = 100.0
    with pytest.raises(Unauthenticated):
        caller(keys, "Bearer sk-old")
    with edited(tmp_path, now) as stored:
        assert stored[0].previous  # by the clock of this process it is valid
        stored.append(record("b"))
    assert tenant(keys, "sk-b") == "b"
    with pytest.raises(Unauthenticated):
        caller(keys, "Bearer sk-old")


def test_an_edit_removes_the_digests_of_replaced_keys_that_have_expired(tmp_path: Path) -> None:
    old = digest_of("sk-old")
    store(tmp_path, *(record(f"until-{until}", previous=old, previous_until=until) for until in (100.0, 101.0)))
    with edited(tmp_path, 100.0):
        pass
    assert [(key.previous, key.previous_until) for key in read_keys(tmp_path)] == [("", 100.0), (old, 101.0)]


def test_edits_use_the_clock_of_the_servers(tmp_path: Path) -> None:
    """That of each is steady, and may differ from the system's. Of two the one that is behind counts."""
    assert abs(time_of(tmp_path) - time.time()) < 60
    for name, behind_s in (("gateway", 7200), ("orchestrator-8100", 3600)):
        wall_ns = time.time_ns() - behind_s * 10**9
        SteadyClock(clock_path(tmp_path, name), lambda wall_ns=wall_ns: wall_ns)  # type: ignore[misc]
    assert abs(time_of(tmp_path) - (time.time() - 7200)) < 60
    store(tmp_path, record("a", previous=digest_of("sk-old"), previous_until=time.time() - 3600))
    with edited(tmp_path) as stored:
        assert stored[0].previous


def test_plain_keys_are_not_in_the_file(tmp_path: Path) -> None:
    plain = key_file.generate()
    path = store(tmp_path, record("a", plain))
    assert plain.encode() not in path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    assert len({key_file.generate() for _ in range(100)}) == 100
    assert len(plain) == len("sk-") + 43


def damaged(directory: Path) -> dict[str, bytes]:
    """The file's contents after each kind of damage."""
    raw = key_path(directory).read_bytes()
    more = json.loads(raw)
    more["keys"][0]["scopes"] = ["models", "admin"]
    return {
        "empty": b"",
        "half": raw[: len(raw) // 2],
        "another scope": json.dumps(more).encode(),
        "not JSON": b"\xff\xfe",
        "too large": raw.ljust(key_file.MAX_BYTES + 1),
        "null": b"null",
        "nesting": b"[" * 100_000,
    }


@pytest.mark.parametrize("kind", ["empty", "half", "another scope", "not JSON", "too large", "null", "nesting"])
def test_damage_is_reported_and_opens_nothing(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    path = store(tmp_path, record("a"))
    follower = KeyFile(path)
    keys = Keys(Config(), follower)
    good = path.read_bytes()
    path.write_bytes(damaged(tmp_path)[kind])
    assert tenant(keys, "sk-a") == "a", "what was read before stays valid"
    assert follower.problem and follower.errors == 1
    assert "the key file cannot be used" in caplog.text
    for header in (None, "Basic x"):
        with pytest.raises(Unauthenticated):
            caller(keys, header)
    fresh = Keys(Config(), KeyFile(path))
    assert fresh
    for header in ("Bearer sk-a", "Bearer other"):
        with pytest.raises(StorageUnavailable):
            caller(fresh, header)
    with pytest.raises(ConfigError, match="damaged"):
        read_keys(tmp_path)
    with pytest.raises(ConfigError, match="damaged"), edited(tmp_path):
        raise AssertionError("a damaged file must not be replaced")
    key_path(tmp_path).write_bytes(good)
    assert tenant(fresh, "sk-a") == "a"


def test_a_file_that_disappears_opens_nothing(tmp_path: Path) -> None:
    path = store(tmp_path, record("a"))
    keys = Keys(Config(), KeyFile(path))
    path.unlink()
    assert tenant(keys, "sk-a") == "a"
    with pytest.raises(Unauthenticated):
        caller(keys, None)
    with pytest.raises(StorageUnavailable):
        caller(keys, "Bearer unknown")
    store(tmp_path, record("b"))
    assert tenant(keys, "sk-b") == "b"


def test_a_file_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    path = store(tmp_path, record("a"))
    path.chmod(0o620)
    with pytest.raises(StorageUnavailable):
        caller(Keys(Config(), KeyFile(path)), "Bearer sk-a")
    with pytest.raises(ConfigError, match="only user"):
        read_keys(tmp_path)


def test_a_change_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    path = store(tmp_path, record("a"))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="same name"), edited(tmp_path) as keys:
        keys.append(record("a", "other", id="0" * 16))
    with pytest.raises(ConfigError), edited(tmp_path) as keys:
        keys += [record(f"k{number}", id=f"{number:016x}") for number in range(key_file.MAX_KEYS)]
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["keys.json", "keys.lock"]


ADD = """
import sys
from pathlib import Path
from tests.pipeline.test_key_file import edited, record
name, count = sys.argv[2], int(sys.argv[3])
for number in range(count):
    with edited(Path(sys.argv[1])) as keys:
        keys.append(record(f"{name}{number}", id=f"{int(name, 36) * 1000 + number:016x}"))
"""


def test_processes_that_edit_at_once_lose_nothing(tmp_path: Path) -> None:
    running = [subprocess.Popen([sys.executable, "-c", ADD, str(tmp_path), name, "20"]) for name in "abc"]
    assert [one.wait(120) for one in running] == [0, 0, 0]
    assert {key.name for key in read_keys(tmp_path)} == {f"{name}{n}" for name in "abc" for n in range(20)}


def test_the_largest_file_can_be_read(tmp_path: Path) -> None:
    most = KeyLimits(*[10**12] * 2, 10**6, *[10**12] * 4)
    keys = [
        record(
            f"{number:064d}",
            id=f"{number:016x}",
            tenant="t" * 64,
            scopes=key_file.SCOPES,
            priority=-100,
            limits=msgspec.to_builtins(most),
            created=1_800_000_000.123,
            rotated=1_800_000_000.123,
            previous="f" * 64,
            previous_until=1_800_000_000.123,
        )
        for number in range(key_file.MAX_KEYS)
    ]
    path = store(tmp_path, *keys)
    assert len(KeyFile(path).keys) == key_file.MAX_KEYS


CONTENTS = msgspec.json.encode({"version": 1, "digest": key_file.contents_digest([record("a")]), "keys": [record("a")]})


@given(st.integers(0, len(CONTENTS) - 1), st.integers(1, 255))
def test_no_changed_byte_makes_another_key(at: int, flip: int) -> None:
    raw = bytearray(CONTENTS)
    raw[at] ^= flip
    try:
        found = parse(bytes(raw))
    except ConfigError:
        return
    assert found == [record("a")]
