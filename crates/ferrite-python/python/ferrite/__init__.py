"""redis-py over RDMA, with fallback to TCP, and large values without copies in Python.

    import ferrite, numpy
    client = ferrite.Redis("10.0.0.1", 6380)      # a redis.Redis with two more methods
    client.set_from("weights", numpy.arange(1 << 20))
    client.get_into("weights", numpy.empty(1 << 20, dtype=int))

`ferrite.Connection` is for `redis.ConnectionPool(connection_class=ferrite.Connection, ...)`.
`ferrite.asyncio` has both for `redis.asyncio`.
"""
from ._native import __version__
from .client import Redis
from .connection import BufferTooSmallError, Connection, FallbackWarning, TlsConnection

__all__ = ["BufferTooSmallError", "Connection", "FallbackWarning", "Redis", "TlsConnection",
           "__version__"]
