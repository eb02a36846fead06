//! Sessions must end, wait and fail like the engine's own clients. These are cases in which they
//! once did not.

mod client;

use std::time::{Duration, Instant};

use client::{of_module, start};
use ferrite_testkit::engine::engines;
use ferrite_testkit::resp::Client;
use ferrite_testkit::{Engine, free_port};

/// Runs a case on each engine.
fn on_each(options: &[&str], case: impl Fn(&mut Engine)) {
    for program in engines() {
        let mut server = start(&program, options);
        case(&mut server);
        server.assert_healthy();
    }
}

/// Runs a case on each engine with the password `x`, and passes a client that has logged in.
fn on_each_with_password(case: impl Fn(&mut Engine, Client)) {
    on_each(&["--requirepass", "x"], |server| {
        let mut admin = server.client();
        admin.ok(&["AUTH", "x"]);
        case(server, admin);
    });
}

/// A client that ends its own session gets the reply first, as with CLIENT KILL.
#[test]
fn a_client_that_kills_its_own_session_gets_the_reply() {
    on_each(&[], |server| {
        for pins in [false, true] {
            let mut client = of_module(server);
            if pins {
                client.ok(&["CLIENT", "NO-EVICT", "on"]);
            }
            let id = client.first_session();
            client.send(&[vec!["FERRITE", "KILL", &id], vec!["PING"]]);
            assert_eq!(client.next_reply().as_deref(), Some(&b"+OK\r\n"[..]), "pinned: {pins}");
            assert_eq!(client.next_reply(), None, "pinned: {pins}");
            server.wait_until("no session is left", || server.count("sessions") == 0);
        }
        assert_eq!(server.count("killed"), 2);
    });
}

/// RESET clears the name. The module then sets its own name again, unless the client sets one
/// first. HELLO can log in and set a name at the same time.
#[test]
fn a_name_that_comes_with_the_login_is_kept() {
    on_each_with_password(|_, mut admin| {
        let address = admin.info("address");
        let mut named = Client::to_tcp(&address);
        assert_eq!(named.text(&["RESET"]), "+RESET");
        named.raw(&["HELLO", "2", "AUTH", "default", "x", "SETNAME", "mine"]);
        assert_eq!(named.text(&["CLIENT", "GETNAME"]), "mine");
        let mut unnamed = Client::to_tcp(&address);
        assert_eq!(unnamed.text(&["RESET"]), "+RESET");
        unnamed.ok(&["AUTH", "x"]);
        assert!(unnamed.text(&["CLIENT", "GETNAME"]).starts_with("ferrite:127.0.0.1:"));
    });
}

/// WAIT is right after a session was pinned to proxy inside a transaction. It once was not.
#[test]
fn wait_is_correct_after_a_pin_inside_a_transaction() {
    for program in engines() {
        let mut primary = start(&program, &["--port", &free_port().to_string()]);
        let port: Vec<String> = primary.ask(&["CONFIG", "GET", "port"]);
        let replica = start(&program, &["--replicaof", "127.0.0.1", &port[1]]);
        let mut admin = primary.client();
        primary.wait_until("a replica", || {
            admin.ask(&["INFO", "replication"]).contains("state=online")
        });
        let mut client = of_module(&primary);
        client.ok(&["SET", "k", "v"]);
        assert_eq!(client.ask(&["WAIT", "1", "20000"]), ":1");
        replica.signal("STOP");
        client.ok(&["SET", "k", "v"]);
        client.ok(&["MULTI"]);
        assert_eq!(client.ask(&["WAIT", "1", "300"]), "+QUEUED");
        assert_eq!(client.ask(&["CLIENT", "NO-EVICT", "on"]), "+QUEUED", "this pins the session");
        assert_eq!(client.ask(&["EXEC"]), "*2\r\n:0\r\n+OK", "{}", program.display());
        assert_eq!(client.ask(&["WAIT", "1", "300"]), ":0", "{}", program.display());
        replica.signal("CONT");
        assert_eq!(client.ask(&["WAIT", "1", "20000"]), ":1");
        primary.assert_healthy();
    }
}

/// Valkey 8.0 sends no reply to a login that fails inside a transaction. The session must not wait
/// for one.
#[test]
fn a_failed_login_in_a_transaction_does_not_block_the_session() {
    on_each(&[], |server| {
        for login in [&["AUTH", "nobody", "wrong"][..], &["HELLO", "2", "AUTH", "nobody", "wrong"]]
        {
            let replies = [of_module(server), server.client()].map(|mut client| {
                client.send(&[vec!["MULTI"], login.to_vec(), vec!["GET", "k"], vec!["EXEC"]]);
                client.read_until(b"$-1\r\n");
                client.send(&[vec!["ECHO", "the-end"]]);
                String::from_utf8_lossy(&client.read_until(b"the-end\r\n")).into_owned()
            });
            assert_eq!(replies[0], replies[1], "{login:?}");
        }
    });
}

/// A session ends when the engine closes its client, whether the session's client closes or not.
#[test]
fn sessions_end_with_the_engines_client() {
    on_each(&[], |server| {
        let mut quitting = of_module(server);
        quitting.ok(&["QUIT"]);
        let mut subscriber = of_module(server);
        subscriber.send(&[vec!["SUBSCRIBE", "c"]]);
        subscriber.next_reply().expect("a reply");
        server.ask::<i64>(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        server.wait_until("both sessions have ended", || server.count("sessions") == 0);
        assert_eq!((quitting.next_reply(), subscriber.next_reply()), (None, None));
    });
}

/// CLIENT KILL ends a session even if its client does not read its replies. This tests a session
/// that is about to be pinned to proxy, and one that is pinned.
#[test]
fn client_kill_ends_sessions_with_unread_replies() {
    on_each(&[], |server| {
        let mut admin = server.client();
        admin.ok(&["SET", "k", &"x".repeat(1 << 20)]);
        let many = vec![vec!["GETRANGE", "k", "0", "-1"]; 60];
        let pin = vec![vec!["CLIENT", "NO-EVICT", "on"]];
        let called = server.count("commands_called");
        let mut pinning = of_module(server);
        let id = pinning.ask(&["CLIENT", "ID"])[1..].to_owned();
        pinning.send(&[many.clone(), pin.clone()].concat());
        server.wait_until("60 calls", || server.count("commands_called") == called + 60);
        let mut pinned = of_module(server);
        pinned.send(&[vec![vec!["CLIENT", "ID"]], pin, many].concat());
        let other = String::from_utf8_lossy(&pinned.next_reply().expect("an id"))[1..]
            .trim_end()
            .to_owned();
        pinned.next_reply().expect("the reply to NO-EVICT");
        for id in [id, other] {
            assert_eq!(admin.ask(&["CLIENT", "KILL", "ID", &id]), ":1");
        }
        server.wait_until("both sessions have ended", || server.count("sessions") == 0);
    });
}

/// A blocked client that closes its connection takes no element, however much it has sent after the
/// blocking command. A client that sends more than client-query-buffer-limit is disconnected.
#[test]
fn a_blocked_client_that_closes_takes_no_element() {
    let blocked = |server: &Engine, count: u32| {
        let wanted = format!("blocked_clients:{count}");
        server.wait_until(&wanted, || server.ask::<String>(&["INFO", "clients"]).contains(&wanted));
    };
    on_each(&["--client-query-buffer-limit", "4mb"], |server| {
        let set = vec!["SET".to_owned(), "k".to_owned(), "x".repeat(1 << 16)];
        let pop = vec![["BLPOP", "l", "0"].map(String::from).to_vec()];
        let mut client = of_module(server);
        client.send(&[pop.clone(), vec![set.clone(); 16]].concat());
        blocked(server, 1);
        drop(client);
        blocked(server, 0);
        let mut admin = server.client();
        assert_eq!(admin.ask(&["RPUSH", "l", "job"]), ":1");
        assert_eq!(admin.ask(&["LPOP", "l"]), "$3\r\njob");
        let mut client = of_module(server);
        client.send(&pop);
        blocked(server, 1);
        while client.try_send(std::slice::from_ref(&set)) {}
        blocked(server, 0);
    });
}

/// Valkey 9.1 rejects a bulk string without CRLF at its end, and other engines accept it. Sessions
/// do the same as their engine.
#[test]
fn malformed_commands_get_the_engines_reply() {
    on_each(&[], |server| {
        let long = format!("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000000\r\n{}zz", "x".repeat(1_000_000));
        for bytes in [
            "*2\r\n$4\r\nECHOxx$1\r\nk\r\n",
            "*2\r\n$4\r\nECHO\rx$1\r\nk\r\n",
            "*2\rx$4\r\nECHO\r\n$1\r\nk\r\n",
            "*2\r\n$4\rxECHO\r\n$1\r\nk\r\n",
            &long,
        ] {
            let (mut client, mut native) = (of_module(server), server.client());
            for either in [&mut client, &mut native] {
                either.write(bytes.as_bytes());
            }
            let reply = native.next_reply();
            assert_eq!(client.next_reply(), reply, "{}", &bytes[..24]);
            if reply.is_some_and(|reply| reply.starts_with(b"-ERR Protocol error")) {
                assert_eq!(client.next_reply(), None);
                continue;
            }
            for either in [&mut client, &mut native] {
                assert_eq!(either.ask(&["ECHO", "next"]), "$4\r\nnext");
            }
        }
        let mut native = server.client();
        native.write(b"*2\r\n$4\r\nECHOxx$1\r\nk\r\n");
        if native.next_reply().is_some_and(|reply| reply.starts_with(b"-ERR Protocol error")) {
            let mut client = of_module(server);
            client.write(b"*2\r\n$4\r\nECHOxx");
            let reply = client.next_reply().expect("an error before the rest of the command");
            assert!(reply.starts_with(b"-ERR Protocol error"));
        }
    });
}

/// A client whose commands are called in-process is not idle for the engine.
#[test]
fn calls_reset_the_idle_time_of_the_client() {
    on_each(&[], |server| {
        let (mut client, mut admin) = (of_module(server), server.client());
        let id = client.ask(&["CLIENT", "ID"])[1..].to_owned();
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(4) {
            client.ask(&["GET", "k"]);
            std::thread::sleep(Duration::from_millis(50));
        }
        let last = Instant::now();
        client.ask(&["GET", "k"]);
        let line = admin.ask(&["CLIENT", "LIST", "ID", &id]);
        let since = last.elapsed().as_secs();
        let idle =
            line.split(" idle=").nth(1).and_then(|rest| rest.split(' ').next()).expect("a time");
        let idle: u64 = idle.parse().expect("a number");
        assert!(idle <= since + 2, "{line}, {since} s after the last command");
    });
}

/// A client that is blocked on a list gets the pushed element, even if the next command of the
/// pushing pipeline would pop it.
#[test]
fn blocked_clients_are_served_before_the_next_command() {
    on_each(&[], |server| {
        let (mut waiting, mut client) = (server.client(), of_module(server));
        for round in 0..20 {
            waiting.send(&[vec!["BLPOP", "l", "0"]]);
            let blocked =
                || server.ask::<String>(&["INFO", "clients"]).contains("blocked_clients:1");
            server.wait_until("a blocked client", blocked);
            client.send(&[vec!["RPUSH", "l", "job"], vec!["LPOP", "l"], vec!["LLEN", "l"]]);
            let replies = client.replies(3);
            assert_eq!(replies.concat(), b":1\r\n$-1\r\n:0\r\n", "round {round}");
            assert_eq!(
                waiting.next_reply().as_deref(),
                Some(&b"*2\r\n$1\r\nl\r\n$3\r\njob\r\n"[..])
            );
        }
    });
}

/// Commands that pin a session to proxy do not pin it before a login. The engine refuses them, and
/// a pinned client would no longer be limited like other clients without a login.
#[test]
fn nothing_pins_a_session_before_a_login() {
    on_each_with_password(|server, mut admin| {
        let (mut client, mut native) = (Client::to_tcp(admin.info("address")), server.client());
        let long = format!("*1\r\n$9000\r\n{}\r\n", "x".repeat(9000));
        for bytes in [
            "GET k\r\n",
            "\x0b \t\x0c\r\nGET k\r\n", // engines treat the first line as empty
            "\"SUB\\x53CRIBE\" a b c\r\n",
            "*2\r\n$9\r\nSUBSCRIBE\r\n$1\r\na\r\n",
            "*3\r\n$6\r\nCLIENT\r\n$5\r\nREPLY\r\n$3\r\nOFF\r\n",
            "*1\r\n$7\r\nMONITOR\r\n",
            "CLIENT REPLY SKIP\r\nGET k\r\n",
            "HELLO 2\r\n",
            &long,
        ] {
            let [replies, expected] = [&mut client, &mut native].map(|client| {
                client.write(bytes.as_bytes());
                client.replies(1 + usize::from(bytes.starts_with("CLIENT"))) // this is two lines
            });
            assert_eq!(replies, expected, "{}", &bytes[..7]);
        }
        assert_eq!(admin.info("sessions_pinned"), "0");
        client.write(b"AUTH x\r\n");
        assert_eq!(client.next_reply().as_deref(), Some(&b"+OK\r\n"[..]));
        let before = admin.info("commands_called");
        client.ok(&["SET", "k", "v"]);
        assert_ne!(admin.info("commands_called"), before, "no call after an inline AUTH");
        client.write(b"GET k\r\n");
        assert_eq!(client.next_reply().as_deref(), Some(&b"$1\r\nv\r\n"[..]));
        assert_eq!(admin.info("sessions_pinned"), "1");
        let mut client = Client::to_tcp(admin.info("address"));
        client.ok(&["QUIT"]);
        assert_eq!(client.next_reply(), None);
    });
}

/// When the engine no longer needs a password, commands such as SUBSCRIBE pin a client that has not
/// logged in.
#[test]
fn clients_that_need_no_login_can_subscribe() {
    on_each_with_password(|_, mut admin| {
        let mut client = Client::to_tcp(admin.info("address"));
        assert!(client.ask(&["GET", "k"]).starts_with("-NOAUTH"));
        admin.ok(&["CONFIG", "SET", "requirepass", ""]);
        client.send(&[vec!["SUBSCRIBE", "a", "b"], vec!["PING"]]);
        for _ in ["a", "b"] {
            assert!(
                client
                    .next_reply()
                    .is_some_and(|reply| reply.starts_with(b"*3\r\n$9\r\nsubscribe"))
            );
        }
        assert_eq!(client.next_reply().as_deref(), Some(&b"*2\r\n$4\r\npong\r\n$0\r\n\r\n"[..]));
        assert_eq!(admin.ask(&["PUBLISH", "a", "hello"]), ":1");
        assert!(client.next_reply().is_some_and(|reply| reply.ends_with(b"hello\r\n")));
    });
}

/// Valkey 8.0 sends no reply to a failed login while earlier replies are still in its buffer. So
/// before a login, the session must not send commands of its own before those of the client.
#[test]
fn failed_logins_get_a_reply_before_a_login() {
    on_each_with_password(|server, mut admin| {
        let (mut client, mut native) = (Client::to_tcp(admin.info("address")), server.client());
        let long = format!("*2\r\n$4\r\nAUTH\r\n$9000\r\n{}\r\n", "y".repeat(9000));
        for bytes in [
            "AUTH wrong\r\n",
            "auth default \"wr ong\"\n",
            "HELLO 2 AUTH default wrong\r\n",
            &long,
            "PING\r\n",
        ] {
            let [replies, expected] = [&mut client, &mut native].map(|client| {
                client.write(bytes.as_bytes());
                client.replies(1)
            });
            assert_eq!(replies, expected, "{}", &bytes[..4]);
        }
        assert_eq!(admin.info("sessions_pinned"), "0");
        client.write(b"\"\\x41UTH\" wrong\r\n");
        assert!(client.next_reply().is_some_and(|reply| reply.starts_with(b"-WRONGPASS")));
    });
}

/// A session ends with its client, whatever the client sent last: lines without a reply, unfinished
/// lines, half a command, or commands that the engine has not run yet.
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
                Client::to_tcp(&address).write(bytes.as_bytes());
            }
            server.wait_until(bytes, || admin.info("sessions") == "0");
        }
    });
}

/// A client that logs in as `default`, which needs no password, may be blocked like any other. The
/// module notices the client's disconnect even behind much unread input.
#[test]
fn a_blocked_client_that_came_back_to_the_default_user_ends() {
    on_each(&[], |server| {
        let _: () = server.ask(&["ACL", "SETUSER", "other", "on", "nopass", "~*", "+@all"]);
        let blocked = |count| {
            let clients: String = server.ask(&["INFO", "clients"]);
            clients.contains(&format!("blocked_clients:{count}\r"))
        };
        let mut client = of_module(server);
        client.ok(&["AUTH", "other", "x"]);
        client.ok(&["AUTH", "default", "x"]);
        client.send(&[vec!["BLPOP", "list", "0"]]);
        server.wait_until("a blocked client", || blocked(1));
        client.send(&[vec!["SET", "k", &"v".repeat(32 << 10)]]);
        drop(client);
        server.wait_until("no blocked client", || blocked(0));
        server.wait_until("no session is left", || server.count("sessions") == 0);
    });
}

/// Commands of a client that disconnects before the engine reads them do not run, as at the
/// engine's own port.
#[test]
fn commands_of_clients_that_disconnect_during_a_pause_do_not_run() {
    on_each(&[], |server| {
        let mut admin = server.client();
        let address = admin.info("address");
        // INFO would wait for the pause too, so this counts the descriptors of the connections.
        let open = || {
            let descriptors = std::fs::read_dir(format!("/proc/{}/fd", server.pid()));
            descriptors.expect("a running engine").count()
        };
        let before = open();
        admin.ok(&["CLIENT", "PAUSE", "10000", "ALL"]);
        let mut clients: Vec<_> = (0..5).map(|_| Client::to_tcp(&address)).collect();
        clients.iter_mut().for_each(|client| client.send(&[vec!["INCR", "n"]]));
        server.wait_until("sessions with proxy connections", || open() >= before + 10);
        drop(clients);
        server.wait_until("no session", || open() <= before);
        assert_eq!(admin.ask(&["GET", "n"]), "$-1");
    });
}

/// A client writes, then logs in as `default`, which Redis 7.0 does not show as a login. Then the
/// session is pinned to proxy and continues.
#[test]
fn sessions_that_have_written_survive_another_login() {
    on_each(&[], |server| {
        let mut admin = server.client();
        admin.ok(&["ACL", "SETUSER", "writer", "on", ">w", "~*", "&*", "+@all"]);
        let address = admin.info("address");
        for pins in ["*2\r\n$9\r\nSUBSCRIBE\r\n$1\r\na\r\n", "PING\r\n"] {
            let mut client = Client::to_tcp(&address);
            client.ok(&["AUTH", "writer", "w"]);
            client.ok(&["SET", "k", "v"]);
            client.ok(&["AUTH", "default", "any"]);
            for _ in ["the command that pins", "one after it"] {
                client.write(pins.as_bytes());
                assert!(client.next_reply().is_some(), "{pins:?}");
            }
        }
    });
}
