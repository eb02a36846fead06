//! Sessions end, wait and fail as the engine's own clients do: cases in which they once did not.

mod scene;
mod talk;

use std::time::{Duration, Instant};

use scene::Server;
use talk::{Peer, engines, start};

/// Runs a case on each engine.
fn on_each(options: &[&str], case: impl Fn(&mut Server)) {
    for program in engines() {
        let mut server = start(&program, options);
        case(&mut server);
        server.assert_well();
    }
}

/// The same where clients need the password `x`, with one who has given it.
fn on_each_with_password(case: impl Fn(&mut Server, Peer)) {
    on_each(&["--requirepass", "x"], |server| {
        let mut admin = Peer::native(server);
        admin.ok(&["AUTH", "x"]);
        case(server, admin);
    });
}

/// S11: a session that goes over to the proxy path inside a transaction.
#[test]
fn wait_tells_the_truth_to_sessions_pinned_inside_a_transaction() {
    for program in engines() {
        let mut primary = start(&program, &["--port", &scene::free_port()]);
        let port: Vec<String> = primary.ask(&["CONFIG", "GET", "port"]);
        let replica = start(&program, &["--replicaof", "127.0.0.1", &port[1]]);
        let mut admin = Peer::native(&primary);
        primary.until("a replica", || admin.ask(&["INFO", "replication"]).contains("state=online"));
        let mut peer = Peer::called(&primary);
        peer.ok(&["SET", "k", "v"]);
        assert_eq!(peer.ask(&["WAIT", "1", "20000"]), ":1");
        replica.signal("STOP");
        peer.ok(&["SET", "k", "v"]);
        peer.ok(&["MULTI"]);
        assert_eq!(peer.ask(&["WAIT", "1", "300"]), "+QUEUED");
        assert_eq!(peer.ask(&["CLIENT", "NO-EVICT", "on"]), "+QUEUED", "which pins the session");
        assert_eq!(peer.ask(&["EXEC"]), "*2\r\n:0\r\n+OK", "{}", program.display());
        assert_eq!(peer.ask(&["WAIT", "1", "300"]), ":0", "{}", program.display());
        replica.signal("CONT");
        assert_eq!(peer.ask(&["WAIT", "1", "20000"]), ":1");
        primary.assert_well();
    }
}

/// A login that fails inside a transaction. Valkey 8.0 gives no answer to it: the next answer
/// stands there.
#[test]
fn a_login_that_fails_in_a_transaction_leaves_no_session_waiting() {
    on_each(&[], |server| {
        for login in [&["AUTH", "nobody", "wrong"][..], &["HELLO", "2", "AUTH", "nobody", "wrong"]]
        {
            let said = [Peer::called(server), Peer::native(server)].map(|mut peer| {
                peer.send(&[vec!["MULTI"], login.to_vec(), vec!["GET", "k"], vec!["EXEC"]]);
                peer.until(b"$-1\r\n");
                peer.send(&[vec!["ECHO", "the-end"]]);
                String::from_utf8_lossy(&peer.until(b"the-end\r\n")).into_owned()
            });
            assert_eq!(said[0], said[1], "{login:?}");
        }
    });
}

/// A session is over when the engine has hung up, whether its client closes or not.
#[test]
fn sessions_end_with_the_engines_client() {
    on_each(&[], |server| {
        let mut quits = Peer::called(server);
        quits.ok(&["QUIT"]);
        let mut subscribes = Peer::called(server);
        subscribes.send(&[vec!["SUBSCRIBE", "c"]]);
        subscribes.next().expect("subscribed");
        server.ask::<i64>(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        server.until("both sessions have ended", || server.count("sessions") == 0);
        assert_eq!((quits.next(), subscribes.next()), (None, None));
    });
}

/// CLIENT KILL ends a session also while its client leaves replies unread: one that goes over to
/// the proxy path, and one that is there.
#[test]
fn client_kill_ends_sessions_with_unread_replies() {
    on_each(&[], |server| {
        let mut admin = Peer::native(server);
        admin.ok(&["SET", "k", &"x".repeat(1 << 20)]);
        let many = vec![vec!["GETRANGE", "k", "0", "-1"]; 60];
        let pin = vec![vec!["CLIENT", "NO-EVICT", "on"]];
        let called = server.count("commands_called");
        let mut pinning = Peer::called(server);
        let id = pinning.ask(&["CLIENT", "ID"])[1..].to_owned();
        pinning.send(&[many.clone(), pin.clone()].concat());
        server.until("its calls are made", || server.count("commands_called") == called + 60);
        let mut pinned = Peer::called(server);
        pinned.send(&[vec![vec!["CLIENT", "ID"]], pin, many].concat());
        let other =
            String::from_utf8_lossy(&pinned.next().expect("an id"))[1..].trim_end().to_owned();
        pinned.next().expect("pinned");
        for id in [id, other] {
            assert_eq!(admin.ask(&["CLIENT", "KILL", "ID", &id]), ":1");
        }
        server.until("both sessions have ended", || server.count("sessions") == 0);
    });
}

/// A client that closes while it waits takes nothing, however much it has sent behind the command;
/// and one that sends more than the engine takes is disconnected.
#[test]
fn a_client_that_closes_behind_a_long_pipeline_takes_nothing() {
    let blocked = |server: &Server, count: u32| {
        let wanted = format!("blocked_clients:{count}");
        server.until(&wanted, || server.ask::<String>(&["INFO", "clients"]).contains(&wanted));
    };
    on_each(&["--client-query-buffer-limit", "4mb"], |server| {
        let set = vec!["SET".to_owned(), "k".to_owned(), "x".repeat(1 << 16)];
        let pop = vec![["BLPOP", "l", "0"].map(String::from).to_vec()];
        let mut peer = Peer::called(server);
        peer.send(&[pop.clone(), vec![set.clone(); 16]].concat());
        blocked(server, 1);
        drop(peer);
        blocked(server, 0);
        let mut admin = Peer::native(server);
        assert_eq!(admin.ask(&["RPUSH", "l", "job"]), ":1");
        assert_eq!(admin.ask(&["LPOP", "l"]), "$3\r\njob");
        let mut peer = Peer::called(server);
        peer.send(&pop);
        blocked(server, 1);
        while peer.try_send(std::slice::from_ref(&set)) {}
        blocked(server, 0);
    });
}

/// Valkey 9.1 refuses a bulk string that does not end as it should, other engines take it: so do
/// sessions.
#[test]
fn sloppy_commands_are_taken_as_the_engine_takes_them() {
    on_each(&[], |server| {
        let long = format!("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000000\r\n{}zz", "x".repeat(1_000_000));
        for bytes in [
            "*2\r\n$4\r\nECHOxx$1\r\nk\r\n",
            "*2\r\n$4\r\nECHO\rx$1\r\nk\r\n",
            "*2\rx$4\r\nECHO\r\n$1\r\nk\r\n",
            "*2\r\n$4\rxECHO\r\n$1\r\nk\r\n",
            &long,
        ] {
            let (mut peer, mut native) = (Peer::called(server), Peer::native(server));
            for client in [&mut peer, &mut native] {
                client.write(bytes.as_bytes());
            }
            let said = native.next();
            assert_eq!(peer.next(), said, "{}", &bytes[..24]);
            if said.is_some_and(|said| said.starts_with(b"-ERR Protocol error")) {
                assert_eq!(peer.next(), None);
                continue;
            }
            for client in [&mut peer, &mut native] {
                assert_eq!(client.ask(&["ECHO", "next"]), "$4\r\nnext");
            }
        }
        let mut native = Peer::native(server);
        native.write(b"*2\r\n$4\r\nECHOxx$1\r\nk\r\n");
        if native.next().is_some_and(|said| said.starts_with(b"-ERR Protocol error")) {
            let mut peer = Peer::called(server);
            peer.write(b"*2\r\n$4\r\nECHOxx");
            let said = peer.next().expect("a refusal before the rest has come");
            assert!(said.starts_with(b"-ERR Protocol error"));
        }
    });
}

/// A client whose commands are called is not idle.
#[test]
fn calls_are_activity_of_the_client() {
    on_each(&[], |server| {
        let (mut peer, mut admin) = (Peer::called(server), Peer::native(server));
        let id = peer.ask(&["CLIENT", "ID"])[1..].to_owned();
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(4) {
            peer.ask(&["GET", "k"]);
            std::thread::sleep(Duration::from_millis(50));
        }
        let last = Instant::now();
        peer.ask(&["GET", "k"]);
        let line = admin.ask(&["CLIENT", "LIST", "ID", &id]);
        let since = last.elapsed().as_secs();
        let idle =
            line.split(" idle=").nth(1).and_then(|rest| rest.split(' ').next()).expect("a time");
        let idle: u64 = idle.parse().expect("a number");
        assert!(idle <= since + 2, "{line}, {since} s after the last command");
    });
}

/// A client that waits for a list gets what is pushed, also if the pipeline that pushes goes on to
/// take it.
#[test]
fn clients_that_wait_are_served_before_the_next_command() {
    on_each(&[], |server| {
        let (mut waiting, mut peer) = (Peer::native(server), Peer::called(server));
        for round in 0..20 {
            waiting.send(&[vec!["BLPOP", "l", "0"]]);
            let blocked =
                || server.ask::<String>(&["INFO", "clients"]).contains("blocked_clients:1");
            server.until("it waits", blocked);
            peer.send(&[vec!["RPUSH", "l", "job"], vec!["LPOP", "l"], vec!["LLEN", "l"]]);
            let replies = peer.replies(3);
            assert_eq!(replies.concat(), b":1\r\n$-1\r\n:0\r\n", "round {round}");
            assert_eq!(waiting.next().as_deref(), Some(&b"*2\r\n$1\r\nl\r\n$3\r\njob\r\n"[..]));
        }
    });
}

/// Whatever pins a session does not before a login: the engine refuses it, and a client that was
/// pinned would no longer wait for its turn.
#[test]
fn nothing_pins_a_session_before_a_login() {
    on_each_with_password(|server, mut admin| {
        let (mut peer, mut native) =
            (Peer::called_at(&admin.info("address")), Peer::native(server));
        let long = format!("*1\r\n$9000\r\n{}\r\n", "x".repeat(9000));
        for bytes in [
            "GET k\r\n",
            "\x0b \t\x0c\r\nGET k\r\n", // the first line is empty for an engine
            "\"SUB\\x53CRIBE\" a b c\r\n",
            "*2\r\n$9\r\nSUBSCRIBE\r\n$1\r\na\r\n",
            "*3\r\n$6\r\nCLIENT\r\n$5\r\nREPLY\r\n$3\r\nOFF\r\n",
            "*1\r\n$7\r\nMONITOR\r\n",
            "CLIENT REPLY SKIP\r\nGET k\r\n",
            "HELLO 2\r\n",
            &long,
        ] {
            let [said, expected] = [&mut peer, &mut native].map(|client| {
                client.write(bytes.as_bytes());
                client.replies(1 + usize::from(bytes.starts_with("CLIENT"))) // which is two lines
            });
            assert_eq!(said, expected, "{}", &bytes[..7]);
        }
        assert_eq!(admin.info("sessions_pinned"), "0");
        peer.write(b"AUTH x\r\n");
        assert_eq!(peer.next().as_deref(), Some(&b"+OK\r\n"[..]));
        let before = admin.info("commands_called");
        peer.ok(&["SET", "k", "v"]);
        assert_ne!(admin.info("commands_called"), before, "it is called after a login by hand");
        peer.write(b"GET k\r\n");
        assert_eq!(peer.next().as_deref(), Some(&b"$1\r\nv\r\n"[..]));
        assert_eq!(admin.info("sessions_pinned"), "1");
        let mut peer = Peer::called_at(&admin.info("address"));
        peer.ok(&["QUIT"]);
        assert_eq!(peer.next(), None);
    });
}

/// A client that may do everything without a login is pinned by what pins.
#[test]
fn clients_that_need_no_login_subscribe() {
    on_each_with_password(|_, mut admin| {
        let mut peer = Peer::called_at(&admin.info("address"));
        assert!(peer.ask(&["GET", "k"]).starts_with("-NOAUTH"));
        admin.ok(&["CONFIG", "SET", "requirepass", ""]);
        peer.send(&[vec!["SUBSCRIBE", "a", "b"], vec!["PING"]]);
        for _ in ["a", "b"] {
            assert!(peer.next().is_some_and(|said| said.starts_with(b"*3\r\n$9\r\nsubscribe")));
        }
        assert_eq!(peer.next().as_deref(), Some(&b"*2\r\n$4\r\npong\r\n$0\r\n\r\n"[..]));
        assert_eq!(admin.ask(&["PUBLISH", "a", "hello"]), ":1");
        assert!(peer.next().is_some_and(|said| said.ends_with(b"hello\r\n")));
    });
}

/// Before a login: Valkey 8.0 gives no answer to a login that fails behind answers that are not
/// written yet, so none of the session's own may be there.
#[test]
fn failed_logins_before_a_login_are_answered() {
    on_each_with_password(|server, mut admin| {
        let (mut peer, mut native) =
            (Peer::called_at(&admin.info("address")), Peer::native(server));
        let long = format!("*2\r\n$4\r\nAUTH\r\n$9000\r\n{}\r\n", "y".repeat(9000));
        for bytes in [
            "AUTH wrong\r\n",
            "auth default \"wr ong\"\n",
            "HELLO 2 AUTH default wrong\r\n",
            &long,
            "PING\r\n",
        ] {
            let [said, expected] = [&mut peer, &mut native].map(|client| {
                client.write(bytes.as_bytes());
                client.replies(1)
            });
            assert_eq!(said, expected, "{}", &bytes[..4]);
        }
        assert_eq!(admin.info("sessions_pinned"), "0");
        peer.write(b"\"\\x41UTH\" wrong\r\n");
        assert!(peer.next().is_some_and(|said| said.starts_with(b"-WRONGPASS")));
    });
}

/// Nothing that a client leaves behind keeps its session: lines that have no answer, lines that
/// have no end, half commands, and commands that the engine has not run yet.
#[test]
fn sessions_before_a_login_end_with_their_clients() {
    on_each_with_password(|server, mut admin| {
        let address = admin.info("address");
        for bytes in [
            "\x0b\n",
            "\0\n",
            "GET \0 k\r\n",
            "*1\r\n$9000\r\nhalf",
            "AUTH wrong\r\n",
            "CLIENT REPLY OFF\r\n",
        ] {
            for _ in 0..5 {
                Peer::called_at(&address).write(bytes.as_bytes());
            }
            server.until(bytes, || admin.info("sessions") == "0");
        }
    });
}

/// What a client asked for that had gone before the engine took it is not run, as at the engine's
/// own port.
#[test]
fn clients_that_go_during_a_pause_leave_nothing() {
    on_each(&[], |server| {
        let mut admin = Peer::native(server);
        let address = admin.info("address");
        // INFO would wait as well: sessions are watched by the descriptors of their connections.
        let open =
            || std::fs::read_dir(format!("/proc/{}/fd", server.pid())).expect("it runs").count();
        let before = open();
        admin.ok(&["CLIENT", "PAUSE", "10000", "ALL"]);
        let mut clients: Vec<_> = (0..5).map(|_| Peer::called_at(&address)).collect();
        clients.iter_mut().for_each(|client| client.send(&[vec!["INCR", "n"]]));
        server.until("sessions with proxy connections", || open() >= before + 10);
        drop(clients);
        server.until("no session", || open() <= before);
        assert_eq!(admin.ask(&["GET", "n"]), "$-1");
    });
}

/// A client that has written logs in as `default`, which shows no login on Redis 7.0, and is then
/// pinned.
#[test]
fn sessions_that_have_written_outlive_another_login() {
    on_each(&[], |server| {
        let mut admin = Peer::native(server);
        admin.ok(&["ACL", "SETUSER", "writer", "on", ">w", "~*", "&*", "+@all"]);
        let address = admin.info("address");
        for pins in ["*2\r\n$9\r\nSUBSCRIBE\r\n$1\r\na\r\n", "PING\r\n"] {
            let mut peer = Peer::called_at(&address);
            peer.ok(&["AUTH", "writer", "w"]);
            peer.ok(&["SET", "k", "v"]);
            peer.ok(&["AUTH", "default", "any"]);
            for _ in ["pinned", "and served"] {
                peer.write(pins.as_bytes());
                assert!(peer.next().is_some(), "{pins:?}");
            }
        }
    });
}
