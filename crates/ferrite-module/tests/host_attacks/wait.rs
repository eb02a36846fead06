//! WAIT, and FERRITE MARK, which makes WAIT cover the writes of in-process commands.

use std::path::Path;

use ferrite_testkit::engine::engines;
use ferrite_testkit::free_port;
use ferrite_testkit::resp::Client;

use crate::client::{of_module, start};
use crate::{address, on_each};

/// WAIT covers the latest writes of users without the right to FERRITE MARK, too. It once counted
/// only older writes.
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

/// Returns the reply to WAIT, or `None` if the client was disconnected. Before that, the client
/// writes and `act` runs, while the replica is stopped and cannot get the write.
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
    // Disconnecting the client is correct, too, because the client then gets no wrong reply.
    let sent = client.try_send(&[vec!["WAIT", "1", "300"]]);
    let reply = if sent { client.next_reply() } else { None };
    replica.signal("CONT");
    primary.assert_healthy();
    reply.map(|reply| String::from_utf8_lossy(&reply).trim_end().to_owned())
}

/// Before a session is pinned to the proxy path, the module marks the session's in-process writes.
/// If it cannot, it ends the session.
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

/// WAIT is correct even if the engine refuses the FERRITE MARK that the module sends before.
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
            // The reply to EXEC would contain the reply to this queued WAIT.
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

/// WAIT fails if the engine refuses the FERRITE MARK that it needs.
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

/// A client can send FERRITE MARK itself. Since the command writes to the append-only file and to
/// replicas, it fails unless the session has written since its last mark.
#[test]
fn mark_fails_unless_the_session_has_written() {
    on_each(&["--requirepass", "x"], |server| {
        let mut admin = server.client();
        admin.ok(&["AUTH", "x"]);
        let mut client = Client::to_tcp(address(&mut admin));
        assert!(
            client.ask(&["FERRITE", "MARK"]).starts_with("-ERR only the module's own"),
            "MARK must fail before a login"
        );
        client.ok(&["AUTH", "x"]);
        assert!(
            client.ask(&["FERRITE", "MARK"]).starts_with("-ERR only the module's own"),
            "MARK must fail before a write"
        );
        client.ok(&["SET", "k", "v"]);
        client.ok(&["FERRITE", "MARK"]);
        assert!(
            client.ask(&["FERRITE", "MARK"]).starts_with("-ERR only the module's own"),
            "MARK must fail if nothing was written since the last one"
        );
    });
}
