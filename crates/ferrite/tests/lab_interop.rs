//! Valkey's own programs and Ferrite's (`ferrite-client`, `ferrite-cli`, `ferrite bench kv`) as
//! clients of Ferrite's gateway, of its module in Valkey's server, and of that server's own
//! listener: `cargo xtask interop`.
//!
//! The same matrix against all: what fails with Valkey alone is no fault of ours. What a client
//! says is compared with what the engine has, asked over its Unix socket. Everything has a time
//! limit, because these clients are known to wait for ever for what they have missed.
//!
//! `cargo xtask interop` builds Valkey and names its directory in `FERRITE_VALKEY`; without it the
//! tests fail.

#[path = "lab_interop/cli.rs"]
mod cli;
#[path = "lab_interop/own.rs"]
mod own;
#[path = "lab_interop/scene.rs"]
mod scene;

use std::time::Duration;

use cli::{cli_commands, cli_json, cli_pipe, cli_resp3, cli_subscriptions, cli_values};
use own::{
    bench_kv, bench_kv_c100, bench_kv_of_64k, bench_kv_p1000, client_blocking_pops, client_many,
    client_pipelines, client_reconnects, client_subscriptions, client_transactions, client_values,
};
use scene::{Scene, Way, bytes, text};

/// For what a client does at once.
const SOON: Duration = Duration::from_secs(20);
/// For megabytes, and for thousands of commands.
const LONG: Duration = Duration::from_secs(90);

/// How often a client must hear what is said before the end: the two race, so that once proves
/// nothing.
const LAST_WORDS: usize = 30;

/// What a benchmark does unless it says otherwise.
const SIMPLE: [&str; 3] = ["PING_MBULK", "SET", "GET"];

/// The matrix, for one kind of server.
macro_rules! matrix {
    ($($way:ident: $of:expr;)+) => { $(
        mod $way {
            use super::*;
            matrix!(@ $of, ping, values, transactions, subscriptions, blocking_pops, monitors, scans, idle,
                many_clients_in_turn, a_client_that_dies, clients_that_die_in_mid_reply, a_client_that_stands_still,
                valkeys_own_test, benchmark_c10_p1, benchmark_c10_p16, benchmark_c100_p1, benchmark_c100_p16,
                benchmark_p200, benchmark_p1000, benchmark_of_64k, benchmark_of_lists, flood_of_messages,
                client_values, client_pipelines, client_transactions, client_blocking_pops, client_subscriptions,
                client_many, client_reconnects, cli_commands, cli_values, cli_pipe, cli_resp3, cli_subscriptions, cli_json,
                bench_kv, bench_kv_c100, bench_kv_p1000, bench_kv_of_64k);
        }
    )+ };
    (@ $of:expr, $($test:ident),+) => { $(
        #[test]
        fn $test() {
            super::$test(&mut Scene::new($of));
        }
    )+ };
}

matrix! {
    valkey: Way::Valkey;
    gateway: Way::Gateway(&[]);
    module: Way::Module;
}

fn ping(scene: &Scene) {
    assert_eq!(scene.cli(&["PING"], b"", SOON), b"PONG\n");
    assert_eq!(scene.cli(&["ECHO", "a b\r\n"], b"", SOON), b"a b\r\n\n");
}

/// Set and read over RDMA, each compared with the engine's own answer.
fn values(scene: &Scene) {
    const SIZES: [usize; 13] = [
        0,
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
    for (seed, size) in SIZES.into_iter().enumerate() {
        let value = bytes(seed, size);
        assert_eq!(text(&scene.cli(&["-x", "SET", "key"], &value, LONG)), "OK\n", "{size} B");
        assert!(scene.engine(&["GET", "key"]) == value, "the engine has another value of {size} B");
        let mut got = scene.cli(&["--raw", "GET", "key"], b"", LONG);
        assert_eq!(got.pop(), Some(b'\n'), "{size} B");
        assert!(got == value, "of {size} B, {} came back, other ones", got.len());
    }
}

fn transactions(scene: &Scene) {
    let said = scene.cli(&[], b"MULTI\nSET counter 1\nINCR counter\nEXEC\n", SOON);
    assert_eq!(text(&said), "OK\nQUEUED\nQUEUED\nOK\n2\n");
    let said = scene.cli(&[], b"WATCH counter\nINCR counter\nMULTI\nGET counter\nEXEC\n", SOON);
    assert_eq!(text(&said), "OK\n3\nOK\nQUEUED\n\n", "what is watched has changed");
    let said = scene.cli(&[], b"MULTI\nINCR counter\nDISCARD\nGET counter\n", SOON);
    assert_eq!(text(&said), "OK\nQUEUED\nOK\n3\n");
}

fn subscriptions(scene: &Scene) {
    let mut subscriber = scene.start_cli(&["SUBSCRIBE", "news"]);
    assert_eq!(subscriber.lines(3, SOON), ["subscribe", "news", "1"]);
    for number in 0..200 {
        let message = format!("message {number}");
        // Half of them by clients over RDMA.
        if number % 10 == 0 {
            assert_eq!(scene.cli(&["PUBLISH", "news", &message], b"", SOON), b"1\n");
        } else {
            assert_eq!(scene.engine(&["PUBLISH", "news", &message]), b"1");
        }
        assert_eq!(subscriber.lines(3, SOON), ["message", "news", &message]);
    }
    // Nobody reads between these, so that several come at once.
    for number in 0..1000 {
        scene.engine(&["PUBLISH", "news", &number.to_string()]);
    }
    for number in 0..1000 {
        assert_eq!(subscriber.lines(3, SOON), ["message", "news", &number.to_string()]);
    }
}

fn blocking_pops(scene: &Scene) {
    let mut waiting = scene.start_cli(&["BLPOP", "list", "30"]);
    scene.until("one client waits", SOON, || scene.info("blocked_clients") == 1);
    assert_eq!(scene.cli(&["RPUSH", "list", "a", "b"], b"", SOON), b"2\n");
    assert_eq!(waiting.lines(2, SOON), ["list", "a"]);
    assert_eq!(waiting.finish(SOON), Some(0));
    assert_eq!(scene.cli(&["BLPOP", "list", "1"], b"", SOON), b"list\nb\n");
    assert_eq!(scene.cli(&["BLPOP", "list", "0.2"], b"", SOON), b"\n", "nothing is left");
}

fn monitors(scene: &Scene) {
    let mut monitor = scene.start_cli(&["MONITOR"]);
    assert_eq!(monitor.lines(1, SOON), ["OK"]);
    assert_eq!(scene.cli(&["SET", "seen", "yes"], b"", SOON), b"OK\n");
    let line = monitor.lines(1, SOON).remove(0);
    assert!(line.ends_with(r#""SET" "seen" "yes""#), "{line}");
}

/// Thousands of keys in many answers, and a hundred thousand lines in one.
fn scans(scene: &Scene) {
    let script = "for i = 1, 5000 do redis.call('SET', 'key' .. i, i) end return 5000";
    assert_eq!(scene.cli(&["EVAL", script, "0"], b"", SOON), b"5000\n");
    let keys = text(&scene.cli(&["--scan"], b"", SOON));
    let keys: std::collections::HashSet<_> = keys.lines().collect();
    assert_eq!(keys.len(), 5000);
    let script = "local list = {} for i = 1, 100000 do list[i] = i end return list";
    let list = text(&scene.cli(&["EVAL", script, "0"], b"", SOON));
    assert!(
        list.lines().eq((1..=100_000).map(|number| number.to_string())),
        "{} bytes",
        list.len()
    );
    assert_eq!(scene.cli(&["-3", "DBSIZE"], b"", SOON), b"5000\n", "RESP3");
}

/// Longer than keepalives take to come: the client hears some, and is there afterwards.
fn idle(scene: &Scene) {
    let mut waiting = scene.start_cli(&["BLPOP", "list", "60"]);
    scene.until("one client waits", SOON, || scene.info("blocked_clients") == 1);
    std::thread::sleep(Duration::from_secs(10));
    scene.engine(&["RPUSH", "list", "late"]);
    assert_eq!(waiting.lines(2, SOON), ["list", "late"]);
}

fn many_clients_in_turn(scene: &Scene) {
    for number in 1..=100 {
        assert_eq!(text(&scene.cli(&["INCR", "visits"], b"", SOON)), format!("{number}\n"));
    }
    // One is us.
    scene.until("clients are gone", SOON, || scene.info("connected_clients") == 1);
}

fn a_client_that_dies(scene: &Scene) {
    let mut waiting: Vec<_> = (0..5).map(|_| scene.start_cli(&["BLPOP", "list", "60"])).collect();
    scene.until("five clients wait", SOON, || scene.info("blocked_clients") == 5);
    waiting.truncate(2); // kills three
    scene.until("two are left", SOON, || scene.info("blocked_clients") == 2);
    scene.engine(&["RPUSH", "list", "a", "b"]);
    for mut client in waiting {
        assert_eq!(client.lines(1, SOON), ["list"]);
    }
    assert_eq!(scene.cli(&["LLEN", "list"], b"", SOON), b"0\n");
}

fn clients_that_die_in_mid_reply(scene: &Scene) {
    let value = bytes(1, 32 << 20);
    scene.cli(&["-x", "SET", "key"], &value, LONG);
    for wait_ms in [50, 100, 200, 400] {
        let client = scene.start_cli(&["--raw", "GET", "key"]);
        std::thread::sleep(Duration::from_millis(wait_ms));
        drop(client);
    }
    scene.until("clients are gone", SOON, || scene.info("connected_clients") == 1);
    assert!(
        scene.cli(&["--raw", "GET", "key"], b"", LONG).starts_with(&value),
        "the next one gets it all"
    );
}

/// One that takes nothing for a while hinders nobody, and gets all that is its own in the end.
fn a_client_that_stands_still(scene: &Scene) {
    let line = "x".repeat(1023);
    let value = format!("{line}\n").repeat(20 << 10);
    scene.cli(&["-x", "SET", "key"], value.as_bytes(), LONG);
    let mut client = scene.start_cli(&["--raw", "GET", "key"]);
    client.signal("STOP");
    for _ in 0..20 {
        assert_eq!(scene.cli(&["PING"], b"", SOON), b"PONG\n");
    }
    client.signal("CONT");
    assert!(client.lines(20 << 10, LONG).iter().all(|got| *got == line));
    assert_eq!(client.finish(SOON), Some(0));
}

/// The program that Valkey tests its own server with: four clients, values of 1 KiB, BGSAVE
/// meanwhile.
fn valkeys_own_test(scene: &Scene) {
    let said = scene.run(
        "rdma-test",
        &["--thread", "4", "--minkeys", "200", "--maxkeys", "800"],
        b"",
        LONG,
    );
    assert!(text(&said).contains("Valkey Over RDMA test [OK]"), "{}", text(&said));
}

fn benchmark_c10_p1(scene: &Scene) {
    scene.benchmark(&SIMPLE, &["-c", "10", "-P", "1", "-n", "2000"], LONG);
}

fn benchmark_c10_p16(scene: &Scene) {
    scene.benchmark(&SIMPLE, &["-c", "10", "-P", "16", "-n", "2000"], LONG);
}

fn benchmark_p200(scene: &Scene) {
    scene.benchmark(&SIMPLE, &["-c", "10", "-P", "200", "-n", "20000"], LONG);
}

fn benchmark_p1000(scene: &Scene) {
    scene.benchmark(&SIMPLE, &["-c", "4", "-P", "1000", "-n", "40000"], LONG);
}

/// Far more than fits anywhere, said at once to several who listen: each gets all of it, in order.
fn flood_of_messages(scene: &Scene) {
    const MESSAGES: usize = 20_000;
    let mut subscribers: Vec<_> = (0..5).map(|_| scene.start_cli(&["SUBSCRIBE", "news"])).collect();
    for subscriber in &mut subscribers {
        assert_eq!(subscriber.lines(3, SOON), ["subscribe", "news", "1"]);
    }
    let flood = "for i = 1, tonumber(ARGV[1]) do redis.call('PUBLISH', 'news', 'message ' .. i) end return 'OK'";
    assert_eq!(scene.cli(&["EVAL", flood, "0", &MESSAGES.to_string()], b"", LONG), b"OK\n");
    for subscriber in &mut subscribers {
        for number in 1..=MESSAGES {
            assert_eq!(
                subscriber.lines(3, SOON),
                ["message", "news", &format!("message {number}")]
            );
        }
    }
}

/// A pipeline is larger than either side's memory for it.
fn benchmark_of_64k(scene: &Scene) {
    scene.benchmark(&["SET", "GET"], &["-c", "4", "-P", "20", "-n", "400", "-d", "65536"], LONG);
}

fn benchmark_of_lists(scene: &Scene) {
    scene.benchmark(&["LRANGE_100", "LRANGE_600"], &["-c", "10", "-n", "500"], LONG);
}

fn benchmark_c100_p1(scene: &Scene) {
    scene.benchmark(&SIMPLE, &["-c", "100", "-P", "1", "-n", "2000"], LONG);
}

fn benchmark_c100_p16(scene: &Scene) {
    scene.benchmark(&SIMPLE, &["-c", "100", "-P", "16", "-n", "2000"], LONG);
}

/// Sessions of both kinds, and nothing over TCP.
#[test]
fn the_module_counts_what_carried_it() {
    let mut scene = Scene::new(Way::Module);
    for _ in 0..3 {
        assert_eq!(scene.cli(&["PING"], b"", SOON), b"PONG\n");
    }
    client_values(&mut scene);
    let count = |name| scene.info_of("ferrite", name);
    assert_eq!((count("ferrite_begun_valkey"), count("ferrite_begun_ferrite")), (3, 1));
    assert_eq!((count("ferrite_begun_tcp"), count("ferrite_rdma_tcp_bytes")), (0, 0));
    assert!(
        count("ferrite_rdma_recv_bytes") > 64 << 20 && count("ferrite_rdma_completion_errors") == 0
    );
}

/// For so many, Valkey's own server takes more memory than the guest has.
#[test]
fn benchmark_c300_of_the_gateway() {
    Scene::new(Way::Gateway(&[])).benchmark(&["SET"], &["-c", "300", "-n", "1500"], LONG);
}

/// As much memory for each client as Valkey's own server has.
#[test]
fn values_by_a_gateway_with_larger_windows() {
    values(&Scene::new(Way::Gateway(&["--rx-size", "1M"])));
}

#[test]
fn benchmark_of_64k_by_a_gateway_with_larger_windows() {
    benchmark_of_64k(&Scene::new(Way::Gateway(&["--rx-size", "1M"])));
}

#[test]
fn clients_beyond_the_limit_are_told() {
    let scene = Scene::new(Way::Gateway(&["--max-clients", "1"]));
    let _first = scene.start_cli(&["BLPOP", "list", "60"]);
    scene.until("one client waits", SOON, || scene.info("blocked_clients") == 1);
    for _ in 0..LAST_WORDS {
        let said = scene.refusal(&["PING"], SOON);
        assert!(said.contains("max number of clients reached"), "{said}");
    }
}

/// The engine answers and hangs up at once. Of Valkey's own server, clients miss about every fifth
/// of these answers.
#[test]
fn the_last_answer_comes() {
    let scene = Scene::new(Way::Gateway(&[]));
    for _ in 0..LAST_WORDS {
        assert_eq!(scene.cli(&["QUIT"], b"", SOON), b"OK\n");
        assert_eq!(
            scene.cli(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "no"], b"", SOON),
            b"1\n"
        );
    }
}

#[test]
fn a_missing_engine_is_told() {
    let mut scene = Scene::new(Way::Gateway(&[]));
    scene.stop_engine();
    for _ in 0..LAST_WORDS {
        let said = scene.refusal(&["PING"], SOON);
        assert!(said.contains("cannot connect to the engine"), "{said}");
    }
}

#[test]
fn an_engine_that_dies_ends_its_clients() {
    let mut scene = Scene::new(Way::Gateway(&[]));
    let mut waiting = scene.start_cli(&["BLPOP", "list", "60"]);
    scene.until("one client waits", SOON, || scene.info("blocked_clients") == 1);
    scene.stop_engine();
    assert!(waiting.finish(SOON).is_some(), "it must not wait for ever");
}

#[test]
fn a_gateway_that_ends_says_what_it_did() {
    let scene = Scene::new(Way::Gateway(&["--json"]));
    for _ in 0..3 {
        assert_eq!(scene.cli(&["PING"], b"", SOON), b"PONG\n");
    }
    let ended = scene.end_gateway(SOON);
    assert_eq!(ended["sessions"]["valkey"], 3, "{ended}");
    assert_eq!((&ended["refused"], &ended["engine_failures"]), (&0.into(), &0.into()), "{ended}");
}
