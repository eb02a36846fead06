"""Code of all benchmarks: runs in pairs inside one boot of the lab, and a verdict on their ratios.

A benchmark is one program with two parts. On the host it builds, boots the guest with itself as the
command (`--guest FILE`), and judges the figures that the guest wrote to FILE. In the guest it runs
the two rivals alternately.

A run during which the host was starved is repeated. On a virtual machine, the load of others shows
as stolen time.
"""
import argparse
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FERRITE = os.path.join(ROOT, "target/release/ferrite")
MODULE = os.path.join(ROOT, "target/release/libferrite_module.so")
NOISY = 1.5  # if the quartiles differ by more than this factor, the result is too noisy to pass
ATTEMPTS = 5
# The host writes the stolen and the used CPU seconds to this file, and the guest reads them.
HOST = os.path.join(ROOT, "target/bench/host")
STARVED = 0.1  # a run is repeated if more than this share of the host's CPU time was stolen
REPEAT_BUDGET_S = 1200  # seconds for all repetitions; after that, starved runs count, too
DISCLAIMER = "Soft-RoCE: ratios only; the microseconds and MiB/s say nothing about hardware"


# ---- in the guest ------------------------------------------------------------------------


def tsc_reader():
    """Returns a function that reads the time stamp counter (rdtsc; shl rdx, 32; or rax, rdx; ret),
    and the page that holds its code."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(bytes.fromhex("0f3148c1e2204809d0c3"))
    at = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return ctypes.CFUNCTYPE(ctypes.c_uint64)(at), page


class Cycles:
    """The rate of the time stamp counter, by the guest's clock over the whole run."""

    def __init__(self):
        self.read, self.page = tsc_reader()
        self.started = self.read(), time.clock_gettime_ns(time.CLOCK_MONOTONIC)

    def per_us(self):
        cycles, now = self.read(), time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        return (cycles - self.started[0]) / ((now - self.started[1]) / 1000)


def kernel_work():
    """Returns the guest's counts so far: context switches, and calls from one CPU to another."""
    with open("/proc/stat", encoding="ascii") as file:
        switches = next(int(line.split()[1]) for line in file if line.startswith("ctxt "))
    with open("/proc/interrupts", encoding="ascii") as file:
        calls = [line for line in file if line.split(":")[0].strip() == "CAL"]
    return {"switches": switches,
            "cpu_calls": sum(int(word) for line in calls for word in line.split() if word.isdigit())}


class Guest:
    """Runs of a server and a client, each on a CPU of its own."""

    def __init__(self, limit_s=20, port=20000, repeat_budget_s=REPEAT_BUDGET_S, attempts=ATTEMPTS):
        self.limit_s = limit_s
        self.port = port
        self.repeat_budget_s = repeat_budget_s
        self.attempts = attempts
        self.runs, self.starved = 0, 0  # number of runs that count, and of starved runs among them
        self.repeated = []
        self.work = {}  # the guest's counts during the last run

    def pair(self, server, client, listening):
        """Starts the server, waits until it listens, runs the client; returns its output."""
        server = subprocess.Popen(["taskset", "-c", "0"] + server, stdout=subprocess.DEVNULL,
                                  stderr=subprocess.PIPE, text=True)
        try:
            listening(server)
            before = kernel_work()
            done = subprocess.run(["taskset", "-c", "1"] + client, capture_output=True, text=True,
                                  timeout=self.limit_s, check=True)
            after = kernel_work()
            server.wait(timeout=5)
            self.work = {what: after[what] - before[what] for what in after}
            return done.stdout
        finally:
            server.kill()
            server.communicate()

    def ferrite(self, command, server, client, host="10.0.0.1"):
        """Runs a pair of Ferrite's programs between the two devices; returns the client's JSON."""
        address = f"{host}:{self.port}"
        output = self.pair([FERRITE] + command + ["--listen", address] + server,
                           [FERRITE] + command + [address, "--json"] + client,
                           lambda process: process.stderr.readline())
        return json.loads(output)

    def perftest(self, words, size):
        """Runs a pair of perftest between the two devices; returns its row for `size`."""
        common = ["-x", "1", "-F", "-s", str(size), "-p", str(self.port)]
        output = self.pair(words + ["-d", "rxe1"] + common, words + ["-d", "rxe2"] + common + ["127.0.0.1"],
                           lambda process: self.wait_for_tcp())
        rows = [line.split() for line in output.splitlines() if line.split()[:1] == [str(size)]]
        return rows[0]

    def wait_for_tcp(self):
        listening = f":{self.port:04X} "
        for _ in range(500):
            with open("/proc/net/tcp", encoding="ascii") as table:
                if any(listening in line and " 0A " in line for line in table):
                    return
            time.sleep(0.01)
        raise TimeoutError("perftest does not listen")

    def attempt(self, name, run, *arguments):
        """Runs `run` on a new port. Repeats it if it fails or takes too long, which is counted, or
        if the host was starved meanwhile."""
        while True:
            self.wait_for_quiet_host()
            started, stolen = time.monotonic(), host_s()[0]
            result = self.attempt_once(name, run, *arguments)
            took = time.monotonic() - started
            starved = host_s()[0] - stolen > STARVED * took * os.cpu_count()
            if starved and self.repeat_budget_s > 0:
                self.repeat_budget_s -= took
                continue
            self.runs, self.starved = self.runs + 1, self.starved + starved
            return result

    def wait_for_quiet_host(self):
        """Waits until no time is stolen from an idle guest, within the budget for repetitions."""
        while self.repeat_budget_s > 0:
            stolen = host_s()[0]
            time.sleep(1)
            if host_s()[0] - stolen <= STARVED:
                return
            self.repeat_budget_s -= 1

    def attempt_once(self, name, run, *arguments):
        for attempt in range(self.attempts):
            self.port += 1
            try:
                return run(*arguments)
            except (subprocess.SubprocessError, OSError, ValueError, IndexError, KeyError) as error:
                stderr = getattr(error, "stderr", None) or ""
                self.repeated.append([name, run.__name__, str(error), str(stderr)[-500:]])
                if attempt + 1 == self.attempts:
                    raise
        raise AssertionError("not reached")

    def write(self, path, **result):
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"kernel": os.uname().release, "runs": self.runs, "starved": self.starved, "repeated": self.repeated, **result},
                      file, indent=1)


def host_s():
    """Returns the CPU seconds that were stolen from the host so far, and those that it has used."""
    for _ in range(10):
        try:
            with open(HOST, encoding="ascii") as file:
                stolen, worked = file.read().split()
            return float(stolen), float(worked)
        except (OSError, ValueError):  # the host is writing the file
            time.sleep(0.01)
    return 0.0, 0.0


class CpuPerCommand:
    """The host's CPU time for each command of a server: client, server, and the kernel that
    emulates the devices. If the host runs nothing but the guest and both CPUs are busy, throughput
    is its inverse. It does not include stolen time."""

    def __init__(self, commands):
        self.commands = commands
        self.before = host_s()[1], commands()

    def us_per_command(self):
        return (host_s()[1] - self.before[0]) * 1e6 / (self.commands() - self.before[1])


# ---- on the host -------------------------------------------------------------------------


def parser(text, rounds, help_of_rounds="alternating rounds (at least 9 for a verdict)"):
    options = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=rounds, help=help_of_rounds)
    options.add_argument("--kernel", default="uml", help="kernel of the lab's guest: uml, stock or newer")
    options.add_argument("--guest", metavar="FILE", help=argparse.SUPPRESS)
    return options


def build(package="ferrite"):
    subprocess.run(["cargo", "build", "--quiet", "--release", "-p", package], cwd=ROOT, check=True)


def raw_file(name):
    """Returns the file for the figures of this run."""
    out = os.path.join(ROOT, "target/bench")
    os.makedirs(out, exist_ok=True)
    return os.path.join(out, f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json")


def raise_priority():
    """Gives the guest priority over other programs of the host."""
    try:
        os.nice(-10)
    except PermissionError:
        print("not root, so the guest gets no priority: other load on this host will increase the spread",
              file=sys.stderr)


def publish_host_times(ended):
    """Writes the host's stolen and used time from /proc/stat to a file for the guest, which has a
    /proc/stat of its own."""
    while not ended.wait(0.1):
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _, _, irq, softirq, stolen = (int(word) / os.sysconf("SC_CLK_TCK") for word in file.readline().split()[1:9])
        with open(HOST, "w", encoding="ascii") as file:
            file.write(f"{stolen} {user + nice + system + irq + softirq}")


def boot(script, words, kernel, limit_s=1800, memory=None, more=(), package="ferrite",
         is_urgent=True):
    """Builds the package and runs `script` in the guest with the arguments `words`; returns the
    figures and the path of their file."""
    build(package)
    raw = raw_file(os.path.basename(script))
    if is_urgent:
        raise_priority()
    lab = [os.path.join(ROOT, "lab/lab"), "run", "-k", kernel, "-c", "2", "-n", "2", "-t", str(limit_s),
           "-w", os.path.dirname(raw)]
    lab += (["-m", memory] if memory else []) + list(more)
    ended = threading.Event()
    threading.Thread(target=publish_host_times, args=[ended], daemon=True).start()
    try:
        subprocess.run(lab + ["--", os.path.abspath(script), "--guest", raw] + words, cwd=ROOT, check=True)
    finally:
        ended.set()
    with open(raw, encoding="utf-8") as file:
        result = json.load(file)
    print(f"the host was starved during {result['starved']} of {result['runs']} runs "
          f"(more than {STARVED:.0%} of its CPU time was stolen)", file=sys.stderr)
    return result, os.path.relpath(raw, ROOT)


def median(samples, field):
    return statistics.median(sample[field] for sample in samples)


def best(samples, most):
    """Formats the ratio of the best runs, for orientation: other load affects these least."""
    pick = min if most else max
    ours, theirs = (pick(sample[who] for sample in samples) for who in ("ours", "theirs"))
    return f", best to best {ours / theirs:.2f}"


def judge(name, ratios, bar, most, more=""):
    """Prints the line of one measure; returns whether it passed. With `most`, the bar is a maximum,
    otherwise a minimum."""
    value = statistics.median(ratios)
    middle = quartiles(ratios)
    passed = value <= bar if most else value >= bar
    verdict = "NOISY" if middle[2] > NOISY * middle[0] else "pass" if passed else "FAIL"
    print(f"{name} {value:.3f} {'<=' if most else '>='}{bar} {verdict} ({spread(ratios)}{more})")
    return verdict == "pass"


def quartiles(ratios):
    return statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3


def spread(ratios, digits=2):
    """Formats how far the ratios of the rounds differ."""
    low, _, high = quartiles(ratios)
    return (f"middle half {low:.{digits}f}–{high:.{digits}f}, "
            f"all {min(ratios):.{digits}f}–{max(ratios):.{digits}f}")


def print_cpu(of, ours, theirs):
    """Prints the line of the CPU time per command, which has no bar."""
    value = statistics.median(a / b for a, b in zip(ours, theirs))
    print(f"cpu-{of} {value:.3f} - (SET and GET; client, server and kernel: "
          f"{statistics.median(ours):.0f} µs, Valkey {statistics.median(theirs):.0f} µs)")


def finish(passed, raw, disclaimer=DISCLAIMER):
    print(f"raw figures: {raw}")
    print(disclaimer)
    return 0 if all(passed) else 1
