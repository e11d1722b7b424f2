"""What clients trust: the certificate of this home's server, or that of another one.

The running server stores its certificate, which is public, in RUN_DIR/gateway.pem, and the one before it.  Commands of
the same home accept exactly these, whatever names they were made for: they connect to an address of this machine.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.config.user_home import expand_user
from pipeline.errors import ConfigError, InvalidRequest
from pipeline.files import replace_file
from pipeline.tls.certificate import MAX_BYTES, files_of, first_certificate

log = logging.getLogger("starling.tls")

FILE_NAME = "gateway.pem"
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME: a server with an outdated certificate can still be operated


def publish(config: Config, leaves: bytes) -> None:
    """Store the server's certificates for the commands of this home."""
    try:
        replace_file(paths.run_dir(config) / FILE_NAME, leaves)
    except OSError as error:
        log.error("commands of this home may not trust the server", extra={"file": FILE_NAME, "reason": error.strerror})


def own_server(config: Config) -> ssl.SSLContext:
    """For connections to this home's server. Raises `ConfigError`."""
    published = paths.run_dir(config) / FILE_NAME
    configured = files_of(config)
    path = published if published.exists() or configured is None else Path(configured.cert)
    try:
        with open(path, "rb") as file:
            pem = file.read(MAX_BYTES)
        context = _context()
        context.check_hostname = False
        context.verify_flags |= _NO_CHECK_TIME
        context.load_verify_locations(cadata=(pem if path == published else first_certificate(pem)).decode("ascii"))
    except (OSError, ValueError) as error:  # and ssl.SSLError
        reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
        raise ConfigError(f"server.tls_cert: {path} cannot be used: {reason}", "server.tls_cert") from None
    return context


def other_server(cacert: str = "") -> ssl.SSLContext:
    """For connections to a server whose name is checked.

    cacert: a PEM file with its authorities or its own certificate; "": those of the system. Raises `InvalidRequest`.
    """
    if not cacert:
        return ssl.create_default_context()
    context = _context()
    try:
        context.load_verify_locations(expand_user(cacert))
    except OSError as error:  # and ssl.SSLError
        reason = error.strerror if not isinstance(error, ssl.SSLError) else "it has no certificate in PEM format"
        raise InvalidRequest(f"--cacert {cacert}: {reason}", "cacert") from None
    return context


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
