"""The connection class and the client for redis.asyncio."""
import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

import redis
import redis.asyncio
from redis.asyncio.retry import Retry

from ._transport import StreamTransport
from .client import BufferCommands
from .connection import TLS, FerriteOptions, has_unread, size_of, store

__all__ = ["Connection", "Redis", "TlsConnection"]


def _start_threads():
    """Creates the executor for connecting and for `get_into`.

    Each of these calls waits in a thread, without Python's lock. A connection needs one thread at
    most. The limit of threads is high, so that calls to a server that does not answer leave
    threads for calls to other servers.
    """
    global _threads
    _threads = ThreadPoolExecutor(1 << 16, thread_name_prefix="ferrite")


_start_threads()
# A forked child has none of these threads, but its copy of the executor would wait for them.
os.register_at_fork(after_in_child=_start_threads)


class Connection(FerriteOptions, redis.asyncio.Connection):
    """A redis.asyncio connection over RDMA or TCP; the options are those of ferrite.Connection."""

    def __init__(self, *, rdma="prefer", local_address=None, **options):
        self._set_options(rdma, local_address, options)
        super().__init__(**options)

    @property
    def _is_open(self):
        return self.is_connected

    async def _connect(self):
        loop = asyncio.get_running_loop()
        connecting = loop.run_in_executor(_threads, self._open_stream)
        try:
            stream = await asyncio.shield(connecting)
        except asyncio.CancelledError:
            connecting.add_done_callback(_close_when_done)
            raise
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport = StreamTransport(loop, stream, protocol)
        self._reader = reader
        self._writer = asyncio.StreamWriter(transport, protocol, reader, loop)

    async def read_value_into(self, view):
        """Reads the reply to a command such as GET into `view`; see `Redis.get_into`."""
        if has_unread(self._parser):
            return store(await self.read_response(disable_decoding=True), view)
        stream, reader, transport = self._stream, self._reader, self._writer.transport
        transport.pause_reading()
        stream.unrecv(reader._buffer)  # bytes that have arrived in the meantime
        reader._buffer.clear()
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(
            _threads, stream.recv_bulk_into, view, self.socket_timeout)
        try:
            size = await asyncio.shield(reading)
        except TimeoutError:
            await self.disconnect(nowait=True)
            raise redis.TimeoutError(f"Timeout reading from {self._host_error()}") from None
        except OSError as error:
            await self.disconnect(nowait=True)
            raise redis.ConnectionError(
                f"Error while reading from {self._host_error()}: {error}") from error
        except BaseException:  # the caller gave up; after this, the thread must not write to `view`
            stream.shutdown(2)
            await asyncio.wait([reading])
            reading.exception()
            await self.disconnect(nowait=True)
            raise
        transport.resume_reading()
        if size is None:  # another reply, such as an error; redis-py's parser handles it
            return store(await self.read_response(disable_decoding=True), view)
        return size_of(size, view)


def _close_when_done(connecting):
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()


class TlsConnection(FerriteOptions, redis.asyncio.SSLConnection):
    """redis.asyncio's own connection over TCP with TLS; see `ferrite.TlsConnection`."""

    def __init__(self, *, rdma="prefer", local_address=None, **options):
        self._set_options(rdma, local_address, {})
        self._forbid_rdma()
        super().__init__(**options)

    @property
    def transport(self):
        return TLS if self.is_connected else None

    async def read_value_into(self, view):
        return store(await self.read_response(disable_decoding=True), view)


class Redis(BufferCommands, redis.asyncio.Redis):
    """A `redis.asyncio.Redis` over `ferrite.asyncio.Connection`; see `ferrite.Redis`."""

    _pool_class, _retry_class = redis.asyncio.ConnectionPool, Retry

    @staticmethod
    def _connection_class(is_tls):
        return TlsConnection if is_tls else Connection
