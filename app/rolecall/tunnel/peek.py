"""Reads the fingerprint in the certificate that is presented at a port, whoever signed it."""

from __future__ import annotations

import contextlib
import ssl
import time

from cryptography import x509

from rolecall.tunnel.channel import Channel, reason_of
from rolecall.tunnel.dial import connect
from rolecall.tunnel.keys import FINGERPRINT, Credentials


def peek(credentials: Credentials | None, address: tuple[str, int], seconds: float) -> str:
    """The fingerprint of the authority that has signed the certificate presented at `address`; empty if that is not
    derived from a token. No service is requested, and nothing is trusted. With `credentials`, a member accepts the
    connection as a member's.

    Raises ConnectionError if the other end does not speak TLS 1.3, TimeoutError and OSError if nothing answers.
    """
    end = time.monotonic() + seconds
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if credentials:
        context = credentials.anybody
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    sock = connect(address, end)
    with contextlib.closing(sock):
        channel = Channel(sock, context, server=False)
        try:
            while not channel.handshake():
                channel.wait(end)
        except ssl.SSLError as error:
            raise ConnectionError(f"what answers speaks no TLS 1.3 ({reason_of(error).lower()})") from error
        except ConnectionError as error:
            raise ConnectionError(f"it hangs up before a handshake ({error})") from error
        presented = channel.tls.getpeercert(binary_form=True)
    if not presented:
        raise ConnectionError("what answers presents no certificate")
    return _read(presented)


def _read(presented: bytes) -> str:
    try:
        for extension in x509.load_der_x509_certificate(presented).extensions:
            match extension.value:
                case x509.AuthorityKeyIdentifier(key_identifier=bytes() as identifier):
                    if len(identifier) == FINGERPRINT:  # other programs' identifiers are of another kind
                        return identifier.hex()
    except ValueError as error:
        raise ConnectionError(f"what answers presents a damaged certificate ({error})") from error
    return ""
