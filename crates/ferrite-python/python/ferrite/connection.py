"""The connection class for redis-py, and what it shares with the one for redis.asyncio."""
import ipaddress
import socket
import threading
import warnings

import redis
from redis.connection import Connection as RedisConnection
from redis.connection import SSLConnection

from ._native import Stream

try:
    from redis._parsers import _HiredisParser
except ImportError:  # another version of redis-py; its parsers in Python work unchanged
    _HiredisParser = None

TLS = "TCP with TLS"
POLICIES = ("prefer", "require", "forbid")

NO_TLS = "this connection has no TLS; use ferrite.TlsConnection, over TCP"
SCHEMES = ("redis", "redis+rdma", "rediss")


def checked_url(url):
    """Returns a URL that redis-py reads, or raises."""
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES:
        expected = ", ".join(f"{known}://" for known in SCHEMES)
        raise ValueError(f"{scheme}:// is not supported, expected one of {expected}; for Unix "
                         "sockets, use redis.Redis")
    return f"redis://{rest}" if scheme == "redis+rdma" else url


class FallbackWarning(RuntimeWarning):
    """A connection uses TCP although RDMA was preferred. The text names the cause."""


class BufferTooSmallError(ValueError):
    """A value is larger than the buffer; `value_bytes` is its size. The buffer is unchanged."""

    def __init__(self, value_bytes, buffer_bytes):
        super().__init__(f"the value has {value_bytes} bytes, the buffer {buffer_bytes}")
        self.value_bytes = value_bytes
        self.buffer_bytes = buffer_bytes


class FerriteOptions:
    """What all connection classes of this package share.

    These are the options, the properties that describe the transport, and how to open a stream.
    """

    _is_open = False  # `Connection` overrides this; `TlsConnection` has no stream

    def _set_options(self, rdma, local_address, others):
        if rdma not in POLICIES:
            raise ValueError(f"rdma={rdma!r}: expected one of {', '.join(POLICIES)}")
        if local_address is not None:
            _check_address(local_address)
        for name in others:
            if name.startswith("ssl"):
                raise ValueError(f"{name}: {NO_TLS}")
        self.rdma = rdma
        self.local_address = local_address
        self._stream = None

    @property
    def transport(self):
        """The transport in use, such as "RDMA (Ferrite)" or "TCP"; None while not connected."""
        return self._stream.transport if self._stream and self._is_open else None

    @property
    def device(self):
        """The RDMA device in use, or None."""
        return self._stream.device if self._stream and self._is_open else None

    @property
    def fallback(self):
        """Why the connection uses TCP although RDMA was preferred, or None."""
        return self._stream.fallback if self._stream and self._is_open else None

    def _forbid_rdma(self):
        if self.rdma == "require":
            raise ValueError("rdma='require' with TLS: RDMA is not encrypted; use redis:// for "
                             "RDMA, or leave rdma out")

    def _error_message(self, exception):
        """Returns the text of the error that redis-py raises if no connection can be made.

        The errors of `Stream` have a text, but no error number.
        """
        if len(exception.args) != 1:
            return super()._error_message(exception)
        host, text = self._host_error(), str(exception)
        return f"Error connecting to {host}: {text.removeprefix(f'{host}: ')}"

    def _open_stream(self):
        """Connects to the first address of the host that answers. Blocks the calling thread."""
        error = OSError("the host has no address")
        found = socket.getaddrinfo(self.host, self.port, self.socket_type, socket.SOCK_STREAM)
        for family, _, _, _, address in found:
            try:
                stream = Stream.connect(_written(family, address), self.rdma,
                                        self.socket_connect_timeout, self.local_address)
            except OSError as failed:
                error = failed
                continue
            if stream.fallback:
                _warn_once(f"{self.host}:{self.port}: {stream.fallback}")
            self._stream = stream
            return stream
        raise error


def _check_address(text):
    try:
        ipaddress.ip_address(text)
    except ValueError:
        raise ValueError(f"local_address={text!r}: expected an IP address of this host") from None


def _written(family, address):
    if family != socket.AF_INET6:
        return f"{address[0]}:{address[1]}"
    ip, scope = address[0].split("%")[0], address[3]
    return f"[{ip}%{scope}]:{address[1]}" if scope else f"[{ip}]:{address[1]}"


_warned, _warned_lock = set(), threading.Lock()


def _warn_once(text):
    """Warns of each server and cause once per process; a connection's `fallback` has the cause."""
    with _warned_lock:
        is_new = text not in _warned
        _warned.add(text)
    if is_new:
        warnings.warn(text, FallbackWarning, stacklevel=2)


if _HiredisParser is not None:

    class _Parser(_HiredisParser):
        """redis-py's parser for hiredis, with another `can_read`.

        The `can_read` of newer versions of redis-py polls the file descriptor of a socket, which a
        `Stream` does not have.
        """

        def can_read(self, timeout=0):
            if not self._reader:
                raise redis.ConnectionError("Connection closed by server.")
            if self._reader.has_data():
                return True
            if not self._sock.can_recv(timeout):
                return False
            if self._sock.is_at_end():
                raise redis.ConnectionError("Connection closed by server.")
            return True


def has_unread(parser):
    """Returns whether the parser holds bytes that belong to the next reply."""
    if hasattr(parser, "_reader"):  # hiredis
        return parser._reader is None or parser._reader.has_data()
    buffer = parser._buffer
    return bool(buffer.unread_bytes() if hasattr(buffer, "unread_bytes") else buffer)


def size_of(size, view):
    """Turns the result of `recv_bulk_into` into that of `get_into`."""
    if size > view.nbytes:
        raise BufferTooSmallError(size, view.nbytes)
    return None if size < 0 else size


def store(value, view):
    """Copies a value that redis-py has parsed to `view`; returns what `get_into` returns."""
    if value is None:
        return None
    if not isinstance(value, (bytes, bytearray)):
        raise redis.ResponseError(f"expected a string as the reply, got {type(value).__name__}")
    size_of(len(value), view)
    view[: len(value)] = value
    return len(value)


class Connection(FerriteOptions, RedisConnection):
    """A redis-py connection over RDMA or TCP.

    rdma: "prefer" (default) uses TCP where RDMA is unavailable and warns (`FallbackWarning`),
    "require" raises instead, "forbid" uses TCP. local_address selects the RDMA device.
    """

    def __init__(self, *args, rdma="prefer", local_address=None, **options):
        self._set_options(rdma, local_address, options)
        super().__init__(*args, **options)

    @property
    def _is_open(self):
        return self._sock is not None

    def set_parser(self, parser_class):
        if _HiredisParser is not None and parser_class is _HiredisParser:
            parser_class = _Parser
        super().set_parser(parser_class)

    def _connect(self):
        stream = self._open_stream()
        stream.settimeout(self.socket_timeout)
        return stream

    def read_value_into(self, view):
        """Reads the reply to a command such as GET into `view`; see `Redis.get_into`."""
        if has_unread(self._parser):
            return store(self.read_response(disable_decoding=True), view)
        stream = self._sock
        try:
            size = stream.recv_bulk_into(view, stream.gettimeout())
        except TimeoutError:
            self.disconnect()
            raise redis.TimeoutError(f"Timeout reading from {self._host_error()}") from None
        except OSError as error:
            self.disconnect()
            raise redis.ConnectionError(
                f"Error while reading from {self._host_error()}: {error}") from error
        except BaseException:
            self.disconnect()
            raise
        if size is None:  # another reply, such as an error; redis-py's parser handles it
            return store(self.read_response(disable_decoding=True), view)
        return size_of(size, view)


class TlsConnection(FerriteOptions, SSLConnection):
    """A connection over TCP with TLS (`rediss://`): redis-py's own, with its `ssl_...` options.

    RDMA is not encrypted, and is not used. `get_into` works, and copies the value once more.
    """

    def __init__(self, *args, rdma="prefer", local_address=None, **options):
        self._set_options(rdma, local_address, {})
        self._forbid_rdma()
        super().__init__(*args, **options)

    @property
    def transport(self):
        return TLS if self._sock is not None else None

    def read_value_into(self, view):
        return store(self.read_response(disable_decoding=True), view)
