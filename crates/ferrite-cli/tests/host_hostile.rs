//! A server that means harm: what it says reaches the terminal harmless, and its replies have an
//! end. And a network that others listen to: a password is not sent in clear text without a word.

#[path = "compare/redis.rs"]
mod redis;

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Command, Output, Stdio};

use redis::Redis;

const CLI: &str = env!("CARGO_BIN_EXE_ferrite-cli");

/// A server that answers each command, whatever it is, with the next of these bytes; its port.
fn server(replies: &[&[u8]]) -> String {
    let replies: Vec<_> = replies.iter().map(|reply| reply.to_vec()).collect();
    serve(move |mut client| {
        for reply in &replies {
            if !matches!(client.read(&mut [0; 4096]), Ok(1..)) {
                return;
            }
            client.write_all(reply).expect("it listens");
        }
        let _ = client.read(&mut [0; 4096]); // until it has gone
    })
}

fn serve(act: impl FnOnce(TcpStream) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("bound").port();
    std::thread::spawn(move || act(listener.accept().expect("a client").0));
    port.to_string()
}

fn cli(port: &str, words: &[&str]) -> Output {
    let mut command = Command::new(CLI);
    command.args(["-p", port, "--rdma", "forbid"]).args(words).stdin(Stdio::null());
    command.env_remove("REDISCLI_AUTH").output().expect("it starts")
}

/// What a terminal gets, stdout and stderr alike.
fn on_terminal(port: &str, words: &[&str]) -> Vec<u8> {
    let line = format!("{CLI} -p {port} --rdma forbid {}", words.join(" "));
    let mut command = Command::new("script");
    command.args(["-qefc", &line, "/dev/null"]).stdin(Stdio::null()).env_remove("REDISCLI_AUTH");
    command.output().expect("util-linux has script").stdout
}

fn has(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

#[test]
fn escape_sequences_do_not_reach_a_terminal() {
    let key: &[u8] = b"*2\r\n$1\r\n0\r\n*1\r\n$5\r\n\x1b[2Jk\r\n";
    let cases: [(&[&str], &[&[u8]]); 12] = [
        (&["PING"], &[b"+\x1b]0;owned\x07OK\r\n"]),
        (&["PING"], &[b"-ERR \x1b[2Jowned\r\n"]),
        (&["-e", "PING"], &[b"-ERR \x1b[2Jowned\r\n"]),
        (&["PING"], &[b"=13\r\ntxt:\x1b[1mowned\r\n"]),
        (&["PING"], &[b"%1\r\n+\x1b[1m\r\n+owned\x9b1m\r\n"]),
        (&["PING"], &[b"!9\r\n\x1b[1mowned\r\n"]),
        (&["PING"], &[b">2\r\n+\x1b[1m\r\n+\xc2\x9b1mowned\r\n+OK\r\n"]),
        (&["PING"], &[b">2\r\n$10\r\ninvalidate\r\n*1\r\n$10\r\n\x1b[1mowned1\r\n+OK\r\n"]),
        (&["INFO"], &[b"$11\r\n\x1b[1mowned\r\n\r\n"]),
        (&["--raw", "GET", "k"], &[b"$9\r\n\x1b[1mowned\r\n"]),
        (&["--bigkeys"], &[b":1\r\n", key, b"+\x1b[1mowned\r\n"]),
        (&["-a", "pw", "PING"], &[b"-ERR \x1b[1mowned\r\n", b"-ERR \x1b[1mowned\r\n"]),
    ];
    for (words, replies) in cases {
        let shown = on_terminal(&server(replies), words);
        let text = String::from_utf8_lossy(&shown).into_owned();
        assert!(has(&shown, b"owned"), "{words:?}: {text:?}");
        assert!(!shown.contains(&0x1b) && !shown.contains(&0x07), "{words:?}: {text:?}");
        assert!(!text.contains(['\u{9b}', '\u{fffd}']), "{words:?}: {text:?}");
    }
}

#[test]
fn hints_and_help_of_a_server_are_harmless() {
    let docs = b"*2\r\n$4\r\nping\r\n*2\r\n$7\r\nsummary\r\n$9\r\n\x1b]0;owned\r\n";
    let shown = on_terminal(&server(&[docs]), &["help", "ping"]);
    assert!(has(&shown, b"\\x1b]0;owned") && !has(&shown, b"\x1b]0;"), "{}", shown.escape_ascii());
}

#[test]
fn pipes_get_the_bytes() {
    let output = cli(&server(&[b"+\x1b[1mOK\x9b\r\n"]), &["PING"]);
    assert_eq!(output.stdout, b"\x1b[1mOK\x9b\n");
}

#[test]
fn replies_without_end_have_one() {
    for (head, each, limit) in [
        (&b"*?\r\n"[..], &b":1\r\n"[..], "15625 values"),
        (b"*2000000000\r\n", b"*1\r\n:1\r\n", "15625 values"),
        (b"$?\r\n", b";5\r\nbytes\r\n", "1000000 bytes"),
        (b"$400000000\r\n", b"bytes", "1000000 bytes"),
    ] {
        let port = serve(move |mut client| {
            let _ = client.read(&mut [0; 4096]);
            let _ = client.write_all(head);
            let many = each.repeat(1000);
            while client.write_all(&many).is_ok() {}
        });
        let output = cli(&port, &["--max-reply-bytes", "1000000", "PING"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(limit) && said.contains("--max-reply-bytes"), "{said}");
    }
}

/// An address of this host that is not loopback, so that others could listen in principle. Nothing
/// is sent.
fn address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?;
    socket
        .local_addr()
        .ok()
        .map(|own| own.ip())
        .filter(|ip| !ip.is_loopback() && !ip.is_unspecified())
}

#[test]
fn warns_before_a_password_goes_out_in_clear_text() {
    let Some(ip) = address().map(|ip| ip.to_string()) else { return }; // it has loopback alone
    let free =
        TcpListener::bind((ip.as_str(), 0)).and_then(|bound| bound.local_addr()).expect("a port");
    let port = free.port().to_string();
    let _redis = Redis::start_with(
        "clear",
        &["--bind", &ip, "127.0.0.1", "--port", &port, "--requirepass", "pw"],
    );
    let run = |host: &str, words: &[&str], input: &str| {
        let mut command = Command::new(CLI);
        command.args(["-h", host, "-p", &port]).args(words).env_remove("REDISCLI_AUTH");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        child.stdin.take().expect("piped").write_all(input.as_bytes()).expect("it reads");
        let output = child.wait_with_output().expect("it ends");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let warns = |said: &str| {
        let lines: Vec<_> = said.lines().filter(|line| line.starts_with("warning: ")).collect();
        match lines.as_slice() {
            [] => false,
            [line] => {
                let (begin, end) =
                    ("warning: RDMA is unavailable (", "); using TCP without encryption");
                assert!(line.starts_with(begin) && line.ends_with(end), "{line}");
                true
            }
            _ => panic!("more than once: {said}"),
        }
    };
    assert!(warns(&run(&ip, &["-a", "pw", "PING"], "")));
    assert!(warns(&run(&ip, &["AUTH", "pw"], "")));
    assert!(warns(&run(&ip, &[], "AUTH pw\nAUTH pw\nHELLO 3 AUTH default pw\n")));
    assert!(!warns(&run(&ip, &["PING"], "")), "no password is sent");
    assert!(!warns(&run("127.0.0.1", &["-a", "pw", "PING"], "")), "nobody else can listen");
    assert!(!warns(&run(&ip, &["-a", "pw", "--rdma", "forbid", "PING"], "")), "TCP was asked for");
    let told = run(&ip, &["-a", "pw", "--rdma", "prefer", "PING"], "");
    assert!(!warns(&told) && told.contains("over TCP: "), "it is told already: {told}");
}
