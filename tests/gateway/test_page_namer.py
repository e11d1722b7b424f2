"""A gateway names the pages of a prompt as the kv stage names them in its arena."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.api.page_names import decode
from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.config.schema import Config, ModelConfig
from pipeline.models.versions import initial
from shm.pages import KvGeometry, create_kv
from shm.prefix_hash import page_hashes, root_hash
from stages.agent.held_prefixes import read_names
from stages.gateway.requests.page_namer import PageNamer
from stages.gateway.requests.spec import RequestSpec
from stages.gateway.versions.catalog import VersionCatalog
from stages.kv.pool.page_headers import PageHeaders, PageIdentity

GEOMETRY = KvGeometry(1, 1, 32, 16, "f16")
DIGEST = "ab" * 32
TOKENS = np.arange(100, dtype="<i4")


def spec(*prompts: bytes, salt: str = "") -> RequestSpec:
    generation = GenerationRequest(endpoint="generate", model="org/m", cache_salt=salt)
    return RequestSpec(
        id="req-1",
        tenant="t",
        model="org/m",
        digest=DIGEST,
        numerics=1,
        generation=generation,
        seed=0,
        created=0,
        fingerprint="",
        deadline=0.0,
        prompts=prompts,
        version="org/m",
    )


def test_names_are_those_of_the_arena(tmp_path: Path) -> None:
    config = Config(models=[ModelConfig(name="org/m")])
    namer = PageNamer(tmp_path, VersionCatalog(config, initial(config), lambda table: None))
    assert namer.header(spec(TOKENS.tobytes())) == "" and read_names(tmp_path) == set()
    arena, views = create_kv(tmp_path / "org--m.kv", GEOMETRY, 8, digest=bytes.fromhex(DIGEST), generation=1)
    headers = PageHeaders(views.headers)
    root = root_hash(bytes.fromhex(DIGEST), GEOMETRY, "salt")
    hashes = page_hashes(root, TOKENS, GEOMETRY.page_tokens)
    for page, one in enumerate(hashes):
        headers.mark_full(page, PageIdentity(root, root, one, 0, page, GEOMETRY.page_tokens))
    headers.lease([7], root, 1, 0, 0)
    named = decode(namer.header(spec(TOKENS.tobytes(), salt="salt")))
    assert named is not None
    assert (named.n_tokens, [end for end, _ in named.pages]) == (100, [16, 32, 48, 64, 80, 96])
    assert {name for _, name in named.pages} == read_names(tmp_path)
    other = decode(namer.header(spec(TOKENS.tobytes())))
    assert other is not None and not {name for _, name in other.pages} & read_names(tmp_path)
    headers.free(0)
    assert len(read_names(tmp_path)) == 5
    assert namer.header(spec(TOKENS[:15].tobytes())) == ""
    assert namer.header(spec(TOKENS.tobytes(), TOKENS.tobytes())) == ""
    del views, headers
    arena.close()
