//! The module does not call commands in-process when the engine would refuse them or treat them
//! differently. The tests cover states of the engine, users' rights, and calls that have crashed
//! engines. Most replies are compared with those of the engine's own socket.

mod client;

use std::path::Path;
use std::time::{Duration, Instant};

use client::{Pair, calls, of_module, start, words};
use ferrite_testkit::cluster::{OTHER_NODE, node_options};
use ferrite_testkit::engine::engines;
use ferrite_testkit::resp::Client;
use ferrite_testkit::{Engine, TempDir, free_port};

/// Redis 7.0 crashes in each of these cases if the module does not propagate the deletions that
/// calls make.
#[test]
fn keys_expire_with_the_aof_enabled() {
    for program in engines() {
        let mut server = start(&program, &["--appendonly", "yes"]);
        let mut pair = Pair::new(&server);
        pair.native.ok(&["DEBUG", "SET-ACTIVE-EXPIRE", "0"]);
        let called = calls(&server, || {
            let names: Vec<_> = (0..50).map(|number| format!("short{number}")).collect();
            for name in &names {
                pair.module.ok(&["SET", name, "value", "PX", "1"]);
            }
            std::thread::sleep(Duration::from_millis(20));
            pair.module.send(&names.iter().map(|name| vec!["GET", name]).collect::<Vec<_>>());
            assert!(pair.module.replies(50).iter().all(|reply| reply == b"$-1\r\n"));
            assert_eq!(pair.same(&["DBSIZE"]), ":0");
            // Now reads delete expired keys while the engine's active expiry does the same.
            pair.native.ok(&["DEBUG", "SET-ACTIVE-EXPIRE", "1"]);
            pair.native.ok(&["CONFIG", "SET", "hz", "500"]);
            for _ in 0..40 {
                for name in &names {
                    pair.module.ok(&["SET", name, "value", "PX", "2"]);
                }
                for name in &names {
                    pair.module.ask(&["GET", name]);
                }
            }
        });
        assert!(called > 4000, "{called}");
        server.wait_until("active expiry of all keys", || pair.native.ask(&["DBSIZE"]) == ":0");
        server.assert_healthy();
    }
}

/// While clients are paused, no write may reach replicas. A called write would crash the engine.
#[test]
fn paused_clients_wait() {
    for program in engines() {
        let mut server = start(&program, &["--appendonly", "yes"]);
        for (mode, read_waits) in [("WRITE", false), ("ALL", true)] {
            let mut pair = Pair::new(&server);
            pair.module.ok(&["SET", "key", "before"]);
            pair.native.ok(&["CLIENT", "PAUSE", "600", mode]);
            let started = Instant::now();
            pair.module.send(&[vec!["GET", "key"]]);
            let read = pair.module.next_within(Duration::from_millis(200));
            assert_eq!(read.is_err(), read_waits, "{mode}: {read:?}");
            pair.module.send(&[vec!["SET", "key", "after"]]);
            assert!(
                pair.module.replies(if read_waits { 2 } else { 1 }).ends_with(&[b"+OK\r\n".into()])
            );
            assert!(
                started.elapsed() >= Duration::from_millis(500),
                "{mode}: {:?}",
                started.elapsed()
            );
            server.wait_until("the end of the pause", || pair.native.ask(&["PING"]) == "+PONG");
        }
        server.assert_healthy();
    }
}

/// A write called while a script runs would take effect in the middle of the script. This script
/// ends when it sees such a write, or when it is killed.
#[test]
fn nothing_is_called_while_a_script_runs() {
    const UNTIL_CHANGED: &str = "while redis.call('get','key')=='before' do end return 'changed'";
    for program in engines() {
        let mut server = start(&program, &["--busy-reply-threshold", "50"]);
        let (mut pair, mut script) = (Pair::new(&server), server.client());
        pair.module.ok(&["SET", "key", "before"]);
        script.send(&[vec!["EVAL", UNTIL_CHANGED, "0"]]);
        server.wait_until("the engine is busy", || {
            pair.native.ask(&["GET", "key"]).starts_with("-BUSY")
        });
        let reply = pair.module.ask(&["SET", "key", "injected"]);
        assert!(reply.starts_with("-BUSY"), "{reply}");
        pair.native.ok(&["SCRIPT", "KILL"]);
        let result = script.next_reply().expect("the script's result");
        let result = String::from_utf8_lossy(&result);
        assert!(result.starts_with("-ERR") && result.contains("killed"), "{result}");
        assert_eq!(pair.same(&["GET", "key"]), "$6\r\nbefore");
        server.assert_healthy();
    }
}

#[test]
fn nothing_is_called_while_data_is_loaded() {
    for program in engines() {
        let mut server = start(&program, &[]);
        let (mut pair, mut loader) = (Pair::new(&server), server.client());
        pair.native.ok(&["DEBUG", "POPULATE", "2000", "key", "1000"]);
        pair.module.ok(&["SET", "key", "before"]);
        pair.native.ok(&["CONFIG", "SET", "key-load-delay", "1000"]);
        pair.native.ok(&["CONFIG", "SET", "loading-process-events-interval-bytes", "1024"]);
        loader.send(&[vec!["DEBUG", "RELOAD"]]);
        server.wait_until("the engine is loading", || {
            pair.native.ask(&["GET", "key"]).starts_with("-LOADING")
        });
        for line in ["GET key", "SET key during", "PING"] {
            pair.same(&words(line));
        }
        pair.native.ok(&["CONFIG", "SET", "key-load-delay", "0"]);
        assert_eq!(loader.next_reply().expect("the end of the load"), b"+OK\r\n");
        assert_eq!(pair.same(&["GET", "key"]), "$6\r\nbefore");
        server.assert_healthy();
    }
}

#[test]
fn maxmemory_applies_to_calls() {
    let value = "v".repeat(4000);
    for program in engines() {
        let mut server = start(&program, &[]);
        let mut pair = Pair::new(&server);
        pair.module.ok(&["SET", "key", "value"]);
        // No memory is left, and no key may be evicted.
        pair.native.ok(&["CONFIG", "SET", "maxmemory", "100kb"]);
        assert!(pair.same(&["SET", "other", "value"]).starts_with("-OOM"));
        assert_eq!(pair.same(&["GET", "key"]), "$5\r\nvalue");
        // Only 4 MiB are left, but keys may be evicted. Calls do not evict; the proxy path does.
        let used = pair.native.ask(&["INFO", "memory"]);
        let used =
            used.lines().find_map(|line| line.strip_prefix("used_memory:")).expect("a field");
        let limit = used.parse::<u64>().expect("a number") + (4 << 20);
        pair.native.ok(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
        pair.native.ok(&["CONFIG", "SET", "maxmemory", &limit.to_string()]);
        for number in 0..4000 {
            pair.module.ok(&["SET", &format!("key{number}"), &value]);
        }
        let left = pair.native.ask(&["DBSIZE"]);
        assert!(left.trim_start_matches(':').parse::<u64>().expect("a number") < 2000, "{left}");
        server.assert_healthy();
    }
}

#[test]
fn calls_respect_the_users_rights() {
    for program in engines() {
        let mut server = start(&program, &[]);
        let mut pair = Pair::new(&server);
        let rules =
            "ACL SETUSER bob on >secret ~b* &b* +get +set +mget +publish +ping +auth +acl|whoami";
        pair.native.ok(&words(rules));
        let (mut bob, mut admin) = (Pair::new(&server), server.client());
        bob.same(&["AUTH", "bob", "wrong"]);
        assert_eq!(bob.same(&["AUTH", "bob", "secret"]), "+OK");
        let called = calls(&server, || {
            for line in ["SET b 1", "GET b", "MGET b b2", "PUBLISH b m", "PING"] {
                assert!(!bob.same(&words(line)).starts_with('-'), "{line}");
            }
        });
        assert_eq!(called, 5);
        for line in
            ["GET a", "SET a 1", "MGET b a", "DEL b", "PUBLISH a m", "FLUSHALL", "ACL WHOAMI"]
        {
            let reply = bob.same(&words(line));
            assert!(reply.starts_with("-NOPERM") || line.starts_with("ACL"), "{line}: {reply}");
        }
        // After the first denial, each further one adds exactly one entry to ACL LOG.
        admin.ok(&["ACL", "LOG", "RESET"]);
        bob.module.ask(&["GET", "a"]);
        bob.module.ask(&["DEL", "b"]);
        let log = admin.ask(&["ACL", "LOG"]);
        assert_eq!(
            (log.matches("toplevel").count(), log.matches("\nmodule\r").count()),
            (2, 0),
            "{log}"
        );
        // Changed rights apply at once.
        admin.ok(&words("ACL SETUSER bob -get +del"));
        assert!(bob.same(&["GET", "b"]).starts_with("-NOPERM"));
        assert_eq!(bob.module.ask(&["DEL", "b"]), ":1");
        // The session of a disabled user continues, as at the engine's own port. The session of a
        // deleted user ends.
        admin.ok(&words("ACL SETUSER bob off"));
        assert_eq!(bob.same(&["SET", "b", "1"]), "+OK");
        assert_eq!(admin.ask(&["ACL", "DELUSER", "bob"]), ":1");
        bob.module.send(&[vec!["SET", "b", "2"]]);
        assert_eq!(bob.module.next_reply(), None, "the session of a deleted user goes on");
        assert_eq!(admin.ask(&["GET", "b"]), "$1\r\n1");
        server.assert_healthy();
    }
}

/// Valkey 9.1 has rights to databases. The call path and the key path check them.
#[test]
fn calls_respect_the_rights_to_databases() {
    for program in engines() {
        let mut server = start(&program, &[]);
        let mut admin = server.client();
        if admin.ask(&words("ACL SETUSER bob on nopass ~* +@all alldbs")).starts_with('-') {
            continue; // this engine has no such rights
        }
        let mut bob = Pair::new(&server);
        bob.same(&["AUTH", "bob", "any"]);
        let long = "v".repeat(1000);
        for (db, rule, may) in [("5", "db=0", false), ("0", "db=5", false), ("5", "db=5", true)] {
            admin.ok(&words("ACL SETUSER bob alldbs"));
            bob.same(&["SELECT", db]);
            bob.same(&["SET", "key", &long]);
            bob.same(&["GET", "key"]);
            bob.same(&["GET", "key"]); // on the key path
            admin.ok(&["ACL", "SETUSER", "bob", "resetdbs", rule]);
            for line in ["GET key", "SET other 1", "GET key"] {
                assert_eq!(
                    bob.same(&words(line)).starts_with("-NOPERM"),
                    !may,
                    "{line} in {db} with {rule}"
                );
            }
        }
        server.assert_healthy();
    }
}

#[test]
fn clients_without_a_login_are_refused() {
    for program in engines() {
        let mut server = start(&program, &[]);
        let (address, mut admin) = (server.info("address"), server.client());
        let mut early = Client::to_tcp(&address);
        early.ok(&["SET", "key", "early"]);
        admin.ok(&["CONFIG", "SET", "requirepass", "secret"]);
        let mut pair = Pair { module: Client::to_tcp(&address), native: server.client() };
        for line in ["GET key", "SET key 1", "PING", "AUTH wrong", "GET key"] {
            assert!(pair.same(&words(line)).starts_with('-'), "{line}");
        }
        pair.same(&["AUTH", "secret"]);
        assert_eq!(pair.same(&["GET", "key"]), "$5\r\nearly");
        // A client from before the password was set keeps its access, as at the engine's own port.
        assert_eq!(early.ask(&["GET", "key"]), "$5\r\nearly");
        admin.ok(&["CONFIG", "SET", "requirepass", ""]);
        assert_eq!(server.count("commands_called"), 3);
        server.assert_healthy();
    }
}

#[test]
fn writes_are_refused_as_at_the_engines_own_port() {
    for program in engines() {
        let mut server = start(&program, &[]);
        let mut pair = Pair::new(&server);
        pair.module.ok(&["SET", "key", "value"]);
        pair.native.ok(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
        assert!(pair.same(&["SET", "key", "other"]).starts_with("-NOREPLICAS"));
        pair.native.ok(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
        // The engine becomes a replica of an unreachable primary. A replica does not delete expired
        // keys but hides them. Redis 7.0 does not hide them from calls.
        pair.module.ok(&["SET", "short", "value", "PX", "300"]);
        pair.native.ok(&["REPLICAOF", "127.0.0.1", "1"]);
        std::thread::sleep(Duration::from_millis(400));
        assert_eq!(pair.same(&["GET", "short"]), "$-1");
        assert!(pair.same(&["SET", "key", "other"]).starts_with("-READONLY"));
        assert_eq!(pair.same(&["GET", "key"]), "$5\r\nvalue");
        pair.native.ok(&["CONFIG", "SET", "replica-serve-stale-data", "no"]);
        assert!(pair.same(&["GET", "key"]).starts_with("-MASTERDOWN"));
        pair.native.ok(&["REPLICAOF", "NO", "ONE"]);
        assert_eq!(pair.same(&["SET", "key", "other"]), "+OK");
        server.assert_healthy();
    }
}

/// Runs a case on each engine, as a cluster node with half of the slots.
fn on_each_cluster_node(case: impl Fn(&Engine, Pair)) {
    for program in engines() {
        let directory = TempDir::new("cluster");
        let mut server = start_cluster_node(&program, &directory);
        case(&server, Pair::new(&server));
        server.assert_healthy();
    }
}

/// Starts a cluster node with half of the slots, and waits until it serves them.
fn start_cluster_node(program: &Path, directory: &TempDir) -> Engine {
    let options = node_options(program, directory);
    let port = free_port().to_string();
    let options = ["--port", &port].into_iter().chain(options.iter().map(String::as_str));
    let server = start(program, &options.collect::<Vec<_>>());
    server.wait_until("the cluster state ok", || {
        server.ask::<String>(&["CLUSTER", "INFO"]).contains("cluster_state:ok")
    });
    server
}

/// In a primary of a cluster, the module calls commands without keys, and commands with one key in
/// the node's own slots. `bar` is in slot 5061, `hello` in 866, and `key` in 12539, which another
/// node serves.
#[test]
fn calls_commands_on_own_slots_of_a_cluster() {
    on_each_cluster_node(|server, mut pair| {
        let long = "v".repeat(1000);
        let called = calls(server, || {
            for _ in 0..10 {
                pair.same(&["SET", "bar", &long]);
                assert_eq!(pair.same(&["GET", "bar"]), format!("$1000\r\n{long}"));
                assert_eq!(pair.same(&["EXISTS", "bar"]), ":1");
                pair.same(&["DBSIZE"]);
            }
        });
        assert_eq!(called, 40);
        pair.same(&["MGET", "bar", "{bar}missing"]);
        // A pipeline with commands for the call path and for the proxy path is executed in order.
        let pipeline = [
            ("SET bar 1", "+OK"),
            ("MSET bar 2 {bar}b 3", "+OK"),
            ("MGET bar {bar}b", "*2\r\n$1\r\n2\r\n$1\r\n3"),
            ("DEL {bar}b {bar}c", ":1"),
            ("INCR bar", ":3"),
            ("MGET bar {bar}b", "*2\r\n$1\r\n3\r\n$-1"),
            ("GET bar", "$1\r\n3"),
        ];
        pair.module.send(&pipeline.map(|(line, _)| words(line)));
        for (line, reply) in pipeline {
            let got = pair.module.next_reply().expect(line);
            assert_eq!(String::from_utf8_lossy(&got), format!("{reply}\r\n"), "{line}");
        }
        for (line, reply) in [
            ("GET key", "-MOVED 12539 127.0.0.1:9"),
            ("SET key value", "-MOVED 12539 127.0.0.1:9"),
            ("MGET bar hello", "-CROSSSLOT"),
        ] {
            let got = pair.same(&words(line));
            assert!(got.starts_with(reply), "{line}: {got}");
        }
        pair.same(&["SELECT", "1"]);
    });
}

/// After one call with keys of different slots, Valkey 9.1 would refuse the scripts of all clients.
#[test]
fn commands_with_keys_of_different_slots_do_not_break_scripts() {
    on_each_cluster_node(|_, mut pair| {
        for line in ["MGET bar hello", "DEL bar hello", "SORT bar STORE hello", "RENAME bar hello"]
        {
            assert!(pair.same(&words(line)).starts_with("-CROSSSLOT"), "{line}");
        }
        for _ in 0..100 {
            let script = "return redis.call('SET', KEYS[1], 'value')";
            assert_eq!(pair.same(&["EVAL", script, "1", "bar"]), "+OK");
        }
    });
}

/// While slots migrate, clients get the redirects of the engine, whatever the key path has learned
/// about a key.
#[test]
fn follows_slots_that_migrate() {
    on_each_cluster_node(|_, mut pair| {
        let long = "v".repeat(1000);
        let value = format!("$1000\r\n{long}");
        pair.module.ok(&["SET", "bar", &long]);
        assert_eq!(
            (pair.same(&["GET", "bar"]), pair.same(&["GET", "bar"])),
            (value.clone(), value)
        );
        pair.native.ok(&["CLUSTER", "SETSLOT", "5061", "MIGRATING", OTHER_NODE]);
        assert!(pair.same(&["GET", "bar"]).starts_with("$1000"));
        assert!(pair.same(&["GET", "{bar}missing"]).starts_with("-ASK 5061 127.0.0.1:9"));
        assert!(pair.same(&["MGET", "bar", "{bar}missing"]).starts_with("-TRYAGAIN"));
        pair.native.ok(&["CLUSTER", "SETSLOT", "5061", "STABLE"]);
        assert_eq!(pair.same(&["GET", "{bar}missing"]), "$-1");
        // The slot of the other node: only ASKING gives access to its keys.
        pair.native.ok(&["CLUSTER", "SETSLOT", "12539", "IMPORTING", OTHER_NODE]);
        pair.native.ok(&["ASKING"]);
        pair.native.ok(&["SET", "key", &long]);
        assert!(pair.same(&["GET", "key"]).starts_with("-MOVED 12539 127.0.0.1:9"));
        pair.same(&["ASKING"]);
        assert!(pair.same(&["GET", "key"]).starts_with("$1000"));
        assert!(pair.same(&["GET", "key"]).starts_with("-MOVED"), "ASKING is for one command");
        assert_eq!(pair.native.ask(&["DEL", "bar"]), ":1");
        pair.native.ok(&["CLUSTER", "DELSLOTS", "5061"]);
        assert!(pair.same(&["GET", "bar"]).starts_with("-CLUSTERDOWN"));
    });
}

/// The engine serves a slot that it imports only to a command after ASKING. The session proxies
/// that command, and calls the next ones again.
#[test]
fn sessions_call_commands_again_after_asking() {
    on_each_cluster_node(|server, mut pair| {
        pair.native.ok(&["CLUSTER", "SETSLOT", "12539", "IMPORTING", OTHER_NODE]);
        let called = calls(server, || {
            for _ in 0..10 {
                // FERRITE MARK for this write must not come between ASKING and the next command.
                pair.same(&["SET", "bar", "value"]);
                pair.same(&["ASKING"]);
                assert_eq!(pair.same(&["SET", "key", "other"]), "+OK");
                assert!(pair.same(&["GET", "key"]).starts_with("-MOVED"));
                assert_eq!(pair.same(&["GET", "bar"]), "$5\r\nvalue");
            }
        });
        assert_eq!(called, 20);
        for line in ["SET bar value", "ASKING", "MULTI", "GET key", "EXEC", "GET key"] {
            pair.same(&words(line));
        }
        for next in ["WAIT 0 0", "CLIENT NO-EVICT off", "PING", "NOSUCH", "SELECT 0", "*0\r\n"] {
            let mut pair = Pair::new(server);
            pair.same(&["SET", "bar", "value"]);
            pair.same(&["ASKING"]);
            for client in [&mut pair.module, &mut pair.native] {
                // An empty command has no reply.
                if next.starts_with('*') {
                    client.write(next.as_bytes());
                } else {
                    client.raw(&words(next));
                }
            }
            assert!(pair.same(&["GET", "key"]).starts_with("-MOVED"), "{next}");
        }
    });
}

/// After a failure to write to disk, the engine refuses writes, and reports the failure to PING.
#[test]
fn ping_reports_disk_errors() {
    for program in engines() {
        let mut server = start(&program, &["--save", "900 1"]);
        let mut pair = Pair::new(&server);
        pair.same(&["SET", "key", "value"]);
        std::fs::create_dir(server.directory().join("dump.rdb")).expect("a directory");
        pair.native.ask(&["BGSAVE"]);
        server.wait_until("a failed save", || {
            pair.native.ask(&["INFO", "persistence"]).contains("rdb_last_bgsave_status:err")
        });
        for line in ["PING", "PING hello", "SET key other", "DEL key"] {
            assert!(pair.same(&words(line)).starts_with("-MISCONF"), "{line}");
        }
        assert_eq!(pair.same(&["GET", "key"]), "$5\r\nvalue");
        pair.native.ok(&["CONFIG", "SET", "stop-writes-on-bgsave-error", "no"]);
        assert_eq!(pair.same(&["PING"]), "+PONG");
        server.assert_healthy();
    }
}

#[test]
fn proxies_everything_if_the_engine_lists_no_commands() {
    for program in engines() {
        let mut server = start(&program, &["--rename-command", "COMMAND", ""]);
        assert!(
            server.log().contains("call path disabled, all commands are proxied"),
            "{}",
            server.log()
        );
        let mut pair = Pair::new(&server);
        for line in ["SET key value", "GET key", "COMMAND", "PING"] {
            pair.same(&words(line));
        }
        assert_eq!(server.count("commands_called"), 0);
        server.assert_healthy();
    }
}

/// A renamed command is unknown by its original name, as at the engine's own port.
#[test]
fn a_renamed_command_is_unknown_by_its_original_name() {
    for program in engines() {
        let mut server = start(&program, &["--rename-command", "GET", "FETCH"]);
        let mut pair = Pair::new(&server);
        let long = "v".repeat(1000);
        assert_eq!(pair.same(&["SET", "key", &long]), "+OK");
        for line in ["GET key", "FETCH key", "GET key", "FETCH key"] {
            assert_eq!(pair.same(&words(line)).starts_with('-'), line.starts_with("GET"), "{line}");
        }
        server.assert_healthy();
    }
}

/// As at the engine's own port, no command of a client runs after its QUIT, or after a CLIENT KILL
/// that ends it.
#[test]
fn nothing_is_executed_after_quit_or_kill() {
    for program in engines() {
        let mut server = start(&program, &[]);
        let mut native = server.client();
        for (at, end) in ["QUIT", "CLIENT KILL TYPE normal SKIPME no"].into_iter().enumerate() {
            let at = at.to_string();
            let mut client = of_module(&server);
            client.send(&[words(&format!("SET before {at}")), words(end), words("SET after 1")]);
            assert_eq!(client.next_reply().as_deref(), Some(&b"+OK\r\n"[..]), "{end}");
            assert!(client.next_reply().is_some_and(|reply| reply[0] != b'-'), "{end}");
            assert_eq!(client.next_reply(), None, "{end}");
            // KILL has disconnected this client too.
            native = if at == "1" { server.client() } else { native };
            assert_eq!(native.ask(&["GET", "before"]), format!("$1\r\n{at}"), "{end}");
            assert_eq!(native.ask(&["EXISTS", "after"]), ":0", "{end}");
        }
        server.assert_healthy();
    }
}

/// The module's internal commands must not become part of a client's transaction.
#[test]
fn transactions_contain_no_internal_commands() {
    const QUEUED: [&str; 5] =
        ["SELECT 1", "WAIT 0 0", "CLIENT NO-EVICT off", "HELLO 9", "SUBSCRIBE channel"];
    for program in engines() {
        let mut server = start(&program, &[]);
        for queued in QUEUED {
            let mut pair = Pair::new(&server);
            for line in
                ["SET key value", "MULTI", "SET key other", queued, "GET key", "EXEC", "GET key"]
            {
                pair.same(&words(line));
            }
        }
        server.assert_healthy();
    }
}

/// A script can make the engine send an invalid reply, or one that is nested too deeply to parse.
/// The session passes these bytes on to the client.
#[test]
fn invalid_replies_are_passed_on() {
    let deep =
        "local all = {} local it = all for i = 1, 100 do it[1] = {} it = it[1] end return all";
    let wrong = "redis.setresp(3) return {big_number = 'no number'}";
    for program in engines() {
        let mut server = start(&program, &[]);
        // Another client writes the key. The module may close a session with writes of its own at
        // the invalid reply, if a later WAIT would not cover these writes.
        server.client().ok(&["SET", "k", "v"]);
        for script in [deep, wrong] {
            let mut pair = Pair::new(&server);
            for client in [&mut pair.module, &mut pair.native] {
                client.raw(&["HELLO", "3"]);
            }
            let both = [&mut pair.module, &mut pair.native].map(|client| {
                let eval = vec!["EVAL", script, "0"];
                client.send(&[
                    vec!["GET", "k"],
                    eval,
                    vec!["GET", "k"],
                    vec!["ECHO", "that is all"],
                ]);
                client.read_until(b"that is all\r\n")
            });
            assert_eq!(
                both[0].escape_ascii().to_string(),
                both[1].escape_ascii().to_string(),
                "{script}"
            );
            assert_eq!(pair.module.ask(&["GET", "k"]), "$1\r\nv", "{script}");
        }
        server.assert_healthy();
    }
}
