"""Valkey's own programs in the lab, for the benchmarks that compare with them."""
import os
import re
import socket
import subprocess
import tempfile
import time

import ratio

HOST = "10.0.0.1"
CLUSTER_PORT = 7999


def build():
    """Builds them with `lab/lab setup valkey`; returns their directory."""
    lab = os.path.join(ratio.ROOT, "lab/lab")
    subprocess.run([lab, "setup", "valkey"], check=True)
    return subprocess.run([lab, "path", "valkey"], capture_output=True, text=True, check=True).stdout.strip()


def in_netns(host, words):
    return ["ip", "netns", "exec", host] + words


def rdma_port(port):
    """Returns the module's port for an engine with the TCP port `port`."""
    return port + 10000


class Server:
    """Valkey's server of one kind: with its own RDMA listener (`valkey`), behind the `gateway`,
    with the `module`, over `tcp` only, or with the module and TCP (`both`).

    `more` are arguments for the gateway or the module. `programs` is the directory of Valkey's
    programs. `engine` is a program to run instead of valkey-server. `under` is a command line that
    starts the engine, such as valgrind's. With `is_cluster`, the engine is a node of a cluster that
    has no slots yet; its own port is then CLUSTER_PORT, unless its kind is `tcp`."""

    def __init__(self, programs, kind, port, more=(), engine=None, under=(), startup_timeout_s=5, is_cluster=False):
        self.kind = kind
        self.directory = tempfile.mkdtemp()
        self.socket = os.path.join(self.directory, "engine.sock")
        engine = engine or os.path.join(programs, "valkey-server")
        words = [*under, engine, "--port", str(port) if kind in ("tcp", "both") else "0", "--save", "", "--appendonly", "no",
                 "--protected-mode", "no", "--unixsocket", self.socket, "--dir", self.directory]
        # A node needs a port for its messages.
        words += ["--cluster-enabled", "yes"] if is_cluster else []
        words += ["--port", str(CLUSTER_PORT), "--bind", HOST] if is_cluster and kind == "module" else []
        words += ["--rdma-bind", HOST, "--rdma-port", str(port)] if kind == "valkey" else []
        words += ["--bind", HOST] if kind in ("tcp", "both") else []
        if kind in ("module", "both"):
            at = port if kind == "module" else rdma_port(port)
            words += ["--loadmodule", ratio.MODULE, "rdma", "require", "rdma-bind", HOST, "rdma-port", str(at), *more]
        self.processes = [self.start(words)]
        for _ in range(startup_timeout_s * 100):
            if os.path.exists(self.socket):
                break
            time.sleep(0.01)
        if kind == "gateway":
            gateway = [ratio.FERRITE, "gateway", "--listen", f"{HOST}:{port}", "--engine", f"unix:{self.socket}",
                       "--protected-mode", "no", "--rdma", "require", "--json", *more]
            self.processes.append(self.start(gateway, stdout=subprocess.PIPE))
            self.processes[-1].stdout.readline()  # the line "listening"
        else:
            time.sleep(0.3)

    def pid(self):
        """Returns the engine's process id: `ip netns exec` and `under` replace themselves by it."""
        return self.processes[0].pid

    def ask(self, *words):
        """Returns the engine's reply, a string, from its own socket."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(60)
            client.connect(self.socket)
            client.sendall(" ".join(words).encode() + b"\r\n")
            answer = client.makefile("rb")
            return answer.read(int(answer.readline()[1:])).decode()

    def tell(self, line):
        """Returns the first line of the engine's reply; empty while it does not answer."""
        try:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(60)
                client.connect(self.socket)
                client.sendall(line.encode() + b"\r\n")
                return client.makefile("rb").readline().decode().rstrip()
        except OSError:
            return ""

    def info(self, section):
        """Returns a section of INFO; empty while the engine does not answer."""
        try:
            return self.ask("INFO", section)
        except (OSError, ValueError):
            return ""

    def number(self, section, field):
        """Returns a number of a section of INFO; 0 if it is missing."""
        found = re.search(rf"^{field}[:=](\d+)", self.info(section), re.MULTILINE)
        return int(found[1]) if found else 0

    def commands(self):
        """Returns the number of commands so far. The engine does not count all in-process commands
        of the module."""
        if self.kind == "module":
            return sum(self.number("ferrite", f"ferrite_commands_{path}") for path in ("called", "proxied"))
        return self.number("stats", "total_commands_processed")

    @staticmethod
    def start(words, stdout=subprocess.DEVNULL):
        return subprocess.Popen(in_netns("h1", words), stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.DEVNULL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
