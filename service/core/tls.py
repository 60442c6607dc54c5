"""The files of TLS. They are read again when they change, without a restart."""

import logging
import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from preblock.service.core.errors import Invalid
from preblock.service.core.file_watch import FileWatcher
from preblock.service.core.settings import Settings

LOG = logging.getLogger(__name__)


class TlsConfig(Protocol):
    """Of a server of HTTP, where the files are."""

    ssl_certfile: str | os.PathLike[str] | None
    ssl_keyfile: str | os.PathLike[str] | None
    ssl_ca_certs: str | os.PathLike[str] | None


class CertificateFiles:
    """A certificate and its key, which change one after the other, and the signers of clients.

    Args:
        certificate: PEM file.
        key: PEM file.
        clients: PEM file of the signers of clients; None where clients need no certificate.

    """

    def __init__(self, certificate: Path, key: Path, clients: Path | None) -> None:
        self._certificate, self._key, self._clients = certificate, key, clients
        self._watch = FileWatcher(*(file for file in (certificate, key, clients) if file is not None))

    def renewed(self) -> bool:
        """Return whether one has changed since the last time, and all can be used; ask before every handshake."""
        if not self._watch.changed():
            return False
        try:
            _check_clients(check_pair(self._certificate, self._key), self._clients)
        except Invalid as error:
            LOG.warning("the certificates stay as they were: %s", error)
            return False
        return True


def follow(config: TlsConfig, make: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """Return what `make` does, which gives each new connection what the files of `config` hold then."""
    assert config.ssl_certfile is not None
    assert config.ssl_keyfile is not None
    clients = None if config.ssl_ca_certs is None else Path(config.ssl_ca_certs)
    pair, newest, changed = CertificateFiles(Path(config.ssl_certfile), Path(config.ssl_keyfile), clients), make(), 0.0

    def choose(connection: ssl.SSLSocket | ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> int | None:
        nonlocal newest, changed
        if pair.renewed():
            newest, changed = make(), time.time()
        connection.context = newest
        # A resumed session shows no certificate; it was checked when the session began.
        if clients is not None and connection.session_reused:
            session = connection.session
            if session is None or session.time <= changed:
                return ssl.ALERT_DESCRIPTION_HANDSHAKE_FAILURE
        return None

    first = newest
    if clients is not None:  # with TLS 1.3 no session is resumed then; 1.2 has others than these
        first.options |= ssl.OP_NO_TICKET
        first.num_tickets = 0
    first.sni_callback = choose  # called in every handshake, whether or not it names a server
    return first


def check_tls(settings: Settings) -> None:
    """Check the files of TLS, before a server of either protocol is given them.

    Raises:
        Invalid: one is missing, or cannot be used.

    """
    certificate, key, clients = settings.tls_cert_file, settings.tls_key, settings.tls_client_ca
    if certificate is None or key is None:
        for name, file in (("tls_cert_file", certificate), ("tls_key", key), ("tls_client_ca", clients)):
            if file is not None:
                raise Invalid(name, str(file), "nothing, or tls_cert_file and tls_key too")
        return
    _check_clients(check_pair(certificate, key), clients)


def check_pair(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return a context with a certificate and its key.

    Raises:
        Invalid: one is missing, or cannot be used, or they are not of each other.

    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password="")  # asks nobody at a terminal
    except (OSError, ValueError) as error:
        files = f"{certificate} and {key}"
        raise Invalid("tls_cert_file", files, f"PEM files of a certificate and its key ({_why(error)})") from error
    return context


def _check_clients(context: ssl.SSLContext, clients: Path | None) -> None:
    """Raise Invalid for an unusable file of signers of clients."""
    try:
        if clients is not None:
            context.load_verify_locations(clients)
    except OSError as error:
        raise Invalid("tls_client_ca", str(clients), f"a PEM file of certificates ({_why(error)})") from error


def _why(error: Exception) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)
