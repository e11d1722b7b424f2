"""Blobs in a bucket: S3 and servers that are compatible with it, Azure Blob Storage, Google Cloud Storage.

`obstore` (the extra `cloud`) speaks their protocols and finds credentials where their own tools do: AWS_ACCESS_KEY_ID
and the like, web identities, the role of the machine.  Starling's configuration holds no credentials.  They also sign
URLs, for agents that have none.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from pipeline.blobs.interface import MAX_LISTED, BlobInfo, BlobStore, Data, check_key, check_range, wrong_length
from pipeline.errors import ConfigError, Conflict, NotFound, ResourceError, StorageUnavailable
from pipeline.extras import how_to_install

SCHEMES = ("s3", "gs", "az")
CONNECT_S = 10
REQUEST_S = 120  # of one request: 32 MiB at 2.2 Mbit/s
_REPORTED = 300  # characters of the library's message


class CloudStore(BlobStore):
    """The blobs below `address`: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or `az://ACCOUNT/CONTAINER/PREFIX`.

    `endpoint`: URL of a server that is compatible with S3, or of the Azure account; "": the cloud's own.
    Raises `ConfigError`.
    """

    can_sign = True

    def __init__(self, address: str, endpoint: str = "", region: str = "") -> None:
        self.address = address.rstrip("/")
        try:
            import obstore
            from obstore import exceptions, store
        except ImportError:
            raise ConfigError(
                f"fleet.blobs = {address!r} needs the extra `cloud`: {how_to_install('cloud')}", "fleet.blobs"
            ) from None
        self._api, self._exceptions, self._from_url = obstore, exceptions, store.from_url
        self._bucket, self._prefix, self._config = _parts(self.address)
        self._allows_http = endpoint.startswith("http://")
        if endpoint:
            self._config["endpoint"] = endpoint
        if region:
            self._config["region"] = region
        self._store = self._open(f"{self._bucket}/{self._prefix}".rstrip("/"))

    def _open(self, url: str) -> Any:
        """A store of the library. Raises `ConfigError`."""
        try:
            return self._from_url(
                url,
                config=self._config,
                client_options={
                    "connect_timeout": timedelta(seconds=CONNECT_S),
                    "timeout": timedelta(seconds=REQUEST_S),
                    "allow_http": self._allows_http,
                },
                # The callers retry (retry.py): here only a connection that has just been closed is tried again.
                retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=REQUEST_S)},
            )
        except (self._exceptions.BaseError, ValueError) as error:
            raise ConfigError(f"fleet.blobs = {self.address!r}: {_line(error)}", "fleet.blobs") from None

    @cached_property
    def _whole_bucket(self) -> Any:
        """Without the prefix, which some releases of the library leave out of signed URLs."""
        return self._open(self._bucket)

    async def sign(self, keys: Sequence[str], valid_s: int) -> dict[str, str]:
        """By key: a URL that reads this blob and does nothing else, for `valid_s`. It is a secret."""
        paths = [f"{self._prefix}/{check_key(key)}".lstrip("/") for key in keys]
        with self._errors("signed URLs"):
            urls = await self._api.sign_async(self._whole_bucket, "GET", paths, timedelta(seconds=valid_s))
        return dict(zip(keys, urls, strict=True))

    async def size(self, key: str) -> int:
        """Bytes of a blob."""
        with self._errors(key):
            return int((await self._api.head_async(self._store, check_key(key)))["size"])

    async def get(self, key: str, offset: int, nbytes: int) -> bytes:
        """Exactly `nbytes` bytes from `offset`."""
        check_range(offset, nbytes)
        with self._errors(key):
            found = await self._api.get_range_async(self._store, check_key(key), start=offset, length=nbytes)
        data = await asyncio.to_thread(bytes, found) if nbytes > 1 << 20 else bytes(found)
        if len(data) != nbytes:
            raise wrong_length(f"{self.address}/{key}", offset, nbytes, len(data))
        return data

    async def put(self, key: str, data: Data, *, replace: bool = False) -> None:
        """Place a blob by one PUT, which stores take as a whole or not at all."""
        mode: Any = "overwrite" if replace else "create"
        with self._errors(key):
            await self._api.put_async(self._store, check_key(key), data, mode=mode, use_multipart=False)

    async def scan(self, folder: str) -> list[BlobInfo]:
        """All blobs below `folder`, sorted by key."""
        found: list[BlobInfo] = []
        with self._errors(folder):
            async for batch in self._api.list(self._store, prefix=check_key(folder)):
                found += [
                    BlobInfo(str(one["path"]), int(one["size"]), one["last_modified"].timestamp()) for one in batch
                ]
                if len(found) > MAX_LISTED:
                    raise ResourceError(f"{self.address}/{folder} has more than {MAX_LISTED:,} blobs; remove some")
        return sorted(found)

    async def delete(self, key: str) -> None:
        """Remove a blob. Idempotent."""
        with contextlib.suppress(NotFound), self._errors(key):
            await self._api.delete_async(self._store, check_key(key))

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Translate the library's exceptions."""
        where = f"{self.address}/{key}"
        known = self._exceptions
        try:
            yield
        except FileNotFoundError:
            raise NotFound(f"{where} does not exist") from None
        except (known.AlreadyExistsError, known.PreconditionError):
            raise Conflict(f"{where} exists already") from None
        except (known.PermissionDeniedError, known.UnauthenticatedError, known.NotSupportedError) as error:
            raise ConfigError(f"{where}: {_line(error)}; check the credentials", "fleet.blobs") from None
        except (known.BaseError, OSError) as error:
            raise StorageUnavailable(f"{where}: {_line(error)}") from None


def _parts(address: str) -> tuple[str, str, dict[str, Any]]:
    """The URL of the bucket as the library reads it, the prefix in it, and the settings for both."""
    parts = urlsplit(address)
    path = parts.path.strip("/")
    if parts.scheme != "az":
        return f"{parts.scheme}://{parts.netloc}", path, {}
    container, _, prefix = path.partition("/")  # the library's az:// begins with the container
    if not container:
        raise ConfigError(f"fleet.blobs = {address!r}: expected az://ACCOUNT/CONTAINER/PREFIX", "fleet.blobs")
    return f"az://{container}", prefix, {"account_name": parts.netloc}


def _line(error: BaseException) -> str:
    """The first line of the library's message, which may be a page."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:_REPORTED]
