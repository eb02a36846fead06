//! Attacks on the identity of clients: logins, users, and the commands by which sessions identify
//! themselves.

use std::time::Duration;

use ferrite_testkit::resp::Client;

use crate::client::of_module;
use crate::{SECRET, address, on_each};

/// The module does not take the surplus replies of a command for the reply to a login. It once did
/// if the name of that command arrived late.
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

/// After a HELLO that logs in and then fails, the module has the same user for the client as the
/// engine. It once had another.
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
        assert_eq!(client.ask(&["GET", "k"]), "_", "the null of RESP3");
        assert_eq!(called(), 2);
    });
}

/// The internal commands of sessions do nothing for other clients.
#[test]
fn internal_commands_refuse_others() {
    on_each(&[], |server| {
        for client in [&mut server.client(), &mut of_module(server)] {
            for words in [&["FERRITE", "BIND", "0123"][..], &["FERRITE", "ATTEST", ""]] {
                assert!(client.ask(words).starts_with("-ERR only the module's own"), "{words:?}");
            }
        }
        assert!(
            server.client().ask(&["FERRITE", "MARK"]).starts_with("-ERR only the module's own")
        );
        assert!(server.client().ask(&["FERRITE", "BIND"]).starts_with("-ERR wrong number"));
    });
}

/// FERRITE CLIENTS shows the engine's client of a session, and ACL LOG the session's address.
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

/// Before a login, a large command is rejected as soon as its header has arrived, at the module's
/// port as at the engine's own.
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
