"""`redis.Redis` with values that go from and to buffers."""
import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from .buffers import byte_view
from .connection import Connection, FerriteOptions, checked_url


def default_retry(retry_class):
    """Returns what redis-py uses for clients that make their own pool."""
    return retry_class(ExponentialWithJitterBackoff(base=1, cap=10), 3)


def read_value_into(connection, view):
    """Checks that the connection is of Ferrite: others cannot read into a buffer."""
    if not isinstance(connection, FerriteOptions):
        raise TypeError(f"{type(connection).__name__} cannot read into a buffer: create the pool "
                        "with connection_class=ferrite.Connection")
    return connection.read_value_into(view)


class Redis(redis.Redis):
    """A `redis.Redis` over `ferrite.Connection`.

    Pass `connection_pool`, or host and port with the options of `redis.ConnectionPool` and of
    `ferrite.Connection`.
    """

    def __init__(self, host="localhost", port=6379, db=0, *, connection_pool=None, **options):
        is_own = connection_pool is None
        if is_own:
            options.setdefault("retry", default_retry(Retry))
            connection_pool = redis.ConnectionPool(
                connection_class=Connection, host=host, port=port, db=db, **options)
            options = {}
        super().__init__(connection_pool=connection_pool, **options)
        if is_own:
            self.auto_close_connection_pool = True

    @classmethod
    def from_url(cls, url, **options):
        """Like `redis.Redis.from_url`; `?rdma=require` and `&local_address=...` are options.

        `redis+rdma://` is another name for `redis://`. `rediss://` is refused: there is no TLS.
        """
        pool = redis.ConnectionPool.from_url(
            checked_url(url), connection_class=Connection, **options)
        client = cls(connection_pool=pool)
        client.auto_close_connection_pool = True
        return client

    def get_into(self, key, buffer):
        """Reads a value into `buffer`; returns its size in bytes, or None without the key.

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
        if view is not None:
            return read_value_into(connection, view)
        return super().parse_response(connection, command_name, **options)
