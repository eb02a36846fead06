//! Attacks that were once possible, with the number of the review's finding (S1 and so on). They
//! all fail at the engine's own port, and so they must at the module's. The tests need no RDMA,
//! since sessions over TCP take the same path.

mod client;

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use client::{of_module, start};
use ferrite_testkit::engine::engines;
use ferrite_testkit::resp::Client;
use ferrite_testkit::{Engine, TIMEOUT, free_port};

const SECRET: &str = "the-secret-value";

/// Runs an attack on each engine.
fn on_each(options: &[&str], attack: impl Fn(&mut Engine)) {
    for program in engines() {
        let mut server = start(&program, options);
        attack(&mut server);
        server.assert_healthy();
    }
}

/// Sends one command again and again and reads the replies, until the server closes the connection.
/// Then sets `is_over`.
fn flood(mut client: Client, command: &[&str], is_over: &AtomicBool) {
    let batch = vec![command.to_vec(); 100];
    while client.try_send(&batch) {
        for _ in 0..batch.len() {
            if client.next_reply().is_none() {
                is_over.store(true, Ordering::SeqCst);
                return;
            }
        }
    }
    is_over.store(true, Ordering::SeqCst);
}

/// Floods the engine with INCR while `act` runs. Asserts that no command of the flood runs after
/// `act`, and that the flooding client is disconnected.
fn assert_disconnected_by(server: &Engine, client: Client, act: impl FnOnce(&mut Client)) {
    let mut admin = server.client();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| flood(client, &["INCR", "counter"], &is_over));
        server.wait_until("the flood has begun", || admin.ask(&["EXISTS", "counter"]) == ":1");
        act(&mut admin);
        let counter = admin.ask(&["GET", "counter"]);
        assert_eq!(
            admin.ask(&["GET", "counter"]),
            counter,
            "a command of the flood ran after the reply to the admin"
        );
        server.wait_until("the client is disconnected", || is_over.load(Ordering::SeqCst));
    });
}

/// S1: a command with many replies whose name arrives late. The module took one of its surplus
/// replies for the reply to a login.
#[test]
fn surplus_replies_are_no_login() {
    on_each(&["--protected-mode", "no"], |server| {
        let mut admin = server.client();
        admin.ok(&["ACL", "SETUSER", "admin", "on", ">right", "~*", "&*", "+@all"]);
        admin.ok(&["AUTH", "admin", "right"]);
        admin.ok(&["SET", "secret", SECRET]);
        admin.ok(&[
            "ACL",
            "SETUSER",
            "default",
            "reset",
            "on",
            "nopass",
            "~public:*",
            "+@all",
            "-@dangerous",
        ]);
        let mut client = Client::to_tcp(address(&mut admin));
        let channels: Vec<_> = (0..60_000).map(|number| format!("c{number}")).collect();
        client.write(format!("*{}\r\n", channels.len() + 1).as_bytes());
        std::thread::sleep(Duration::from_millis(100)); // so that the header arrives alone
        let words = channels.iter().map(|name| format!("${}\r\n{name}\r\n", name.len()));
        client.write(format!("$11\r\nUNSUBSCRIBE\r\n{}", words.collect::<String>()).as_bytes());
        client.send(&[
            vec!["HELLO", "2", "AUTH", "admin", "wrong"],
            vec!["GET", "secret"],
            vec!["SET", "owned", "1"],
            vec!["ECHO", "the-end"],
        ]);
        // Valkey 8.0 sends no reply to a failed login after other commands in a pipeline.
        let replies = String::from_utf8_lossy(&client.read_until(b"the-end\r\n")).into_owned();
        let last: Vec<_> = replies.lines().rev().take(6).collect();
        assert_eq!(last.iter().filter(|line| line.starts_with("-NOPERM")).count(), 2, "{last:?}");
        assert!(!replies.contains(SECRET), "{last:?}");
        assert_eq!(admin.ask(&["EXISTS", "owned"]), ":0");
    });
}

/// Returns the address of the module's port. `admin` must be allowed to run INFO.
fn address(admin: &mut Client) -> String {
    admin.info("address")
}

/// S2: with SUBSCRIBE renamed, three small commands caused a surplus reply.
#[test]
fn a_renamed_subscribe_is_a_subscribe() {
    on_each(&["--rename-command", "SUBSCRIBE", "sub2"], |server| {
        let mut admin = server.client();
        admin.ok(&["ACL", "SETUSER", "admin", "on", ">right", "~*", "+@all"]);
        admin.ok(&["ACL", "SETUSER", "low", "on", ">p", "~low", "&*", "+subscribe", "+hello"]);
        admin.ok(&["SET", "secret", SECRET]);
        let mut client = of_module(server);
        client.ok(&["AUTH", "low", "p"]);
        client.send(&[
            vec!["sub2", "a", "b"],
            vec!["HELLO", "2", "AUTH", "admin", "wrong"],
            vec!["GET", "secret"],
        ]);
        let replies = client.replies(4).concat();
        assert!(!String::from_utf8_lossy(&replies).contains(SECRET));
    });
}

/// S2: with SELECT renamed, writes went to the previous database.
#[test]
fn a_renamed_select_selects() {
    on_each(&["--rename-command", "SELECT", "sel"], |server| {
        let mut client = of_module(server);
        client.ok(&["sel", "5"]);
        client.ok(&["SET", "k", "in 5"]);
        let mut admin = server.client();
        assert_eq!(admin.ask(&["EXISTS", "k"]), ":0");
        admin.ok(&["sel", "5"]);
        assert_eq!(admin.ask(&["EXISTS", "k"]), ":1");
    });
}

/// S2: with MULTI renamed, commands ran at once instead of being queued.
#[test]
fn a_renamed_multi_queues() {
    on_each(
        &["--rename-command", "MULTI", "xmulti", "--rename-command", "EXEC", "xexec"],
        |server| {
            let (mut client, mut admin) = (of_module(server), server.client());
            client.ok(&["xmulti"]);
            assert_eq!(client.ask(&["SET", "k", "queued"]), "+QUEUED");
            assert_eq!(admin.ask(&["EXISTS", "k"]), ":0");
            assert_eq!(client.ask(&["xexec"]), "*1\r\n+OK");
            assert_eq!(client.ask(&["EXISTS", "k"]), ":1");
        },
    );
}

/// S2: with AUTH renamed, calls kept the rights of the previous user.
#[test]
fn a_renamed_auth_changes_the_user() {
    on_each(&["--rename-command", "AUTH", "xauth"], |server| {
        let (mut client, mut admin) = (of_module(server), server.client());
        admin.ok(&["ACL", "SETUSER", "low", "on", ">p", "~low:*", "+get"]);
        admin.ok(&["SET", "k", "v"]);
        client.ok(&["xauth", "low", "p"]);
        assert!(client.ask(&["GET", "k"]).starts_with("-NOPERM"));
        assert_eq!(client.ask(&["GET", "low:k"]), "$-1");
    });
}

/// S2: with CLIENT renamed, REPLY SKIP made the session wait forever.
#[test]
fn a_renamed_client_reply_skips() {
    on_each(&["--rename-command", "CLIENT", "xclient"], |server| {
        let mut client = of_module(server);
        client.send(&[vec!["xclient", "REPLY", "SKIP"], vec!["SET", "k", "v"], vec!["GET", "k"]]);
        assert_eq!(client.next_reply().as_deref(), Some(&b"$1\r\nv\r\n"[..]));
    });
}

/// S3: CLIENT KILL did not stop a client that kept sending.
#[test]
fn client_kill_stops_a_client_that_keeps_sending() {
    on_each(&[], |server| {
        let mut client = of_module(server);
        let id = client.ask(&["CLIENT", "ID"]);
        assert_disconnected_by(server, client, |admin| {
            assert_eq!(admin.ask(&["CLIENT", "KILL", "ID", &id[1..]]), ":1");
        });
    });
}

/// S3: the session of a deleted user continued as a new user of the same name.
#[test]
fn a_deleted_users_session_ends() {
    on_each(&[], |server| {
        let mut client = of_module(server);
        let mut admin = server.client();
        admin.ok(&["ACL", "SETUSER", "bob", "on", ">old", "~*", "+@all"]);
        client.ok(&["AUTH", "bob", "old"]);
        assert_disconnected_by(server, client, |admin| {
            admin.send(&[
                vec!["MULTI"],
                vec!["ACL", "DELUSER", "bob"],
                vec!["ACL", "SETUSER", "bob", "on", ">new", "~*", "+@all"],
                vec!["EXEC"],
            ]);
            admin.replies(4);
        });
    });
}

/// S3: a client beyond maxclients ran commands before it was rejected.
#[test]
fn rejects_clients_beyond_maxclients_before_their_first_command() {
    for program in engines() {
        let mut server = start(&program, &["--maxclients", "10"]);
        let address = server.info("address");
        let mut held: Vec<_> = (0..10).map(|_| server.client()).collect();
        held.iter_mut().for_each(|client| assert_eq!(client.ask(&["PING"]), "+PONG"));
        let mut late = Client::to_tcp(&address);
        late.send(&[vec!["SET", "over1", "1"], vec!["SET", "over2", "1"]]);
        assert_eq!(
            late.next_reply().as_deref(),
            Some(&b"-ERR max number of clients reached\r\n"[..])
        );
        assert_eq!(late.next_reply(), None);
        assert_eq!(held[0].ask(&["DBSIZE"]), ":0");
        drop(held);
        server.wait_until("room for a client", || server.connection().is_ok());
        server.assert_healthy();
    }
}

/// The module rejects a client that connects while the engine is full, as the engine's own port
/// does, even if there is room again when the session begins.
#[test]
fn rejects_clients_that_came_while_the_engine_was_full() {
    for program in engines() {
        let mut server = start(&program, &["--maxclients", "10"]);
        let address = server.info("address");
        let mut held: Vec<_> = (0..10).map(|_| server.client()).collect();
        held.iter_mut().for_each(|client| assert_eq!(client.ask(&["PING"]), "+PONG"));
        let mut late = Client::to_tcp(&address);
        // After these the engine's event loop has run, and the module has accepted the connection.
        (0..20).for_each(|_| assert_eq!(held[0].ask(&["PING"]), "+PONG"));
        drop(held.pop());
        server.wait_until("room for a client", || {
            held[0].ask(&["INFO", "clients"]).contains("connected_clients:9\r\n")
        });
        late.send(&[vec!["SET", "over", "1"]]);
        assert_eq!(
            late.next_reply().as_deref(),
            Some(&b"-ERR max number of clients reached\r\n"[..])
        );
        assert_eq!(late.next_reply(), None);
        let mut next = Client::to_tcp(&address);
        next.ok(&["SET", "next", "1"]);
        assert_eq!(held[0].ask(&["DBSIZE"]), ":1");
        drop(held);
        server.assert_healthy();
    }
}

/// Returns the resident memory of the engine's process in MiB.
fn rss_mib(server: &Engine) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid()))
        .expect("a running engine");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a size");
    line.split_whitespace().next().and_then(|kib| kib.parse::<usize>().ok()).expect("a number")
        >> 10
}

/// S4: a client that had not authenticated and read nothing made the module store all its commands.
#[test]
fn a_client_that_never_authenticates_is_not_read_without_end() {
    on_each(&["--requirepass", "x"], |server| {
        let mut admin = server.client();
        admin.ok(&["AUTH", "x"]);
        let mut client = Client::to_tcp(address(&mut admin));
        let before = rss_mib(server);
        let batch = b"*1\r\n$4\r\nPING\r\n".repeat(4096);
        let mut sent = 0;
        while sent < 64 << 20 && client.write_within(&batch, Duration::from_millis(500)) {
            sent += batch.len();
        }
        assert!(sent < 32 << 20, "the module read {sent} bytes");
        let grown = rss_mib(server).saturating_sub(before);
        assert!(grown <= 8, "{grown} MiB more memory");
    });
}

/// S5: the module stored unread replies beyond client-output-buffer-limit.
#[test]
fn a_client_over_the_output_limit_is_disconnected() {
    on_each(&["--client-output-buffer-limit", "normal 1mb 1mb 1"], |server| {
        let mut admin = server.client();
        let values = vec!["x".repeat(1000); 4000];
        let words: Vec<_> =
            ["RPUSH", "l"].into_iter().chain(values.iter().map(String::as_str)).collect();
        admin.ask(&words);
        let before = rss_mib(server);
        let mut client = of_module(server);
        client.send(&vec![vec!["LRANGE", "l", "0", "-1"]; 60]);
        server.wait_until("the end of the session", || server.count("sessions") == 0);
        let grown = rss_mib(server).saturating_sub(before);
        assert!(grown <= 32, "{grown} MiB more memory");
        assert_eq!(admin.ask(&["PING"]), "+PONG");
    });
}

/// Clients that are disconnected again and again for the same reason do not fill the log.
#[test]
fn clients_over_the_output_limit_do_not_fill_the_log() {
    on_each(&["--client-output-buffer-limit", "normal 1mb 1mb 1"], |server| {
        of_module(server).ok(&["SET", "k", &"x".repeat(1 << 20)]);
        for _ in 0..5 {
            let mut client = of_module(server);
            client.send(&vec![vec!["GETRANGE", "k", "0", "-1"]; 60]);
            server.wait_until("the end of the session", || server.count("sessions") == 0);
        }
        let lines = server.log().matches("over the hard client-output-buffer-limit").count();
        assert_eq!(lines, 1, "{}", server.log());
    });
}

/// A client that stays above the soft limit is disconnected when its time is over, and the log says
/// so.
#[test]
fn a_client_over_the_soft_limit_is_disconnected_in_time() {
    on_each(&["--client-output-buffer-limit", "normal 0 1mb 1"], |server| {
        let mut client = of_module(server);
        client.ok(&["SET", "k", &"x".repeat(1 << 20)]);
        client.send(&vec![vec!["GETRANGE", "k", "0", "-1"]; 20]);
        server.wait_until("the end of the session", || server.count("sessions") == 0);
        let log = server.log();
        assert_eq!(log.matches("over the soft client-output-buffer-limit").count(), 1, "{log}");
        assert!(!log.contains(" with 0 unread bytes"), "{log}");
    });
}

/// The replies of all sessions together are limited by maxmemory-clients. Beyond it, the sessions
/// with the most unread replies are ended, each counted once.
#[test]
fn evicts_the_largest_sessions_beyond_maxmemory_clients() {
    on_each(&["--maxmemory-clients", "8mb"], |server| {
        let mut small = of_module(server);
        small.ok(&["SET", "k", &"x".repeat(1 << 20)]);
        // Each of them exceeds the limit by itself, whatever its socket buffers hold.
        let mut large: Vec<_> = (0..4).map(|_| of_module(server)).collect();
        large
            .iter_mut()
            .for_each(|client| client.send(&vec![vec!["GETRANGE", "k", "0", "-1"]; 60]));
        server.wait_until("only one session is left", || server.count("sessions") == 1);
        assert_eq!(server.count("sessions_evicted"), 4);
        assert_eq!(small.ask(&["PING"]), "+PONG");
    });
}

/// A client may send a long pipeline before it reads, as at the engine's own port.
#[test]
fn a_client_may_send_all_before_it_reads() {
    on_each(&[], |server| {
        let mut client = of_module(server);
        client.ok(&["SET", "k", &"x".repeat(10_000)]);
        let count = 10_000;
        client.send(&vec![vec!["GETRANGE", "k", "0", "-1"]; count]);
        assert!(client.replies(count).iter().all(|reply| reply.len() == 10_010));
    });
}

/// S11: for users without the right to FERRITE MARK, WAIT counted only older writes.
#[test]
fn wait_is_correct_whatever_the_users_rights() {
    for program in engines() {
        let mut primary = start(&program, &["--port", &free_port().to_string()]);
        let port: Vec<String> = primary.ask(&["CONFIG", "GET", "port"]);
        let replica = start(&program, &["--replicaof", "127.0.0.1", &port[1]]);
        let mut admin = primary.client();
        primary.wait_until("an online replica", || {
            admin.ask(&["INFO", "replication"]).contains("state=online")
        });
        admin.ok(&["ACL", "SETUSER", "w", "on", ">w", "~*", "+set", "+wait", "+auth"]);
        let mut client = of_module(&primary);
        client.ok(&["AUTH", "w", "w"]);
        client.ok(&["SET", "k", "v"]);
        assert_eq!(client.ask(&["WAIT", "1", "20000"]), ":1");
        replica.signal("STOP");
        client.ok(&["SET", "k", "v"]);
        assert_eq!(client.ask(&["WAIT", "1", "300"]), ":0");
        replica.signal("CONT");
        assert_eq!(client.ask(&["WAIT", "1", "20000"]), ":1");
        primary.assert_healthy();
    }
}

/// Returns the reply to WAIT after a client has written and `act` has run, while the replica is
/// stopped and cannot have the write. `None` if the client was disconnected.
fn wait_after(program: &Path, act: impl Fn(&mut Client, &mut Client)) -> Option<String> {
    let mut primary =
        start(program, &["--port", &free_port().to_string(), "--repl-diskless-sync-delay", "0"]);
    let port: Vec<String> = primary.ask(&["CONFIG", "GET", "port"]);
    let replica = start(program, &["--replicaof", "127.0.0.1", &port[1]]);
    let (mut admin, mut client) = (primary.client(), of_module(&primary));
    primary
        .wait_until("a replica", || admin.ask(&["INFO", "replication"]).contains("state=online"));
    client.ok(&["SET", "k", "older"]);
    assert_eq!(client.ask(&["WAIT", "1", "20000"]), ":1");
    replica.signal("STOP");
    client.ok(&["SET", "k", "newer"]);
    act(&mut client, &mut admin);
    // To disconnect the client is correct too: then it gets no wrong reply.
    let sent = client.try_send(&[vec!["WAIT", "1", "300"]]);
    let reply = if sent { client.next_reply() } else { None };
    replica.signal("CONT");
    primary.assert_healthy();
    reply.map(|reply| String::from_utf8_lossy(&reply).trim_end().to_owned())
}

/// Before a session is pinned to proxy, its called writes are marked; otherwise it is ended.
#[test]
fn wait_is_correct_after_replies_and_commands_that_cannot_be_framed() {
    for program in engines() {
        let after_script = wait_after(&program, |client, _| {
            let deep = "local t = {} for i = 1, 40 do t = {t} end return t";
            client.send(&[vec!["EVAL", deep, "0"]]);
            client.read_until(b"*1\r\n*0\r\n");
        });
        assert_eq!(after_script.as_deref(), Some(":0"), "{program:?}");
        let after_wrong_end = wait_after(&program, |client, _| {
            let value = "x".repeat(400_000);
            // Engines before Valkey 9 accept any two bytes as the end of a word.
            client.write(format!("*2\r\n$4\r\nECHO\r\n$400000\r\n{value}zz").as_bytes());
            let _ = client.next_reply();
        });
        assert!(after_wrong_end.is_none_or(|reply| reply == ":0"), "{program:?}");
    }
}

/// As the test before, but the engine refuses FERRITE MARK.
#[test]
fn wait_is_correct_if_the_mark_is_refused() {
    let refuse_writes =
        |admin: &mut Client| admin.ok(&["CONFIG", "SET", "min-replicas-to-write", "2"]);
    for program in engines() {
        let after_pin = wait_after(&program, |client, admin| {
            refuse_writes(admin);
            client.write(b"PING\r\n");
            let _ = client.next_reply();
        });
        assert!(after_pin.is_none_or(|reply| reply == ":0"), "{program:?}");
        let in_transaction = wait_after(&program, |client, admin| {
            refuse_writes(admin);
            client.ok(&["MULTI"]);
            // The reply to EXEC would have the reply to this queued WAIT.
            let sent = client.try_send(&[vec!["WAIT", "1", "0"], vec!["EXEC"]]);
            let replies = [client.next_reply(), client.next_reply()]
                .into_iter()
                .flatten()
                .flatten()
                .collect::<Vec<_>>();
            assert!(!sent || !String::from_utf8_lossy(&replies).contains(":1"), "{program:?}");
        });
        assert!(
            in_transaction.is_none_or(|reply| reply == ":0" || reply.starts_with('-')),
            "{program:?}"
        );
    }
}

/// S11: WAIT fails if the engine refuses the FERRITE MARK that it needs.
#[test]
fn wait_fails_if_its_mark_is_refused() {
    on_each(&[], |server| {
        let (mut client, mut admin) = (of_module(server), server.client());
        client.ok(&["SET", "k", "v"]);
        admin.ok(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
        assert!(client.ask(&["WAIT", "1", "100"]).starts_with("-NOREPLICAS"));
        admin.ok(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
        assert_eq!(client.ask(&["WAIT", "1", "100"]), ":0");
    });
}

/// S14: after a HELLO that logged in and then failed, the engine and the module had different
/// users for the client.
#[test]
fn a_hello_that_fails_after_its_login_changes_the_user() {
    on_each(&[], |server| {
        let (mut client, mut native) = (of_module(server), server.client());
        native.ok(&["ACL", "SETUSER", "low", "on", ">p", "~low:*", "+get", "+acl|whoami"]);
        native.ok(&["SET", "k", "v"]);
        for either in [&mut client, &mut native] {
            let reply = either.ask(&["HELLO", "3", "AUTH", "low", "p", "BAD"]);
            assert!(reply.starts_with("-ERR"), "{reply}");
        }
        let user = native.ask(&["ACL", "WHOAMI"]);
        assert_eq!(client.ask(&["ACL", "WHOAMI"]), user);
        assert_eq!(client.ask(&["GET", "k"]), native.ask(&["GET", "k"]));
    });
}

/// Commands run in-process only after the client has logged in.
#[test]
fn calls_begin_with_the_login() {
    on_each(&["--requirepass", "x"], |server| {
        let mut admin = server.client();
        admin.ok(&["AUTH", "x"]);
        let mut client = Client::to_tcp(address(&mut admin));
        let mut called = || {
            let info = admin.ask(&["INFO", "ferrite"]);
            let line = info.lines().find_map(|line| line.strip_prefix("ferrite_commands_called:"));
            line.and_then(|number| number.trim_end().parse::<u64>().ok()).expect("a number")
        };
        assert!(client.ask(&["GET", "k"]).starts_with("-NOAUTH"));
        assert!(client.ask(&["AUTH", "wrong"]).starts_with("-WRONGPASS"));
        assert!(client.ask(&["GET", "k"]).starts_with("-NOAUTH"));
        assert_eq!(called(), 0);
        client.ok(&["AUTH", "x"]);
        assert_eq!(client.ask(&["GET", "k"]), "$-1");
        assert_eq!(called(), 1, "after a login as the user `default`");
        assert_eq!(client.ask(&["RESET"]), "+RESET");
        assert!(client.ask(&["GET", "k"]).starts_with("-NOAUTH"));
        assert_eq!(called(), 1);
        client.ask(&["HELLO", "3", "AUTH", "default", "x"]);
        assert_eq!(client.ask(&["GET", "k"]), "_", "in RESP3");
        assert_eq!(called(), 2);
    });
}

/// The internal commands of sessions do nothing for other clients.
#[test]
fn internal_commands_refuse_others() {
    on_each(&[], |server| {
        for client in [&mut server.client(), &mut of_module(server)] {
            for words in [&["FERRITE", "BIND", "0123"][..], &["FERRITE", "ATTEST", ""]] {
                assert!(client.ask(words).starts_with("-ERR only sessions"), "{words:?}");
            }
        }
        assert!(server.client().ask(&["FERRITE", "MARK"]).starts_with("-ERR only sessions"));
        assert!(server.client().ask(&["FERRITE", "BIND"]).starts_with("-ERR wrong number"));
    });
}

/// S13: FERRITE CLIENTS shows the engine's client of a session, and ACL LOG the session's address.
#[test]
fn sessions_can_be_matched_with_the_engines_clients() {
    on_each(&[], |server| {
        let (mut client, mut admin) = (of_module(server), server.client());
        admin.ok(&["ACL", "SETUSER", "low", "on", ">p", "~low:*", "+get", "+client|id"]);
        client.ok(&["AUTH", "low", "p"]);
        let id = client.ask(&["CLIENT", "ID"])[1..].to_owned();
        let line = admin.ask(&["FERRITE", "CLIENTS"]);
        assert!(line.contains(&format!(" client-id={id} user=low addr=127.0.0.1:")), "{line}");
        assert!(client.ask(&["GET", "k"]).starts_with("-NOPERM"));
        let log = admin.ask(&["ACL", "LOG"]);
        assert!(log.contains("name=ferrite:127.0.0.1:"), "no address in ACL LOG: {log}");
    });
}

/// If ACL is renamed, the module cannot find out whether the engine needs a password. Sessions then
/// use the proxy path.
#[test]
fn sessions_work_if_acl_is_renamed() {
    on_each(&["--rename-command", "ACL", "xacl"], |server| {
        let mut client = of_module(server);
        client.ok(&["SET", "k", "v"]);
        assert_eq!(client.ask(&["xacl", "WHOAMI"]), "$7\r\ndefault");
        assert_eq!(client.ask(&["GET", "k"]), "$1\r\nv");
    });
}

/// Before a login, the engine rejects a large command as soon as it has read its header.
#[test]
fn large_commands_are_rejected_before_a_login() {
    on_each(&["--requirepass", "x"], |server| {
        let mut admin = server.client();
        admin.ok(&["AUTH", "x"]);
        let address = address(&mut admin);
        for head in ["*1001\r\n", "*2\r\n$4\r\nECHO\r\n$100000\r\n"] {
            let (mut client, mut native) = (Client::to_tcp(&address), server.client());
            client.write(head.as_bytes());
            native.write(head.as_bytes());
            let refusal = client.next_reply();
            assert_eq!(refusal, native.next_reply(), "{head:?}");
            assert!(
                refusal.is_some_and(|it| it.starts_with(b"-ERR Protocol error: unauthenticated"))
            );
            assert_eq!(client.next_reply(), None);
        }
    });
}

/// A client can send FERRITE MARK itself. Since that writes to the append-only file and to
/// replicas, it fails unless the session has written before.
#[test]
fn mark_fails_unless_the_session_has_written() {
    on_each(&["--requirepass", "x"], |server| {
        let mut admin = server.client();
        admin.ok(&["AUTH", "x"]);
        let mut client = Client::to_tcp(address(&mut admin));
        assert!(
            client.ask(&["FERRITE", "MARK"]).starts_with("-ERR only sessions"),
            "before a login"
        );
        client.ok(&["AUTH", "x"]);
        assert!(
            client.ask(&["FERRITE", "MARK"]).starts_with("-ERR only sessions"),
            "before a write"
        );
        client.ok(&["SET", "k", "v"]);
        client.ok(&["FERRITE", "MARK"]);
        assert!(
            client.ask(&["FERRITE", "MARK"]).starts_with("-ERR only sessions"),
            "a second time"
        );
    });
}

/// A slow reader uses memory only for the replies that it has not read yet.
#[test]
fn replies_that_were_read_use_no_memory() {
    on_each(&[], |server| {
        let mut client = of_module(server);
        client.ok(&["SET", "k", &"x".repeat(1 << 20)]);
        let get = ["GETRANGE", "k", "0", "-1"];
        // From now on some replies are always unread.
        client.send(&vec![get.to_vec(); 20]);
        client.next_reply().expect("a reply");
        let before = rss_mib(server);
        for _ in 0..100 {
            client.send(&[get.to_vec()]);
            assert_eq!(client.next_reply().map(|reply| reply.len()), Some((1 << 20) + 12));
        }
        let grown = rss_mib(server).saturating_sub(before);
        assert!(grown < 60, "{grown} MiB more memory after 100 MiB were read");
    });
}

/// S2: a command can be renamed to a name of any length.
#[test]
fn a_renamed_reset_with_a_long_name_resets() {
    let name = "reset-0123456789abcdef0123456789abcdef0123456789";
    on_each(&["--requirepass", "x", "--rename-command", "RESET", name], |server| {
        let mut admin = server.client();
        admin.ok(&["AUTH", "x"]);
        let mut client = Client::to_tcp(address(&mut admin));
        client.ok(&["AUTH", "x"]);
        client.ok(&["SET", "k", "v"]);
        assert_eq!(client.ask(&[name]), "+RESET");
        assert!(client.ask(&["GET", "k"]).starts_with("-NOAUTH"));
    });
}

fn open_files(server: &Engine) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", server.pid())).expect("a running engine").count()
}

/// Silent connections used up the descriptor numbers that the engine's event loop can handle. The
/// engine then accepted clients at its own port but never read from them, and kept them open after
/// they had gone.
#[test]
fn silent_connections_take_no_descriptors_of_the_engines() {
    on_each(&["--maxclients", "40"], |server| {
        let address = server.info("address");
        let silent: Vec<_> =
            (0..400).map(|_| TcpStream::connect(&address).expect("a connection")).collect();
        server.wait_until("all are accepted", || open_files(server) > silent.len());
        assert_eq!(server.client().ask(&["PING"]), "+PONG");
        assert_eq!(of_module(server).ask(&["PING"]), "+PONG");
        // Now all of them send a command at once.
        for mut client in &silent {
            client.write_all(b"*1\r\n$4\r\nPING\r\n").expect("to send");
        }
        for mut client in &silent {
            client.set_read_timeout(Some(TIMEOUT)).expect("a read timeout");
            // Each gets a reply or a rejection, or is reset.
            let received = client.read(&mut [0; 64]);
            assert!(!received.is_err_and(|error| error.kind() == ErrorKind::WouldBlock));
        }
        drop(silent);
        server.wait_until("all are closed", || open_files(server) < 100);
    });
}

/// The session of a client that lost its power stayed forever. TCP keepalive ends it.
#[test]
fn clients_that_vanish_are_detected_by_keepalive() {
    on_each(&[], |server| {
        let address = server.info("address");
        let mut client = Client::to_tcp(&address);
        assert_eq!(client.ask(&["PING"]), "+PONG");
        let port =
            address.rsplit(':').next().and_then(|port| port.parse::<u16>().ok()).expect("a port");
        let local = format!(":{port:04X}");
        let sockets = std::fs::read_to_string("/proc/net/tcp").expect("the kernel's TCP sockets");
        // The columns: local address, remote address, state (1: established), queues, and timer
        // (2: keepalive).
        let timers: Vec<_> = sockets
            .lines()
            .map(|line| line.split_ascii_whitespace().collect::<Vec<_>>())
            .filter(|words| words[1].ends_with(&local) && words[3] == "01")
            .map(|words| words[5].to_owned())
            .collect();
        assert!(
            !timers.is_empty() && timers.iter().all(|timer| timer.starts_with("02:")),
            "{timers:?}"
        );
    });
}

/// The engine's `timeout` also applies to clients that have never sent anything.
#[test]
fn silent_clients_are_disconnected_after_the_engines_timeout() {
    on_each(&["--timeout", "1"], |server| {
        let mut silent = of_module(server);
        assert_eq!(silent.next_reply(), None);
    });
}
