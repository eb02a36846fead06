//! Where the module listens: where the engine does, unless it is told otherwise, and not in clear
//! text beside TLS alone; and who may keep others out there.

mod scene;

use std::io::{Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::path::Path;
use std::time::{Duration, Instant};

use scene::{Server, Start, engines, free_port};

/// Whether somebody answers PING there. `None` if nobody listens.
fn ping(ip: &str, port: &str) -> Option<bool> {
    let at = (ip, port.parse().ok()?).to_socket_addrs().ok()?.next()?;
    let mut socket = TcpStream::connect_timeout(&at, Duration::from_secs(5)).ok()?;
    socket.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    socket.write_all(b"PING\r\n").ok()?;
    let mut answer = [0; 7];
    Some(socket.read_exact(&mut answer).is_ok() && answer == *b"+PONG\r\n")
}

fn start(program: &Path, arguments: &[&str], options: &[&str]) -> Server {
    Server::start(&Start { program, arguments, options })
}

#[test]
fn listens_where_the_engine_listens() {
    for program in engines() {
        let [tcp, own] = [free_port(), free_port()];
        let arguments = ["rdma-port", &own];
        let server = start(&program, &arguments, &["--port", &tcp, "--bind", "127.0.0.1 -::1"]);
        assert_eq!(ping("127.0.0.1", &own), Some(true));
        assert_eq!(ping("127.0.0.2", &own), None, "the engine is not there either");
        let address = server.info("address");
        assert!(address.starts_with(&format!("127.0.0.1:{own}")), "{address}");
        assert_eq!(server.info("status"), "tcp-only");
        server.until_logged(", TCP only: ");
        let log = server.log();
        let said = log.matches(", TCP only: ").count() + log.matches("takes TCP only").count();
        assert_eq!(said, 1, "once, and not for each address: {log}");
        // Several, and all.
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
        assert!(
            server.info("address").starts_with(&format!("0.0.0.0:{own}")),
            "{}",
            server.info("address")
        );
        if std::net::TcpListener::bind("[::1]:0").is_ok() {
            assert_eq!(ping("::1", &own), Some(true), "{}", server.info("address"));
        }
        server.assert_well();
    }
}

/// An engine that is killed while it saves leaves a child behind, which does not keep the port.
#[test]
fn listens_again_beside_a_child_that_still_saves() {
    for program in engines() {
        let own = free_port();
        let arguments = ["rdma-port", &own, "rdma-bind", "127.0.0.1"];
        let begin =
            Start { program: &program, arguments: &arguments, options: &["port 0", "save \"\""] };
        let mut server = Server::start_by_file(&begin);
        server.ask::<String>(&["SET", "k", "v"]);
        // a minute for a key
        server.ask::<String>(&["CONFIG", "SET", "rdb-key-save-delay", "60000000"]);
        server.ask::<String>(&["BGSAVE"]);
        let started = "Background saving started by pid ";
        server.until_logged(started);
        let log = server.log();
        let child = log
            .split(started)
            .nth(1)
            .and_then(|rest| rest.split_whitespace().next())
            .expect("a number");
        server.signal("KILL");
        server.wait();
        server.start_again(&program);
        let is_saving = Path::new("/proc").join(child).exists();
        let answers = ping("127.0.0.1", &own);
        let _ = std::process::Command::new("kill").args(["-s", "KILL", child]).status();
        assert!(is_saving, "{}", server.log());
        assert_eq!(answers, Some(true), "{}", server.log());
    }
}

/// One address of the engine's that cannot be had does not keep clients from the others. Those that
/// are of one link alone are named with its interface.
#[test]
fn serves_the_addresses_that_can_be_had() {
    for program in engines() {
        let [tcp, own] = [free_port(), free_port()];
        let _taken = std::net::TcpListener::bind(format!("127.0.0.2:{own}")).expect("a free port");
        let bind = format!("127.0.0.1 127.0.0.2 127.0.0.3 {}", link_local().unwrap_or_default());
        let mut server =
            start(&program, &["rdma-port", &own], &["--port", &tcp, "--bind", bind.trim_end()]);
        assert_eq!([1, 3].map(|last| ping(&format!("127.0.0.{last}"), &own)), [Some(true); 2]);
        let why = format!("cannot listen on 127.0.0.2:{own}: ");
        server.until_logged(&why);
        assert_eq!(server.log().matches(&why).count(), 1);
        let report = server.ask::<String>(&["FERRITE", "DOCTOR"]);
        assert!(report.contains(&format!("[warn] {why}")), "{report}");
        if let Some(address) = link_local() {
            let (ip, _) = address.split_once('%').expect("an interface");
            assert!(
                server.info("address").contains(&format!("[{ip}%")),
                "{}",
                server.info("address")
            );
            // To protected mode such a client is one of another host.
            assert!(ping(&address, &own).is_some(), "nobody listens at {address}");
        }
        server.assert_well();
    }
}

/// An address of one link, if the host has one, with the link: `fe80::1%eth0`.
fn link_local() -> Option<String> {
    const SCOPE: &str = "20";
    let all = std::fs::read_to_string("/proc/net/if_inet6").ok()?;
    all.lines().find_map(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        let [address, _, _, SCOPE, _, interface] = words[..] else { return None };
        let ip = std::net::Ipv6Addr::from(u128::from_str_radix(address, 16).ok()?);
        Some(format!("{ip}%{interface}"))
    })
}

/// Who has no address but a Unix socket has not said where others may come in.
#[test]
fn an_engine_without_addresses_gets_none() {
    for program in engines() {
        let own = free_port();
        let mut server = start(&program, &["rdma-port", &own], &["--port", "0"]);
        server.until_logged("the engine listens at no address");
        assert_eq!((server.info("status"), ping("127.0.0.1", &own)), ("off".into(), None));
        server.assert_well();
    }
}

/// As redis-server reads it.
fn pem(label: &str, der: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = format!("-----BEGIN {label}-----");
    for (number, group) in der.chunks(3).enumerate() {
        if number % 16 == 0 {
            text.push('\n');
        }
        let bits =
            (0..3).fold(0, |bits, at| bits << 8 | usize::from(group.get(at).copied().unwrap_or(0)));
        for digit in 0..4 {
            let is_padding = digit > group.len();
            text.push(if is_padding { '=' } else { DIGITS[bits >> (18 - 6 * digit) & 63].into() });
        }
    }
    format!("{text}\n-----END {label}-----\n")
}

/// Mutual TLS may be the only login: nobody comes in beside it unless that is said by name.
#[test]
fn refuses_clear_text_beside_tls_alone() {
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).expect("a certificate");
    let files = std::env::temp_dir().join(format!("ferrite-listen-tls-{}", std::process::id()));
    let [cert, key] = ["cert", "key"].map(|end| format!("{}.{end}", files.display()));
    std::fs::write(&cert, pem("CERTIFICATE", made.cert.der())).expect("a file");
    std::fs::write(&key, pem("PRIVATE KEY", &made.signing_key.serialize_der())).expect("a file");
    // Debian's has TLS, which not every engine is built with.
    let program = Path::new(scene::REDIS);
    let (tls, own) = (free_port(), free_port());
    let options = [
        &["--port", "0", "--tls-port", &tls, "--bind", "127.0.0.1", "--protected-mode", "no"][..],
        &["--tls-cert-file", &cert, "--tls-key-file", &key, "--tls-ca-cert-file", &cert],
    ]
    .concat();
    for arguments in [&["rdma-port", &own][..], &["rdma-port", &own, "rdma-bind", "127.0.0.1"]] {
        let mut server = start(program, arguments, &options);
        server.until_logged("no RDMA listener: the engine serves TLS alone");
        assert_eq!((server.info("status"), ping("127.0.0.1", &own)), ("off".into(), None));
        server.assert_well();
    }
    // Also for one without a Unix socket: nobody opens one and hears of the policy only then.
    for more in [&[][..], &["--unixsocket", ""]] {
        let options = [&options[..], more].concat();
        let required = Start { program, arguments: &["rdma", "require"], options: &options };
        let (status, log) = Server::refused(&required);
        assert!(!status.success() && log.contains("allow-clear-text yes"), "{log}");
    }
    let server = start(program, &["rdma-port", &own, "allow-clear-text", "yes"], &options);
    assert_eq!(ping("127.0.0.1", &own), Some(true));
    drop(server);
    for file in [cert, key] {
        let _ = std::fs::remove_file(file);
    }
}

/// Silent connections are no handshakes: a client beside hundreds of them, of its own address, is
/// served at once.
#[test]
fn silent_connections_keep_nobody_out() {
    for program in engines() {
        let own = free_port();
        let mut server =
            start(&program, &["rdma-port", &own, "rdma-bind", "127.0.0.1"], &["--port", "0"]);
        let connect =
            || TcpStream::connect(("127.0.0.1", own.parse().expect("a port"))).expect("it listens");
        let held: Vec<_> = (0..400).map(|_| connect()).collect();
        let begun = Instant::now();
        for _ in 0..5 {
            assert_eq!(ping("127.0.0.1", &own), Some(true));
        }
        assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
        // A client of a pool that has been silent is served like any other.
        for mut silent in held.into_iter().step_by(100) {
            silent.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
            silent.write_all(b"PING\r\n").expect("said");
            let mut answer = [0; 7];
            silent.read_exact(&mut answer).expect("an answer");
        }
        server.assert_well();
    }
}
