"""Certificates for TLS between ranks: made from JOB_TOKEN, or a user's own.

Whoever knows the token derives the key of the job's certificate authority (RFC 5869, HKDF) and signs itself a
certificate. The key of the authority and that of the certificate never touch a disk.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import secrets
import ssl
import time
from collections.abc import Iterator

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from rolecall.config import Settings
from rolecall.errors import UsageError

CONTEXT = "rolecall certificate authority 1"  # with the job's name: what the derived key is for
BADGE = "rolecall badge 1"
SIGNING = "rolecall signing 1"
TOKEN_BYTES = 32
FINGERPRINT = 4  # bytes of a digest: enough to tell two tokens apart, too few to know that a guess is right
LIFE = datetime.timedelta(hours=48)  # of a certificate
SKEW = datetime.timedelta(hours=1)  # that two machines' clocks may differ
RENEW = 12 * 3600.0  # seconds after which it is made anew
RELOAD = 10.0  # seconds between two looks at a user's files
ALWAYS = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 1, 1)
MISSING = (
    "JOB_TOKEN is not set: whoever reaches this rank could run code on it. Give every rank the same JOB_TOKEN_FILE "
    "(`rolecall token` makes a token; `make k8s-token JOB=NAME` makes the Secret), or type TLS=off for a network "
    "that only ranks are in"
)


def new_token() -> str:
    """A new JOB_TOKEN, of 256 bits."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def badge(token: str, job: str) -> str:
    """What a rank shows with TLS=off to say that it knows the token, which itself is never sent."""
    return _derive(token, BADGE, job).hex()


def signing_key(token: str) -> bytes:
    """The key that signs requests to rank 0's METRICS_PORT: HKDF-SHA256 without salt, info `SIGNING` and a zero."""
    return _derive(token, SIGNING, "")


def fingerprint(settings: Settings, job: str) -> str:
    """What tells this rank's authority from another: hexadecimal digits of a digest of its public key, which is derived
    from JOB_TOKEN, or is that of TLS_CA. Empty if there is neither. Raises OSError and ValueError for a wrong file.
    """
    if settings.tls_cert is not None and settings.tls_ca is not None:
        return _identifier(x509.load_pem_x509_certificates(settings.tls_ca.read_bytes())[0].public_key()).hex()
    return _identifier(derive_authority(settings.token, job)[1].public_key()).hex() if settings.token else ""


def host_of(job: str, name: str) -> str:
    """The host name in the certificate of the member `name` of `job`, such as observer_1. A digest: a role's name may
    hold what no host name may."""
    return f"{hashlib.sha256(f'{job}/{name}'.encode()).hexdigest()[:40]}.rolecall"


class Credentials:
    """What this rank proves with who it is, and checks others by: `server` and `client` are its current contexts.

    Raises UsageError if there is neither a token nor a usable certificate.
    """

    def __init__(self, settings: Settings, job: str, name: str = "") -> None:
        self._settings, self._job, self._name = settings, job, name
        self.given = settings.tls_cert is not None  # a certificate of the user's authority
        if not self.given and not settings.token:
            raise UsageError(MISSING)
        self._seen: tuple[object, ...] = ()
        self._made_at = self._looked_at = 0.0
        self.server: ssl.SSLContext
        self.client: ssl.SSLContext
        self.anybody: ssl.SSLContext  # of a client that checks no name
        self.authority = self.chain = ""  # as PEM: the authority; the certificate and its key
        self._make()

    def place(self, name: str) -> None:
        """This rank is `name` from now on, as peers that dial it check: its next certificate, which is due, says so."""
        if name != self._name and not self.given:
            self._name, self._made_at = name, 0.0

    def host(self, name: str, first: bool) -> str | None:
        """The host name that the certificate of the member `name` must carry; None if any of the authority is as
        good. With a user's own certificates, rank 0's, which is `first`, must be for MASTER_ADDR."""
        if self.given:
            return self._settings.master_addr if first else None
        return host_of(self._job, name)

    def refresh(self) -> str:
        """Renews a certificate of this rank's own making; reads the user's files if they have changed. Returns what
        is wrong with those, or nothing: then the ones from before stay in use."""
        now = time.monotonic()
        try:
            if not self.given:
                if abs(time.time() - self._made_at) > RENEW:  # it is valid by the clock, which may be set
                    self._make()
            elif now - self._looked_at > RELOAD:
                self._looked_at = now
                if self._files() != self._seen:
                    self._make()
        except (OSError, ValueError, UsageError) as error:
            return str(error)
        return ""

    def _files(self) -> tuple[object, ...]:
        s = self._settings
        stats = [file.stat() for file in (s.tls_cert, s.tls_key, s.tls_ca) if file]
        return tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in stats)

    def _make(self) -> None:
        if self.given:
            self._make_of_files()
            return
        self.authority, self.chain = _certificates(self._settings.token, self._job, self._name)
        self.server, self.client, self.anybody = contexts(self.authority, self.chain)
        self._made_at = time.time()

    def _make_of_files(self) -> None:
        s = self._settings
        seen = self._files()  # before they are read: a change meanwhile is another one
        texts = dict[str, str]()
        for variable in ("tls_cert", "tls_key", "tls_ca"):
            with UsageError.wrap(f"{variable.upper()}={getattr(s, variable)}: cannot be read", OSError):
                texts[variable] = getattr(s, variable).read_bytes().decode(errors="replace")
        with UsageError.wrap(
            f"TLS_CERT={s.tls_cert} TLS_KEY={s.tls_key} TLS_CA={s.tls_ca}: are not a certificate, its "
            "key and an authority",
            ssl.SSLError,
            OSError,
            ValueError,
            advice="give them as PEM files",
        ):
            authority, chain = texts["tls_ca"], f"{texts['tls_key']}\n{texts['tls_cert']}"
            self.server, self.client, self.anybody = contexts(authority, chain)
        self.authority, self.chain, self._seen = authority, chain, seen


def contexts(authority: str, chain: str) -> tuple[ssl.SSLContext, ssl.SSLContext, ssl.SSLContext]:
    """The contexts of a server, a client, and a client that checks no name, from PEM: TLS 1.3, both ends show a
    certificate of the authority. `chain` has the certificate and its key. Raises ssl.SSLError, OSError and
    ValueError."""
    built = []
    with _file_in_memory(chain) as path:
        for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(protocol)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            context.hostname_checks_common_name = False
            context.load_verify_locations(cadata=authority)
            context.load_cert_chain(path, password=_refuse_to_ask)
            built.append(context)
    built[0].num_tickets = 0  # no connection is resumed, so none can be replayed
    built[2].check_hostname = False
    return built[0], built[1], built[2]


def _refuse_to_ask() -> str:
    raise ValueError("the key is encrypted; nobody can be asked for its password")


def derive_authority(token: str, job: str) -> tuple[Ed25519PrivateKey, x509.Certificate]:
    """The key and the certificate of the job's authority: the same in every process that knows the token."""
    key = Ed25519PrivateKey.from_private_bytes(_derive(token, CONTEXT, job))
    certificate = (
        _builder(f"rolecall {job}"[:64], key, *ALWAYS)
        .issuer_name(_subject(f"rolecall {job}"[:64]))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    return key, certificate


def issue(
    authority: Ed25519PrivateKey, certificate: x509.Certificate, host: str, now: datetime.datetime | None = None
) -> tuple[Ed25519PrivateKey, x509.Certificate]:
    """A new key and its certificate for `host`, or for nobody, valid around `now` (UTC). It names the authority's
    fingerprint, so that one of another token says so."""
    key, now = Ed25519PrivateKey.generate(), now or datetime.datetime.now(datetime.UTC)
    issuer = x509.AuthorityKeyIdentifier(_identifier(authority.public_key()), None, None)
    builder = _builder("rank", key, now - SKEW, now + LIFE).issuer_name(certificate.subject)
    builder = builder.add_extension(issuer, critical=False)
    if host:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
    return key, builder.sign(authority, None)


def pem(key: Ed25519PrivateKey, certificate: x509.Certificate) -> bytes:
    """Key and certificate as a PEM file."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate.public_bytes(Encoding.PEM)


def _certificates(token: str, job: str, name: str) -> tuple[str, str]:
    """The authority as PEM, and a new certificate with its key."""
    key, certificate = derive_authority(token, job)
    chain = pem(*issue(key, certificate, host_of(job, name) if name else ""))
    return certificate.public_bytes(Encoding.PEM).decode(), chain.decode()


@contextlib.contextmanager
def _file_in_memory(content: str) -> Iterator[str]:
    """The path of a file with `content` that is on no disk: ssl reads keys from files."""
    file = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(file, content.encode())
        yield f"/proc/self/fd/{file}"
    finally:
        os.close(file)


def _derive(token: str, purpose: str, job: str) -> bytes:
    return HKDF(hashes.SHA256(), 32, salt=None, info=f"{purpose}\0{job}".encode()).derive(token.encode())


def _identifier(key: PublicKeyTypes) -> bytes:
    content = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(content).digest()[:FINGERPRINT]


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _builder(
    name: str, key: Ed25519PrivateKey, begin: datetime.datetime, end: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
    )
