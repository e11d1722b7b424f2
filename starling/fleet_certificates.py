"""Makes the authority of a fleet and the certificates of its hosts, by the package `cryptography`.

    DIR/authority.pem, DIR/authority.key   the authority; its key is needed only where certificates are issued
    DIR/NAME.pem, DIR/NAME.key             the certificate of a host or process, and its key

What the certificates say is in pipeline/fleet/peer_tls.py.  Existing files are not replaced.  No certificate lasts
longer than its authority, whose end would end it, too.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import ConfigError, Conflict, InvalidRequest
from pipeline.extras import how_to_install
from pipeline.fleet.denied_list import serial_of
from pipeline.fleet.peer_tls import Role
from pipeline.fleet.records import check_agent_id

AUTHORITY = "authority"
MAX_AUTHORITY_DAYS = 7300  # 20 years
MAX_DAYS = 825  # of other certificates: one that is stolen and not noticed ends in a foreseeable time
_BEGUN = datetime.timedelta(hours=1)  # before now: clocks of hosts differ


class Description(NamedTuple):
    """What a certificate says."""

    holder: str  # agent:ID, orchestrator:NAME, monitor:NAME, authority
    serial: str
    not_after: str  # ISO 8601


def make_authority(folder: Path, days: int) -> Path:
    """A new authority in `folder`; its certificate. Raises `InvalidRequest`, `ConfigError`, `Conflict`."""
    _check_days(days, MAX_AUTHORITY_DAYS)
    x509, ec, hashes = _library()
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Starling fleet")])
    usage = _usage(x509, signs=True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    built = (
        _begun(x509, days, datetime.datetime.now(datetime.UTC))
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    return _write(folder, AUTHORITY, built, key)


def issue(folder: Path, out: Path, role: Role, name: str, days: int, *, now: datetime.datetime | None = None) -> Path:
    """A certificate of the authority in `folder`, placed in `out`. It begins now, or at `now`, with a time zone.

    Raises `InvalidRequest`, `ConfigError`, `Conflict`.
    """
    if (problem := check_agent_id(name)) or name == AUTHORITY:
        raise InvalidRequest(
            f"the name {name[:80]!r} cannot be used: {problem or 'it is that of the authority'}", "name"
        )
    _check_days(days, MAX_DAYS)
    x509, ec, hashes = _library()
    authority, authority_key = _read_authority(folder)
    now = now or datetime.datetime.now(datetime.UTC)
    if now + datetime.timedelta(days=days) > authority.not_valid_after_utc:
        raise InvalidRequest(
            f"days = {days}: the certificate would outlast its authority, which ends at "
            f"{authority.not_valid_after_utc.isoformat()}: give fewer days, or make a new authority",
            "days",
        )
    key = ec.generate_private_key(ec.SECP256R1())
    both = [x509.ExtendedKeyUsageOID.SERVER_AUTH, x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer_identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    uri = x509.UniformResourceIdentifier(f"starling:{role}:{name}")
    built = (
        _begun(x509, days, now)
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .add_extension(x509.SubjectAlternativeName([uri]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(x509, signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_identifier), critical=False
        )
        .sign(authority_key, hashes.SHA256())
    )
    return _write(out, name, built, key)


def describe(path: Path) -> Description:
    """What a certificate says. Raises `ConfigError`."""
    x509, _, _ = _library()
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} has no certificate in PEM format: {error}") from None
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        uris = []
    own = [uri.removeprefix("starling:") for uri in uris if uri.startswith("starling:")]
    holder = own[0] if len(own) == 1 else AUTHORITY if found.subject == found.issuer else "unknown"
    return Description(holder, serial_of(f"{found.serial_number:X}"), found.not_valid_after_utc.isoformat())


def _library() -> tuple[Any, Any, Any]:
    """x509, ec, hashes of `cryptography`. Raises `ConfigError`."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise ConfigError(f"certificates need the extra `certificates`: {how_to_install('certificates')}") from None
    return x509, ec, hashes


def _check_days(days: int, most: int) -> None:
    if not 1 <= days <= most:
        raise InvalidRequest(f"days = {days}: expected 1 to {most}", "days")


def _begun(x509: Any, days: int, now: datetime.datetime) -> Any:
    builder = x509.CertificateBuilder().serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _BEGUN).not_valid_after(now + datetime.timedelta(days=days))


def _usage(x509: Any, *, signs: bool) -> Any:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _read_authority(folder: Path) -> tuple[Any, Any]:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    certificate, key = folder / f"{AUTHORITY}.pem", folder / f"{AUTHORITY}.key"
    try:
        return x509.load_pem_x509_certificate(certificate.read_bytes()), load_pem_private_key(key.read_bytes(), None)
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be read: {error.strerror}; make an authority with "
            f"`starling fleet certificate authority`, or name its directory with --authority"
        ) from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{certificate} and {key} are not an authority: {error}") from None


def _write(folder: Path, name: str, certificate: Any, key: Any) -> Path:
    """Write the key, then the certificate. Raises `Conflict`, `ConfigError`."""
    from cryptography.hazmat.primitives import serialization

    pem, private = folder / f"{name}.pem", folder / f"{name}.key"
    encoded_key = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, mode, data in (
            (private, 0o600, encoded_key),
            (pem, 0o644, certificate.public_bytes(serialization.Encoding.PEM)),
        ):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(fd)
    except FileExistsError as error:
        raise Conflict(f"{error.filename} exists already; choose another --out, or remove it") from None
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from None
    return pem
