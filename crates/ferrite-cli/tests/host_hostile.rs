//! Tests with a hostile server: its escape sequences do not reach the terminal, and its replies are
//! limited. Also tests that ferrite-cli warns before it sends a password in clear text.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Command, Output, Stdio};

use ferrite_testkit::{Engine, Terminal, free_port};

const CLI: &str = env!("CARGO_BIN_EXE_ferrite-cli");

/// Starts a server that answers each command, whatever the command is, with the next of these
/// replies. Returns the server's port.
fn server(replies: &[&[u8]]) -> String {
    let replies: Vec<_> = replies.iter().map(|reply| reply.to_vec()).collect();
    serve(move |mut client| {
        for reply in &replies {
            if !matches!(client.read(&mut [0; 4096]), Ok(1..)) {
                return;
            }
            client.write_all(reply).expect("write the reply");
        }
        let _ = client.read(&mut [0; 4096]); // until the client has disconnected
    })
}

fn serve(act: impl FnOnce(TcpStream) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let port = listener.local_addr().expect("bound address").port();
    std::thread::spawn(move || act(listener.accept().expect("accept").0));
    port.to_string()
}

fn cli(port: &str, words: &[&str]) -> Output {
    let mut command = Command::new(CLI);
    command.args(["-p", port, "--rdma", "forbid"]).args(words).stdin(Stdio::null());
    command.env_remove("REDISCLI_AUTH").output().expect("start ferrite-cli")
}

fn cli_with_input(port: &str, words: &[&str], input: &str) -> Output {
    let mut command = Command::new(CLI);
    command.args(["-p", port, "--rdma", "forbid"]).args(words).env_remove("REDISCLI_AUTH");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("start ferrite-cli");
    child.stdin.take().expect("piped stdin").write_all(input.as_bytes()).expect("write stdin");
    child.wait_with_output().expect("wait for ferrite-cli")
}

/// Returns the bytes that a terminal gets, from stdout and stderr together.
fn on_terminal(port: &str, words: &[&str]) -> Vec<u8> {
    let line = format!("{CLI} -p {port} --rdma forbid {}", words.join(" "));
    let mut command = Command::new("script");
    command.args(["-qefc", &line, "/dev/null"]).stdin(Stdio::null()).env_remove("REDISCLI_AUTH");
    command.output().expect("start script, which is part of util-linux").stdout
}

fn has(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

#[test]
fn escapes_control_characters_on_a_terminal() {
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
        // Leaves out the sequence with which the progress bar erases its line.
        let text = String::from_utf8_lossy(&shown).replace("\r\x1b[2K", "");
        assert!(has(&shown, b"owned"), "{words:?}: {text:?}");
        assert!(!text.contains(['\x1b', '\x07']), "{words:?}: {text:?}");
        assert!(!text.contains(['\u{9b}', '\u{fffd}']), "{words:?}: {text:?}");
    }
}

/// A redirect to an invalid host is not followed. It is shown as the error that it is.
#[test]
fn follows_no_redirect_to_an_invalid_host() {
    let hosts = ["\x1b]0;evil\x07", "a\x08b", "\u{9b}2J", "a/b", "a@b", "\u{e9}"];
    for host in hosts {
        let reply = format!("-MOVED 1 {host}:6379\r\n");
        let words = ["-c", "GET", "k"];
        let shown = on_terminal(&server(&[reply.as_bytes()]), &words);
        let text = String::from_utf8_lossy(&shown);
        assert!(text.contains("MOVED 1 ") && !text.contains("Redirected"), "{text:?}");
        assert!(!text.contains(['\x1b', '\x07', '\x08', '\u{9b}']), "{text:?}");
        let piped = cli(&server(&[reply.as_bytes()]), &words);
        assert_eq!(piped.stdout, format!("MOVED 1 {host}:6379\n\n").as_bytes());
        let input = cli_with_input(&server(&[reply.as_bytes()]), &["-c"], "GET k\n");
        assert!(!has(&input.stdout, b"Redirected"), "{}", input.stdout.escape_ascii());
    }
}

#[test]
fn escapes_control_characters_in_help() {
    let docs = b"*2\r\n$4\r\nping\r\n*2\r\n$7\r\nsummary\r\n$9\r\n\x1b]0;owned\r\n";
    let shown = on_terminal(&server(&[docs]), &["help", "ping"]);
    assert!(has(&shown, b"\\x1b]0;owned") && !has(&shown, b"\x1b]0;"), "{}", shown.escape_ascii());
}

#[test]
fn writes_original_bytes_to_a_pipe() {
    let output = cli(&server(&[b"+\x1b[1mOK\x9b\r\n"]), &["PING"]);
    assert_eq!(output.stdout, b"\x1b[1mOK\x9b\n");
}

#[test]
fn limits_endless_replies() {
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
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains(limit) && stderr.contains("--max-reply-bytes"), "{stderr}");
    }
}

/// Returns an address of this host that is not loopback: others could eavesdrop on it in principle.
/// Connecting the UDP socket sends no packet.
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
fn warns_before_sending_a_password_in_clear_text() {
    let Some(ip) = address().map(|ip| ip.to_string()) else { return }; // only loopback exists
    let port = free_port().to_string();
    let _redis =
        Engine::redis(&["--bind", &ip, "127.0.0.1", "--port", &port, "--requirepass", "pw"]);
    let run = |host: &str, words: &[&str], input: &str| {
        let mut command = Command::new(CLI);
        command.args(["-h", host, "-p", &port]).args(words).env_remove("REDISCLI_AUTH");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("start ferrite-cli");
        child.stdin.take().expect("piped stdin").write_all(input.as_bytes()).expect("write stdin");
        let output = child.wait_with_output().expect("wait for ferrite-cli");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let has_warning = |stderr: &str| {
        let lines: Vec<_> = stderr.lines().filter(|line| line.starts_with("warning: ")).collect();
        match lines.as_slice() {
            [] => false,
            [line] => {
                let begin = "warning: using TCP without encryption, because RDMA is unavailable: ";
                assert!(line.starts_with(begin), "{line}");
                true
            }
            _ => panic!("more than one warning: {stderr}"),
        }
    };
    assert!(has_warning(&run(&ip, &["-a", "pw", "PING"], "")));
    assert!(has_warning(&run(&ip, &["AUTH", "pw"], "")));
    assert!(has_warning(&run(&ip, &[], "AUTH pw\nAUTH pw\nHELLO 3 AUTH default pw\n")));
    assert!(!has_warning(&run(&ip, &["PING"], "")), "no password is sent");
    assert!(!has_warning(&run("127.0.0.1", &["-a", "pw", "PING"], "")), "nobody else can listen");
    let forbidden = run(&ip, &["-a", "pw", "--rdma", "forbid", "PING"], "");
    assert!(!has_warning(&forbidden), "TCP was asked for: {forbidden}");
    let preferred = run(&ip, &["-a", "pw", "--rdma", "prefer", "PING"], "");
    assert!(
        !has_warning(&preferred) && preferred.contains("over TCP, because "),
        "the fallback is reported instead: {preferred}"
    );
}

#[test]
fn a_terminal_gets_one_line_about_a_fallback_and_none_for_loopback() {
    let Some(ip) = address().map(|ip| ip.to_string()) else { return }; // only loopback exists
    let port = free_port().to_string();
    let arguments = ["--bind", &ip, "127.0.0.1", "--port", &port, "--protected-mode", "no"];
    let _redis = Engine::redis(&arguments);
    let lines = |host: &str, words: &[&str]| {
        let mut command = Command::new(CLI);
        command.args(["-h", host, "-p", &port]).args(words).env_remove("REDISCLI_AUTH");
        let (status, text) = Terminal::start(&command, 1000, 30).finish();
        assert!(status.success(), "{text}");
        let lines = text.lines().filter(|line| !["", "PONG"].contains(&line.trim_end()));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(lines("127.0.0.1", &["PING"]), [""; 0], "nobody else can listen");
    let remote = lines(&ip, &["PING"]);
    assert_eq!(remote.len(), 1, "{remote:?}");
    assert!(remote[0].starts_with("warning: using TCP without encryption, "), "{remote:?}");
    for words in [["--rdma", "prefer", "PING"].as_slice(), &["--verbose", "PING"]] {
        let explicit = lines(&ip, words);
        assert_eq!(explicit.len(), 1, "{words:?}: {explicit:?}");
        assert!(explicit[0].starts_with("over TCP, because RDMA is unavailable: "), "{explicit:?}");
    }
}
