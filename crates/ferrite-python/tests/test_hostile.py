"""Servers that misbehave, and callers that give up. Over TCP: the servers are plain sockets."""
import asyncio
import contextlib
import socket
import threading

import pytest
import redis

import ferrite
import ferrite.asyncio

MIB = 1 << 20


def options_for(listener):
    """Options for clients that send nothing but their commands."""
    return {"host": "127.0.0.1", "port": listener.getsockname()[1], "rdma": "forbid",
            "protocol": 2, "retry": None, "lib_name": None, "lib_version": None,
            "socket_timeout": 60}


@contextlib.contextmanager
def serve(act):
    """Runs `act` with the first connection, in a thread. Yields the options for a client."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def run():
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(60)
                act(connection)

        thread = threading.Thread(target=run)
        thread.start()
        yield options_for(listener)
        thread.join()


@pytest.mark.parametrize("size", [b"18446744073709551615", b"18446744073709551614", b"-2", b"x"])
def test_impossible_sizes_end_the_connection(size):
    def act(connection):
        connection.recv(1024)
        connection.sendall(b"$%b\r\nvalue" % size)
        assert connection.recv(1024) == b""

    with serve(act) as options, ferrite.Redis(**options) as client:
        buffer = bytearray(4)
        with pytest.raises(redis.ConnectionError):
            client.get_into("key", buffer)
        assert buffer == bytes(4)


def test_cancelled_set_from_sends_nothing_more():
    has_begun, is_reused = threading.Event(), threading.Event()
    received = bytearray()

    def act(connection):
        received.extend(connection.recv(1024))
        has_begun.set()
        is_reused.wait()
        while more := connection.recv(MIB):
            received.extend(more)

    async def program(options):
        async with ferrite.asyncio.Redis(**options) as client:
            buffer = bytearray(b"a" * (32 * MIB))
            setting = asyncio.create_task(client.set_from("key", buffer))
            await asyncio.to_thread(has_begun.wait)
            setting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await setting
            buffer[:] = b"b" * len(buffer)
            is_reused.set()

    with serve(act) as options:
        asyncio.run(program(options))
    assert received.startswith(b"*3\r\n$3\r\nSET") and len(received) < 32 * MIB
    assert received.count(b"b") == 0


@pytest.mark.parametrize("client", [ferrite.Redis, ferrite.asyncio.Redis])
@pytest.mark.parametrize("url", ["http://:secret@127.0.0.1", "unix:///run/redis.sock"])
def test_urls_of_other_transports_are_refused(client, url):
    with pytest.raises(ValueError, match="expected one of redis://") as refused:
        client.from_url(url)
    assert "secret" not in str(refused.value)


def test_a_server_that_does_not_answer_holds_up_no_other(server):
    async def program():
        # The kernel accepts the connections, but no program answers on them.
        with socket.create_server(("127.0.0.1", 0), backlog=128) as silent:
            async with ferrite.asyncio.Redis(**options_for(silent)) as client:
                waiting = [asyncio.create_task(client.get_into("key", bytearray(1)))
                           for _ in range(64)]
                for _ in range(20):
                    async with ferrite.asyncio.Redis(**server.options) as other:
                        assert await asyncio.wait_for(other.ping(), 30)
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(program())
