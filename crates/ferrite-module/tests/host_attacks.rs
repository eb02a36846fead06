//! Attacks that a review reproduced, each named after its finding. The same attack on the engine's
//! own port is the reference: there, all of them fail. No RDMA is needed: sessions over TCP take
//! the same path.

mod scene;
mod talk;

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use scene::Server;
use talk::{Peer, engines, start};

const SECRET: &str = "the-secret-value";

/// Runs an attack on each engine.
fn on_each(options: &[&str], attack: impl Fn(&mut Server)) {
    for program in engines() {
        let mut server = start(&program, options);
        attack(&mut server);
        server.assert_well();
    }
}

/// A client that sends one command for ever and reads what comes; whether it has been hung up on.
fn flood(mut peer: Peer, command: &[&str], is_over: &AtomicBool) {
    let batch = vec![command.to_vec(); 100];
    while peer.try_send(&batch) {
        for _ in 0..batch.len() {
            if peer.next().is_none() {
                is_over.store(true, Ordering::SeqCst);
                return;
            }
        }
    }
    is_over.store(true, Ordering::SeqCst);
}

/// Floods the engine with INCR while `act` runs; then the client must be hung up on, and from then
/// on the counter stands still.
fn is_cut_off(server: &Server, peer: Peer, act: impl FnOnce(&mut Peer)) {
    let mut admin = Peer::native(server);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| flood(peer, &["INCR", "counter"], &is_over));
        server.until("commands of the flood", || admin.ask(&["EXISTS", "counter"]) == ":1");
        act(&mut admin);
        let counter = admin.ask(&["GET", "counter"]);
        assert_eq!(
            admin.ask(&["GET", "counter"]),
            counter,
            "no command runs after the answer to the admin"
        );
        server.until("the client is hung up on", || is_over.load(Ordering::SeqCst));
    });
}

/// S1: a command whose name comes late has many replies; a surplus one was taken for the answer to
/// a login.
#[test]
fn surplus_replies_are_no_login() {
    on_each(&["--protected-mode", "no"], |server| {
        let mut admin = Peer::native(server);
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
        let mut peer = Peer::called_at(&address(&mut admin));
        let channels: Vec<_> = (0..60_000).map(|number| format!("c{number}")).collect();
        peer.write(format!("*{}\r\n", channels.len() + 1).as_bytes());
        std::thread::sleep(Duration::from_millis(100)); // the header comes alone
        let words = channels.iter().map(|name| format!("${}\r\n{name}\r\n", name.len()));
        peer.write(format!("$11\r\nUNSUBSCRIBE\r\n{}", words.collect::<String>()).as_bytes());
        peer.send(&[
            vec!["HELLO", "2", "AUTH", "admin", "wrong"],
            vec!["GET", "secret"],
            vec!["SET", "owned", "1"],
            vec!["ECHO", "the-end"],
        ]);
        // Valkey 8.0 itself gives no answer to a login that fails behind others.
        let said = String::from_utf8_lossy(&peer.until(b"the-end\r\n")).into_owned();
        let last: Vec<_> = said.lines().rev().take(6).collect();
        assert_eq!(last.iter().filter(|line| line.starts_with("-NOPERM")).count(), 2, "{last:?}");
        assert!(!said.contains(SECRET), "{last:?}");
        assert_eq!(admin.ask(&["EXISTS", "owned"]), ":0");
    });
}

/// As the engine tells its own client: the module's port, when `default` may not ask.
fn address(admin: &mut Peer) -> String {
    admin.info("address")
}

/// S2: with SUBSCRIBE renamed, three small commands made a surplus reply.
#[test]
fn a_renamed_subscribe_is_a_subscribe() {
    on_each(&["--rename-command", "SUBSCRIBE", "sub2"], |server| {
        let mut admin = Peer::native(server);
        admin.ok(&["ACL", "SETUSER", "admin", "on", ">right", "~*", "+@all"]);
        admin.ok(&["ACL", "SETUSER", "low", "on", ">p", "~low", "&*", "+subscribe", "+hello"]);
        admin.ok(&["SET", "secret", SECRET]);
        let mut peer = Peer::called(server);
        peer.ok(&["AUTH", "low", "p"]);
        peer.send(&[
            vec!["sub2", "a", "b"],
            vec!["HELLO", "2", "AUTH", "admin", "wrong"],
            vec!["GET", "secret"],
        ]);
        let said = peer.replies(4).concat();
        assert!(!String::from_utf8_lossy(&said).contains(SECRET));
    });
}

/// S2: with SELECT renamed, writes went to the database before.
#[test]
fn a_renamed_select_selects() {
    on_each(&["--rename-command", "SELECT", "sel"], |server| {
        let mut peer = Peer::called(server);
        peer.ok(&["sel", "5"]);
        peer.ok(&["SET", "k", "in 5"]);
        let mut admin = Peer::native(server);
        assert_eq!(admin.ask(&["EXISTS", "k"]), ":0");
        admin.ok(&["sel", "5"]);
        assert_eq!(admin.ask(&["EXISTS", "k"]), ":1");
    });
}

/// S2: with MULTI renamed, queued commands ran at once.
#[test]
fn a_renamed_multi_queues() {
    on_each(
        &["--rename-command", "MULTI", "xmulti", "--rename-command", "EXEC", "xexec"],
        |server| {
            let (mut peer, mut admin) = (Peer::called(server), Peer::native(server));
            peer.ok(&["xmulti"]);
            assert_eq!(peer.ask(&["SET", "k", "queued"]), "+QUEUED");
            assert_eq!(admin.ask(&["EXISTS", "k"]), ":0");
            assert_eq!(peer.ask(&["xexec"]), "*1\r\n+OK");
            assert_eq!(peer.ask(&["EXISTS", "k"]), ":1");
        },
    );
}

/// S2: with AUTH renamed, calls kept the rights of the user before.
#[test]
fn a_renamed_auth_changes_the_user() {
    on_each(&["--rename-command", "AUTH", "xauth"], |server| {
        let (mut peer, mut admin) = (Peer::called(server), Peer::native(server));
        admin.ok(&["ACL", "SETUSER", "low", "on", ">p", "~low:*", "+get"]);
        admin.ok(&["SET", "k", "v"]);
        peer.ok(&["xauth", "low", "p"]);
        assert!(peer.ask(&["GET", "k"]).starts_with("-NOPERM"));
        assert_eq!(peer.ask(&["GET", "low:k"]), "$-1");
    });
}

/// S2: with CLIENT renamed, REPLY SKIP made the session wait for ever.
#[test]
fn a_renamed_client_reply_skips() {
    on_each(&["--rename-command", "CLIENT", "xclient"], |server| {
        let mut peer = Peer::called(server);
        peer.send(&[vec!["xclient", "REPLY", "SKIP"], vec!["SET", "k", "v"], vec!["GET", "k"]]);
        assert_eq!(peer.next().as_deref(), Some(&b"$1\r\nv\r\n"[..]));
    });
}

/// S3: CLIENT KILL did not stop a client that keeps sending.
#[test]
fn client_kill_stops_a_client_that_keeps_sending() {
    on_each(&[], |server| {
        let mut peer = Peer::called(server);
        let id = peer.ask(&["CLIENT", "ID"]);
        is_cut_off(server, peer, |admin| {
            assert_eq!(admin.ask(&["CLIENT", "KILL", "ID", &id[1..]]), ":1");
        });
    });
}

/// S3: a session of a deleted user went on as the new user of that name.
#[test]
fn a_deleted_users_session_ends() {
    on_each(&[], |server| {
        let mut peer = Peer::called(server);
        let mut admin = Peer::native(server);
        admin.ok(&["ACL", "SETUSER", "bob", "on", ">old", "~*", "+@all"]);
        peer.ok(&["AUTH", "bob", "old"]);
        is_cut_off(server, peer, |admin| {
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

/// S3: a client beyond maxclients ran commands before it was refused.
#[test]
fn rejects_clients_beyond_maxclients_before_their_first_command() {
    for program in engines() {
        let mut server = start(&program, &["--maxclients", "10"]);
        let address = server.info("address");
        let mut held: Vec<_> = (0..10).map(|_| Peer::native(&server)).collect();
        held.iter_mut().for_each(|peer| assert_eq!(peer.ask(&["PING"]), "+PONG"));
        let mut late = Peer::called_at(&address);
        late.send(&[vec!["SET", "over1", "1"], vec!["SET", "over2", "1"]]);
        assert_eq!(late.next().as_deref(), Some(&b"-ERR max number of clients reached\r\n"[..]));
        assert_eq!(late.next(), None);
        assert_eq!(held[0].ask(&["DBSIZE"]), ":0");
        drop(held);
        server.until("there is room again", || server.connection().is_ok());
        server.assert_well();
    }
}

/// A client that comes while there is no place is refused, as at the engine's own port, also if
/// there is one by the time that its session begins.
#[test]
fn rejects_clients_that_came_while_the_engine_was_full() {
    for program in engines() {
        let mut server = start(&program, &["--maxclients", "10"]);
        let address = server.info("address");
        let mut held: Vec<_> = (0..10).map(|_| Peer::native(&server)).collect();
        held.iter_mut().for_each(|peer| assert_eq!(peer.ask(&["PING"]), "+PONG"));
        let mut late = Peer::called_at(&address);
        // The engine's loop has come around then, and the module has taken the connection.
        (0..20).for_each(|_| assert_eq!(held[0].ask(&["PING"]), "+PONG"));
        drop(held.pop());
        server.until("there is a place", || {
            held[0].ask(&["INFO", "clients"]).contains("connected_clients:9\r\n")
        });
        late.send(&[vec!["SET", "over", "1"]]);
        assert_eq!(late.next().as_deref(), Some(&b"-ERR max number of clients reached\r\n"[..]));
        assert_eq!(late.next(), None);
        let mut next = Peer::called_at(&address);
        next.ok(&["SET", "next", "1"]);
        assert_eq!(held[0].ask(&["DBSIZE"]), ":1");
        drop(held);
        server.assert_well();
    }
}

/// The memory that the engine's process has, in MiB.
fn rss_mib(server: &Server) -> usize {
    let status =
        std::fs::read_to_string(format!("/proc/{}/status", server.pid())).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a size");
    line.split_whitespace().next().and_then(|kib| kib.parse::<usize>().ok()).expect("a number")
        >> 10
}

/// S4: a client without a password that reads nothing made the module keep all that it sent.
#[test]
fn a_client_that_never_authenticates_is_not_read_without_end() {
    on_each(&["--requirepass", "x"], |server| {
        let mut admin = Peer::native(server);
        admin.ok(&["AUTH", "x"]);
        let mut peer = Peer::called_at(&address(&mut admin));
        let before = rss_mib(server);
        let batch = b"*1\r\n$4\r\nPING\r\n".repeat(4096);
        let mut sent = 0;
        while sent < 64 << 20 && peer.write_within(&batch, Duration::from_millis(500)) {
            sent += batch.len();
        }
        assert!(sent < 32 << 20, "{sent} bytes were taken");
        let grown = rss_mib(server).saturating_sub(before);
        assert!(grown <= 8, "{grown} MiB are held");
    });
}

/// S5: replies that a client does not read were kept beyond client-output-buffer-limit.
#[test]
fn a_client_over_the_output_limit_is_disconnected() {
    on_each(&["--client-output-buffer-limit", "normal 1mb 1mb 1"], |server| {
        let mut admin = Peer::native(server);
        let values = vec!["x".repeat(1000); 4000];
        let words: Vec<_> =
            ["RPUSH", "l"].into_iter().chain(values.iter().map(String::as_str)).collect();
        admin.ask(&words);
        let before = rss_mib(server);
        let mut peer = Peer::called(server);
        peer.send(&vec![vec!["LRANGE", "l", "0", "-1"]; 60]);
        server.until("the session has ended", || server.count("sessions") == 0);
        let grown = rss_mib(server).saturating_sub(before);
        assert!(grown <= 32, "{grown} MiB are held");
        assert_eq!(admin.ask(&["PING"]), "+PONG");
    });
}

/// A client over the soft limit has its time, and no more.
#[test]
fn a_client_over_the_soft_limit_is_disconnected_in_time() {
    on_each(&["--client-output-buffer-limit", "normal 0 1mb 1"], |server| {
        let mut peer = Peer::called(server);
        peer.ok(&["SET", "k", &"x".repeat(1 << 20)]);
        peer.send(&vec![vec!["GETRANGE", "k", "0", "-1"]; 20]);
        server.until("the session has ended", || server.count("sessions") == 0);
    });
}

/// Replies of all sessions together are limited by maxmemory-clients; who holds most goes first,
/// once.
#[test]
fn the_largest_holder_goes_beyond_maxmemory_clients() {
    on_each(&["--maxmemory-clients", "8mb"], |server| {
        let mut small = Peer::called(server);
        small.ok(&["SET", "k", &"x".repeat(1 << 20)]);
        // Each of them holds too much by itself, whatever its socket takes.
        let mut large: Vec<_> = (0..4).map(|_| Peer::called(server)).collect();
        large.iter_mut().for_each(|peer| peer.send(&vec![vec!["GETRANGE", "k", "0", "-1"]; 60]));
        server.until("all but one have ended", || server.count("sessions") == 1);
        assert_eq!(server.count("sessions_evicted"), 4);
        assert_eq!(small.ask(&["PING"]), "+PONG");
    });
}

/// A client that sends a long pipeline before it reads works as at the engine's own port.
#[test]
fn a_client_may_send_all_before_it_reads() {
    on_each(&[], |server| {
        let mut peer = Peer::called(server);
        peer.ok(&["SET", "k", &"x".repeat(10_000)]);
        let count = 10_000;
        peer.send(&vec![vec!["GETRANGE", "k", "0", "-1"]; count]);
        assert!(peer.replies(count).iter().all(|reply| reply.len() == 10_010));
    });
}

/// S11: without the right to FERRITE MARK, WAIT spoke of older writes.
#[test]
fn wait_tells_the_truth_whatever_the_users_rights() {
    for program in engines() {
        let mut primary = start(&program, &["--port", &scene::free_port()]);
        let port: Vec<String> = primary.ask(&["CONFIG", "GET", "port"]);
        let replica = start(&program, &["--replicaof", "127.0.0.1", &port[1]]);
        let mut admin = Peer::native(&primary);
        primary.until("a replica", || admin.ask(&["INFO", "replication"]).contains("state=online"));
        admin.ok(&["ACL", "SETUSER", "w", "on", ">w", "~*", "+set", "+wait", "+auth"]);
        let mut peer = Peer::called(&primary);
        peer.ok(&["AUTH", "w", "w"]);
        peer.ok(&["SET", "k", "v"]);
        assert_eq!(peer.ask(&["WAIT", "1", "20000"]), ":1");
        replica.signal("STOP");
        peer.ok(&["SET", "k", "v"]);
        assert_eq!(peer.ask(&["WAIT", "1", "300"]), ":0");
        replica.signal("CONT");
        assert_eq!(peer.ask(&["WAIT", "1", "20000"]), ":1");
        primary.assert_well();
    }
}

/// What becomes of a WAIT for one replica when a client has written, has done something, and no
/// replica can have heard of the write.
fn wait_after(program: &Path, act: impl Fn(&mut Peer, &mut Peer)) -> Option<String> {
    let mut primary =
        start(program, &["--port", &scene::free_port(), "--repl-diskless-sync-delay", "0"]);
    let port: Vec<String> = primary.ask(&["CONFIG", "GET", "port"]);
    let replica = start(program, &["--replicaof", "127.0.0.1", &port[1]]);
    let (mut admin, mut peer) = (Peer::native(&primary), Peer::called(&primary));
    primary.until("a replica", || admin.ask(&["INFO", "replication"]).contains("state=online"));
    peer.ok(&["SET", "k", "older"]);
    assert_eq!(peer.ask(&["WAIT", "1", "20000"]), ":1");
    replica.signal("STOP");
    peer.ok(&["SET", "k", "newer"]);
    act(&mut peer, &mut admin);
    // A client that was hung up on was not lied to.
    let sent = peer.try_send(&[vec!["WAIT", "1", "300"]]);
    let answer = if sent { peer.next() } else { None };
    replica.signal("CONT");
    primary.assert_well();
    answer.map(|answer| String::from_utf8_lossy(&answer).trim_end().to_owned())
}

/// Writes that were called are marked before the session is pinned, or there is no session.
#[test]
fn wait_tells_the_truth_after_replies_and_commands_without_a_clear_end() {
    for program in engines() {
        let after_script = wait_after(&program, |peer, _| {
            let deep = "local t = {} for i = 1, 40 do t = {t} end return t";
            peer.send(&[vec!["EVAL", deep, "0"]]);
            peer.until(b"*1\r\n*0\r\n");
        });
        assert_eq!(after_script.as_deref(), Some(":0"), "{program:?}");
        let after_wrong_end = wait_after(&program, |peer, _| {
            let value = "x".repeat(400_000);
            // Engines before Valkey 9 take any two bytes for the end of a word.
            peer.write(format!("*2\r\n$4\r\nECHO\r\n$400000\r\n{value}zz").as_bytes());
            let _ = peer.next();
        });
        assert!(after_wrong_end.is_none_or(|answer| answer == ":0"), "{program:?}");
    }
}

/// The same where the engine refuses the mark.
#[test]
fn wait_tells_the_truth_where_its_mark_is_refused() {
    let refuse_writes =
        |admin: &mut Peer| admin.ok(&["CONFIG", "SET", "min-replicas-to-write", "2"]);
    for program in engines() {
        let after_pin = wait_after(&program, |peer, admin| {
            refuse_writes(admin);
            peer.write(b"PING\r\n");
            let _ = peer.next();
        });
        assert!(after_pin.is_none_or(|answer| answer == ":0"), "{program:?}");
        let in_transaction = wait_after(&program, |peer, admin| {
            refuse_writes(admin);
            peer.ok(&["MULTI"]);
            // The WAIT that is queued here would be answered in EXEC.
            let sent = peer.try_send(&[vec!["WAIT", "1", "0"], vec!["EXEC"]]);
            let said =
                [peer.next(), peer.next()].into_iter().flatten().flatten().collect::<Vec<_>>();
            assert!(!sent || !String::from_utf8_lossy(&said).contains(":1"), "{program:?}");
        });
        assert!(
            in_transaction.is_none_or(|answer| answer == ":0" || answer.starts_with('-')),
            "{program:?}"
        );
    }
}

/// S11: where the write that WAIT needs is refused, so is WAIT.
#[test]
fn wait_fails_where_its_mark_is_refused() {
    on_each(&[], |server| {
        let (mut peer, mut admin) = (Peer::called(server), Peer::native(server));
        peer.ok(&["SET", "k", "v"]);
        admin.ok(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
        assert!(peer.ask(&["WAIT", "1", "100"]).starts_with("-NOREPLICAS"));
        admin.ok(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
        assert_eq!(peer.ask(&["WAIT", "1", "100"]), ":0");
    });
}

/// S14: an error after its login part left HELLO's user in the engine, and another in the module.
#[test]
fn a_hello_that_fails_after_its_login_has_the_engines_user() {
    on_each(&[], |server| {
        let (mut peer, mut native) = (Peer::called(server), Peer::native(server));
        native.ok(&["ACL", "SETUSER", "low", "on", ">p", "~low:*", "+get", "+acl|whoami"]);
        native.ok(&["SET", "k", "v"]);
        for client in [&mut peer, &mut native] {
            let said = client.ask(&["HELLO", "3", "AUTH", "low", "p", "BAD"]);
            assert!(said.starts_with("-ERR"), "{said}");
        }
        let who = native.ask(&["ACL", "WHOAMI"]);
        assert_eq!(peer.ask(&["ACL", "WHOAMI"]), who);
        assert_eq!(peer.ask(&["GET", "k"]), native.ask(&["GET", "k"]));
    });
}

/// Commands run in-process for who has logged in, and for nobody before.
#[test]
fn calls_begin_with_the_login() {
    on_each(&["--requirepass", "x"], |server| {
        let mut admin = Peer::native(server);
        admin.ok(&["AUTH", "x"]);
        let mut peer = Peer::called_at(&address(&mut admin));
        let mut called = || {
            let info = admin.ask(&["INFO", "ferrite"]);
            let line = info.lines().find_map(|line| line.strip_prefix("ferrite_commands_called:"));
            line.and_then(|number| number.trim_end().parse::<u64>().ok()).expect("a number")
        };
        assert!(peer.ask(&["GET", "k"]).starts_with("-NOAUTH"));
        assert!(peer.ask(&["AUTH", "wrong"]).starts_with("-WRONGPASS"));
        assert!(peer.ask(&["GET", "k"]).starts_with("-NOAUTH"));
        assert_eq!(called(), 0);
        peer.ok(&["AUTH", "x"]);
        assert_eq!(peer.ask(&["GET", "k"]), "$-1");
        assert_eq!(called(), 1, "the user `default`, with its password");
        assert_eq!(peer.ask(&["RESET"]), "+RESET");
        assert!(peer.ask(&["GET", "k"]).starts_with("-NOAUTH"));
        assert_eq!(called(), 1);
        peer.ask(&["HELLO", "3", "AUTH", "default", "x"]);
        assert_eq!(peer.ask(&["GET", "k"]), "_", "in RESP3");
        assert_eq!(called(), 2);
    });
}

/// The commands that sessions run for themselves do nothing for anybody else.
#[test]
fn internal_commands_refuse_others() {
    on_each(&[], |server| {
        for peer in [&mut Peer::native(server), &mut Peer::called(server)] {
            for words in [&["FERRITE", "BIND", "0123"][..], &["FERRITE", "ATTEST", ""]] {
                assert!(peer.ask(words).starts_with("-ERR only sessions"), "{words:?}");
            }
        }
        assert!(Peer::native(server).ask(&["FERRITE", "MARK"]).starts_with("-ERR only sessions"));
        assert!(Peer::native(server).ask(&["FERRITE", "BIND"]).starts_with("-ERR wrong number"));
    });
}

/// S13: a session leads to the engine's client and back.
#[test]
fn sessions_show_the_engines_client() {
    on_each(&[], |server| {
        let (mut peer, mut admin) = (Peer::called(server), Peer::native(server));
        admin.ok(&["ACL", "SETUSER", "low", "on", ">p", "~low:*", "+get", "+client|id"]);
        peer.ok(&["AUTH", "low", "p"]);
        let id = peer.ask(&["CLIENT", "ID"])[1..].to_owned();
        let line = admin.ask(&["FERRITE", "CLIENTS"]);
        assert!(line.contains(&format!(" client-id={id} user=low addr=127.0.0.1:")), "{line}");
        assert!(peer.ask(&["GET", "k"]).starts_with("-NOPERM"));
        let log = admin.ask(&["ACL", "LOG"]);
        assert!(log.contains("name=ferrite:127.0.0.1:"), "the source is in ACL LOG: {log}");
    });
}

/// An engine whose ACL command is renamed does not tell whether it asks for a password: sessions
/// work, on the proxy path.
#[test]
fn sessions_work_where_acl_is_renamed() {
    on_each(&["--rename-command", "ACL", "xacl"], |server| {
        let mut peer = Peer::called(server);
        peer.ok(&["SET", "k", "v"]);
        assert_eq!(peer.ask(&["xacl", "WHOAMI"]), "$7\r\ndefault");
        assert_eq!(peer.ask(&["GET", "k"]), "$1\r\nv");
    });
}

/// The engine refuses a client that has not logged in by the head of a large command.
#[test]
fn heads_of_large_commands_are_refused_before_a_login() {
    on_each(&["--requirepass", "x"], |server| {
        let mut admin = Peer::native(server);
        admin.ok(&["AUTH", "x"]);
        let address = address(&mut admin);
        for head in ["*1001\r\n", "*2\r\n$4\r\nECHO\r\n$100000\r\n"] {
            let (mut peer, mut native) = (Peer::called_at(&address), Peer::native(server));
            peer.write(head.as_bytes());
            native.write(head.as_bytes());
            let refusal = peer.next();
            assert_eq!(refusal, native.next(), "{head:?}");
            assert!(
                refusal.is_some_and(|it| it.starts_with(b"-ERR Protocol error: unauthenticated"))
            );
            assert_eq!(peer.next(), None);
        }
    });
}

/// A client can send FERRITE MARK itself. It writes to the append-only file and to replicas, so it
/// does nothing unless its session has written before.
#[test]
fn marks_are_for_sessions_that_have_written() {
    on_each(&["--requirepass", "x"], |server| {
        let mut admin = Peer::native(server);
        admin.ok(&["AUTH", "x"]);
        let mut peer = Peer::called_at(&address(&mut admin));
        assert!(peer.ask(&["FERRITE", "MARK"]).starts_with("-ERR only sessions"), "before a login");
        peer.ok(&["AUTH", "x"]);
        assert!(
            peer.ask(&["FERRITE", "MARK"]).starts_with("-ERR only sessions"),
            "nothing was written"
        );
        peer.ok(&["SET", "k", "v"]);
        peer.ok(&["FERRITE", "MARK"]);
        assert!(peer.ask(&["FERRITE", "MARK"]).starts_with("-ERR only sessions"), "once");
    });
}

/// A slow reader costs what it has not read, not what it ever was sent.
#[test]
fn replies_that_were_read_take_no_memory() {
    on_each(&[], |server| {
        let mut peer = Peer::called(server);
        peer.ok(&["SET", "k", &"x".repeat(1 << 20)]);
        let get = ["GETRANGE", "k", "0", "-1"];
        // Some are always unread.
        peer.send(&vec![get.to_vec(); 20]);
        peer.next().expect("a reply");
        let before = rss_mib(server);
        for _ in 0..100 {
            peer.send(&[get.to_vec()]);
            assert_eq!(peer.next().map(|reply| reply.len()), Some((1 << 20) + 12));
        }
        let grown = rss_mib(server).saturating_sub(before);
        assert!(grown < 60, "{grown} MiB more after 100 MiB were read");
    });
}

/// S2: a name of any length may be what a command was renamed to.
#[test]
fn a_long_new_name_is_no_plain_command() {
    let name = "reset-0123456789abcdef0123456789abcdef0123456789";
    on_each(&["--requirepass", "x", "--rename-command", "RESET", name], |server| {
        let mut admin = Peer::native(server);
        admin.ok(&["AUTH", "x"]);
        let mut peer = Peer::called_at(&address(&mut admin));
        peer.ok(&["AUTH", "x"]);
        peer.ok(&["SET", "k", "v"]);
        assert_eq!(peer.ask(&[name]), "+RESET");
        assert!(peer.ask(&["GET", "k"]).starts_with("-NOAUTH"));
    });
}

fn open_files(server: &Server) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", server.pid())).expect("it runs").count()
}

/// Connections that say nothing took the numbers of descriptors that the engine's loop has a place
/// for: it accepted clients at its own port, never heard them, and kept them when they had gone.
#[test]
fn silent_connections_take_no_descriptors_of_the_engines() {
    on_each(&["--maxclients", "40"], |server| {
        let address = server.info("address");
        let silent: Vec<_> =
            (0..400).map(|_| TcpStream::connect(&address).expect("it listens")).collect();
        server.until("they are accepted", || open_files(server) > silent.len());
        assert_eq!(Peer::native(server).ask(&["PING"]), "+PONG");
        assert_eq!(Peer::called(server).ask(&["PING"]), "+PONG");
        // Nor do those that speak, all at a time.
        for mut client in &silent {
            client.write_all(b"*1\r\n$4\r\nPING\r\n").expect("it is there");
        }
        for mut client in &silent {
            client.set_read_timeout(Some(scene::PATIENCE)).expect("a time limit");
            // It is answered or refused, and hears of it unless it was reset.
            let heard = client.read(&mut [0; 64]);
            assert!(!heard.is_err_and(|error| error.kind() == ErrorKind::WouldBlock));
        }
        drop(silent);
        server.until("all are closed", || open_files(server) < 100);
    });
}

/// A client that has lost its power had its session for ever.
#[test]
fn clients_that_vanish_are_looked_for() {
    on_each(&[], |server| {
        let address = server.info("address");
        let mut peer = Peer::called_at(&address);
        assert_eq!(peer.ask(&["PING"]), "+PONG");
        let port =
            address.rsplit(':').next().and_then(|port| port.parse::<u16>().ok()).expect("a port");
        let local = format!(":{port:04X}");
        let sockets = std::fs::read_to_string("/proc/net/tcp").expect("Linux has it");
        // Where it is, where its peer is, its state (1: established), its queues, and its timer (2:
        // keepalive).
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

/// The engine's `timeout` is for who has never said anything, too.
#[test]
fn silent_clients_are_hung_up_on_after_the_engines_timeout() {
    on_each(&["--timeout", "1"], |server| {
        let mut silent = Peer::called(server);
        assert_eq!(silent.next(), None);
    });
}
