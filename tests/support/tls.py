"""TLS of a server: files of an authority of their own, and what clients see."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trustme

from tests.support.connections import dial


class TlsFiles:
    """Certificate and key of a server at 127.0.0.1, in files of a folder.

    Args:
        folder: for the files `certificate.pem` and `key.pem`.

    """

    def __init__(self, folder: Path) -> None:
        self.ca, self.certificate, self.key = trustme.CA(), folder / "certificate.pem", folder / "key.pem"
        self.options = "--tls-cert-file", str(self.certificate), "--tls-key", str(self.key)
        self.write_key(self.write_certificate())

    def write_certificate(self) -> trustme.LeafCert:
        """Write a new certificate without its key, and return both."""
        issued = self.ca.issue_cert("127.0.0.1", "localhost")
        issued.cert_chain_pems[0].write_to_path(str(self.certificate))
        return issued

    def write_key(self, issued: trustme.LeafCert) -> bytes:
        """Write the key of a certificate, and return the certificate in DER."""
        issued.private_key_pem.write_to_path(str(self.key))
        return ssl.PEM_cert_to_DER_cert(issued.cert_chain_pems[0].bytes().decode())

    def context(self, client: trustme.LeafCert | None = None) -> ssl.SSLContext:
        """Return the context of a client that trusts the authority, with a certificate of its own if given."""
        context = ssl.create_default_context(cadata=self.ca.cert_pem.bytes().decode())
        if client is not None:
            client.configure_cert(context)
        return context

    @contextmanager
    def connect(self, address: str, context: ssl.SSLContext | None = None) -> Iterator[ssl.SSLSocket]:
        """Open a connection to a URL."""
        context = context or self.context()
        with dial(address) as plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as stream:
            yield stream

    def shown(self, address: str, *protocols: str) -> bytes | None:
        """Return the certificate of a new connection in DER, with protocols of ALPN if given."""
        context = self.context()
        context.set_alpn_protocols([*protocols])
        with self.connect(address, context) as stream:
            return stream.getpeercert(binary_form=True)
