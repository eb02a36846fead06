"""A remote connector for LMCache: chunks of a KV cache in Redis or Valkey, over RDMA or TCP.

LMCache loads it by name (`external://` or its plugin framework). Put this file on PYTHONPATH:

    remote_url: "external://ignored:0/lmcache_connector/?connector_name=FerriteConnector"
    save_unfull_chunk: false
    extra_config:
      save_chunk_meta: false
      ferrite_url: "redis://10.0.0.1:6380/0?rdma=prefer"

A chunk is one key. It is read into LMCache's memory and sent from there, without a copy in Python.
"""
import asyncio
import logging
from typing import List, Optional

from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

import ferrite.asyncio

PREFIX = "lmcache:"
logger = logging.getLogger(__name__)


class FerriteConnector(RemoteConnector):
    """LMCache's interface over `ferrite.asyncio.Redis`. All commands run in LMCache's loop."""

    def __init__(self, loop, local_cpu_backend, config):
        super().__init__(local_cpu_backend.config, local_cpu_backend.metadata)
        settings = config.extra_config or {}
        if self.save_chunk_meta:
            raise ValueError("set save_chunk_meta: false: a chunk is stored without metadata")
        if "ferrite_url" not in settings:
            raise ValueError("set ferrite_url in extra_config, such as redis://10.0.0.1:6380/0")
        self.loop, self.local_cpu_backend = loop, local_cpu_backend
        self.client = ferrite.asyncio.Redis.from_url(
            settings["ferrite_url"], socket_timeout=float(settings.get("ferrite_timeout", 30)))
        # Each transfer has a connection of its own. More transfers would only queue at the device.
        self.transfers = asyncio.Semaphore(int(settings.get("ferrite_transfers", 8)))

    async def exists(self, key: CacheEngineKey) -> bool:
        return bool(await self.client.exists(_name(key)))

    def exists_sync(self, key: CacheEngineKey) -> bool:
        return asyncio.run_coroutine_threadsafe(self.exists(key), self.loop).result()

    async def get(self, key: CacheEngineKey) -> Optional[MemoryObj]:
        memory = self.local_cpu_backend.allocate(
            self.meta_shapes, self.meta_dtypes, self.meta_fmt)
        if memory is None:
            return None
        try:
            async with self.transfers:
                size = await self.client.get_into(_name(key), memory.byte_array)
            if size is not None:
                return self.reshape_partial_chunk(memory, size)
        except BaseException:
            memory.ref_count_down()
            raise
        memory.ref_count_down()
        return None

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj):
        async with self.transfers:
            await self.client.set_from(_name(key), memory_obj.byte_array)

    async def list(self) -> List[str]:
        found = self.client.scan_iter(PREFIX + "*", count=1000)
        return [name.decode()[len(PREFIX):] async for name in found]

    async def close(self):
        await self.client.aclose()

    def support_ping(self) -> bool:
        return True

    async def ping(self) -> int:
        return 0 if await self.client.ping() else 1

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: List[CacheEngineKey]) -> List[Optional[MemoryObj]]:
        # A failed chunk counts as missing. The memory of the other chunks must not be lost with it.
        found = await asyncio.gather(*map(self.get, keys), return_exceptions=True)
        for key, failed in zip(keys, found):
            if isinstance(failed, Exception):
                logger.warning("cannot read chunk %s: %s", key.to_string(), failed)
        return [None if isinstance(chunk, BaseException) else chunk for chunk in found]

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: List[CacheEngineKey], memory_objs: List[MemoryObj]):
        # LMCache reuses the memory of all chunks when this method returns, so it waits for all
        # chunks.
        done = await asyncio.gather(*map(self.put, keys, memory_objs), return_exceptions=True)
        for failed in filter(None, done):
            raise failed

    def remove_sync(self, key: CacheEngineKey) -> bool:
        removing = asyncio.run_coroutine_threadsafe(self.client.delete(_name(key)), self.loop)
        return bool(removing.result())


def _name(key: CacheEngineKey) -> str:
    return PREFIX + key.to_string()
