//! The addresses that the module listens on. They are the engine's unless `rdma-bind` names others.
//! There is no clear-text listener if the engine serves only TLS. Silent connections do not block
//! other clients.

use ferrite_testkit::engine::{REDIS, engines, module};
use ferrite_testkit::port::link_local_address;
use ferrite_testkit::{Engine, Start, TempDir, free_port, pem};
use std::io::{Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::path::Path;
use std::time::{Duration, Instant};

/// Returns whether a server replies to PING at this address; `None` if nothing listens there.
fn ping(ip: &str, port: &str) -> Option<bool> {
    let at = (ip, port.parse().ok()?).to_socket_addrs().ok()?.next()?;
    let mut socket = TcpStream::connect_timeout(&at, Duration::from_secs(5)).ok()?;
    socket.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    socket.write_all(b"PING\r\n").ok()?;
    let mut reply = [0; 7];
    Some(socket.read_exact(&mut reply).is_ok() && reply == *b"+PONG\r\n")
}

fn start(program: &Path, arguments: &[&str], options: &[&str]) -> Engine {
    Engine::start(&Start { program, module: Some(arguments), options })
}

#[test]
fn listens_where_the_engine_listens() {
    for program in engines() {
        let [tcp, own] = [free_port().to_string(), free_port().to_string()];
        let arguments = ["rdma-port", &own];
        let server = start(&program, &arguments, &["--port", &tcp, "--bind", "127.0.0.1 -::1"]);
        assert_eq!(ping("127.0.0.1", &own), Some(true));
        assert_eq!(ping("127.0.0.2", &own), None, "the engine does not listen there either");
        let address = server.info("address");
        assert!(address.starts_with(&format!("127.0.0.1:{own}")), "{address}");
        assert_eq!(server.info("status"), "tcp-only");
        server.wait_for_log(", TCP only: ");
        let log = server.log();
        let lines = log.matches(", TCP only: ").count() + log.matches("takes TCP only").count();
        assert_eq!(lines, 1, "one line for all addresses: {log}");
        // The engine listens on two addresses, then on all.
        drop(server);
        let server =
            start(&program, &arguments, &["--port", &tcp, "--bind", "127.0.0.2 127.0.0.3"]);
        assert_eq!(
            [1, 2, 3].map(|last| ping(&format!("127.0.0.{last}"), &own)),
            [None, Some(true), Some(true)]
        );
        drop(server);
        let mut server = start(&program, &arguments, &["--port", &tcp]);
        assert_eq!(ping("127.0.0.9", &own), Some(true));
        if server.info("status") == "tcp-only" {
            let (reason, log) = (server.info("reason"), server.log());
            assert_eq!(log.matches(&reason).count(), 1, "one line for all addresses: {log}");
            assert!(!log.contains("RDMA is unavailable"), "{log}");
        }
        assert!(
            server.info("address").starts_with(&format!("0.0.0.0:{own}")),
            "{}",
            server.info("address")
        );
        if std::net::TcpListener::bind("[::1]:0").is_ok() {
            assert_eq!(ping("::1", &own), Some(true), "{}", server.info("address"));
        }
        server.assert_healthy();
    }
}

/// Kills an engine while a child of it saves. Returns the child's process id.
fn kill_while_it_saves(server: &mut Engine) -> String {
    server.ask::<String>(&["SET", "k", "v"]);
    // The save takes a minute per key.
    server.ask::<String>(&["CONFIG", "SET", "rdb-key-save-delay", "60000000"]);
    server.ask::<String>(&["BGSAVE"]);
    let started = "Background saving started by pid ";
    server.wait_for_log(started);
    let log = server.log();
    let child = log.split(started).nth(1).and_then(|rest| rest.split_whitespace().next());
    server.signal("KILL");
    server.wait();
    child.expect("a number").to_owned()
}

/// Returns whether this process still runs, and ends it.
fn ends(child: &str) -> bool {
    let is_running = Path::new("/proc").join(child).exists();
    let _ = std::process::Command::new("kill").args(["-s", "KILL", child]).status();
    is_running
}

/// An engine that is killed while it saves leaves a child process behind. The child must not keep
/// the module's port open.
#[test]
fn a_restarted_engine_listens_while_the_old_child_still_saves() {
    for program in engines() {
        let own = free_port().to_string();
        let arguments = ["rdma-port", &own, "rdma-bind", "127.0.0.1"];
        let start = Start {
            program: &program,
            module: Some(&arguments),
            options: &["port 0", "save \"\""],
        };
        let mut server = Engine::start_from_file(&start);
        let child = kill_while_it_saves(&mut server);
        server.restart();
        let reply = ping("127.0.0.1", &own);
        assert!(ends(&child), "{}", server.log());
        assert_eq!(reply, Some(true), "{}", server.log());
    }
}

/// The child process that saves must not keep the admin port open either, whether or not the module
/// has a listener.
#[test]
fn a_child_that_saves_does_not_keep_the_admin_port_open() {
    for program in engines() {
        for arguments in [&["rdma-bind", "127.0.0.1"][..], &[]] {
            let [own, admin] = [free_port().to_string(), free_port().to_string()];
            let admin = format!("127.0.0.1:{admin}");
            let own = ["rdma-port", &own, "admin-listen", &admin];
            let arguments = [&own, arguments].concat();
            // The engine listens on no address, so the module listens only if `rdma-bind` names
            // one.
            let options = ["port 0", "bind \"\"", "save \"\""];
            let start = Start { program: &program, module: Some(&arguments), options: &options };
            let mut server = Engine::start_from_file(&start);
            TcpStream::connect(&admin).expect("the admin port");
            let child = kill_while_it_saves(&mut server);
            let is_open = TcpStream::connect(&admin).is_ok();
            assert!(ends(&child), "{}", server.log());
            assert!(!is_open, "{arguments:?}");
        }
    }
}

/// If the module cannot listen on one of the engine's addresses, it still serves the others.
/// Link-local addresses are shown with their interface.
#[test]
fn serves_the_other_addresses_if_one_is_in_use() {
    for program in engines() {
        let [tcp, own] = [free_port().to_string(), free_port().to_string()];
        let _taken = std::net::TcpListener::bind(format!("127.0.0.2:{own}")).expect("a free port");
        let bind =
            format!("127.0.0.1 127.0.0.2 127.0.0.3 {}", link_local_address().unwrap_or_default());
        let mut server =
            start(&program, &["rdma-port", &own], &["--port", &tcp, "--bind", bind.trim_end()]);
        assert_eq!([1, 3].map(|last| ping(&format!("127.0.0.{last}"), &own)), [Some(true); 2]);
        let why = format!("cannot listen on 127.0.0.2:{own}: ");
        server.wait_for_log(&why);
        assert_eq!(server.log().matches(&why).count(), 1);
        let report = server.ask::<String>(&["FERRITE", "DOCTOR"]);
        assert!(report.contains(&format!("[warn] {why}")), "{report}");
        if let Some(address) = link_local_address() {
            let (ip, _) = address.split_once('%').expect("an interface");
            assert!(
                server.info("address").contains(&format!("[{ip}%")),
                "{}",
                server.info("address")
            );
            // Each end has this address, so protected mode counts the client as one of this host.
            assert!(ping(&address, &own).is_some(), "nothing listens at {address}");
        }
        server.assert_healthy();
    }
}

/// The module does not load if it cannot listen on an address that was named. Otherwise the engine
/// would run without the port that clients expect.
#[test]
fn refuses_to_load_if_a_named_address_cannot_be_used() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("an address").port().to_string();
    for program in engines() {
        for (bind, why) in [
            ("127.0.0.1", "already in use"),
            ("192.0.2.77", "cannot listen on 192.0.2.77:"),
            ("no-such-host.invalid", "rdma-bind: cannot resolve \"no-such-host.invalid\""),
        ] {
            let arguments = ["rdma-bind", bind, "rdma-port", &port];
            let options = ["--port", "0"];
            let start = Start { program: &program, module: Some(&arguments), options: &options };
            let (status, log) = Engine::run_until_exit(&start);
            assert!(!status.success(), "{log}");
            assert!(log.contains("ferrite: not loaded: ") && log.contains(why), "{log}");
        }
        // In a running engine, MODULE LOAD fails as well. The engine goes on, and can load the
        // module afterwards on a free port.
        let mut server = Engine::start(&Start { program: &program, ..Start::redis(&[]) });
        let module = module();
        let load = ["MODULE", "LOAD", module.to_str().expect("UTF-8"), "rdma-bind", "127.0.0.1"];
        let refusal = server.refusal(&[&load[..], &["rdma-port", &port]].concat());
        assert!(refusal.to_lowercase().contains("error loading"), "{refusal}");
        for _ in 0..20 {
            assert_eq!(server.ask::<String>(&["PING"]), "PONG");
        }
        let own = free_port().to_string();
        let () = server.ask(&[&load[..], &["rdma-port", &own]].concat());
        assert_eq!(ping("127.0.0.1", &own), Some(true));
        server.assert_healthy();
    }
}

/// Without `rdma-bind`, the module does not load either if it can use none of the engine's
/// addresses.
#[test]
fn refuses_to_load_if_the_engines_only_address_is_in_use() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let own = taken.local_addr().expect("an address").port().to_string();
    for program in engines() {
        let tcp = free_port().to_string();
        // An address that this host may lack does not count.
        for bind in ["127.0.0.1", "127.0.0.1 -192.0.2.77"] {
            let options = ["--port", &tcp, "--bind", bind];
            let start =
                Start { program: &program, module: Some(&["rdma-port", &own]), options: &options };
            let (status, log) = Engine::run_until_exit(&start);
            assert!(!status.success(), "{log}");
            let why = format!("ferrite: not loaded: cannot listen on 127.0.0.1:{own}: ");
            assert!(log.contains(&why) && log.contains("already in use"), "{log}");
        }
    }
}

#[test]
fn listens_on_names_and_on_addresses_in_brackets() {
    for program in engines() {
        let own = free_port().to_string();
        let has_ipv6 = std::net::TcpListener::bind("[::1]:0").is_ok();
        let mut bind = "localhost,127.0.0.2".to_owned();
        if has_ipv6 {
            bind += ",[::1]";
        }
        if let Some(address) = link_local_address() {
            bind += &format!(",[{address}]");
        }
        let mut server =
            start(&program, &["rdma-port", &own, "rdma-bind", &bind], &["--port", "0"]);
        assert_eq!([1, 2].map(|last| ping(&format!("127.0.0.{last}"), &own)), [Some(true); 2]);
        if has_ipv6 {
            assert_eq!(ping("::1", &own), Some(true), "{}", server.info("address"));
        }
        if let Some(address) = link_local_address() {
            assert!(ping(&address, &own).is_some(), "nothing listens at {address}");
        }
        server.assert_healthy();
    }
}

/// If the engine has only a Unix socket, the module does not listen.
#[test]
fn does_not_listen_if_the_engine_has_no_address() {
    for program in engines() {
        let own = free_port().to_string();
        let mut server = start(&program, &["rdma-port", &own], &["--port", "0"]);
        server.wait_for_log("the engine listens on no address");
        assert_eq!((server.info("status"), ping("127.0.0.1", &own)), ("off".into(), None));
        server.assert_healthy();
    }
}

/// Mutual TLS may be the engine's only authentication. So if the engine serves only TLS, the module
/// accepts no clear text without `allow-clear-text yes`.
#[test]
fn refuses_clear_text_beside_tls_alone() {
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).expect("a certificate");
    let files = TempDir::new("listen-tls");
    let cert = files.file("cert", pem("CERTIFICATE", made.cert.der()));
    let key = files.file("key", pem("PRIVATE KEY", &made.signing_key.serialize_der()));
    let [cert, key] = [cert, key].map(|file| file.display().to_string());
    // Debian's Redis has TLS; not every engine is built with it.
    let program = Path::new(REDIS);
    let (tls, own) = (free_port().to_string(), free_port().to_string());
    let options = [
        &["--port", "0", "--tls-port", &tls, "--bind", "127.0.0.1", "--protected-mode", "no"][..],
        &["--tls-cert-file", &cert, "--tls-key-file", &key, "--tls-ca-cert-file", &cert],
    ]
    .concat();
    for arguments in [&["rdma-port", &own][..], &["rdma-port", &own, "rdma-bind", "127.0.0.1"]] {
        let mut server = start(program, arguments, &options);
        server.wait_for_log("no RDMA listener: the engine serves TLS only");
        assert_eq!((server.info("status"), ping("127.0.0.1", &own)), ("off".into(), None));
        server.assert_healthy();
    }
    // An engine without a Unix socket gets the same error, not one about the missing socket.
    for more in [&[][..], &["--unixsocket", ""]] {
        let options = [&options[..], more].concat();
        let required = Start { program, module: Some(&["rdma", "require"]), options: &options };
        let (status, log) = Engine::run_until_exit(&required);
        assert!(!status.success() && log.contains("allow-clear-text yes"), "{log}");
    }
    let server = start(program, &["rdma-port", &own, "allow-clear-text", "yes"], &options);
    assert_eq!(ping("127.0.0.1", &own), Some(true));
    drop(server);
}

/// Silent connections do not count as handshakes. A client is served at once although its address
/// has hundreds of silent connections.
#[test]
fn silent_connections_keep_nobody_out() {
    for program in engines() {
        let own = free_port().to_string();
        let mut server =
            start(&program, &["rdma-port", &own, "rdma-bind", "127.0.0.1"], &["--port", "0"]);
        let connect = || {
            TcpStream::connect(("127.0.0.1", own.parse().expect("a port"))).expect("a connection")
        };
        let held: Vec<_> = (0..400).map(|_| connect()).collect();
        let started = Instant::now();
        for _ in 0..5 {
            assert_eq!(ping("127.0.0.1", &own), Some(true));
        }
        assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
        // A connection that was silent so far, as in a client's pool, is served like any other.
        for mut silent in held.into_iter().step_by(100) {
            silent.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
            silent.write_all(b"PING\r\n").expect("the connection is open");
            let mut reply = [0; 7];
            silent.read_exact(&mut reply).expect("a reply");
        }
        server.assert_healthy();
    }
}
