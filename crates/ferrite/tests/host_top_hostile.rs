//! `ferrite top` against engines and admin ports that attack it.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Output};

/// Control sequences that a terminal would obey: a title, a colour, and one that starts with the
/// single character CSI (U+009B) instead of ESC.
const EVIL: &str = "\x1b]0;owned\x07\x1b[31m\u{9b}2J";

/// Serves every connection with `act`. Returns the address.
fn serve(act: impl Fn(TcpStream) + Send + Copy + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || act(stream));
        }
    });
    address
}

/// Answers every command of `top` as an engine whose texts contain [`EVIL`].
fn evil_engine(mut stream: TcpStream) {
    let mut input = vec![0; 1024];
    while let Ok(count @ 1..) = stream.read(&mut input) {
        let command = String::from_utf8_lossy(&input[..count]);
        let bulk = |text: &str| format!("${}\r\n{text}\r\n", text.len());
        let reply = if command.contains("STATS") {
            let fallback = format!("rdma_fallbacks_{EVIL}");
            let words = ["status", EVIL, "version", EVIL, &fallback, "1"].map(bulk).concat();
            format!("*6\r\n{words}")
        } else if command.contains("CLIENTS") {
            bulk(&format!("id=1 user={EVIL} addr={EVIL} transport={EVIL} path={EVIL}\n"))
        } else if command.contains("latencystats") {
            bulk(&format!("latency_percentiles_usec_{EVIL}:p50=1,p99=2,p99.9=3\r\n"))
        } else {
            bulk(&format!("redis_version:{EVIL}\r\n"))
        };
        if stream.write_all(reply.as_bytes()).is_err() {
            return;
        }
    }
}

/// Begins an answer and repeats a part of it until the reader disconnects.
fn endless(mut stream: TcpStream, begin: &str, part: &str) {
    let _ = stream.read(&mut [0; 1024]);
    let parts = part.repeat(1000);
    let mut sent = stream.write_all(begin.as_bytes());
    while sent.is_ok() {
        sent = stream.write_all(parts.as_bytes());
    }
}

fn top(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command.args(["top", "--interval", "0.1", "--once"]).args(arguments);
    command.output().expect("ferrite starts")
}

/// Returns whether the output contains only characters that a terminal prints.
fn is_harmless(output: &[u8]) -> bool {
    let text = String::from_utf8_lossy(output);
    text.chars().all(|c| !c.is_control() || c == '\n')
}

#[test]
fn text_of_a_server_cannot_control_the_terminal() {
    let engine = serve(evil_engine);
    for arguments in [&[engine.as_str()][..], &[engine.as_str(), "--json"]] {
        let output = top(arguments);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("owned") && is_harmless(&output.stdout), "{text:?}");
    }
    let refusing = serve(|mut stream| {
        let _ = stream.read(&mut [0; 1024]);
        let _ = stream.write_all(format!("-ERR {EVIL}\r\n").as_bytes());
    });
    let failing = serve(|mut stream| {
        let _ = stream.read(&mut [0; 1024]);
        let _ = stream.write_all(format!("HTTP/1.0 500 {EVIL}\r\n\r\n").as_bytes());
    });
    for arguments in [&[refusing.as_str(), "--json"][..], &["--admin", &failing, "--json"]] {
        let output = top(arguments);
        assert!(!output.status.success());
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains("owned") && is_harmless(&output.stderr), "{text:?}");
        assert!(is_harmless(&output.stdout), "{:?}", String::from_utf8_lossy(&output.stdout));
    }
}

#[test]
fn endless_answers_are_refused() {
    let engine = serve(|stream| endless(stream, "*1000000000\r\n", "$5\r\nhello\r\n"));
    let admin = serve(|stream| endless(stream, "HTTP/1.0 200 OK\r\n\r\n", "ferrite_x 1\n"));
    for arguments in [&[engine.as_str()][..], &["--admin", &admin]] {
        let output = top(arguments);
        let text = String::from_utf8_lossy(&output.stderr);
        // A busy machine may reach the limit of time first.
        let causes = ["longer than 67108864 bytes", "not complete after 15s"];
        assert!(causes.iter().any(|cause| text.contains(cause)), "{text}");
        assert!(!output.status.success());
    }
}
