"""get_into and set_from."""
import array
import socket
import threading

import numpy as np
import pytest
import redis

import ferrite
from conftest import IS_RDMA, MIB

pytestmark = pytest.mark.filterwarnings("ignore::ferrite.FallbackWarning")


@pytest.mark.parametrize("size", [0, 1, 1000, 16 << 10, (16 << 10) + 1, MIB, 64 * MIB + 3])
def test_bytes_come_back(large, size):
    value = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    assert large.set_from("value", value) is True
    assert large.strlen("value") == size
    out = np.full(size + 5, 7, dtype=np.uint8)
    assert large.get_into("value", out) == size
    assert np.array_equal(out[:size], value) and (out[size:] == 7).all()
    assert large.ping()


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex128", "datetime64[s]", "i8,f4"])
def test_numpy_arrays_of_any_type(large, dtype):
    value = np.frombuffer(np.random.default_rng(1).bytes(24 * 60 * 16), dtype=dtype)
    value = value.reshape(24, -1)
    large.set_from("array", value)
    out = np.empty_like(value)
    assert large.get_into("array", out) == value.nbytes
    assert out.tobytes() == value.tobytes()


def test_other_buffers(large):
    large.set_from("b", bytearray(b"abc"), ex=100)
    assert 0 < large.ttl("b") <= 100
    out = bytearray(3)
    assert large.get_into("b", out) == 3 and out == b"abc"
    numbers = array.array("d", [1.0, 2.0])
    large.set_from("d", numbers)
    back = array.array("d", [0.0, 0.0])
    assert large.get_into("d", memoryview(back)) == 16 and back == numbers
    part = np.zeros((4, 8), dtype=np.uint8)
    assert large.get_into("b", part[2]) == 3  # a row, in place
    assert part[2, :3].tobytes() == b"abc" and part.sum() == sum(b"abc")


def test_torch_tensors(large):
    torch = pytest.importorskip("torch")
    value = torch.arange(1000, dtype=torch.float32).to(torch.bfloat16)
    large.set_from("tensor", value)
    out = torch.empty_like(value)
    assert large.get_into("tensor", out) == 2000 and torch.equal(out, value)


def test_missing_key_is_none(large):
    assert large.get_into("absent", bytearray(10)) is None


def test_small_buffer_names_the_size_and_the_connection_stays(large):
    large.set("value", b"x" * MIB)
    before = large.client_id()
    out = bytearray(b"-" * 10)
    with pytest.raises(ferrite.BufferTooSmallError, match="1048576 bytes, the buffer 10") as found:
        large.get_into("value", out)
    assert found.value.value_bytes == MIB and found.value.buffer_bytes == 10
    assert out == b"-" * 10
    assert large.client_id() == before


def test_errors_of_the_server_are_those_of_redis_py(large):
    large.rpush("list", 1)
    before = large.client_id()
    with pytest.raises(redis.ResponseError, match="wrong kind"):
        large.get_into("list", bytearray(10))
    assert large.client_id() == before


def test_wrong_buffers_are_refused_before_anything_is_sent(large):
    large.set("value", b"abc")
    with pytest.raises(BufferError, match="read-only"):
        large.get_into("value", b"   ")
    with pytest.raises(ValueError, match="not contiguous"):
        large.get_into("value", np.zeros((4, 4), dtype=np.uint8)[:, 1])
    with pytest.raises(TypeError):
        large.get_into("value", 5)
    assert large.get("value") == b"abc"


def test_push_messages_before_the_value(server):
    """Tracking sends push messages on the same connection (RESP3)."""
    with ferrite.Redis(**server.options, protocol=3, max_connections=1) as tracked, \
            ferrite.Redis(**server.options) as other:
        other.set("k", b"old")
        tracked.execute_command("CLIENT", "TRACKING", "ON")
        out = bytearray(3)
        for value in (b"new", b"two"):
            tracked.get_into("k", out)
            other.set("k", value)
            connection = tracked.connection_pool.get_connection()
            connection._sock.can_recv(30)  # the push message has arrived
            tracked.connection_pool.release(connection)
            assert tracked.get_into("k", out) == 3 and out == value


def test_other_commands_and_retries(large):
    large.hset("hash", "field", b"12345")
    out = bytearray(8)
    view = memoryview(out)
    assert large.execute_command("HGET", "hash", "field", into=view) == 5
    assert out[:5] == b"12345"
    connection = large.connection_pool.get_connection()
    connection._sock.close()  # lost without notice
    large.connection_pool.release(connection)
    assert large.get_into("absent", out) is None


@pytest.mark.skipif(IS_RDMA, reason="the server here has TCP only")
def test_impossible_sizes_are_errors():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def answer():
            peer, _ = listener.accept()
            with peer:
                while (request := peer.recv(1000)) and b"GET\r\n" not in request:
                    peer.sendall(b"+OK\r\n" * request.count(b"SETINFO"))
                peer.sendall(b"$18446744073709551615\r\nabc")
                peer.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        port = listener.getsockname()[1]
        with ferrite.Redis("127.0.0.1", port, retry=None, protocol=2) as client:
            with pytest.raises(redis.ConnectionError, match="a bulk reply with an invalid size"):
                client.get_into("value", bytearray(10))
        thread.join(60)


def test_needs_a_connection_of_ferrite(server):
    pool = redis.ConnectionPool(host="127.0.0.1", port=server.port)
    assert not issubclass(pool.connection_class, ferrite.Connection)
    connection = redis.Connection()
    with pytest.raises(TypeError, match="connection_class=ferrite.Connection"):
        ferrite.Redis(connection_pool=pool).parse_response(connection, "GET", into=memoryview(b""))
