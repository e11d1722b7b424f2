"""Reading a certificate: what is taken, and errors that name the file and the remedy."""

from __future__ import annotations

import os
import ssl
import subprocess
from pathlib import Path

import pytest

from pipeline.errors import ConfigError, InvalidRequest
from pipeline.tls.certificate import MAX_BYTES, CertificateFiles, first_certificate, read_certificate
from pipeline.tls.trust import other_server
from tests.tls_files import DATA, der, place


def files(directory: Path, name: str = "one") -> CertificateFiles:
    return CertificateFiles(*map(str, place(directory, name)))


def test_a_pair_is_taken_for_tls_1_2_and_later(tmp_path: Path) -> None:
    found = read_certificate(files(tmp_path))
    assert found is not None
    assert ssl.PEM_cert_to_DER_cert(found.leaf.decode()) == der("one")
    assert (found.outdated, found.not_after) == ("", ssl.cert_time_to_seconds("Jan  1 00:00:00 2119 GMT"))
    assert found.context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert read_certificate(files(tmp_path), found.digest) is None


def test_a_chain_is_taken_and_its_first_certificate_is_the_servers_own(tmp_path: Path) -> None:
    pair = files(tmp_path)
    chain = (DATA / "one.pem").read_bytes() + (DATA / "ca.pem").read_bytes()
    Path(pair.cert).write_bytes(b"Certificate of the server:\n" + chain)
    found = read_certificate(pair)
    assert found is not None
    assert ssl.PEM_cert_to_DER_cert(found.leaf.decode()) == der("one")
    assert first_certificate(b"-----END CERTIFICATE-----") == first_certificate(b"") == b""


def test_an_outdated_certificate_is_reported(tmp_path: Path) -> None:
    found = read_certificate(files(tmp_path, "expired"))
    assert found is not None
    assert found.outdated == "has expired"


@pytest.mark.parametrize(
    ("cert", "key", "param", "words"),
    [
        ("missing", "one.key", "server.tls_cert", "No such file"),
        ("one.pem", "missing", "server.tls_key", "No such file"),
        (".", "one.key", "server.tls_cert", "directory"),
        ("/dev/null", "one.key", "server.tls_cert", "not a regular file"),
        ("one.key", "one.key", "server.tls_cert", "does not begin with a valid certificate"),
        ("damaged.pem", "one.key", "server.tls_cert", "does not begin with a valid certificate"),
        ("one.pem", "one.pem", "server.tls_key", "no private key"),
        ("one.pem", "two.key", "server.tls_key", "not the key of the certificate"),
        ("one.pem", "damaged.key", "server.tls_cert", "OpenSSL refuses"),
        ("one.pem", "open.key", "server.tls_key", "chmod 600"),
        ("client.pem", "client.key", "server.tls_cert", "certificate for a server"),
        ("large.pem", "one.key", "server.tls_cert", "larger than"),
    ],
)
def test_what_cannot_be_used_is_refused_with_file_and_remedy(
    tmp_path: Path, cert: str, key: str, param: str, words: str
) -> None:
    for source in DATA.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
        (tmp_path / source.name).chmod(0o600)
    for name, of in (("damaged.pem", "one.pem"), ("damaged.key", "one.key")):
        lines = (DATA / of).read_text().splitlines()
        (tmp_path / name).write_text("\n".join([lines[0], lines[1][::-1], *lines[2:]]))
        (tmp_path / name).chmod(0o600)
    (tmp_path / "open.key").write_bytes((DATA / "one.key").read_bytes())
    (tmp_path / "open.key").chmod(0o644)
    (tmp_path / "large.pem").write_bytes(b"x" * (MAX_BYTES + 1))
    pair = CertificateFiles(str(tmp_path / cert), str(tmp_path / key))
    with pytest.raises(ConfigError, match=words) as raised:
        read_certificate(pair)
    assert raised.value.param == param
    assert (pair.cert if param == "server.tls_cert" else pair.key) in raised.value.message


def test_an_encrypted_key_is_refused_without_a_question(tmp_path: Path) -> None:
    pair = files(tmp_path)
    done = subprocess.run(
        ["openssl", "pkey", "-in", pair.key, "-aes256", "-passout", "pass:x"], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("there is no openssl command")
    Path(pair.key).write_bytes(done.stdout)
    with pytest.raises(ConfigError, match="is encrypted"):
        read_certificate(pair)


def test_the_group_may_read_the_key_but_not_change_it(tmp_path: Path) -> None:
    pair = files(tmp_path)
    os.chmod(pair.key, 0o640)
    assert read_certificate(pair) is not None
    os.chmod(pair.key, 0o660)
    with pytest.raises(ConfigError, match="mode 660"):
        read_certificate(pair)


def test_clients_may_be_required_to_show_a_certificate(tmp_path: Path) -> None:
    pair = files(tmp_path)
    found = read_certificate(pair._replace(client_ca=str(DATA / "ca.pem")))
    assert found is not None
    assert found.context.verify_mode == ssl.CERT_REQUIRED
    with pytest.raises(ConfigError, match="tls_client_ca"):
        read_certificate(pair._replace(client_ca=pair.key))


def test_a_client_names_a_cacert_that_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="No such file"):
        other_server(str(tmp_path / "missing"))
    (tmp_path / "empty").touch()
    with pytest.raises(InvalidRequest, match="no certificate"):
        other_server(str(tmp_path / "empty"))
