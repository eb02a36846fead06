"""Writes and reads numbered values of a cluster with valkey-glide. `../program.rs` starts it."""

import asyncio
import sys

from glide import (
    AdvancedGlideClusterClientConfiguration,
    GlideClusterClient,
    GlideClusterClientConfiguration,
    NodeAddress,
    ServerCredentials,
)

HOST, PORT, PASSWORD, PREFIX = sys.argv[1:5]
WORKERS = 3


def say(*words):
    print(*words, flush=True)


def value(number):
    return (f"{number}:" + "x" * (100_000 if number % 50 == 0 else number % 700)).encode()


def check(what, found, expected):
    if found != expected:
        say("wrong", what, str(found)[:40], "instead of", str(expected)[:40])


async def work(cluster, worker, stop):
    counter, number, written = f"{PREFIX}:{worker}:counter", 0, {}
    while not stop.is_set():
        try:
            if number is None:
                number = int(await cluster.get(counter) or 0)
            key, number = f"{PREFIX}:{worker}:{number % 100}", number + 1
            check(counter, await cluster.incr(counter), number)
            written[key] = None
            check(f"SET {key}", await cluster.set(key, value(number)), "OK")
            written[key] = value(number)
            check(f"GET {key}", await cluster.get(key), written[key])
            say("round", worker)
        except Exception as error:
            number = None
            say("error", type(error).__name__, " ".join(str(error).split()))
        await asyncio.sleep(0.02)
    for key, last in written.items():
        if last is not None:
            check(f"last GET {key}", await cluster.get(key), last)


async def main():
    configuration = GlideClusterClientConfiguration(
        [NodeAddress(HOST, int(PORT))],
        credentials=ServerCredentials(PASSWORD),
        # The defaults are 250 ms and 2 s. A cut of the TCP path exceeds the first one, and the start
        # of many programs at a time the second one.
        request_timeout=10_000,
        advanced_config=AdvancedGlideClusterClientConfiguration(connection_timeout=10_000),
    )
    cluster = await GlideClusterClient.create(configuration)
    stop = asyncio.Event()
    workers = [asyncio.create_task(work(cluster, worker, stop)) for worker in range(WORKERS)]
    await asyncio.to_thread(sys.stdin.read)
    stop.set()
    await asyncio.gather(*workers)
    await cluster.close()
    say("end")


asyncio.run(main())
