"""A certificate and its private key, read from PEM files and checked before they are shown to a client.

    server.tls_cert       the server's certificate, then the intermediate ones
    server.tls_key        its private key, not encrypted, unreadable for other users
    server.tls_client_ca  "", or the authorities that sign the certificates of clients: then every client needs one

`Params` has other names for certificates that are configured elsewhere (pipeline/fleet/peer_tls.py).

The check ends with a handshake in memory, so that whatever OpenSSL refuses is refused here.  Blocking: files are read.
"""

from __future__ import annotations

import hashlib
import os
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from pipeline.config.schema import Config
from pipeline.config.user_home import expand_user
from pipeline.errors import ConfigError

MAX_BYTES = 1 << 20  # of a file
_EXPIRED, _NOT_YET_VALID = 10, 9  # X509_V_ERR_CERT_HAS_EXPIRED and _NOT_YET_VALID of OpenSSL
_BEGIN, _END = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"
# The error in the handshake of a server whose certificate is outdated is one of its clients: the server can start.
OUTDATED = {_EXPIRED: "has expired", _NOT_YET_VALID: "is not valid yet"}


class Params(NamedTuple):
    """The keys of the configuration that name the files, for messages."""

    cert: str = "server.tls_cert"
    key: str = "server.tls_key"
    client_ca: str = "server.tls_client_ca"


class CertificateFiles(NamedTuple):
    """Paths. `client_ca`: "" if clients need no certificate."""

    cert: str
    key: str
    client_ca: str = ""
    params: Params = Params()

    @property
    def paths(self) -> list[str]:
        """Those that are given."""
        return [path for path in (self.cert, self.key, self.client_ca) if path]


class Contents(msgspec.Struct, frozen=True, array_like=True):
    """The contents of the files."""

    cert: bytes
    key: bytes
    client_ca: bytes = b""

    def __repr__(self) -> str:
        return "Contents(...)"  # never the key


class Certificate(NamedTuple):
    """What a server needs for its handshakes."""

    context: ssl.SSLContext
    leaf: bytes  # the server's own certificate, as PEM
    outdated: str  # "", or why clients will not accept it now
    not_after: float  # s since 1970; 0.0 if it is outdated
    digest: bytes  # of the contents of all files
    contents: Contents


def files_of(config: Config) -> CertificateFiles | None:
    """The files of the configuration; None without TLS."""
    server = config.server
    if not server.tls_cert:
        return None
    return CertificateFiles(absolute(server.tls_cert), absolute(server.tls_key), absolute(server.tls_client_ca))


def absolute(path: str) -> str:
    """The path without `~`; "" stays."""
    return os.path.abspath(expand_user(path)) if path else ""


def read_certificate(files: CertificateFiles, known: bytes = b"") -> Certificate | None:
    """Read and check the files; None if their contents have the digest `known`. Raises `ConfigError`."""
    params = files.params
    contents = Contents(
        read_file(files.cert, params.cert),
        read_file(files.key, params.key, is_key=True),
        read_file(files.client_ca, params.client_ca) if files.client_ca else b"",
    )
    return check_contents(contents, files, known)


def check_contents(contents: Contents, files: CertificateFiles, known: bytes = b"") -> Certificate | None:
    """Check what was read from the files; None if it has the digest `known`. Raises `ConfigError`."""
    cert, key, client_ca = contents.cert, contents.key, contents.client_ca
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in (cert, key, client_ca))).digest()
    if digest == known:
        return None
    leaf = first_certificate(cert)
    if not leaf or not _is_certificate(leaf):
        raise ConfigError(
            f"{files.params.cert}: {files.cert} does not begin with a valid certificate; expected one in PEM format",
            files.params.cert,
        )
    if b"PRIVATE KEY-----" not in key:
        raise ConfigError(
            f"{files.params.key}: {files.key} has no private key; expected one in PEM format", files.params.key
        )
    context = server_context(files, cert, key)
    outdated, not_after = _try_handshake(context, leaf, files)
    if client_ca:
        require_clients(context, client_ca, files)
    return Certificate(context, leaf, outdated, not_after, digest, contents)


def first_certificate(pem: bytes) -> bytes:
    """The first certificate of a PEM file, which is the server's own; b"" if there is none."""
    begin, end = pem.find(_BEGIN), pem.find(_END)
    return pem[begin : end + len(_END)] + b"\n" if 0 <= begin < end else b""


def read_file(path: str, param: str, *, is_key: bool = False) -> bytes:
    """The contents of a file. Raises `ConfigError`, for a key also if other users can read it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            info = os.fstat(fd)
            mode = stat.S_IMODE(info.st_mode)
            if not stat.S_ISREG(info.st_mode):
                raise ConfigError(f"{param}: {path} is not a regular file; name a PEM file", param)
            if is_key and mode & 0o027:
                raise ConfigError(
                    f"{param}: {path} has mode {mode:o}: other users can read or its group can change the private key; "
                    f"chmod 600 it (or 640)",
                    param,
                )
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{param}: {path} cannot be read: {error.strerror}; correct the path, or let user {os.getuid()} read it",
            param,
        ) from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{param}: {path} is larger than {MAX_BYTES} bytes; name a PEM file", param)
    return data


def _is_certificate(pem: bytes) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError):
        return False
    return True


@contextmanager
def as_file(data: bytes) -> Iterator[str]:
    """A path of `data` in memory: what was checked is what OpenSSL reads."""
    fd = os.memfd_create("tls", os.MFD_CLOEXEC)
    try:
        os.write(fd, data)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def server_context(files: CertificateFiles, cert: bytes, key: bytes) -> ssl.SSLContext:
    """The context of a server. Raises `ConfigError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(["http/1.1"])

    def refuse_encrypted() -> str:
        raise ConfigError(
            f"{files.params.key}: {files.key} is encrypted, and the server starts without a question; store the key "
            f"without a passphrase (openssl pkey -in OLD -out NEW)",
            files.params.key,
        )

    try:
        with as_file(cert) as cert_path, as_file(key) as key_path:
            context.load_cert_chain(cert_path, key_path, refuse_encrypted)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            message = f"{files.key} is not the key of the certificate in {files.cert}; name the files of one pair"
            raise ConfigError(f"{files.params.key}: {message}", files.params.key) from None
        raise ConfigError(
            f"{files.params.cert}, {files.params.key}: OpenSSL refuses {files.cert} and {files.key}: "
            f"{error.reason or error}; `openssl x509 -in FILE -text` and `openssl pkey -in FILE -check` show the fault",
            files.params.cert,
        ) from None
    return context


def _try_handshake(shown: ssl.SSLContext, leaf: bytes, files: CertificateFiles) -> tuple[str, float]:
    """Whether the certificate is outdated and why, and until when it is valid. Raises `ConfigError`."""
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    client_context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client_context.load_verify_locations(cadata=leaf.decode("ascii"))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = shown.wrap_bio(to_server, to_client, server_side=True)
    try:
        for side in (client, server, client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
        found = client.getpeercert()
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in OUTDATED:
            return OUTDATED[error.verify_code], 0.0
        reason = error.verify_message
    except (ssl.SSLError, ValueError) as error:
        reason = str(error)
    else:
        return "", ssl.cert_time_to_seconds(str(found["notAfter"])) if found else 0.0
    raise ConfigError(
        f"{files.params.cert}: no client can use {files.cert}: {reason}; make a certificate for a server",
        files.params.cert,
    )


def require_clients(context: ssl.SSLContext, authorities: bytes, files: CertificateFiles) -> None:
    """Let a server's context accept only clients with a certificate of `authorities`. Raises `ConfigError`."""
    try:
        context.load_verify_locations(cadata=authorities.decode("ascii"))
    except (ssl.SSLError, ValueError):
        param = files.params.client_ca
        raise ConfigError(f"{param}: {files.client_ca} has no certificates in PEM format", param) from None
    context.verify_mode = ssl.CERT_REQUIRED
