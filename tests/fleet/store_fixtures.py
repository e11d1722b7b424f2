"""Fixtures of real servers (peers.py), for the conftest of each folder whose tests use them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fleet.peers import Bucket, Etcd, Redis, azure_container, s3_bucket


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    with Redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with s3_bucket(tmp_path_factory.mktemp("s3")) as found:
        yield found


@pytest.fixture(scope="session")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with azure_container(tmp_path_factory.mktemp("azure")) as found:
        yield found
