"""TLS between agents and orchestrators: each side checks the other's certificate, and whose it is.

A certificate of the fleet's authority names its holder by one URI (subjectAltName):

    starling:agent:ID             the host of that agent. Connections to an agent are used only if it shows this id
    starling:orchestrator:NAME    may call agents, and send requests to their engines
    starling:monitor:NAME         may read the metrics of agents

Names of hosts are not checked: addresses change, ids do not.  The authority must sign for one fleet and nothing else.
The check is a part of the handshake, so that no request is sent to a peer that fails it, and is made again when the
files change and when the certificate ends: nothing more passes through a connection whose peer fails it then.
"""

from __future__ import annotations

import logging
import re
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from pipeline.config.schema import FleetTlsConfig
from pipeline.errors import ConfigError
from pipeline.fleet.denied_list import DeniedList, serial_of
from pipeline.tls.certificate import (
    CertificateFiles,
    Contents,
    Params,
    absolute,
    as_file,
    require_clients,
    server_context,
)
from pipeline.tls.follower import CertificateFollower

log = logging.getLogger("starling.tls")

Role = Literal["agent", "orchestrator", "monitor"]

PARAMS = Params("fleet.tls.cert", "fleet.tls.key", "fleet.tls.ca")
ORCHESTRATOR = "orchestrator"  # what {id} in a path stands for there
MAX_CONTEXTS = 2048  # one for each agent; then they are made again
_NAME = re.compile(r"starling:(agent|orchestrator|monitor):([A-Za-z0-9][A-Za-z0-9._-]{0,62})")
_PEM = re.compile(rb"-----BEGIN[^-]*-----(.*?)-----END", re.DOTALL)
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL: an outdated certificate is reported elsewhere

Shown = Mapping[str, Any]  # a certificate, as `getpeercert()` returns it


class Peer(NamedTuple):
    """The holder of a certificate."""

    role: str
    name: str
    serial: str  # hexadecimal, without leading zeros

    def __str__(self) -> str:
        return f"{self.role}:{self.name}"


def peer_of(shown: Shown) -> Peer | None:
    """Whose certificate it is; None unless it has exactly one name of a fleet."""
    uris = [value for kind, value in shown.get("subjectAltName", ()) if kind == "URI" and value.startswith("starling:")]
    found = _NAME.fullmatch(uris[0]) if len(uris) == 1 else None
    return Peer(found[1], found[2], serial_of(str(shown.get("serialNumber", "")))) if found is not None else None


def open_tls(tls: FleetTlsConfig, role: Role, name: str = "") -> PeerTls | None:
    """The certificate of the configuration; None without TLS. `name`: as of `PeerTls`. Raises `ConfigError`."""
    if not tls.cert:
        return None
    given = (tls.cert, tls.key, tls.ca, tls.denied)
    written = ORCHESTRATOR if role == "orchestrator" else name
    if not written and any("{id}" in path for path in given):
        raise ConfigError(f"{PARAMS.cert} = {tls.cert!r} has {{id}}: set fleet.agent.id, too", PARAMS.cert)
    cert, key, ca, denied = (absolute(path.replace("{id}", written)) for path in given)
    files = CertificateFiles(cert, key, ca, PARAMS)
    return PeerTls(files, DeniedList(denied), role, name, is_required=tls.required)


def boot_clock() -> float:
    """Seconds since the boot, with suspension."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class PeerTls:
    """The certificate of this process, and what it accepts of others. Call `tick` often, in an event loop."""

    def __init__(
        self,
        files: CertificateFiles,
        denied: DeniedList,
        role: Role,
        name: str = "",
        *,
        is_required: bool = False,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        """Read the files. `name`: that the certificate must have; "": any. Raises `ConfigError`."""
        self._files = files
        self._role = role
        self._list = denied
        self._wall = wall  # s since 1970; used in handshakes alone: a step of the clock ends no connection
        self._clock = clock  # s, never set
        self._serial = ""  # of the own certificate
        self.name = name  # of the own certificate
        self.is_required = is_required
        self._follower = CertificateFollower(files, check=self._check)
        if self._is_denied(role, self.name, self._serial):
            raise ConfigError(
                f"{PARAMS.cert}: {files.cert} of {role}:{self.name} is denied by fleet.tls.denied; issue another one",
                PARAMS.cert,
            )
        self._contexts: dict[tuple[str, str], ssl.SSLContext] = {}
        self._made_of: tuple[object, object] = (None, None)
        self._authorities: frozenset[bytes] = frozenset()
        self._epoch = 0  # grows when an authority is removed
        self._stamp = object()

    def tick(self) -> None:
        """Look at the files if it is time."""
        self._follower.tick()
        self._list.tick()

    @property
    def stamp(self) -> object:
        """Another object when the files have changed."""
        contents, entries = self._follower.certificate.contents, self._list.entries
        if self._made_of[0] is not contents or self._made_of[1] is not entries:
            self._take(contents, entries)
        return self._stamp

    @property
    def not_after(self) -> float:
        """The end of the own certificate, s since 1970; 0.0 if it is outdated."""
        return self._follower.certificate.not_after

    def server_context(self, *roles: Role) -> ssl.SSLContext:
        """For a listening socket that accepts peers of these roles."""

        def make(contents: Contents) -> ssl.SSLContext:
            context = _server(self._files, contents)
            context.sslobject_class = self._checking(lambda shown: self.refusal(shown, *roles))
            return context

        following = _Following(ssl.PROTOCOL_TLS_SERVER)
        following.current = lambda: self._context("server", ",".join(roles), make)
        return following

    def client_context(self, agent_id: str) -> ssl.SSLContext:
        """For a connection to this agent. Another one as soon as the files have changed."""

        def problem(shown: Shown) -> str:
            peer = peer_of(shown)
            if peer is not None and (peer.role, peer.name) != ("agent", agent_id):
                return f"its certificate is of {peer}, expected agent:{agent_id}"
            return self.refusal(shown, "agent")

        def make(contents: Contents) -> ssl.SSLContext:
            context = _client(contents)
            context.sslobject_class = self._checking(problem)
            return context

        return self._context("client", agent_id, make)

    def refusal(self, shown: Shown, *roles: Role) -> str:
        """Why a peer with this certificate is refused; "" if it is not. `roles`: that are accepted."""
        peer = peer_of(shown)
        if peer is None:
            return "the certificate must name its holder by one URI as starling:agent:ID or starling:orchestrator:NAME"
        if self._is_denied(peer.role, peer.name, peer.serial):
            return f"the certificate {peer.serial} of {peer} is denied (fleet.tls.denied)"
        if roles and peer.role not in roles:
            return f"the certificate is of {peer}; this needs one of the role {' or '.join(roles)}"
        return ""

    # ---------------------------------------------------------------- parts

    def _is_denied(self, role: str, name: str, serial: str) -> bool:
        return f"{role}:{name}" in self._list.entries or serial in self._list.entries

    def _take(self, contents: Contents, entries: frozenset[str]) -> None:
        """Use other files: contexts are made again, and each connection's peer is checked again."""
        if entries is not self._made_of[1] and self._is_denied(self._role, self.name, self._serial):
            log.error("the own certificate is denied", extra={"file": self._files.cert})
        self._made_of = contents, entries
        authorities = frozenset(b"".join(body.split()) for body in _PEM.findall(contents.client_ca))
        self._epoch += not self._authorities <= authorities
        self._authorities = authorities
        self._contexts.clear()
        self._stamp = object()

    def _context(self, kind: str, key: str, make: Callable[[Contents], ssl.SSLContext]) -> ssl.SSLContext:
        assert self.stamp is not None  # what was made of other files is forgotten
        found = self._contexts.get((kind, key))
        if found is None:
            if len(self._contexts) >= MAX_CONTEXTS:
                self._contexts.clear()
            found = self._contexts[kind, key] = make(self._follower.certificate.contents)
        return found

    def _checking(self, problem: Callable[[Shown], str]) -> type[ssl.SSLObject]:
        """The class of connections whose peer is checked. The context of one epoch accepts its authorities."""
        tls, epoch = self, self._epoch

        class Checked(CheckedConnection):
            _stamp: object = None
            _end = 0.0  # of the certificate, by `clock`

            def check(self) -> None:
                if self._stamp is tls.stamp and tls._clock() < self._end:
                    return
                shown = self.getpeercert() or {}
                if self._stamp is None:
                    self._end = tls._clock() + _end_of(shown) - tls._wall()
                found = "an authority has been removed from fleet.tls.ca" if epoch != tls._epoch else problem(shown)
                if not found and tls._clock() >= self._end:
                    found = f"the certificate of {peer_of(shown)} has expired: issue another one"
                if found:
                    raise ssl.SSLCertVerificationError(found)
                self._stamp = tls.stamp

        return Checked

    def _check(self, contents: Contents) -> None:
        """Raises `ConfigError` unless this process can use them: its authority accepts its certificate, of its name."""
        files, cert = self._files, self._files.params.cert
        try:
            server, client = _server(files, contents), _client(contents)
            for context in (server, client):
                context.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME)
            own = peer_of(_shown_by(server, client))
        except (ssl.SSLError, ValueError) as error:
            reason = getattr(error, "verify_message", "") or str(error)
            raise ConfigError(
                f"{cert}: {files.cert} is not accepted by the authority in {files.client_ca}: {reason}; issue it with "
                "`starling fleet certificate`",
                cert,
            ) from None
        expected = f"{self._role}:{self.name or 'NAME'}"
        if own is None or own.role != self._role or self.name not in ("", own.name):
            raise ConfigError(
                f"{cert}: {files.cert} is of {own or 'no member of a fleet'}, expected {expected}: issue one with "
                f"`starling fleet certificate {self._role} {self.name or 'NAME'}`",
                cert,
            )
        self.name, self._serial = own.name, own.serial


class CheckedConnection(ssl.SSLObject):
    """A connection whose peer is checked at the end of the handshake and, if anything has changed, before each use."""

    def check(self) -> None:
        """Raise `SSLCertVerificationError` unless the peer is accepted."""
        raise NotImplementedError

    def do_handshake(self) -> None:
        """Make a step; the last one checks the certificate."""
        try:
            super().do_handshake()
            self.check()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            if self.server_side:  # a client's caller gets the reason
                log.warning("a connection is refused", extra={"reason": reason_of(error)})
            raise

    def read(self, len: int = 1024, buffer: Any = None) -> Any:
        """Receive."""
        self.check()
        return super().read(len, buffer) if buffer is not None else super().read(len)

    def write(self, data: Any) -> int:
        """Send."""
        self.check()
        return super().write(data)


def reason_of(error: ssl.SSLError) -> str:
    """The reason of a failed handshake, in few words."""
    return str(getattr(error, "verify_message", "") or getattr(error, "reason", "") or error)


def _end_of(shown: Shown) -> float:
    """The end of a certificate, s since 1970."""
    return float(ssl.cert_time_to_seconds(str(shown["notAfter"]))) if "notAfter" in shown else 0.0


class _Following(ssl.SSLContext):
    """Each handshake uses the context of that moment."""

    current: Callable[[], ssl.SSLContext]

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """Begin a connection."""
        return self.current().wrap_bio(*arguments, **options)


def _server(files: CertificateFiles, contents: Contents) -> ssl.SSLContext:
    context = server_context(files, contents.cert, contents.key)
    require_clients(context, contents.client_ca, files)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # each connection shows its certificate
    return context


def _client(contents: Contents) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the id is checked instead
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=contents.client_ca.decode("ascii"))
    with as_file(contents.cert) as cert, as_file(contents.key) as key:
        context.load_cert_chain(cert, key)
    return context


def _shown_by(server_side: ssl.SSLContext, client_side: ssl.SSLContext) -> Shown:
    """The certificate that a server shows, after a handshake in memory. Raises `ssl.SSLError`."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_side.wrap_bio(to_client, to_server)
    server = server_side.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            pass
    return client.getpeercert() or {}
