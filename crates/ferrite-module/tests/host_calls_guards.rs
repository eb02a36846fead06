//! Commands are not called when the engine would not run them, or would otherwise: on states of the
//! engine, on users' rights, and on what has crashed engines that were called without care. Every
//! reply is held against the engine's own socket.

mod scene;
mod talk;

use std::time::{Duration, Instant};

use talk::{Pair, Peer, calls, engines, start, words};

/// Redis 7.0 dies of each, if nothing is done about what calls leave to be propagated.
#[test]
fn keys_end_in_time_with_the_aof_on() {
    for program in engines() {
        let mut server = start(&program, &["--appendonly", "yes"]);
        let mut pair = Pair::new(&server);
        pair.native.ok(&["DEBUG", "SET-ACTIVE-EXPIRE", "0"]);
        let called = calls(&server, || {
            let names: Vec<_> = (0..50).map(|number| format!("short{number}")).collect();
            for name in &names {
                pair.called.ok(&["SET", name, "value", "PX", "1"]);
            }
            std::thread::sleep(Duration::from_millis(20));
            pair.called.send(&names.iter().map(|name| vec!["GET", name]).collect::<Vec<_>>());
            assert!(pair.called.replies(50).iter().all(|reply| reply == b"$-1\r\n"));
            assert_eq!(pair.same(&["DBSIZE"]), ":0");
            // Reads that end keys in turns of the loop in which the engine looks for such itself.
            pair.native.ok(&["DEBUG", "SET-ACTIVE-EXPIRE", "1"]);
            pair.native.ok(&["CONFIG", "SET", "hz", "500"]);
            for _ in 0..40 {
                for name in &names {
                    pair.called.ok(&["SET", name, "value", "PX", "2"]);
                }
                for name in &names {
                    pair.called.ask(&["GET", name]);
                }
            }
        });
        assert!(called > 4000, "{called}");
        std::thread::sleep(Duration::from_millis(200)); // a few turns of the loop
        server.assert_well();
    }
}

/// A called write while clients are paused would reach replicas, and the engine dies of it.
#[test]
fn paused_clients_wait() {
    for program in engines() {
        let mut server = start(&program, &["--appendonly", "yes"]);
        for (mode, read_waits) in [("WRITE", false), ("ALL", true)] {
            let mut pair = Pair::new(&server);
            pair.called.ok(&["SET", "key", "before"]);
            pair.native.ok(&["CLIENT", "PAUSE", "600", mode]);
            let begun = Instant::now();
            pair.called.send(&[vec!["GET", "key"]]);
            let read = pair.called.within(Duration::from_millis(200));
            assert_eq!(read.is_err(), read_waits, "{mode}: {read:?}");
            pair.called.send(&[vec!["SET", "key", "after"]]);
            assert!(
                pair.called.replies(if read_waits { 2 } else { 1 }).ends_with(&[b"+OK\r\n".into()])
            );
            assert!(begun.elapsed() >= Duration::from_millis(500), "{mode}: {:?}", begun.elapsed());
            server.until("unpaused", || pair.native.ask(&["PING"]) == "+PONG");
        }
        server.assert_well();
    }
}

/// A called write would land inside of the script.
#[test]
fn a_script_is_not_disturbed() {
    const LONG: &str = "redis.call('set','key','script') local i=0 while i<200000000 do i=i+1 end return redis.call('get','key')";
    for program in engines() {
        let mut server = start(&program, &["--busy-reply-threshold", "50"]);
        let (mut pair, mut script) = (Pair::new(&server), Peer::native(&server));
        pair.called.ok(&["SET", "key", "before"]);
        script.send(&[vec!["EVAL", LONG, "0"]]);
        server.until("busy", || pair.native.ask(&["GET", "key"]).starts_with("-BUSY"));
        let told = pair.called.ask(&["SET", "key", "injected"]);
        assert!(told.starts_with("-BUSY"), "{told}");
        assert_eq!(script.next().expect("an end"), b"$6\r\nscript\r\n");
        assert_eq!(pair.same(&["GET", "key"]), "$6\r\nscript");
        server.assert_well();
    }
}

#[test]
fn nothing_is_called_while_data_is_loaded() {
    for program in engines() {
        let mut server = start(&program, &[]);
        let (mut pair, mut loader) = (Pair::new(&server), Peer::native(&server));
        pair.native.ok(&["DEBUG", "POPULATE", "2000", "key", "1000"]);
        pair.called.ok(&["SET", "key", "before"]);
        pair.native.ok(&["CONFIG", "SET", "key-load-delay", "1000"]);
        pair.native.ok(&["CONFIG", "SET", "loading-process-events-interval-bytes", "1024"]);
        loader.send(&[vec!["DEBUG", "RELOAD"]]);
        server.until("loading", || pair.native.ask(&["GET", "key"]).starts_with("-LOADING"));
        for line in ["GET key", "SET key during", "PING"] {
            pair.same(&words(line));
        }
        pair.native.ok(&["CONFIG", "SET", "key-load-delay", "0"]);
        assert_eq!(loader.next().expect("an end"), b"+OK\r\n");
        assert_eq!(pair.same(&["GET", "key"]), "$6\r\nbefore");
        server.assert_well();
    }
}

#[test]
fn memory_is_the_engines_to_refuse_and_to_free() {
    let value = "v".repeat(4000);
    for program in engines() {
        let mut server = start(&program, &[]);
        let mut pair = Pair::new(&server);
        pair.called.ok(&["SET", "key", "value"]);
        // None left, and none to be had.
        pair.native.ok(&["CONFIG", "SET", "maxmemory", "100kb"]);
        assert!(pair.same(&["SET", "other", "value"]).starts_with("-OOM"));
        assert_eq!(pair.same(&["GET", "key"]), "$5\r\nvalue");
        // None left, but what nobody asks for may go. Calls do not make it go.
        let used = pair.native.ask(&["INFO", "memory"]);
        let used =
            used.lines().find_map(|line| line.strip_prefix("used_memory:")).expect("a field");
        let limit = used.parse::<u64>().expect("a number") + (4 << 20);
        pair.native.ok(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
        pair.native.ok(&["CONFIG", "SET", "maxmemory", &limit.to_string()]);
        for number in 0..4000 {
            pair.called.ok(&["SET", &format!("key{number}"), &value]);
        }
        let left = pair.native.ask(&["DBSIZE"]);
        assert!(left.trim_start_matches(':').parse::<u64>().expect("a number") < 2000, "{left}");
        server.assert_well();
    }
}

#[test]
fn a_user_has_his_rights_and_no_others() {
    for program in engines() {
        let mut server = start(&program, &[]);
        let mut pair = Pair::new(&server);
        let rules =
            "ACL SETUSER bob on >secret ~b* &b* +get +set +mget +publish +ping +auth +acl|whoami";
        pair.native.ok(&words(rules));
        let (mut bob, mut admin) = (Pair::new(&server), Peer::native(&server));
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
            let told = bob.same(&words(line));
            assert!(told.starts_with("-NOPERM") || line.starts_with("ACL"), "{line}: {told}");
        }
        // One word in the log for each denial, after the first.
        admin.ok(&["ACL", "LOG", "RESET"]);
        bob.called.ask(&["GET", "a"]);
        bob.called.ask(&["DEL", "b"]);
        let log = admin.ask(&["ACL", "LOG"]);
        assert_eq!(
            (log.matches("toplevel").count(), log.matches("\nmodule\r").count()),
            (2, 0),
            "{log}"
        );
        // What he may not any more, or has come to, counts at once.
        admin.ok(&words("ACL SETUSER bob -get +del"));
        assert!(bob.same(&["GET", "b"]).starts_with("-NOPERM"));
        assert_eq!(bob.called.ask(&["DEL", "b"]), ":1");
        // A user who is off goes on, as ever; one who is gone does not.
        admin.ok(&words("ACL SETUSER bob off"));
        assert_eq!(bob.same(&["SET", "b", "1"]), "+OK");
        assert_eq!(admin.ask(&["ACL", "DELUSER", "bob"]), ":1");
        bob.called.send(&[vec!["SET", "b", "2"]]);
        assert_eq!(bob.called.next(), None, "a session of nobody's");
        assert_eq!(admin.ask(&["GET", "b"]), "$1\r\n1");
        server.assert_well();
    }
}

/// Valkey 9.1 has rights to databases. They are looked at where a command runs, be it by a call or
/// by a key.
#[test]
fn a_database_may_be_forbidden() {
    for program in engines() {
        let mut server = start(&program, &[]);
        let mut admin = Peer::native(&server);
        if admin.ask(&words("ACL SETUSER bob on nopass ~* +@all alldbs")).starts_with('-') {
            continue; // an engine that has none
        }
        let mut bob = Pair::new(&server);
        bob.same(&["AUTH", "bob", "any"]);
        let long = "v".repeat(1000);
        for (db, rule, may) in [("5", "db=0", false), ("0", "db=5", false), ("5", "db=5", true)] {
            admin.ok(&words("ACL SETUSER bob alldbs"));
            bob.same(&["SELECT", db]);
            bob.same(&["SET", "key", &long]);
            bob.same(&["GET", "key"]);
            bob.same(&["GET", "key"]); // by its key
            admin.ok(&["ACL", "SETUSER", "bob", "resetdbs", rule]);
            for line in ["GET key", "SET other 1", "GET key"] {
                assert_eq!(
                    bob.same(&words(line)).starts_with("-NOPERM"),
                    !may,
                    "{line} in {db} with {rule}"
                );
            }
        }
        server.assert_well();
    }
}

#[test]
fn who_has_no_password_has_no_answer() {
    for program in engines() {
        let mut server = start(&program, &[]);
        let (address, mut admin) = (server.info("address"), Peer::native(&server));
        let mut early = Peer::called_at(&address);
        early.ok(&["SET", "key", "early"]);
        admin.ok(&["CONFIG", "SET", "requirepass", "secret"]);
        let mut pair = Pair { called: Peer::called_at(&address), native: Peer::native(&server) };
        for line in ["GET key", "SET key 1", "PING", "AUTH wrong", "GET key"] {
            assert!(pair.same(&words(line)).starts_with('-'), "{line}");
        }
        pair.same(&["AUTH", "secret"]);
        assert_eq!(pair.same(&["GET", "key"]), "$5\r\nearly");
        // Who was in before stays in, as ever.
        assert_eq!(early.ask(&["GET", "key"]), "$5\r\nearly");
        admin.ok(&["CONFIG", "SET", "requirepass", ""]);
        assert_eq!(server.count("commands_called"), 3);
        server.assert_well();
    }
}

#[test]
fn writes_are_refused_as_ever() {
    for program in engines() {
        let mut server = start(&program, &[]);
        let mut pair = Pair::new(&server);
        pair.called.ok(&["SET", "key", "value"]);
        pair.native.ok(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
        assert!(pair.same(&["SET", "key", "other"]).starts_with("-NOREPLICAS"));
        pair.native.ok(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
        // A replica whose primary does not answer. It deletes no keys whose time is over, and hides
        // them: Redis 7.0 not from calls.
        pair.called.ok(&["SET", "short", "value", "PX", "300"]);
        pair.native.ok(&["REPLICAOF", "127.0.0.1", "1"]);
        std::thread::sleep(Duration::from_millis(400));
        assert_eq!(pair.same(&["GET", "short"]), "$-1");
        assert!(pair.same(&["SET", "key", "other"]).starts_with("-READONLY"));
        assert_eq!(pair.same(&["GET", "key"]), "$5\r\nvalue");
        pair.native.ok(&["CONFIG", "SET", "replica-serve-stale-data", "no"]);
        assert!(pair.same(&["GET", "key"]).starts_with("-MASTERDOWN"));
        pair.native.ok(&["REPLICAOF", "NO", "ONE"]);
        assert_eq!(pair.same(&["SET", "key", "other"]), "+OK");
        server.assert_well();
    }
}

#[test]
fn a_cluster_redirects() {
    for program in engines() {
        let port = scene::free_port();
        let mut server = start(
            &program,
            &["--cluster-enabled", "yes", "--port", &port, "--cluster-port", &scene::free_port()],
        );
        let mut pair = Pair::new(&server);
        assert!(pair.same(&["GET", "key"]).starts_with("-CLUSTERDOWN"));
        pair.native.ok(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
        server.until("a cluster", || pair.native.ask(&["GET", "key"]) == "$-1");
        for line in ["SET key 1", "GET key", "MGET key other", "MSET key 1 other 2", "SELECT 1"] {
            pair.same(&words(line));
        }
        server.assert_well();
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
        server.assert_well();
    }
}

/// A command that goes by another name is unknown by its own, as ever.
#[test]
fn a_renamed_command_is_another() {
    for program in engines() {
        let mut server = start(&program, &["--rename-command", "GET", "FETCH"]);
        let mut pair = Pair::new(&server);
        let long = "v".repeat(1000);
        assert_eq!(pair.same(&["SET", "key", &long]), "+OK");
        for line in ["GET key", "FETCH key", "GET key", "FETCH key"] {
            assert_eq!(pair.same(&words(line)).starts_with('-'), line.starts_with("GET"), "{line}");
        }
        server.assert_well();
    }
}

/// The engine reads nothing of a client that it is about to hang up on.
#[test]
fn nothing_is_executed_after_the_end() {
    for program in engines() {
        let mut server = start(&program, &[]);
        let mut native = Peer::native(&server);
        for (at, end) in ["QUIT", "CLIENT KILL TYPE normal SKIPME no"].into_iter().enumerate() {
            let at = at.to_string();
            let mut peer = Peer::called(&server);
            peer.send(&[words(&format!("SET before {at}")), words(end), words("SET after 1")]);
            assert_eq!(peer.next().as_deref(), Some(&b"+OK\r\n"[..]), "{end}");
            assert!(peer.next().is_some_and(|reply| reply[0] != b'-'), "{end}");
            assert_eq!(peer.next(), None, "{end}");
            native = if at == "1" { Peer::native(&server) } else { native }; // it was killed, too
            assert_eq!(native.ask(&["GET", "before"]), format!("$1\r\n{at}"), "{end}");
            assert_eq!(native.ask(&["EXISTS", "after"]), ":0", "{end}");
        }
        server.assert_well();
    }
}

/// What the module sends for itself must not get into a transaction of the client's.
#[test]
fn transactions_after_calls_have_their_own_commands_alone() {
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
        server.assert_well();
    }
}

/// Scripts can make the engine say what is no reply, or nest one deeper than anybody reads: the
/// client's to make sense of.
#[test]
fn what_is_no_reply_is_passed_on() {
    let deep =
        "local all = {} local it = all for i = 1, 100 do it[1] = {} it = it[1] end return all";
    let wrong = "redis.setresp(3) return {big_number = 'no number'}";
    for program in engines() {
        let mut server = start(&program, &[]);
        // a session that has written itself ends, so that WAIT cannot lie
        Peer::native(&server).ok(&["SET", "k", "v"]);
        for script in [deep, wrong] {
            let mut pair = Pair::new(&server);
            for peer in [&mut pair.called, &mut pair.native] {
                peer.raw(&["HELLO", "3"]);
            }
            let both = [&mut pair.called, &mut pair.native].map(|peer| {
                let eval = vec!["EVAL", script, "0"];
                peer.send(&[vec!["GET", "k"], eval, vec!["GET", "k"], vec!["ECHO", "that is all"]]);
                peer.until(b"that is all\r\n")
            });
            assert_eq!(
                both[0].escape_ascii().to_string(),
                both[1].escape_ascii().to_string(),
                "{script}"
            );
            assert_eq!(pair.called.ask(&["GET", "k"]), "$1\r\nv", "{script}");
        }
        server.assert_well();
    }
}
