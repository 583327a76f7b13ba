"""Who answers at a port: the certificate that is presented there, whoever signed it."""

from __future__ import annotations

import contextlib
import ssl
import time
from dataclasses import dataclass

from cryptography import x509

from rolecall.tunnel.channel import Channel, reason_of
from rolecall.tunnel.dial import connect
from rolecall.tunnel.keys import FINGERPRINT, Credentials


@dataclass(frozen=True)
class Presented:
    """What a certificate says: the `fingerprint` of the authority that signed it (of one that is derived from a token,
    otherwise empty), that authority's name, the hosts that it is for, and when it is valid (Unix seconds)."""

    fingerprint: str
    issuer: str
    hosts: tuple[str, ...]
    begins: float
    ends: float


def peek(credentials: Credentials | None, address: tuple[str, int], seconds: float) -> Presented:
    """The certificate that is presented at `address`. Nothing is asked there, and nobody is trusted. With
    `credentials`, a member takes the visit for one of its own; they check nobody afterwards, and are of no other use.

    Raises ConnectionError if what answers speaks no TLS 1.3, TimeoutError and OSError where nothing answers.
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


def _read(presented: bytes) -> Presented:
    try:
        certificate = x509.load_der_x509_certificate(presented)
        fingerprint, hosts = "", tuple[str, ...]()
        for extension in certificate.extensions:
            match extension.value:
                case x509.AuthorityKeyIdentifier(key_identifier=bytes() as identifier):
                    if len(identifier) == FINGERPRINT:  # other programs' identifiers are of another kind
                        fingerprint = identifier.hex()
                case x509.SubjectAlternativeName() as names:
                    hosts = tuple(str(name.value) for name in names)
        issuer = ", ".join(str(name.value) for name in certificate.issuer)
        begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    except ValueError as error:
        raise ConnectionError(f"what answers presents a damaged certificate ({error})") from error
    return Presented(fingerprint, issuer, hosts, begins.timestamp(), ends.timestamp())
