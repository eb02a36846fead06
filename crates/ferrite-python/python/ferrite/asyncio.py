"""The connection class and the client for redis.asyncio."""
import asyncio
from concurrent.futures import ThreadPoolExecutor

import redis
import redis.asyncio
from redis.asyncio.retry import Retry

from ._transport import StreamTransport
from .buffers import byte_view
from .client import default_retry, read_value_into
from .connection import FerriteOptions, checked_url, has_unread, size_of, store

__all__ = ["Connection", "Redis"]

# For connecting and for large values: each waits in a thread, without Python's lock.
_threads = ThreadPoolExecutor(32, thread_name_prefix="ferrite")


class Connection(FerriteOptions, redis.asyncio.Connection):
    """A redis.asyncio connection over RDMA or TCP; the options are those of ferrite.Connection."""

    def __init__(self, *, rdma="prefer", local_address=None, **options):
        self._set_options(rdma, local_address, options)
        super().__init__(**options)

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
        stream.unrecv(reader._buffer)  # what has arrived meanwhile
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
        except BaseException:  # the caller gave up; nobody may write to the buffer after this
            stream.shutdown(2)
            await asyncio.wait([reading])
            reading.exception()
            await self.disconnect(nowait=True)
            raise
        transport.resume_reading()
        if size is None:  # an error or a push message, which redis-py's parser handles
            return store(await self.read_response(disable_decoding=True), view)
        return size_of(size, view)


def _close_when_done(connecting):
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()


class Redis(redis.asyncio.Redis):
    """A `redis.asyncio.Redis` over `ferrite.asyncio.Connection`; see `ferrite.Redis`."""

    def __init__(self, host="localhost", port=6379, db=0, *, connection_pool=None, **options):
        is_own = connection_pool is None
        if is_own:
            options.setdefault("retry", default_retry(Retry))
            connection_pool = redis.asyncio.ConnectionPool(
                connection_class=Connection, host=host, port=port, db=db, **options)
            options = {}
        super().__init__(connection_pool=connection_pool, **options)
        if is_own:
            self.auto_close_connection_pool = True

    @classmethod
    def from_url(cls, url, **options):
        """Like `redis.asyncio.Redis.from_url`, with the options of `ferrite.Connection`."""
        pool = redis.asyncio.ConnectionPool.from_url(
            checked_url(url), connection_class=Connection, **options)
        client = cls(connection_pool=pool)
        client.auto_close_connection_pool = True
        return client

    async def get_into(self, key, buffer):
        """Reads a value into `buffer`; see `ferrite.Redis.get_into`."""
        return await self.execute_command("GET", key, into=byte_view(buffer, writable=True))

    async def set_from(self, key, buffer, **options):
        """Sets a value from the memory of `buffer`. The options are those of `set`."""
        return await self.set(key, byte_view(buffer, writable=False), **options)

    async def parse_response(self, connection, command_name, **options):
        view = options.pop("into", None)
        if view is not None:
            return await read_value_into(connection, view)
        return await super().parse_response(connection, command_name, **options)
