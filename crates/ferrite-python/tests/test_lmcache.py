"""The example connector: chunks of 1 to 64 MiB, many at a time."""
import asyncio
import os
import sys

import numpy as np
import pytest

import lmcache_interface
from conftest import MIB
from lmcache_interface import Backend, CacheEngineKey, MemoryObj

pytestmark = pytest.mark.filterwarnings("ignore::ferrite.FallbackWarning")
lmcache_interface.install()
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../examples"))
from lmcache_connector import FerriteConnector  # noqa: E402


def run(server, chunk_bytes, program):
    async def main():
        url = f"redis://{server.options['host']}:{server.port}/2?rdma={server.options['rdma']}"
        extra = {"save_chunk_meta": False, "ferrite_url": url, "ferrite_timeout": 120}
        backend = Backend(chunk_bytes, extra)
        connector = FerriteConnector(asyncio.get_running_loop(), backend, backend.config)
        await connector.client.flushdb()
        try:
            await program(connector, backend)
        finally:
            await connector.close()

    asyncio.run(asyncio.wait_for(main(), 600))


def chunk(seed, size):
    memory = MemoryObj(size)
    memory.raw_data[:] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return memory


@pytest.mark.parametrize("mebibytes", [1, 4, 16, 64])
def test_chunks_come_back_equal(server, mebibytes):
    async def program(connector, backend):
        count = max(2, 16 // mebibytes)
        keys = [CacheEngineKey(f"model@1@0@{n}") for n in range(count)]
        chunks = [chunk(n, mebibytes * MIB) for n in range(count)]
        assert not await connector.exists(keys[0])
        await connector.batched_put(keys, chunks)
        assert all(await asyncio.gather(*map(connector.exists, keys)))
        found = await connector.batched_get(keys)
        for sent, got in zip(chunks, found):
            assert np.array_equal(sent.raw_data, got.raw_data)
        assert sorted(await connector.list()) == sorted(key.to_string() for key in keys)

    run(server, mebibytes * MIB, program)


def test_missing_and_partial_chunks(server):
    async def program(connector, backend):
        assert await connector.get(CacheEngineKey("absent")) is None
        assert backend.allocated[-1].references == 0  # its memory was given back
        part = chunk(5, MIB // 2)
        await connector.put(CacheEngineKey("part"), part)
        got = await connector.get(CacheEngineKey("part"))
        assert np.array_equal(got.raw_data, part.raw_data)
        assert await connector.ping() == 0
        loop = asyncio.get_running_loop()
        for expected in (True, False):
            key = CacheEngineKey("part")
            assert await loop.run_in_executor(None, connector.exists_sync, key) is expected
            assert await loop.run_in_executor(None, connector.remove_sync, key) is expected

    run(server, MIB, program)


def test_a_batch_ends_only_when_all_its_chunks_are_done(server):
    """LMCache reuses the memory of all chunks as soon as the batch has ended."""
    async def program(connector, backend):
        keys = [CacheEngineKey(name) for name in ("bad", "good")]
        started, may_end, ended = asyncio.Event(), asyncio.Event(), []

        class Client:
            async def set_from(self, name, _):
                if name.endswith("bad"):
                    await started.wait()
                    raise OSError("lost")
                started.set()
                await may_end.wait()
                ended.append(name)

        real, connector.client = connector.client, Client()
        putting = asyncio.create_task(connector.batched_put(keys, [chunk(1, 10), chunk(2, 10)]))
        await started.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not putting.done()
        may_end.set()
        with pytest.raises(OSError, match="lost"):
            await putting
        assert ended == ["lmcache:good"]
        connector.client = real

        await connector.put(keys[1], chunk(3, MIB))
        await connector.client.set("lmcache:bad", b"x" * (MIB + 1))  # larger than a chunk
        bad, good = await connector.batched_get(keys)
        assert bad is None and good.references == 1
        assert sum(memory.references for memory in backend.allocated) == 1

    run(server, MIB, program)


def test_a_missing_url_is_named(server):
    backend = Backend(MIB, {"save_chunk_meta": False})
    with pytest.raises(ValueError, match="^set ferrite_url in extra_config"):
        FerriteConnector(None, backend, backend.config)
