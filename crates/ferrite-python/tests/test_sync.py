"""What redis-py's documentation shows, over Ferrite's connections."""
import multiprocessing
import signal
import threading
import warnings

import pytest
import redis

import ferrite
import ferrite.asyncio
from conftest import HOST, IS_RDMA, MIB

pytestmark = pytest.mark.filterwarnings("ignore::ferrite.FallbackWarning")


def connection_of(client):
    pool = client.connection_pool
    connection = pool.get_connection()
    pool.release(connection)
    return connection


def test_names_the_transport(client):
    connection = connection_of(client)
    if IS_RDMA:
        assert connection.transport == "RDMA (Ferrite)"
        assert connection.device == "rxe2" and connection.fallback is None
    else:
        assert connection.transport == "TCP"
        assert connection.device is None and "RDMA" in connection.fallback
    connection.disconnect()
    assert connection.transport is None


def test_strings_and_expiry(client):
    assert client.set("foo", "bar") is True
    assert client.get("foo") == b"bar"
    assert client.get("absent") is None
    assert client.set("foo", "again", nx=True) is None
    client.set("soon", b"\x00\xff\r\n", ex=100)
    assert client.get("soon") == b"\x00\xff\r\n" and 0 < client.ttl("soon") <= 100
    assert client.incr("n") == 1 and client.incrby("n", 41) == 42
    assert client.mset({"a": 1, "b": 2}) and client.mget("a", "b", "c") == [b"1", b"2", None]


def test_collections_and_scan(client):
    client.hset("hash", mapping={"name": "John", "age": 29})
    assert client.hgetall("hash") == {b"name": b"John", b"age": b"29"}
    client.rpush("list", *range(1000))
    assert client.lrange("list", 0, -1) == [str(n).encode() for n in range(1000)]
    client.zadd("board", {"a": 1.5, "b": 2.5})
    assert client.zrange("board", 0, -1) == [b"a", b"b"]
    client.mset({f"key:{n}": n for n in range(500)})
    assert len(set(client.scan_iter("key:*", count=50))) == 500


def test_decodes_responses(options):
    with ferrite.Redis(**options, decode_responses=True) as client:
        client.set("text", "größe")
        assert client.get("text") == "größe"


def test_pipelines(client):
    pipe = client.pipeline()
    for n in range(500):
        pipe.set(f"p{n}", n).get(f"p{n}")
    assert pipe.execute()[1::2] == [str(n).encode() for n in range(500)]
    plain = client.pipeline(transaction=False)
    plain.set("x", 1).lpush("x", 1).get("x")
    results = plain.execute(raise_on_error=False)
    assert results[0] is True and isinstance(results[1], redis.ResponseError)
    assert results[2] == b"1"


def test_transactions_watch(client):
    client.set("watched", 1)
    with client.pipeline() as pipe:
        pipe.watch("watched")
        client.set("watched", 2)
        pipe.multi()
        pipe.set("watched", 3)
        with pytest.raises(redis.WatchError):
            pipe.execute()

    def increment(pipe):
        value = int(pipe.get("watched"))
        pipe.multi()
        pipe.set("watched", value + 1)

    assert client.transaction(increment, "watched") == [True]
    assert client.get("watched") == b"3"


def test_scripts(client):
    multiply = client.register_script("return redis.call('GET', KEYS[1]) * ARGV[1]")
    client.set("foo", 2)
    assert multiply(keys=["foo"], args=[5]) == 10


def test_pubsub(client):
    with client.pubsub() as subscriber:
        subscriber.subscribe("news")
        subscriber.psubscribe("n*")
        kinds = [subscriber.get_message(timeout=30)["type"] for _ in range(2)]
        assert kinds == ["subscribe", "psubscribe"]
        assert subscriber.get_message(timeout=0.01) is None
        assert client.publish("news", "hello") == 2
        found = [subscriber.get_message(timeout=30) for _ in range(2)]
        assert {(m["type"], m["data"]) for m in found} == {
            ("message", b"hello"), ("pmessage", b"hello")}


def test_pubsub_in_a_thread(client):
    arrived, got = threading.Event(), []
    subscriber = client.pubsub()

    def handler(message):
        got.append(message["data"])
        arrived.set()

    subscriber.subscribe(**{"thread": handler})
    thread = subscriber.run_in_thread(sleep_time=0.1)
    try:
        while not client.publish("thread", "x"):  # until the subscription has arrived
            pass
        assert arrived.wait(30) and got[0] == b"x"
    finally:
        thread.stop()
        thread.join(30)


def test_locks(client):
    with client.lock("lock", timeout=60, blocking_timeout=30) as lock:
        assert lock.owned()
        other = client.lock("lock", timeout=60)
        assert other.acquire(blocking=False) is False
    assert other.acquire(blocking=False) is True
    other.release()


def test_acl_users_and_databases(server, client):
    client.acl_setuser("reader", enabled=True, passwords="+secret", commands=["+@all"], keys=["*"])
    with ferrite.Redis(**server.options, username="reader", password="secret", db=3) as user:
        assert user.acl_whoami() in (b"reader", "reader") and user.client_info()["db"] == 3
    with ferrite.Redis(**server.options, username="reader", password="wrong") as user:
        with pytest.raises(redis.AuthenticationError):
            user.ping()
    client.acl_deluser("reader")


def test_waiting_calls_release_the_lock_of_python(client):
    popped = []
    waiting = threading.Thread(target=lambda: popped.append(client.blpop("queue", timeout=60)))
    waiting.start()
    while not any(info["cmd"].startswith("blpop") for info in client.client_list()):
        pass  # this thread runs although the other one waits
    client.rpush("queue", "item")
    waiting.join(60)
    assert popped == [(b"queue", b"item")] or popped == [[b"queue", b"item"]]


def test_timeout_raises_and_the_next_command_works(client):
    connection = connection_of(client)
    # hiredis's parser keeps the timeout itself, redis-py's parsers keep it in their buffers.
    for place in (connection._parser, connection._parser._buffer):
        for name in ("_socket_timeout", "socket_timeout"):
            if hasattr(place, name):
                setattr(place, name, 0.2)
    connection._sock.settimeout(0.2)
    with pytest.raises(redis.TimeoutError):
        client.execute_command("BLPOP", "nothing", 0)
    assert client.ping()


def test_signals_interrupt_a_wait(client):
    class Interrupted(Exception):
        pass

    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(Interrupted):
            client.execute_command("BLPOP", "nothing", 50)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert client.ping()


def test_reconnects_after_the_server_closed(server, client):
    before, connection = client.client_id(), connection_of(client)
    with ferrite.Redis(**server.options) as other:
        assert other.client_kill_filter(_id=before) == 1
    assert connection._sock.can_recv(60)  # the end has arrived
    assert client.client_id() != before


def test_threads_share_a_pool(client):
    def count():
        for _ in range(200):
            client.incr("count")

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert client.get("count") == b"1600"


def _in_a_child(client, results):
    results.put((client.get("parent"), client.set("child", 1)))


def test_works_in_a_forked_child(client):
    client.set("parent", "value")
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_in_a_child, args=(client, results))
    child.start()
    assert results.get(timeout=60) == (b"value", True)
    child.join(60)
    assert child.exitcode == 0
    assert client.get("child") == b"1"


def test_large_values(client):
    value = bytes(range(256)) * (MIB // 8)  # 32 MiB
    client.set("large", value)
    assert client.get("large") == value


@pytest.mark.skipif(IS_RDMA, reason="RDMA is available in the lab")
def test_fallback_warns_once_and_require_raises(server):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        ferrite.connection._warned.clear()
        for _ in range(2):
            with ferrite.Redis(**server.options) as client:
                client.ping()
    texts = [str(w.message) for w in found if w.category is ferrite.FallbackWarning]
    assert len(texts) == 1 and f"127.0.0.1:{server.port}: uses TCP instead of RDMA" in texts[0]
    pool = redis.ConnectionPool(connection_class=ferrite.Connection,
                                **{**server.options, "rdma": "require"})
    with pytest.raises(redis.ConnectionError, match="RDMA.*; to do: ") as raised:
        redis.Redis(connection_pool=pool).ping()
    assert str(raised.value).startswith(f"Error connecting to 127.0.0.1:{server.port}: no RDMA")


def test_policy_and_url(server):
    with pytest.raises(ValueError, match="rdma='always': expected one of prefer"):
        ferrite.Connection(rdma="always")
    url = f"redis://{server.options['host']}:{server.port}/1?rdma={server.options['rdma']}"
    with ferrite.Redis.from_url(url) as client:
        assert client.ping() and client.client_info()["db"] == 1
    with ferrite.Redis.from_url(url.replace("redis:", "redis+rdma:")) as client:
        assert client.ping()


@pytest.mark.parametrize("package", [ferrite, ferrite.asyncio])
def test_options_without_effect_are_refused(package):
    """TLS above all: a client that asks for it must never send a password without it."""
    with pytest.raises(ValueError, match="^ssl_ca_certs: this connection has no TLS"):
        package.Connection(ssl_ca_certs="ca.crt")
    with pytest.raises(ValueError, match="^local_address='eth0': expected an IP address"):
        package.Connection(local_address="eth0")


def test_refused_connection_is_a_connection_error(server):
    options = {**server.options, "port": 1, "socket_connect_timeout": 5}
    pool = redis.ConnectionPool(connection_class=ferrite.Connection, **options)
    with pytest.raises((redis.ConnectionError, redis.TimeoutError)) as raised:
        redis.Redis(connection_pool=pool).ping()
    assert IS_RDMA or str(raised.value).startswith(f"Error connecting to {HOST}:1: ")
