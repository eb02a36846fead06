//! Clients that must be rejected or disconnected: beyond maxclients, killed, deleted, silent or
//! vanished.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use ferrite_testkit::engine::engines;
use ferrite_testkit::resp::Client;
use ferrite_testkit::{Engine, TIMEOUT};

use crate::client::{of_module, start};
use crate::on_each;

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

/// CLIENT KILL ends a session whose client keeps sending. It once did not.
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

/// The session of a deleted user ends, even if a user of the same name is created at once. It once
/// continued as the new user.
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

const TOO_MANY: &[u8] = b"-ERR max number of clients reached\r\n";

/// Starts an engine and connects as many clients to it as it allows. Also returns the address of
/// the module's port.
fn start_full(program: &Path) -> (Engine, String, Vec<Client>) {
    let server = start(program, &["--maxclients", "10"]);
    let address = server.info("address");
    let mut held: Vec<_> = (0..10).map(|_| server.client()).collect();
    held.iter_mut().for_each(|client| assert_eq!(client.ask(&["PING"]), "+PONG"));
    (server, address, held)
}

/// A client beyond maxclients runs no command. It once ran some before it was rejected.
#[test]
fn rejects_clients_beyond_maxclients_before_their_first_command() {
    for program in engines() {
        let (mut server, address, mut held) = start_full(&program);
        let mut late = Client::to_tcp(&address);
        late.send(&[vec!["SET", "over1", "1"], vec!["SET", "over2", "1"]]);
        assert_eq!(late.next_reply().as_deref(), Some(TOO_MANY));
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
        let (mut server, address, mut held) = start_full(&program);
        let mut late = Client::to_tcp(&address);
        // After these commands, the engine's event loop has run, and the module has accepted the
        // connection.
        (0..20).for_each(|_| assert_eq!(held[0].ask(&["PING"]), "+PONG"));
        drop(held.pop());
        server.wait_until("room for a client", || {
            held[0].ask(&["INFO", "clients"]).contains("connected_clients:9\r\n")
        });
        late.send(&[vec!["SET", "over", "1"]]);
        assert_eq!(late.next_reply().as_deref(), Some(TOO_MANY));
        assert_eq!(late.next_reply(), None);
        let mut next = Client::to_tcp(&address);
        next.ok(&["SET", "next", "1"]);
        assert_eq!(held[0].ask(&["DBSIZE"]), ":1");
        drop(held);
        server.assert_healthy();
    }
}

fn open_files(server: &Engine) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", server.pid())).expect("a running engine").count()
}

/// Silent connections do not use up the descriptor numbers that the engine's event loop can handle.
/// They once did. The engine then accepted clients at its own port but never read from them, and
/// kept them open after they had gone.
#[test]
fn silent_connections_take_no_descriptors_of_the_engines() {
    on_each(&["--maxclients", "40"], |server| {
        let address = server.info("address");
        let silent: Vec<_> =
            (0..400).map(|_| TcpStream::connect(&address).expect("a connection")).collect();
        server.wait_until("all are accepted", || open_files(server) > silent.len());
        assert_eq!(server.client().ask(&["PING"]), "+PONG");
        assert_eq!(of_module(server).ask(&["PING"]), "+PONG");
        for mut client in &silent {
            client.write_all(b"*1\r\n$4\r\nPING\r\n").expect("the connection is open");
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

/// The module enables TCP keepalive, which ends the session of a client that lost its power. Such a
/// session once stayed forever.
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
