"""redis.asyncio over Ferrite's connections."""
import asyncio
import multiprocessing
import os
import signal

import numpy as np
import pytest
import redis
import redis.asyncio

import ferrite.asyncio
from conftest import IS_RDMA, MIB

pytestmark = pytest.mark.filterwarnings("ignore::ferrite.FallbackWarning")


@pytest.fixture(params=["python-resp2", "python-resp3", "hiredis-resp3"])
def options(server, request):
    parser, protocol = request.param.split("-resp")
    found = {**server.options, "protocol": int(protocol)}
    if parser == "python":
        from redis._parsers import _AsyncRESP2Parser, _AsyncRESP3Parser
        found["parser_class"] = _AsyncRESP2Parser if protocol == "2" else _AsyncRESP3Parser
    else:
        pytest.importorskip("hiredis")
    return found


def run(options, program):
    async def main():
        pool = redis.asyncio.ConnectionPool(
            connection_class=ferrite.asyncio.Connection, **options)
        async with ferrite.asyncio.Redis(connection_pool=pool) as client:
            await client.flushall()
            await program(client)
        await pool.disconnect()

    asyncio.run(asyncio.wait_for(main(), 300))


def test_strings_pipelines_and_scan(options):
    async def program(client):
        await client.set("key", "value")
        assert await client.get("key") == b"value" and await client.get("absent") is None
        async with client.pipeline(transaction=True) as pipe:
            for n in range(500):
                pipe.set(f"p{n}", n).get(f"p{n}")
            assert (await pipe.execute())[1::2] == [str(n).encode() for n in range(500)]
        assert len([k async for k in client.scan_iter("p*")]) == 500
        with pytest.raises(redis.ResponseError):
            await client.lpush("key", 1)
        connection = await client.connection_pool.get_connection()
        assert connection.transport == ("RDMA (Ferrite)" if IS_RDMA else "TCP")
        await client.connection_pool.release(connection)

    run(options, program)


def test_pubsub(options):
    async def program(client):
        async with client.pubsub() as subscriber:
            await subscriber.subscribe("news")
            assert (await subscriber.get_message(timeout=30))["type"] == "subscribe"
            assert await subscriber.get_message(timeout=0.01) is None
            reading = asyncio.create_task(anext(subscriber.listen()))
            assert await client.publish("news", "hello") == 1
            assert (await reading)["data"] == b"hello"

    run(options, program)


def test_locks_and_blocking_commands(options):
    async def program(client):
        async with client.lock("lock", timeout=60):
            assert not await client.lock("lock", timeout=60).acquire(blocking=False)
        popping = asyncio.create_task(client.blpop("queue", timeout=60))
        await client.rpush("queue", "item")
        assert list(await popping) == [b"queue", b"item"]

    run(options, program)


def test_many_tasks(options):
    async def program(client):
        await asyncio.gather(*(client.incr("count") for _ in range(300)))
        assert await client.get("count") == b"300"

    run({**options, "max_connections": 400}, program)


def test_timeouts_and_cancelled_commands(options):
    async def program(client):
        pool = client.connection_pool
        connection = await pool.get_connection()
        connection.socket_timeout = 0.2
        await pool.release(connection)
        with pytest.raises(redis.TimeoutError):
            await client.execute_command("BLPOP", "nothing", 0)
        connection.socket_timeout = 60
        assert await client.ping()
        waiting = asyncio.create_task(client.execute_command("BLPOP", "nothing", 0))
        while not any(c["cmd"] == "blpop" for c in await client.client_list()):
            pass
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await client.ping()

    run(options, program)


def test_large_values(options):
    async def program(client):
        value = bytes(range(256)) * (MIB // 16)  # 16 MiB
        await client.set("large", value)
        assert await client.get("large") == value

    run(options, program)


def test_buffers(options):
    async def program(client):
        async def move(n, size):
            value = np.random.default_rng(n).integers(0, 256, size, dtype=np.uint8)
            await client.set_from(f"value{n}", value)
            out = np.empty(size, dtype=np.uint8)
            assert await client.get_into(f"value{n}", out) == size
            assert np.array_equal(out, value)
            assert await client.get(f"value{n}") == value.tobytes()

        sizes = [0, 1, 1000, MIB, 8 * MIB, 3 * MIB]
        await asyncio.gather(*(move(n, size) for n, size in enumerate(sizes)))
        assert await client.get_into("absent", bytearray(1)) is None
        with pytest.raises(ferrite.BufferTooSmallError):
            await client.get_into("value3", bytearray(10))
        await client.rpush("list", 1)
        with pytest.raises(redis.ResponseError):
            await client.get_into("list", bytearray(10))
        assert await client.ping()

    run(options, program)


def test_cancelled_get_into_leaves_the_buffer_alone(options):
    async def program(client):
        out = bytearray(100)
        # BLPOP's reply never comes, so the read waits.
        reading = asyncio.create_task(
            client.execute_command("BLPOP", "nothing", 0, into=memoryview(out)))
        async with client.client() as other:
            while not any(c["cmd"] == "blpop" for c in await other.client_list()):
                pass
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await client.ping() and out == bytes(100)

    run(options, program)


def test_cancelled_set_from_stores_nothing(server):
    """After it has cancelled the call, the caller may use the buffer for something else."""
    async def program(client):
        value = bytearray(64 * MIB)
        assert await client.ping()
        cancelled = await client.client_id()
        async with redis.asyncio.Redis(unix_socket_path=server.socket) as other:
            os.kill(server.process.pid, signal.SIGSTOP)
            try:
                setting = asyncio.create_task(client.set_from("value", value))
                connection = None
                while connection is None or not connection._writer.transport._unsent:
                    await asyncio.sleep(0)  # until the server's buffers are full
                    connection = next(iter(client.connection_pool._in_use_connections), None)
                setting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await setting
                value[:] = b"x" * len(value)
            finally:
                os.kill(server.process.pid, signal.SIGCONT)
            while any(int(c["id"]) == cancelled for c in await other.client_list()):
                pass
            assert await other.get("value") is None
            assert await client.ping()

    run(server.options, program)


def _in_a_child(options, results):
    async def program(client):
        results.put(await client.set("child", 1))

    run(options, program)


def test_works_in_a_forked_child(server):
    async def program(client):
        assert await client.ping()

    run(server.options, program)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_in_a_child, args=(server.options, results))
    child.start()
    try:
        assert results.get(timeout=60) is True
        child.join(60)
        assert child.exitcode == 0
    finally:
        child.kill()
