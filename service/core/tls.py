"""The TLS files of a server, reloaded when they change."""

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from preblock.service.core.errors import Invalid
from preblock.service.core.file_watch import FileWatcher, check_regular, poll
from preblock.service.core.settings import Settings
from preblock.service.core.tasks import start_task

LOG = logging.getLogger(__name__)
PLAIN_HTTP = frozenset({"HTTP_REQUEST", "HTTPS_PROXY_REQUEST"})
"""Reasons of OpenSSL for a request without TLS."""
NO_TLS = "WRONG_VERSION_NUMBER"
"""Reason of OpenSSL for other input that is not TLS. It gets no alert."""
TEXT = b"this port speaks TLS: use https:// in place of http://\n"
PLAIN_HTTP_ANSWER = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(TEXT), TEXT)
)
Result = TypeVar("Result")


class ServerTls(ssl.SSLObject):
    """TLS of a connection that sends the alert of a failed handshake, and answers a request without TLS.

    The event loop closes the transport at an error of the handshake, before it sends anything. It sends pending bytes
    only when the handshake needs more input. So the first call reports that, and a next call the error, if the client
    sends more. The client closes the connection after the alert or answer; the time limit of the handshake ends others.
    """

    _failure: ssl.SSLError | None = None
    _outgoing: ssl.MemoryBIO

    @classmethod
    def _create(cls, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **options: Any) -> "ServerTls":
        """Keep `outgoing`, to write into; `SSLContext.wrap_bio` calls this."""
        created: ServerTls = super()._create(incoming, outgoing, *args, **options)  # type: ignore[misc]
        created._outgoing = outgoing
        return created

    def do_handshake(self) -> None:
        """Continue the handshake."""
        if self._failure is not None:
            raise self._failure
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            if error.reason == NO_TLS:
                raise
            self._failure = error.with_traceback(None)  # its frames would hold this object
            if error.reason in PLAIN_HTTP:
                self._outgoing.write(PLAIN_HTTP_ANSWER)
            raise ssl.SSLWantReadError from error


class CertificateFiles:
    """A certificate, its key, and the CAs of client certificates.

    Args:
        certificate: PEM file.
        key: PEM file.
        client_ca: PEM file; None if clients need no certificate.

    Raises:
        Invalid: a file is missing or invalid, or the key belongs to another certificate.

    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        self.certificate, self.key, self.client_ca = certificate, key, client_ca
        files = [file for file in (certificate, key, client_ca) if file is not None]
        self._watcher = FileWatcher("TLS files", "certificate", *files)
        self._watch: asyncio.Task[None] | None = None
        self._check()

    def watch(self, read: Callable[[], Result], use: Callable[[Result], object]) -> None:
        """Call `use` with the result of `read` after each change to valid files, until the event loop ends.

        `read` reads the files in a thread, and may raise OSError.
        """

        async def run() -> None:
            while True:
                await poll(partial(self.reload, read), use)

        self._watch = start_task(run)  # the loop itself would not keep it

    def reload(self, read: Callable[[], Result]) -> Result | None:
        """Return the result of `read` if a file has changed and all are valid, else None; this may block."""

        def check_and_read() -> Result:
            self._check()  # for example, the certificate is new and its key still old
            return read()

        return self._watcher.load(check_and_read, LOG.warning)

    def refuse(self, error: Exception) -> Invalid:
        """Return the error for a certificate and a key that cannot be used, because of `error`."""
        files, expected = f"{self.certificate} and {self.key}", "PEM files of a certificate and its key"
        message = f"tls_cert_file: {files} are no {expected}: {_reason(error)}"
        return Invalid("tls_cert_file", files, expected, message=message)

    def _check(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            check_regular(self.certificate)
            check_regular(self.key)
            context.load_cert_chain(self.certificate, self.key, password="")  # without a prompt at the terminal
        except (OSError, ValueError) as error:
            raise self.refuse(error) from error
        try:
            if self.client_ca is not None:
                check_regular(self.client_ca)
                context.load_verify_locations(self.client_ca)
        except OSError as error:
            message = f"tls_client_ca: {self.client_ca} is no PEM file of certificates: {_reason(error)}"
            raise Invalid(
                "tls_client_ca", str(self.client_ca), "a PEM file of certificates", message=message
            ) from error


def load_certificates(settings: Settings) -> CertificateFiles | None:
    """Return the TLS files of the settings; None without TLS.

    Raises:
        Invalid: a file is missing or invalid, or only some of the settings are set.

    """
    certificate, key, client_ca = settings.tls_cert_file, settings.tls_key, settings.tls_client_ca
    if certificate is not None and key is not None:
        return CertificateFiles(certificate, key, client_ca)
    for name, file in (("tls_cert_file", certificate), ("tls_key", key), ("tls_client_ca", client_ca)):
        if file is not None:
            message = f"{name} is set alone; TLS needs tls_cert_file and tls_key"
            raise Invalid(name, str(file), "also tls_cert_file and tls_key", message=message)
    return None


def reloading_context(files: CertificateFiles, _: object, make: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """Return a context that uses the current `files` for each new connection; a task of the event loop reloads them.

    The arguments after `files` are those of uvicorn's `ssl_context_factory`; `make` reads the files.

    Raises:
        Invalid: a file has changed since its check.

    """
    try:
        first = newest = make()
    except (OSError, ValueError) as error:
        raise files.refuse(error) from error
    changed = 0.0

    def use(context: ssl.SSLContext) -> None:
        nonlocal newest, changed
        newest, changed = context, time.time()

    def choose(connection: ssl.SSLSocket | ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> int | None:
        connection.context = newest
        # A resumed session shows no certificate. The certificate was checked when the session began.
        if files.client_ca is not None and connection.session_reused:
            session = connection.session
            if session is None or session.time <= changed:
                return ssl.ALERT_DESCRIPTION_HANDSHAKE_FAILURE
        return None

    if files.client_ca is not None:  # disables the resumption of TLS 1.3; TLS 1.2 resumes by other means
        first.options |= ssl.OP_NO_TICKET
        first.num_tickets = 0
    first.sslobject_class = ServerTls
    files.watch(make, use)
    first.sni_callback = choose  # OpenSSL calls it in every handshake, even without a server name
    return first


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)
