"""Addresses of downloads: what a redirect gives, which proxy an address takes, and how a failure is named."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    import yarl


def as_sent(url: str, first: str) -> str | yarl.URL:
    """What is sent for `url`: one that a redirect from `first` gave may be signed, and is sent as it came."""
    import yarl

    return yarl.URL(url, encoded=True) if url != first and url.isascii() else url


def redirected(url: str, location: str, named: str) -> str:
    """The address of a redirect from `url`; `named`: the download, for messages. Raises `ConfigError`."""
    try:
        address = urljoin(url, location)
        urlsplit(address)
    except ValueError as error:
        raise ConfigError(f"{named} redirects to what is not an address: {error}") from None
    return address


def proxy_of(url: str, subject: str) -> str | None:
    """The proxy of ALL_PROXY, if it holds for `url`: aiohttp reads the other variables itself.

    Raises `ConfigError` for a proxy of another kind than HTTP; `subject` begins its message.
    """
    proxies = getproxies()
    proxy = proxies.get("all", "")
    try:
        parts = urlsplit(url)
    except ValueError:  # the request will say so
        return None
    if not proxy or parts.scheme in proxies or proxy_bypass(parts.hostname or ""):
        return None
    scheme, separator, _ = proxy.partition("://")
    if separator and scheme not in ("http", "https"):
        raise ConfigError(
            f"{subject}: ALL_PROXY names a {scheme}:// proxy; downloads go through http:// and https:// ones"
        )
    return proxy if separator else f"http://{proxy}"


def reason(error: BaseException, timeout_s: float) -> str:
    """Why a request failed. `timeout_s`: how long a server may be silent."""
    import aiohttp

    if isinstance(error, TimeoutError):
        return f"no data for {timeout_s:g} s"
    if isinstance(error, aiohttp.ClientResponseError):  # its text has the address of a proxy, with its password
        return f"{error.status} {error.message}"
    return str(error) or type(error).__name__
