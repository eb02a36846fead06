"""Writes and reads numbered values of a cluster with redis-py. `../program.rs` starts it."""

import sys
import threading

from redis.cluster import RedisCluster

HOST, PORT, PASSWORD, PREFIX = sys.argv[1:5]
WORKERS = 3
stop = threading.Event()
output = threading.Lock()


def say(*words):
    with output:
        print(*words, flush=True)


def value(number):
    return f"{number}:" + "x" * (100_000 if number % 50 == 0 else number % 700)


def check(what, found, expected):
    if found != expected:
        say("wrong", what, str(found)[:40], "instead of", str(expected)[:40])


def work(cluster, worker):
    counter, number, written = f"{PREFIX}:{worker}:counter", 0, {}
    while not stop.is_set():
        try:
            if number is None:
                number = int(cluster.get(counter) or 0)
            key, number = f"{PREFIX}:{worker}:{number % 100}", number + 1
            check(counter, cluster.incr(counter), number)
            written[key] = None
            check(f"SET {key}", cluster.set(key, value(number)), True)
            written[key] = value(number)
            check(f"GET {key}", cluster.get(key), written[key])
            say("round", worker)
        except Exception as error:
            number = None
            say("error", type(error).__name__, " ".join(str(error).split()))
        stop.wait(0.02)
    for key, last in written.items():
        if last is not None:
            check(f"last GET {key}", cluster.get(key), last)


cluster = RedisCluster(host=HOST, port=int(PORT), password=PASSWORD, decode_responses=True)
workers = [threading.Thread(target=work, args=(cluster, worker)) for worker in range(WORKERS)]
for worker in workers:
    worker.start()
sys.stdin.read()
stop.set()
for worker in workers:
    worker.join()
say("end")
