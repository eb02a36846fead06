"""The server of the tests, and which transport they must use.

By default, the tests use a redis-server on this machine over TCP. If FERRITE_TEST_MODULE is the
path of the module, they run in the lab's namespace h2, and use a redis-server with the module in
the namespace h1 over RDMA. `test` starts them in this way.
"""
import os
import socket
import subprocess
import tempfile
import time

import pytest
import redis

import ferrite

MODULE = os.environ.get("FERRITE_TEST_MODULE")
IS_RDMA = MODULE is not None
HOST = "10.0.0.1" if IS_RDMA else "127.0.0.1"
MIB = 1 << 20


class Server:
    """A redis-server of its own, with the options for connections to it."""

    def __init__(self, *more):
        self.directory = tempfile.TemporaryDirectory()
        self.port = 26380 if IS_RDMA else _free_port()
        self.options = {"host": HOST, "port": self.port,
                        "rdma": "require" if IS_RDMA else "prefer", "socket_timeout": 60}
        self.socket = os.path.join(self.directory.name, "redis.sock")
        words = ["redis-server", "--save", "", "--dir", self.directory.name, "--bind", HOST,
                 "--protected-mode", "no", "--unixsocket", self.socket]
        if IS_RDMA:
            words = ["ip", "netns", "exec", "h1", *words, "--port", "0", "--loadmodule", MODULE,
                     "rdma", "require", "rdma-bind", HOST, "rdma-port", str(self.port)]
        else:
            words += ["--port", str(self.port), *more]
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        self._wait()

    def _wait(self):
        deadline = time.monotonic() + 60
        while True:
            try:
                with redis.Redis(unix_socket_path=self.socket) as client:
                    client.ping()
                return
            except redis.ConnectionError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def stop(self):
        self.process.terminate()
        self.process.wait(30)
        self.directory.cleanup()


def _free_port():
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def server():
    running = Server()
    yield running
    running.stop()


@pytest.fixture(params=["python-resp2", "python-resp3", "hiredis-resp3"])
def options(server, request):
    """The options of connections, for each of redis-py's parsers."""
    parser, protocol = request.param.split("-resp")
    found = {**server.options, "protocol": int(protocol)}
    if parser == "python":
        from redis._parsers import _RESP2Parser, _RESP3Parser
        found["parser_class"] = _RESP2Parser if protocol == "2" else _RESP3Parser
    else:
        pytest.importorskip("hiredis")
    return found


@pytest.fixture
def client(options):
    """redis-py's own client over Ferrite's connections."""
    pool = redis.ConnectionPool(connection_class=ferrite.Connection, **options)
    with redis.Redis(connection_pool=pool) as found:
        found.flushall()
        yield found
    pool.disconnect()


@pytest.fixture
def large(server):
    """Ferrite's client, with get_into and set_from."""
    with ferrite.Redis(**server.options) as found:
        found.flushall()
        yield found
