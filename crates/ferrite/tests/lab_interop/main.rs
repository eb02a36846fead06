//! Interoperability with Valkey: `cargo xtask interop`.
//!
//! The clients are Valkey's own programs and Ferrite's (`ferrite-client`, `ferrite-cli`, `ferrite
//! bench kv`). The servers are Ferrite's gateway, Ferrite's module in Valkey's server, and the RDMA
//! listener of Valkey's server itself. Most tests run with every server. If a test also fails with
//! Valkey's listener, that is no fault of Ferrite.
//!
//! The tests compare a client's output with the engine's data, which they read over the engine's
//! Unix socket. Every step has a time limit, because these clients may wait forever for a message
//! that they missed.
//!
//! `cargo xtask interop` builds Valkey and sets `FERRITE_VALKEY` to its directory. The tests fail
//! if the variable is not set.

mod ferrite_cli;
mod ferrite_clients;
mod server;

use std::time::Duration;

use ferrite_cli::{cli_commands, cli_json, cli_pipe, cli_resp3, cli_subscriptions, cli_values};
use ferrite_clients::{
    bench_kv, bench_kv_c100, bench_kv_of_64k, bench_kv_p1000, client_blocking_pops, client_many,
    client_pipelines, client_reconnects, client_subscriptions, client_transactions, client_values,
};
use server::{ServerKind, TestServer, bytes, text};

/// Time limit for steps that a client does at once.
const SOON: Duration = Duration::from_secs(20);
/// Time limit for steps with megabytes, or with thousands of commands.
const LONG: Duration = Duration::from_secs(90);

/// Repetitions of tests in which the last reply races with the end of the connection.
const REPEATS: usize = 30;

/// The tests of most benchmarks.
const SIMPLE_TESTS: [&str; 3] = ["PING_MBULK", "SET", "GET"];

/// Defines all tests for each kind of server.
macro_rules! matrix {
    ($($kind:ident: $server:expr;)+) => { $(
        mod $kind {
            use super::*;
            matrix!(@ $server, ping, values, transactions, subscriptions, blocking_pops,
                monitor_shows_commands, scans_and_large_arrays, idle_client_stays_connected,
                many_clients_one_after_another, removes_killed_clients,
                clients_killed_during_a_reply, stopped_client_blocks_nobody, valkeys_rdma_test,
                benchmark_c10_p1, benchmark_c10_p16, benchmark_c100_p1, benchmark_c100_p16,
                benchmark_p200, benchmark_p1000, benchmark_of_64k, benchmark_of_lists,
                flood_of_messages, client_values, client_pipelines, client_transactions,
                client_blocking_pops, client_subscriptions, client_many, client_reconnects,
                cli_commands, cli_values, cli_pipe, cli_resp3, cli_subscriptions, cli_json,
                bench_kv, bench_kv_c100, bench_kv_p1000, bench_kv_of_64k);
        }
    )+ };
    (@ $server:expr, $($test:ident),+) => { $(
        #[test]
        fn $test() {
            super::$test(&mut TestServer::new($server));
        }
    )+ };
}

matrix! {
    valkey: ServerKind::Valkey;
    gateway: ServerKind::Gateway(&[]);
    module: ServerKind::Module;
}

fn ping(server: &TestServer) {
    assert_eq!(server.cli(&["PING"], b"", SOON), b"PONG\n");
    assert_eq!(server.cli(&["ECHO", "a b\r\n"], b"", SOON), b"a b\r\n\n");
}

/// Sizes of values around those of windows, segments and buffers.
pub(crate) const SIZES: [usize; 12] = [
    1,
    2,
    1000,
    4096,
    65_535,
    65_536,
    65_537,
    1_048_575,
    1_048_576,
    1_048_577,
    10_000_000,
    64 << 20,
];

/// Writes and reads values over RDMA, and compares each with the engine's.
fn values(server: &TestServer) {
    for (seed, size) in std::iter::once(0).chain(SIZES).enumerate() {
        let value = bytes(seed, size);
        assert_eq!(text(&server.cli(&["-x", "SET", "key"], &value, LONG)), "OK\n", "{size} B");
        assert!(
            server.engine(&["GET", "key"]) == value,
            "the engine has another value of {size} B"
        );
        let mut got = server.cli(&["--raw", "GET", "key"], b"", LONG);
        assert_eq!(got.pop(), Some(b'\n'), "{size} B");
        assert!(got == value, "wrong value of {size} B: received {} B", got.len());
    }
}

fn transactions(server: &TestServer) {
    let output = server.cli(&[], b"MULTI\nSET counter 1\nINCR counter\nEXEC\n", SOON);
    assert_eq!(text(&output), "OK\nQUEUED\nQUEUED\nOK\n2\n");
    let output = server.cli(&[], b"WATCH counter\nINCR counter\nMULTI\nGET counter\nEXEC\n", SOON);
    assert_eq!(text(&output), "OK\n3\nOK\nQUEUED\n\n", "the watched key has changed");
    let output = server.cli(&[], b"MULTI\nINCR counter\nDISCARD\nGET counter\n", SOON);
    assert_eq!(text(&output), "OK\nQUEUED\nOK\n3\n");
}

fn subscriptions(server: &TestServer) {
    let mut subscriber = server.start_cli(&["SUBSCRIBE", "news"]);
    assert_eq!(subscriber.lines(3, SOON), ["subscribe", "news", "1"]);
    for number in 0..200 {
        let message = format!("message {number}");
        // Every tenth message comes from a client over RDMA.
        if number % 10 == 0 {
            assert_eq!(server.cli(&["PUBLISH", "news", &message], b"", SOON), b"1\n");
        } else {
            assert_eq!(server.engine(&["PUBLISH", "news", &message]), b"1");
        }
        assert_eq!(subscriber.lines(3, SOON), ["message", "news", &message]);
    }
    // The test does not read between these messages, so that several arrive at once.
    for number in 0..1000 {
        server.engine(&["PUBLISH", "news", &number.to_string()]);
    }
    for number in 0..1000 {
        assert_eq!(subscriber.lines(3, SOON), ["message", "news", &number.to_string()]);
    }
}

fn blocking_pops(server: &TestServer) {
    let mut waiting = server.start_cli(&["BLPOP", "list", "30"]);
    server.until("one client waits", SOON, || server.info("blocked_clients") == 1);
    assert_eq!(server.cli(&["RPUSH", "list", "a", "b"], b"", SOON), b"2\n");
    assert_eq!(waiting.lines(2, SOON), ["list", "a"]);
    assert_eq!(waiting.finish(SOON), Some(0));
    assert_eq!(server.cli(&["BLPOP", "list", "1"], b"", SOON), b"list\nb\n");
    assert_eq!(server.cli(&["BLPOP", "list", "0.2"], b"", SOON), b"\n", "nothing is left");
}

fn monitor_shows_commands(server: &TestServer) {
    let mut monitor = server.start_cli(&["MONITOR"]);
    assert_eq!(monitor.lines(1, SOON), ["OK"]);
    assert_eq!(server.cli(&["SET", "seen", "yes"], b"", SOON), b"OK\n");
    let line = monitor.lines(1, SOON).remove(0);
    assert!(line.ends_with(r#""SET" "seen" "yes""#), "{line}");
}

/// Reads thousands of keys in many replies, and a hundred thousand lines in one reply.
fn scans_and_large_arrays(server: &TestServer) {
    let script = "for i = 1, 5000 do redis.call('SET', 'key' .. i, i) end return 5000";
    assert_eq!(server.cli(&["EVAL", script, "0"], b"", SOON), b"5000\n");
    let keys = text(&server.cli(&["--scan"], b"", SOON));
    let keys: std::collections::HashSet<_> = keys.lines().collect();
    assert_eq!(keys.len(), 5000);
    let script = "local list = {} for i = 1, 100000 do list[i] = i end return list";
    let list = text(&server.cli(&["EVAL", script, "0"], b"", SOON));
    assert!(
        list.lines().eq((1..=100_000).map(|number| number.to_string())),
        "{} bytes",
        list.len()
    );
    assert_eq!(server.cli(&["-3", "DBSIZE"], b"", SOON), b"5000\n", "RESP3");
}

/// A client that is idle for longer than the keepalive interval stays connected.
fn idle_client_stays_connected(server: &TestServer) {
    let mut waiting = server.start_cli(&["BLPOP", "list", "60"]);
    server.until("one client waits", SOON, || server.info("blocked_clients") == 1);
    std::thread::sleep(Duration::from_secs(10));
    server.engine(&["RPUSH", "list", "late"]);
    assert_eq!(waiting.lines(2, SOON), ["list", "late"]);
}

fn many_clients_one_after_another(server: &TestServer) {
    for number in 1..=100 {
        assert_eq!(text(&server.cli(&["INCR", "visits"], b"", SOON)), format!("{number}\n"));
    }
    // The remaining client is the connection of this test.
    server.until("clients are gone", SOON, || server.info("connected_clients") == 1);
}

fn removes_killed_clients(server: &TestServer) {
    let mut waiting: Vec<_> = (0..5).map(|_| server.start_cli(&["BLPOP", "list", "60"])).collect();
    server.until("five clients wait", SOON, || server.info("blocked_clients") == 5);
    waiting.truncate(2); // kills three
    server.until("two are left", SOON, || server.info("blocked_clients") == 2);
    server.engine(&["RPUSH", "list", "a", "b"]);
    for mut client in waiting {
        assert_eq!(client.lines(1, SOON), ["list"]);
    }
    assert_eq!(server.cli(&["LLEN", "list"], b"", SOON), b"0\n");
}

fn clients_killed_during_a_reply(server: &TestServer) {
    let value = bytes(1, 32 << 20);
    server.cli(&["-x", "SET", "key"], &value, LONG);
    for wait_ms in [50, 100, 200, 400] {
        let client = server.start_cli(&["--raw", "GET", "key"]);
        std::thread::sleep(Duration::from_millis(wait_ms));
        drop(client);
    }
    server.until("clients are gone", SOON, || server.info("connected_clients") == 1);
    assert!(
        server.cli(&["--raw", "GET", "key"], b"", LONG).starts_with(&value),
        "the next client gets the whole value"
    );
}

/// A client that does not read for a while blocks no other client, and gets its whole reply in the
/// end.
fn stopped_client_blocks_nobody(server: &TestServer) {
    let line = "x".repeat(1023);
    let value = format!("{line}\n").repeat(20 << 10);
    server.cli(&["-x", "SET", "key"], value.as_bytes(), LONG);
    let mut client = server.start_cli(&["--raw", "GET", "key"]);
    client.signal("STOP");
    for _ in 0..20 {
        assert_eq!(server.cli(&["PING"], b"", SOON), b"PONG\n");
    }
    client.signal("CONT");
    assert!(client.lines(20 << 10, LONG).iter().all(|got| *got == line));
    assert_eq!(client.finish(SOON), Some(0));
}

/// Runs Valkey's own test program: four clients, values of 1 KiB, and a BGSAVE at the same time.
fn valkeys_rdma_test(server: &TestServer) {
    let output = server.run(
        "rdma-test",
        &["--thread", "4", "--minkeys", "200", "--maxkeys", "800"],
        b"",
        LONG,
    );
    assert!(text(&output).contains("Valkey Over RDMA test [OK]"), "{}", text(&output));
}

fn benchmark_c10_p1(server: &TestServer) {
    server.benchmark(&SIMPLE_TESTS, &["-c", "10", "-P", "1", "-n", "2000"], LONG);
}

fn benchmark_c10_p16(server: &TestServer) {
    server.benchmark(&SIMPLE_TESTS, &["-c", "10", "-P", "16", "-n", "2000"], LONG);
}

fn benchmark_p200(server: &TestServer) {
    server.benchmark(&SIMPLE_TESTS, &["-c", "10", "-P", "200", "-n", "20000"], LONG);
}

fn benchmark_p1000(server: &TestServer) {
    server.benchmark(&SIMPLE_TESTS, &["-c", "4", "-P", "1000", "-n", "40000"], LONG);
}

/// Publishes far more than fits into any buffer at once. Each subscriber gets all messages, in
/// order.
fn flood_of_messages(server: &TestServer) {
    const MESSAGES: usize = 20_000;
    let mut subscribers: Vec<_> =
        (0..5).map(|_| server.start_cli(&["SUBSCRIBE", "news"])).collect();
    for subscriber in &mut subscribers {
        assert_eq!(subscriber.lines(3, SOON), ["subscribe", "news", "1"]);
    }
    let flood = "for i = 1, tonumber(ARGV[1]) do \
                 redis.call('PUBLISH', 'news', 'message ' .. i) end return 'OK'";
    assert_eq!(server.cli(&["EVAL", flood, "0", &MESSAGES.to_string()], b"", LONG), b"OK\n");
    for subscriber in &mut subscribers {
        for number in 1..=MESSAGES {
            assert_eq!(
                subscriber.lines(3, SOON),
                ["message", "news", &format!("message {number}")]
            );
        }
    }
}

/// The pipeline is larger than the window of either side.
fn benchmark_of_64k(server: &TestServer) {
    server.benchmark(&["SET", "GET"], &["-c", "4", "-P", "20", "-n", "400", "-d", "65536"], LONG);
}

fn benchmark_of_lists(server: &TestServer) {
    server.benchmark(&["LRANGE_100", "LRANGE_600"], &["-c", "10", "-n", "500"], LONG);
}

fn benchmark_c100_p1(server: &TestServer) {
    server.benchmark(&SIMPLE_TESTS, &["-c", "100", "-P", "1", "-n", "2000"], LONG);
}

fn benchmark_c100_p16(server: &TestServer) {
    server.benchmark(&SIMPLE_TESTS, &["-c", "100", "-P", "16", "-n", "2000"], LONG);
}

/// Counts sessions of both protocols over RDMA, and none over TCP.
#[test]
fn module_counts_sessions_by_transport() {
    let mut server = TestServer::new(ServerKind::Module);
    for _ in 0..3 {
        assert_eq!(server.cli(&["PING"], b"", SOON), b"PONG\n");
    }
    client_values(&mut server);
    let count = |name| server.info_of("ferrite", name);
    assert_eq!((count("ferrite_begun_valkey"), count("ferrite_begun_ferrite")), (3, 1));
    assert_eq!((count("ferrite_begun_tcp"), count("ferrite_rdma_tcp_bytes")), (0, 0));
    assert!(
        count("ferrite_rdma_recv_bytes") > 64 << 20 && count("ferrite_rdma_completion_errors") == 0
    );
}

/// Valkey's own listener has no such test: for 300 clients it needs more memory than the virtual
/// machine has.
#[test]
fn gateway_serves_a_benchmark_with_300_clients() {
    TestServer::new(ServerKind::Gateway(&[])).benchmark(
        &["SET"],
        &["-c", "300", "-n", "1500"],
        LONG,
    );
}

/// The windows are as large as those of Valkey's own server.
#[test]
fn gateway_with_larger_windows_carries_values() {
    values(&TestServer::new(ServerKind::Gateway(&["--rx-size", "1mb"])));
}

#[test]
fn gateway_with_larger_windows_serves_a_benchmark_of_64k() {
    benchmark_of_64k(&TestServer::new(ServerKind::Gateway(&["--rx-size", "1mb"])));
}

#[test]
fn gateway_rejects_clients_beyond_the_limit() {
    let server = TestServer::new(ServerKind::Gateway(&["--max-clients", "1"]));
    let _first = server.start_cli(&["BLPOP", "list", "60"]);
    server.until("one client waits", SOON, || server.info("blocked_clients") == 1);
    for _ in 0..REPEATS {
        let output = server.refusal(&["PING"], SOON);
        assert!(output.contains("max number of clients reached"), "{output}");
    }
}

/// The engine replies and closes the connection at once. With Valkey's own server, clients miss
/// about every fifth of these replies.
#[test]
fn gateway_delivers_the_last_reply() {
    let server = TestServer::new(ServerKind::Gateway(&[]));
    for _ in 0..REPEATS {
        assert_eq!(server.cli(&["QUIT"], b"", SOON), b"OK\n");
        assert_eq!(
            server.cli(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "no"], b"", SOON),
            b"1\n"
        );
    }
}

#[test]
fn gateway_reports_a_missing_engine() {
    let mut server = TestServer::new(ServerKind::Gateway(&[]));
    server.stop_engine();
    for _ in 0..REPEATS {
        let output = server.refusal(&["PING"], SOON);
        assert!(output.contains("cannot connect to the engine"), "{output}");
    }
}

#[test]
fn gateway_disconnects_clients_of_a_killed_engine() {
    let mut server = TestServer::new(ServerKind::Gateway(&[]));
    let mut waiting = server.start_cli(&["BLPOP", "list", "60"]);
    server.until("one client waits", SOON, || server.info("blocked_clients") == 1);
    server.stop_engine();
    assert!(waiting.finish(SOON).is_some(), "it must not wait for ever");
}

#[test]
fn gateway_reports_its_counters_at_the_end() {
    let server = TestServer::new(ServerKind::Gateway(&["--json"]));
    for _ in 0..3 {
        assert_eq!(server.cli(&["PING"], b"", SOON), b"PONG\n");
    }
    let ended = server.end_gateway(SOON);
    assert_eq!(ended["sessions"]["valkey"], 3, "{ended}");
    assert_eq!((&ended["refused"], &ended["engine_failures"]), (&0.into(), &0.into()), "{ended}");
}
