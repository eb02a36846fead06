"""`redis.Redis` with values that go from and to buffers."""
import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from .buffers import byte_view
from .connection import Connection, FerriteOptions, TlsConnection, checked_url


class BufferCommands:
    """What `ferrite.Redis` and `ferrite.asyncio.Redis` add to redis-py's clients.

    The commands of `ferrite.asyncio.Redis` return awaitables.
    """

    def __init__(self, host="localhost", port=6379, db=0, *, connection_pool=None, **options):
        is_own = connection_pool is None
        if is_own:
            # redis-py's default for clients that create their own pool
            retry = self._retry_class(ExponentialWithJitterBackoff(base=1, cap=10), 3)
            options.setdefault("retry", retry)
            connection_class = self._connection_class(options.pop("ssl", False))
            connection_pool = self._pool_class(
                connection_class=connection_class, host=host, port=port, db=db, **options)
            options = {}
        super().__init__(connection_pool=connection_pool, **options)
        if is_own:
            self.auto_close_connection_pool = True

    @classmethod
    def from_url(cls, url, **options):
        """Creates a client from a URL, as redis-py does.

        The URL may have the options of `ferrite.Connection`: `?rdma=require&local_address=...`.

        `redis+rdma://` means the same as `redis://`. `rediss://` is TLS over TCP.
        """
        url = checked_url(url)
        pool = cls._pool_class.from_url(url, **options)
        # Sets the class of the finished pool instead of passing the option `connection_class`.
        # For rediss://, redis.asyncio ignores this option. redis-py uses it in place of its own
        # class for TLS, so it would send the password without TLS.
        pool.connection_class = cls._connection_class(url.startswith("rediss://"))
        client = cls(connection_pool=pool)
        client.auto_close_connection_pool = True
        return client

    def get_into(self, key, buffer):
        """Reads a value into `buffer`; returns its size in bytes, or None if there is no such key.

        The buffer is any writable object with contiguous memory: a bytearray, a NumPy array, a
        torch tensor on the CPU. Raises `BufferTooSmallError` if the value does not fit. The rest
        of a larger buffer is unchanged.
        """
        return self.execute_command("GET", key, into=byte_view(buffer, writable=True))

    def set_from(self, key, buffer, **options):
        """Sets a value from the memory of `buffer`. The options are those of `set`."""
        return self.set(key, byte_view(buffer, writable=False), **options)

    def parse_response(self, connection, command_name, **options):
        view = options.pop("into", None)
        if view is None:
            return super().parse_response(connection, command_name, **options)
        if not isinstance(connection, FerriteOptions):
            raise TypeError(f"{type(connection).__name__} cannot read into a buffer: create the "
                            "pool with connection_class=ferrite.Connection")
        return connection.read_value_into(view)


class Redis(BufferCommands, redis.Redis):
    """A `redis.Redis` over `ferrite.Connection`.

    Pass `connection_pool`, or host and port with the options of `redis.ConnectionPool` and of
    `ferrite.Connection`. `ssl=True` uses `ferrite.TlsConnection`.
    """

    _pool_class, _retry_class = redis.ConnectionPool, Retry

    @staticmethod
    def _connection_class(is_tls):
        return TlsConnection if is_tls else Connection
