"""The part of LMCache that its remote connectors see, for machines without LMCache and torch.

The real package needs torch with CUDA. `test_lmcache_interface.py` compares this copy and the example
with the source of the real package, of this version.
"""
import abc
import sys
import types

import numpy as np

VERSION = "0.5.6"

class CacheEngineKey:
    def __init__(self, name):
        self.name = name

    def to_string(self):
        return self.name


class MemoryObj:
    """Memory with a count of references, from the backend's `allocate`."""

    def __init__(self, size):
        self.raw_data = np.zeros(size, dtype=np.uint8)
        self.references = 1

    @property
    def byte_array(self):
        return memoryview(self.raw_data)

    def ref_count_down(self):
        self.references -= 1


class RemoteConnector(metaclass=abc.ABCMeta):
    def __init__(self, config, metadata):
        self.save_chunk_meta = (config.extra_config or {}).get("save_chunk_meta", True)
        self.meta_shapes, self.meta_dtypes, self.meta_fmt = metadata.shapes, ["uint8"], "KV_2LTD"
        self.full_chunk_size_bytes = int(np.prod(metadata.shapes[0]))

    def reshape_partial_chunk(self, memory_obj, bytes_read):
        if bytes_read == 0 or bytes_read > self.full_chunk_size_bytes:
            raise ValueError(f"bytes_read: {bytes_read}")
        memory_obj.raw_data = memory_obj.raw_data[:bytes_read]
        return memory_obj

    @abc.abstractmethod
    async def exists(self, key): ...

    @abc.abstractmethod
    def exists_sync(self, key): ...

    @abc.abstractmethod
    async def get(self, key): ...

    @abc.abstractmethod
    async def put(self, key, memory_obj): ...

    @abc.abstractmethod
    async def list(self): ...

    @abc.abstractmethod
    async def close(self): ...


class Backend:
    """LMCache's LocalCPUBackend, as far as connectors use it."""

    def __init__(self, chunk_bytes, extra_config):
        self.config = types.SimpleNamespace(extra_config=extra_config, use_layerwise=False)
        self.metadata = types.SimpleNamespace(shapes=[(chunk_bytes,)])
        self.allocated = []

    def allocate(self, shapes, dtypes, fmt):
        self.allocated.append(MemoryObj(int(np.prod(shapes[0]))))
        return self.allocated[-1]


def install():
    """Makes `import lmcache...` of the example find the classes above."""
    base = "lmcache.v1.storage_backend.connector.base_connector"
    for name in ["lmcache", "lmcache.v1", "lmcache.v1.storage_backend",
                 "lmcache.v1.storage_backend.connector"]:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    found = {"lmcache.utils": CacheEngineKey, "lmcache.v1.memory_management": MemoryObj,
             base: RemoteConnector}
    for name, what in found.items():
        sys.modules[name] = types.ModuleType(name)
        setattr(sys.modules[name], what.__name__, what)
