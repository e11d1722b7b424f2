"""How an orchestrator and an agent prove to each other that they have the agent's token, without sending it.

    request    Authorization: Starling NONCE.SHA256.MAC    of method, whole URL, nonce, and SHA-256 of the body
    answer     X-Starling-Proof: MAC                       of the request's nonce, status, and SHA-256 of the body

The URL is the one under which the agent has registered: a request that another process relays to the agent is refused,
because its URL is that process's.  An agent that registers under the id of another one learns nothing from the requests
that it gets, and cannot answer them.  The bodies are not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from typing import NamedTuple

from pipeline.errors import Unauthenticated

HEADER = "X-Starling-Proof"
SCHEME = "Starling"
_CREDENTIALS = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{64})\.([0-9a-f]{64})")


class Claim(NamedTuple):
    """What an authentic request's header says."""

    nonce: str
    body_sha256: str

    def check_body(self, body: bytes) -> None:
        """Raise `Unauthenticated` for another body."""
        if not hmac.compare_digest(hashlib.sha256(body).hexdigest(), self.body_sha256):
            raise Unauthenticated("the body is not the one that was signed")


def sign_request(token: str, method: str, url: str, body: bytes) -> tuple[str, str]:
    """The value of `Authorization`, and the nonce."""
    nonce, digest = secrets.token_hex(16), hashlib.sha256(body).hexdigest()
    return f"{SCHEME} {nonce}.{digest}.{_mac(token, 'request', method, url, nonce, digest)}", nonce


def check_request(header: str, token: str, method: str, url: str) -> Claim:
    """Check the header of a request to `url`. Raises `Unauthenticated`. Takes constant time."""
    match = _CREDENTIALS.fullmatch(header.partition(" ")[2].strip())
    if match is None:
        raise Unauthenticated(f"the header Authorization: {SCHEME} has no proof; send Bearer TOKEN instead")
    nonce, digest, mac = match.groups()
    if not hmac.compare_digest(mac, _mac(token, "request", method, url, nonce, digest)):
        raise Unauthenticated(
            f"the request was not signed with this agent's token for {url}; `starling fleet token` issues tokens, and "
            "fleet.agent.advertise must be the address that orchestrators use"
        )
    return Claim(nonce, digest)


def is_signed(header: str | None) -> bool:
    """Whether the header `Authorization` has a proof."""
    return header is not None and header.partition(" ")[0].lower() == SCHEME.lower()


def sign_answer(token: str, nonce: str, status: int, body: bytes) -> str:
    """The value of `X-Starling-Proof`."""
    return _mac(token, "answer", nonce, str(status), hashlib.sha256(body).hexdigest())


def is_answer(given: str, token: str, nonce: str, status: int, body: bytes) -> bool:
    """Whether the answer is of a process that has the token. Takes constant time."""
    return hmac.compare_digest(
        given.encode("utf-8", "surrogateescape"), sign_answer(token, nonce, status, body).encode()
    )


def _mac(token: str, *parts: str) -> str:
    return hmac.digest(token.encode(), "\n".join(parts).encode("utf-8", "surrogateescape"), "sha256").hex()
