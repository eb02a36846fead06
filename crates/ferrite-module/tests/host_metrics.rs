//! The module's admin port, in real engines.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;

use ferrite_testkit::engine::{REDIS, engines};
use ferrite_testkit::{Engine, Start, TIMEOUT, free_port, until};

fn get(port: u16, path: &str) -> (u16, String) {
    let mut socket = TcpStream::connect(("127.0.0.1", port)).expect("the admin port");
    socket.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
    write!(socket, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .expect("the connection is open");
    let mut answer = String::new();
    socket.read_to_string(&mut answer).expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    (status.expect("a status"), body.to_owned())
}

fn sample(port: u16, name: &str) -> u64 {
    let (_, text) = get(port, "/metrics");
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value
        .unwrap_or_else(|| panic!("{name} is not among the metrics: {text}"))
        .parse()
        .expect("a number")
}

fn start(program: &Path, own: u16, admin: u16) -> Engine {
    let (own, admin) = (own.to_string(), format!("127.0.0.1:{admin}"));
    let arguments = ["rdma-bind", "127.0.0.1", "rdma-port", &own, "admin-listen", &admin];
    // With this option, the engine answers nobody while a script runs.
    let options = &["--lua-time-limit", "0"];
    Engine::start(&Start { program, module: Some(&arguments), options })
}

#[test]
fn counters_move_with_traffic_and_the_port_ends_with_the_engine() {
    for program in engines() {
        let [own, admin] = [free_port(), free_port()];
        let mut engine = start(&program, own, admin);
        assert_eq!(get(admin, "/live"), (200, "live\n".into()));
        assert_eq!(get(admin, "/ready"), (200, "ready\n".into()));
        assert_eq!(sample(admin, "ferrite_listener_up"), 1);
        let mut session = TcpStream::connect(("127.0.0.1", own)).expect("a session");
        session.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
        session.write_all(b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n").expect("the connection is open");
        let mut reply = [0; 5];
        session.read_exact(&mut reply).expect("a reply");
        assert_eq!(&reply, b"$-1\r\n");
        assert_eq!(sample(admin, "ferrite_sessions{transport=\"tcp\"}"), 1);
        assert_eq!(sample(admin, "ferrite_sessions_opened_total{client=\"tcp\"}"), 1);
        assert_eq!(sample(admin, "ferrite_commands_total{path=\"called\"}"), 1);
        engine.signal("TERM");
        assert!(engine.wait().success(), "{}", engine.log());
        assert!(TcpStream::connect(("127.0.0.1", admin)).is_err());
    }
}

/// The admin port answers while the engine's main thread runs an endless script, for a client of
/// the engine or for a client of the module.
#[test]
fn answers_while_the_main_thread_is_busy() {
    const ENDLESS: &[u8] = b"*3\r\n$4\r\nEVAL\r\n$17\r\nwhile true do end\r\n$1\r\n0\r\n";
    for program in engines() {
        for is_over_the_module in [false, true] {
            let [own, admin] = [free_port(), free_port()];
            let engine = start(&program, own, admin);
            let mut session = TcpStream::connect(("127.0.0.1", own)).expect("a session");
            session.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
            session.write_all(b"PING\r\n").expect("the connection is open");
            session.read_exact(&mut [0; 7]).expect("a reply");
            let mut client = engine.client();
            if is_over_the_module {
                session.write_all(ENDLESS).expect("the connection is open");
            } else {
                client.write(ENDLESS);
            }
            until(TIMEOUT, "a busy engine", || get(admin, "/ready").0 == 503);
            assert_eq!(
                get(admin, "/ready"),
                (503, "the readiness check took longer than 1 s\n".into())
            );
            assert_eq!(sample(admin, "ferrite_sessions{transport=\"tcp\"}"), 1);
            assert_eq!(get(admin, "/live"), (200, "live\n".into()));
        }
    }
}

#[test]
fn port_in_use_refuses_the_load_and_default_has_no_port() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let admin = taken.local_addr().expect("an address").to_string();
    let own = free_port().to_string();
    let arguments = ["rdma-bind", "127.0.0.1", "rdma-port", &own, "admin-listen", &admin];
    let start = Start { program: Path::new(REDIS), module: Some(&arguments), options: &[] };
    let (status, log) = Engine::run_until_exit(&start);
    assert!(!status.success(), "{log}");
    assert!(log.contains(&format!("cannot open the admin port at {admin}")), "{log}");
    let start = Start { program: Path::new(REDIS), module: Some(&arguments[..4]), options: &[] };
    let engine = Engine::start(&start);
    let threads = std::fs::read_dir(format!("/proc/{}/task", engine.pid())).expect("threads");
    for thread in threads.flatten() {
        let name = std::fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
        assert!(!name.starts_with("ferrite-admin"), "{name}");
    }
}
