//! Tests of ferrite-cli's URIs, TLS and prompt over TCP, with a real `redis-server` on this host.

use std::process::{Command, Output, Stdio};

use ferrite_testkit::{Engine, TempDir, Terminal, free_port, pem};

fn run(words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite-cli"));
    command.args(words).env_remove("REDISCLI_AUTH").env_remove("SSL_CERT_FILE");
    command.stdin(Stdio::null()).output().expect("start ferrite-cli")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("UTF-8")
}

/// A server that speaks only TLS. It requires a certificate from its clients if `authenticates` is
/// set.
struct TlsServer {
    _redis: Engine,
    _files: TempDir,
    port: String,
    /// The self-signed certificate, and its key.
    cert: String,
    key: String,
}

impl TlsServer {
    fn start(authenticates: bool) -> Self {
        let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()]);
        let certified = certified.expect("create a certificate");
        let files = TempDir::new("cli-tls");
        let cert = files.file("cert.pem", pem("CERTIFICATE", certified.cert.der()));
        let key = files.file("key.pem", pem("PRIVATE KEY", &certified.signing_key.serialize_der()));
        let [cert, key] = [cert, key].map(|file| file.display().to_string());
        let port = free_port().to_string();
        let clients = if authenticates { "yes" } else { "no" };
        let redis = Engine::redis(&[
            "--bind",
            "127.0.0.1",
            "--tls-port",
            &port,
            "--tls-cert-file",
            &cert,
            "--tls-key-file",
            &key,
            "--tls-ca-cert-file",
            &cert,
            "--tls-auth-clients",
            clients,
        ]);
        Self { _redis: redis, _files: files, port, cert, key }
    }
}

#[test]
fn connects_over_tls() {
    let server = TlsServer::start(false);
    let at = ["-h", "localhost", "-p", &server.port];
    let with = |more: &[&str]| run(&[&at[..], more].concat());
    let trusted = with(&["--tls", "--cacert", &server.cert, "--verbose", "PING"]);
    assert_eq!(
        (stdout(&trusted).as_str(), stderr(&trusted).as_str()),
        ("PONG\n", "over TCP with TLS\n")
    );
    let uri = format!("rediss://localhost:{}/3", server.port);
    let by_uri = run(&["-u", &uri, "--cacert", &server.cert, "CLIENT", "INFO"]);
    assert!(stdout(&by_uri).contains(" db=3 "), "{}", stderr(&by_uri));
    let by_system = Command::new(env!("CARGO_BIN_EXE_ferrite-cli"))
        .args(["-u", &uri, "PING"])
        .env("SSL_CERT_FILE", &server.cert)
        .output()
        .expect("start ferrite-cli");
    assert_eq!(stdout(&by_system), "PONG\n", "{}", stderr(&by_system));
    let insecure = with(&["--tls", "--insecure", "PING"]);
    assert_eq!(stdout(&insecure), "PONG\n", "{}", stderr(&insecure));

    let untrusted = with(&["--tls", "PING"]);
    assert_eq!(untrusted.status.code(), Some(1));
    let error = stderr(&untrusted);
    assert!(error.contains("invalid peer certificate") && error.contains("--cacert"), "{error}");
    // The certificate is valid only for `localhost`, not for the address 127.0.0.1.
    let by_address = ["-p", &server.port, "--tls", "--cacert", &server.cert];
    let other_name = run(&[&by_address[..], &["PING"]].concat());
    assert_eq!(other_name.status.code(), Some(1));
    assert!(
        stderr(&other_name).contains("for the name 127.0.0.1 failed: "),
        "{}",
        stderr(&other_name)
    );
    let named = run(&[&by_address[..], &["--sni", "localhost", "PING"]].concat());
    assert_eq!(stdout(&named), "PONG\n", "{}", stderr(&named));
}

/// An engine without TLS reads the TLS handshake as a command, and waits for the end of that
/// command.
#[test]
fn says_that_a_port_may_not_speak_tls() {
    let port = free_port().to_string();
    let _redis = Engine::redis(&["--bind", "127.0.0.1", "--port", &port]);
    let output = run(&["-p", &port, "--tls", "--insecure", "-t", "0.5", "PING"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).ends_with("is it a TLS port?\n"), "{}", stderr(&output));
}

#[test]
fn authenticates_with_a_client_certificate() {
    let server = TlsServer::start(true);
    let options = ["-h", "localhost", "-p", &server.port, "--tls", "--cacert", &server.cert];
    let with = |more: &[&str]| run(&[&options[..], more].concat());
    let known = with(&["--cert", &server.cert, "--key", &server.key, "PING"]);
    assert_eq!(stdout(&known), "PONG\n", "{}", stderr(&known));
    let unknown = with(&["PING"]);
    assert_eq!((unknown.status.code(), stdout(&unknown).as_str()), (Some(1), ""));
    let missing = with(&["--cert", "/nonexistent", "--key", &server.key, "PING"]);
    assert_eq!(missing.status.code(), Some(1));
    let error = stderr(&missing);
    assert!(error.contains("cannot read the certificate /nonexistent: No such file"), "{error}");
    assert_eq!(with(&["--cert", &server.cert, "PING"]).status.code(), Some(2), "without a key");
}

#[test]
fn wrong_ports_and_schemes_are_answered_with_what_is_expected() {
    for (words, why) in [
        (&["-p", "abc", "PING"], "expected a number from 0 to 65535"),
        (&["-p", "65536", "PING"], "expected a number from 0 to 65535"),
        (&["-u", "reds://host", "PING"], "-u: unknown scheme reds://; expected redis://"),
    ] {
        let output = run(words);
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(stderr(&output).contains(why), "{words:?}: {}", stderr(&output));
    }
}

#[test]
fn refuses_tls_options_that_contradict_each_other() {
    for (words, why) in [
        (
            &["--tls", "--rdma", "require", "PING"][..],
            "TLS works only over TCP, but RDMA is required",
        ),
        (
            &["-u", "rediss://host", "--rdma", "require", "PING"],
            "TLS works only over TCP, but RDMA is required",
        ),
        (&["-u", "rediss://host?rdma=require", "PING"], "rediss:// means TLS over TCP"),
        (&["--cacert", "file", "PING"], "--cacert needs --tls or a rediss:// URI"),
        (&["--insecure", "PING"], "--insecure needs --tls"),
    ] {
        let output = run(words);
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(stderr(&output).contains(why), "{words:?}: {}", stderr(&output));
    }
}

#[test]
fn connects_by_uri_to_the_first_server_that_answers() {
    let port = free_port().to_string();
    let _redis = Engine::redis(&["--bind", "127.0.0.1", "--port", &port]);
    let uri = format!("redis://127.0.0.1:1,localhost:{port}/4?rdma=forbid&protocol=3");
    let output = run(&["-u", &uri, "--verbose", "CLIENT", "INFO"]);
    let info = stdout(&output);
    assert!(info.contains(" db=4 ") && info.contains(" resp=3"), "{info}{}", stderr(&output));
    assert_eq!(stderr(&output), "over TCP\n");
    let nobody = run(&["-u", "redis://127.0.0.1:1,127.0.0.1:2?rdma=forbid", "PING"]);
    assert_eq!(
        stderr(&nobody),
        "Could not connect to Redis at 127.0.0.1:1,127.0.0.1:2: 127.0.0.1:1: Connection refused; \
         127.0.0.1:2: Connection refused\n"
    );
}

/// clap's own messages would show the whole URI.
#[test]
fn never_shows_the_password() {
    let port = free_port().to_string();
    let _redis = Engine::redis(&["--bind", "127.0.0.1", "--port", &port]);
    let wrong = format!("redis://me:secret@127.0.0.1:{port}?rdma=forbid");
    for (words, code) in [
        (&["-u", "http://me:secret@host", "PING"][..], 2),
        (&["-u", "redis://me:secret@host:0", "PING"], 2),
        (&["-u", "redis://me:secret@host?x=1", "PING"], 2),
        (&["-u", "redis://me:secret/1@host", "PING"], 2),
        (&["-u", "redis://me:secret", "PING"], 2),
        (&["-u", "me:secret@host", "PING"], 2),
        (&["-u", "rediss://me:secret@host", "--rdma", "require", "PING"], 2),
        (&["-u", "redis://me:secret@127.0.0.1:1?rdma=forbid", "PING"], 1),
        (&["-u", &wrong, "--verbose", "PING"], 0), // AUTH fails, and PING needs no login
        (&["-p", &port, "-a", "secret", "--user", "me", "--no-such-option"], 2),
        (&["-p", &port, "-a", "secret", "--rdb"], 2),
        (&["-p", &port, "--passwd=secret"], 2),
    ] {
        let output = run(words);
        assert_eq!(output.status.code(), Some(code), "{words:?}: {}", stderr(&output));
        let shown = stdout(&output) + &stderr(&output);
        assert!(!shown.contains("secret"), "{words:?}: {shown}");
    }
}

#[test]
fn shows_the_transport_in_the_prompt() {
    let port = free_port().to_string();
    let _redis = Engine::redis(&["--bind", "127.0.0.1", "--port", &port]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite-cli"));
    command.args(["-p", &port, "--rdma", "forbid"]).env("FERRITECLI_HISTFILE", "/dev/null");
    let mut terminal = Terminal::start(&command, 120, 40);
    let screen = &mut terminal.screen;
    screen.expect_next(&format!("127.0.0.1:{port} TCP> "));
    screen.type_keys("SELECT 2\r");
    screen.expect_next(&format!("127.0.0.1:{port}[2] TCP> "));
    screen.type_keys("exit\r");
    assert!(terminal.finish().0.success());
}

/// RDMA is preferred, but loopback has none.
#[test]
fn shows_tcp_in_the_prompt_after_a_fallback() {
    let port = free_port().to_string();
    let _redis = Engine::redis(&["--bind", "127.0.0.1", "--port", &port]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite-cli"));
    command.args(["-p", &port, "--rdma", "prefer"]).env("FERRITECLI_HISTFILE", "/dev/null");
    let mut terminal = Terminal::start(&command, 1000, 40);
    terminal.screen.expect_next("over TCP, because RDMA is unavailable: ");
    terminal.screen.expect_next(&format!("127.0.0.1:{port} TCP> "));
    terminal.screen.type_keys("exit\r");
    assert!(terminal.finish().0.success());
}

#[test]
fn shows_tls_in_the_prompt() {
    let server = TlsServer::start(false);
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite-cli"));
    command.args(["-h", "localhost", "-p", &server.port, "--tls", "--cacert", &server.cert]);
    let mut terminal = Terminal::start(command.env("FERRITECLI_HISTFILE", "/dev/null"), 120, 40);
    terminal.screen.expect_next(&format!("localhost:{} TLS> ", server.port));
    terminal.screen.type_keys("exit\r");
    assert!(terminal.finish().0.success());
}
