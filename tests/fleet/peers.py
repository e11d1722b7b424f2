"""Real servers for the tests of stores, from packages (`make fleet-peers`). Without one its tests are skipped."""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hmac
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.blobs.cloud import CloudStore
from pipeline.coordination.etcd_store import EtcdStore
from pipeline.coordination.redis_store import RedisStore
from tools.ports import free_port

START_S = 180.0  # beside other work
_S3_IDENTITY = """{"identities": [{"name": "test", "actions": ["Admin", "Read", "Write", "List"],
 "credentials": [{"accessKey": "test", "secretKey": "testtest"}]}]}"""


_ACCOUNT = "devstoreaccount1"  # the only one of Azurite, with the key that its documentation names
_AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class Bucket:
    """A bucket of a running server. `base`: its address."""

    def __init__(self, endpoint: str, base: str = "s3://starling-test", region: str = "us-east-1") -> None:
        self.endpoint, self._base, self._region = endpoint, base, region

    def address(self, prefix: str) -> str:
        return f"{self._base}/{prefix}"

    def open(self, prefix: str) -> CloudStore:
        return CloudStore(self.address(prefix), self.endpoint, self._region)


class Etcd:
    """An etcd of its own, which can be killed and started again. A context manager."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("aetcd", reason="aetcd is not installed: make fleet-peers")
        self._program = program("etcd")
        self._folder = folder
        self._ports = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Etcd:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it on its files and wait until it answers."""
        client, peer = (f"http://127.0.0.1:{port}" for port in self._ports)
        # fmt: off
        command = [
            self._program, f"--data-dir={self._folder / 'data'}", f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}", "--unsafe-no-fsync",
        ]
        # fmt: on
        log = self._folder / "log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        wait_for_port(self._ports[0], self._process, log)

    @property
    def port(self) -> int:
        return self._ports[0]

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def open(self, namespace: str) -> EtcdStore:
        return EtcdStore("127.0.0.1", self._ports[0], namespace)


class Redis:
    """A Redis of its own, which can be killed and started again. A context manager.

    By default what it has acknowledged survives it; otherwise `settings` say what does.
    """

    DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
    FORGETFUL = ("--appendonly", "no")

    def __init__(self, folder: Path, *settings: str) -> None:
        pytest.importorskip("redis", reason="redis-py is not installed: make fleet-peers")
        self._program = program("redis-server")
        self._folder = folder
        self._settings = settings or self.DURABLE
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Redis:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it on its files and wait until it answers."""
        # fmt: off
        command = [
            self._program, "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._folder), "--save", "",
            "--daemonize", "no", *self._settings,
        ]
        # fmt: on
        log = self._folder / "redis.log"
        with log.open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        wait_for_port(self.port, self.process, log)

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def restart(self) -> None:
        """SIGKILL and a new start."""
        self.kill()
        self.start()

    def open(self, namespace: str, **options: Any) -> RedisStore:
        return RedisStore("127.0.0.1", self.port, namespace, **options)


async def compact(store: EtcdStore, revision: int) -> None:
    """Let etcd forget the changes before a revision."""
    await store._call(store._stub("KVStub").Compact(store._rpc.CompactionRequest(revision=revision), timeout=30))


def program(name: str) -> str:
    """Path of an installed server; otherwise the test is skipped."""
    found = shutil.which(name) or shutil.which(name, path=f"{Path(sys.executable).parent}:/usr/sbin:/usr/local/sbin")
    if not found:
        pytest.skip(f"{name} is not installed: make fleet-peers")
    return found


@contextlib.contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server process, ended by its pid."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            yield process
        finally:
            process.kill()  # what it has stored is not needed any more
            process.wait()


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server listens."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.05)
    raise AssertionError(f"the server did not start: {log.read_text()[-2000:]}")


@contextlib.contextmanager
def s3_bucket(folder: Path) -> Iterator[Bucket]:
    """A bucket of SeaweedFS. The credentials are in the environment meanwhile."""
    pytest.importorskip("obstore", reason="obstore is not installed: make fleet-peers")
    weed = program("weed")
    ports = [free_port() for _ in range(4)]
    identity = folder / "s3.json"
    identity.write_text(_S3_IDENTITY)
    # fmt: off
    command = [
        weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", f"-s3.config={identity}",
        f"-master.port={ports[0]}", f"-volume.port={ports[1]}", f"-filer.port={ports[2]}", f"-s3.port={ports[3]}",
        f"-master.port.grpc={free_port()}", f"-volume.port.grpc={free_port()}", f"-filer.port.grpc={free_port()}",
        f"-s3.port.grpc={free_port()}", "-volume.max=8", "-master.volumeSizeLimitMB=64",
    ]
    # fmt: on
    patch = pytest.MonkeyPatch()
    patch.setenv("AWS_ACCESS_KEY_ID", "test")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "testtest")
    try:
        with running(command, folder / "weed.log") as process:
            wait_for_port(ports[3], process, folder / "weed.log")
            bucket = Bucket(f"http://127.0.0.1:{ports[3]}")
            _create_bucket(bucket.endpoint, process)
            yield bucket
    finally:
        patch.undo()


@contextlib.contextmanager
def azure_container(folder: Path) -> Iterator[Bucket]:
    """A container of Azurite. The account's key is in the environment meanwhile."""
    pytest.importorskip("obstore", reason="obstore is not installed: make fleet-peers")
    port = free_port()
    # fmt: off
    command = [
        program("azurite-blob"), "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence",
        "--disableTelemetry",
    ]
    # fmt: on
    with pytest.MonkeyPatch.context() as patch, running(command, folder / "azurite.log") as process:
        patch.setenv("AZURE_STORAGE_ACCOUNT_KEY", _AZURITE_KEY)
        wait_for_port(port, process, folder / "azurite.log")
        _create_container(port)
        yield Bucket(f"http://127.0.0.1:{port}/{_ACCOUNT}", f"az://{_ACCOUNT}/starling-test", "")


def _create_container(port: int) -> None:
    """PUT /ACCOUNT/CONTAINER with the account's key: the library has no call for it, nor have URLs the right."""
    date, version = email.utils.formatdate(usegmt=True), "2021-08-06"
    lines = ["PUT", *[""] * 11, f"x-ms-date:{date}", f"x-ms-version:{version}"]
    text = "\n".join([*lines, f"/{_ACCOUNT}/{_ACCOUNT}/starling-test", "restype:container"])
    digest = hmac.digest(base64.b64decode(_AZURITE_KEY), text.encode(), "sha256")
    signature = base64.b64encode(digest).decode()
    headers = {"x-ms-date": date, "x-ms-version": version, "Authorization": f"SharedKey {_ACCOUNT}:{signature}"}
    url = f"http://127.0.0.1:{port}/{_ACCOUNT}/starling-test?restype=container"
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers, method="PUT"), timeout=60):
        return


def _create_bucket(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    """PUT /BUCKET, signed by obstore, whose stores have no call for it."""
    from datetime import timedelta

    import obstore
    from obstore.store import S3Store

    store = S3Store(
        "starling-test",
        endpoint=endpoint,
        region="us-east-1",
        client_options={"allow_http": True},  # type: ignore[call-arg]
    )
    deadline = time.monotonic() + START_S
    while True:
        url = obstore.sign(store, "PUT", "", timedelta(minutes=5))
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=60):
                return
        except (urllib.error.URLError, OSError) as error:
            if time.monotonic() > deadline or process.poll() is not None:
                raise AssertionError(f"no bucket: {error}") from None
            time.sleep(0.1)
