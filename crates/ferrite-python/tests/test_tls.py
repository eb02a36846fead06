"""rediss://: TLS over TCP, never a password in plain text."""
import asyncio
import os
import socket
import subprocess
import threading

import pytest
import redis

import ferrite
import ferrite.asyncio
from conftest import IS_RDMA, Server

pytestmark = pytest.mark.skipif(IS_RDMA, reason="TLS is TCP only")


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    files = tmp_path_factory.mktemp("tls")
    certificate, key = str(files / "cert.pem"), str(files / "key.pem")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
                    "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
                    "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Server("--tls-port", str(port), "--tls-auth-clients", "no",
                    "--tls-cert-file", certificate, "--tls-key-file", key)
    yield port, certificate
    server.stop()


def test_sends_no_password_in_plain_text():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        received = []

        def accept():
            peer, _ = listener.accept()
            with peer:
                received.append(peer.recv(100))

        for is_async in (False, True):
            thread = threading.Thread(target=accept)
            thread.start()
            url = f"rediss://me:secret@127.0.0.1:{listener.getsockname()[1]}/0"
            with pytest.raises((redis.ConnectionError, OSError)):
                if is_async:
                    asyncio.run(_ping(url))
                else:
                    ferrite.Redis.from_url(url, retry=None).ping()
            thread.join(60)
        assert [bytes[:1] for bytes in received] == [b"\x16"] * 2  # a handshake of TLS
        assert b"secret" not in b"".join(received)


async def _ping(url):
    async with ferrite.asyncio.Redis.from_url(url, retry=None) as client:
        await client.ping()


def test_values_go_over_tls(tls):
    port, certificate = tls
    with ferrite.Redis.from_url(f"rediss://localhost:{port}/1", ssl_ca_certs=certificate) as client:
        value = os.urandom(1 << 20)
        assert client.set_from("value", value)
        out = bytearray(len(value))
        assert client.get_into("value", out) == len(value) and out == value
        with pytest.raises(ferrite.BufferTooSmallError):
            client.get_into("value", bytearray(10))
        assert client.client_info()["db"] == 1
        connection = client.connection_pool.get_connection()
        assert connection.transport == "TCP with TLS" and connection.device is None
        client.connection_pool.release(connection)
    with ferrite.Redis("localhost", port, ssl=True, ssl_ca_certs=certificate, db=1) as client:
        assert client.get("value") == value


def test_values_go_over_tls_with_asyncio(tls):
    port, certificate = tls

    async def main():
        url = f"rediss://localhost:{port}"
        async with ferrite.asyncio.Redis.from_url(url, ssl_ca_certs=certificate) as client:
            assert await client.set_from("asyncio", b"value")
            out = bytearray(5)
            assert await client.get_into("asyncio", out) == 5 and out == b"value"
            connection = await client.connection_pool.get_connection()
            assert connection.transport == "TCP with TLS"
            await client.connection_pool.release(connection)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_refuses_untrusted_servers_and_required_rdma(tls):
    port, _ = tls
    with pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
        ferrite.Redis.from_url(f"rediss://localhost:{port}", retry=None).ping()
    with pytest.raises(ValueError, match="RDMA is not encrypted"):
        ferrite.Redis.from_url(f"rediss://localhost:{port}?rdma=require").ping()
