"""Calls by gRPC with mutual TLS. Arrays are sent as bytes, and read as an array of them."""

from __future__ import annotations

import argparse
import datetime
import ipaddress
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from bench.peers import calls

METHOD = "/bench.Echo/echo"
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
THREADS = 10  # of the callee, as in gRPC's examples


def make_keys(address: str, place: Path) -> None:
    """A certificate that both ends have, and trust."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bench")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    place.write_bytes(pem + certificate.public_bytes(serialization.Encoding.PEM))


def read_keys(place: Path) -> tuple[bytes, bytes]:
    content = place.read_bytes()
    cut = content.index(b"-----BEGIN CERTIFICATE")
    return content[:cut], content[cut:]


def encode(value: Any) -> bytes:
    return value.tobytes() if isinstance(value, np.ndarray) else value


def decode(data: bytes) -> Any:
    return np.frombuffer(data, np.float32) if len(data) > 4096 else data


def serve(chosen: argparse.Namespace, place: Path) -> None:
    make_keys(chosen.address, place)
    key, certificate = read_keys(place)
    handler = grpc.unary_unary_rpc_method_handler(
        lambda value, _: value, request_deserializer=decode, response_serializer=encode
    )
    server = grpc.server(futures.ThreadPoolExecutor(THREADS), options=UNLIMITED)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", {"echo": handler}),))
    credentials = grpc.ssl_server_credentials([(key, certificate)], certificate, require_client_auth=True)
    server.add_secure_port(f"{chosen.address}:{chosen.port}", credentials)
    server.start()
    calls.ready()
    server.wait_for_termination()  # the benchmark ends it


def main() -> None:
    chosen = calls.options(__doc__)
    place = chosen.directory / "keys.pem"
    if chosen.listen:
        serve(chosen, place)
        return
    key, certificate = read_keys(place)
    credentials = grpc.ssl_channel_credentials(certificate, key, certificate)
    channel = grpc.secure_channel(f"{chosen.address}:{chosen.port}", credentials, options=UNLIMITED)
    echo = channel.unary_unary(METHOD, request_serializer=encode, response_deserializer=decode)

    def send(payload: Any) -> Callable[[], Any]:
        return echo.future(payload).result

    calls.measure(chosen, send)


if __name__ == "__main__":
    main()
