//! The `ferrite` command on a host without RDMA devices, such as a build host. It starts, names the
//! missing part and the remedy, and exits with the code for missing RDMA. rdma-core may be
//! installed or not. The tests that need no such host run everywhere.

mod host {
    mod logs;
}

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use ferrite_testkit::process::signal;
use ferrite_testkit::{TIMEOUT, TempDir, Terminal};
use serde_json::Value;

/// The exit code on a host without usable RDMA.
const UNAVAILABLE: i32 = 69;

fn ferrite(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ferrite")).args(arguments).output().expect("ferrite starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Invocations that need RDMA.
const COMMANDS: [&[&str]; 10] = [
    &["devices"],
    &["pingpong", "10.0.0.1"],
    &["pingpong", "--listen", "10.0.0.1:7471"],
    &["bench", "fabric", "10.0.0.1"],
    &["bench", "fabric", "--listen", "10.0.0.1:7472"],
    &["bench", "stream", "10.0.0.1"],
    &["bench", "stream", "--listen", "10.0.0.1:7473"],
    &["bench", "kv", "10.0.0.1", "--rdma", "require"],
    &["gateway", "--rdma", "require", "--listen", "127.0.0.1:0"],
    &["relay", "--rdma", "require", "--to", "10.0.0.1"],
];

/// Returns whether this host has a device. Tests of its absence are then skipped.
fn has_device() -> bool {
    Path::new("/sys/class/infiniband").read_dir().is_ok_and(|mut devices| devices.next().is_some())
}

#[test]
fn prints_absence_as_one_paragraph_with_its_remedy() {
    if has_device() {
        return;
    }
    for arguments in COMMANDS {
        let output = ferrite(arguments);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(UNAVAILABLE), "{arguments:?}: {message}");
        assert_eq!(text(&output.stdout), "", "{arguments:?}");
        assert_eq!(message.trim_end().lines().count(), 1, "{arguments:?}: {message}");
        let parts =
            ["the library is missing", "the kernel support is missing", "a device is missing"];
        assert!(parts.iter().any(|part| message.contains(part)), "{arguments:?}: {message}");
        assert!(message.contains("What to do: "), "{arguments:?}: {message}");
    }
}

#[test]
fn prints_absence_as_json_object() {
    if has_device() {
        return;
    }
    for arguments in COMMANDS {
        let output = ferrite(&[arguments, &["--json"]].concat());
        assert_eq!(output.status.code(), Some(UNAVAILABLE), "{arguments:?}");
        let object: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let error = &object["error"];
        assert_eq!(error["kind"], "absent", "{object}");
        let missing = error["missing"].as_str().expect("the missing part");
        assert!(["library", "kernel", "device"].contains(&missing), "{object}");
        assert!(error["remedy"].as_str().is_some_and(|remedy| !remedy.is_empty()), "{object}");
    }
}

#[test]
fn does_not_link_rdma_core() {
    let output =
        Command::new("ldd").arg(env!("CARGO_BIN_EXE_ferrite")).output().expect("ldd starts");
    let libraries = text(&output.stdout);
    assert!(libraries.contains("libc.so"), "{libraries}");
    assert!(!libraries.contains("libibverbs") && !libraries.contains("librdmacm"), "{libraries}");
}

#[test]
fn exits_with_2_on_wrong_usage() {
    for arguments in [
        &["pingpong"][..],
        &["pingpong", "10.0.0.1", "--listen", "10.0.0.1"],
        &["pingpong", "10.0.0.1", "--size", "0"],
        &["pingpong", "10.0.0.1:port"],
        &["pingpong", "--listen", "10.0.0.1", "--op", "read"],
        &["pingpong", "10.0.0.1", "--forever"],
        &["bench"],
        &["bench", "fabric"],
        &["bench", "fabric", "10.0.0.1", "--listen", "10.0.0.1"],
        &["bench", "fabric", "10.0.0.1", "--size", "3mb"],
        &["bench", "fabric", "10.0.0.1", "--op", "atomic"],
        &["bench", "fabric", "10.0.0.1", "--iters", "5", "--seconds", "1"],
        &["bench", "fabric", "10.0.0.1", "--once"],
        &["bench", "fabric", "--listen", "10.0.0.1", "--links", "2"],
        &["bench", "kv", "10.0.0.1", "--threads", "20", "--connections", "5"],
        &["gateway", "--max-clients", "0"],
        &["gateway", "--config", "/nonexistent/ferrite.toml"],
        &["gateway", "--listen", "[10.0.0.1]:6380"],
        &["relay"],
        &["server", "--no-such-option"],
        &["server", "--config", "/nonexistent/ferrite.toml"],
        &["config", "--program", "module", "--", "memory-pool-max", "8gb"],
        &["no-such-command"],
    ] {
        assert_eq!(ferrite(arguments).status.code(), Some(2), "{arguments:?}");
    }
    for command in [&["pingpong"][..], &["bench", "fabric"], &["bench", "stream"]] {
        let message = text(&ferrite(command).stderr);
        assert!(message.contains(" --listen ADDRESS"), "{command:?}: {message}");
    }
    let output = ferrite(&["pingpong", "10.0.0.1", "--op", "write", "--mode", "event"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("a write completes nothing at its receiver"));
}

#[test]
fn config_check_prints_problems_and_exits_with_2() {
    let directory = ferrite_testkit::TempDir::new("config-check");
    let file = directory.file("ferrite.toml", "[network]\nrdma-device = \"a\"\n");
    let file = file.to_str().expect("UTF-8");
    let output = ferrite(&["--json", "config", "check", file]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    let object: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(object["problems"][0]["message"], "unknown key; write network.rdma_device");
    let output = ferrite(&["config", "check", file]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stdout).contains("ferrite.toml:2: network.rdma-device: "));
}

/// Returns the first event that a program with `--json` prints, which is `listening`. Its stdout
/// must be piped.
fn first_event(program: &mut Child) -> Value {
    let mut line = String::new();
    let stdout = program.stdout.as_mut().expect("piped");
    BufReader::new(stdout).read_line(&mut line).expect("a line");
    serde_json::from_str(&line).expect("JSON")
}

/// The gateway accepts several addresses, names, and IPv6 addresses in brackets.
#[test]
fn gateway_listens_on_several_addresses_and_names() {
    let has_ipv6 = std::net::TcpListener::bind("[::1]:0").is_ok();
    let listen = if has_ipv6 { "localhost:0,[::1]:0" } else { "localhost:0,127.0.0.2:0" };
    let mut gateway = Command::new(env!("CARGO_BIN_EXE_ferrite"))
        .args(["gateway", "--json", "--listen", listen, "--engine", "localhost:1"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("ferrite starts");
    let event = first_event(&mut gateway);
    let addresses = event["addresses"].as_array().expect("addresses");
    assert_eq!(addresses.len(), 2, "{event}");
    for address in addresses {
        // The engine does not answer, and the gateway says so.
        let mut client = TcpStream::connect(address.as_str().expect("text")).expect("it listens");
        client.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
        client.write_all(b"PING\r\n").expect("to write");
        let mut reply = String::new();
        let _ = client.read_to_string(&mut reply);
        assert!(reply.starts_with("-ERR Ferrite gateway: cannot connect"), "{address}: {reply}");
    }
    signal("TERM", gateway.id());
    assert!(gateway.wait().expect("it ends").success());
}

/// A script may read only the first event, and then close its end of the pipe.
#[test]
fn a_closed_stdout_does_not_fail_a_gateway_or_a_relay() {
    let gateway = ["gateway", "--listen", "127.0.0.1:0", "--engine", "unix:/nonexistent"];
    let relay = ["relay", "--listen", "127.0.0.1:0", "--to", "127.0.0.1:1"];
    for arguments in [&gateway[..], &relay] {
        let mut process = Command::new(env!("CARGO_BIN_EXE_ferrite"))
            .args(arguments)
            .args(["--json", "--rdma", "forbid"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("ferrite starts");
        assert_eq!(first_event(&mut process)["event"], "listening");
        drop(process.stdout.take());
        signal("TERM", process.id());
        assert_eq!(process.wait().expect("it ends").code(), Some(0), "{arguments:?}");
    }
}

#[test]
fn relay_names_the_fix_for_an_address_in_use() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("listen");
    let address = taken.local_addr().expect("an address").to_string();
    let output = ferrite(&["relay", "--to", "127.0.0.1:1", "--listen", &address]);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("choose another port"), "{message}");
}

#[test]
fn writes_man_pages_and_completions() {
    let directory = TempDir::new("manuals");
    let path = directory.path().to_str().expect("UTF-8");
    let output = ferrite(&["--write-manuals", path]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    for name in ["ferrite.1", "ferrite-server.1", "ferrite.bash", "_ferrite", "ferrite.fish"] {
        let written = std::fs::read_to_string(directory.path().join(name)).expect(name);
        assert!(written.contains("ferrite"), "{name}");
        for internal in ["write-manuals", "server-exec"] {
            assert!(!written.contains(internal), "{name} shows the internal {internal}");
        }
    }
    for name in ["ferrite-help.1", "ferrite-bench-help-kv.1"] {
        assert!(!directory.path().join(name).exists(), "{name} repeats another page");
    }
}

#[test]
fn prints_help_and_version() {
    let version = text(&ferrite(&["--version"]).stdout);
    assert!(version.starts_with("ferrite 0."), "{version}");
    for line in ["\ncommit: ", "\nbuild: ", "-linux-", "\nrdma-core: "] {
        assert!(version.contains(line), "{line:?} is not in {version}");
    }
    for command in [&["devices"][..], &["pingpong"], &["bench", "fabric"]] {
        let help = ferrite(&[command, &["--help"]].concat());
        assert!(help.status.success() && text(&help.stdout).contains("JSON fields"), "{command:?}");
    }
}

#[test]
fn help_lists_the_exit_codes_once() {
    for arguments in [&["--help"][..], &["server", "--help"]] {
        let help = text(&ferrite(arguments).stdout);
        assert!(help.contains(&ferrite_config::exit_code::help()), "{arguments:?}: {help}");
        assert_eq!(help.matches("Exit codes").count(), 1, "{arguments:?}: {help}");
    }
}

/// Returns a pipe that nobody reads.
fn closed_pipe() -> Stdio {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    writer.into()
}

#[test]
fn stdout_that_nobody_reads_ends_a_command_without_a_message() {
    for arguments in [&["config"][..], &["config", "schema"], &["--version"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        let output = command.args(arguments).stdout(closed_pipe()).output().expect("ferrite");
        assert_eq!(text(&output.stderr), "", "{arguments:?}");
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    }
}

#[test]
fn a_full_disk_behind_stdout_is_a_failure_with_its_cause() {
    for arguments in [&["config"][..], &["config", "reference"], &["--version"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").expect("/dev/full");
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        let output = command.args(arguments).stdout(full).output().expect("ferrite");
        let message = text(&output.stderr);
        assert!(
            message.starts_with("ferrite: cannot write to stdout: No space left"),
            "{arguments:?}: {message}"
        );
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    }
}

#[test]
fn a_gateway_goes_on_without_a_reader_of_its_events() {
    let arguments = ["gateway", "--json", "--rdma", "forbid", "--listen", "127.0.0.1:0"];
    let mut gateway = Command::new(env!("CARGO_BIN_EXE_ferrite"))
        .args(arguments)
        .args(["--engine", "127.0.0.1:1"])
        .stdout(closed_pipe())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a gateway");
    // The warning about the engine follows the event `listening`.
    let mut log = BufReader::new(gateway.stderr.take().expect("stderr"));
    let mut line = String::new();
    log.read_line(&mut line).expect("a line");
    assert!(line.contains("does not answer"), "{line}");
    let pid = gateway.id().to_string();
    assert!(Command::new("kill").arg(pid).status().expect("kill").success());
    let status = gateway.wait().expect("its end");
    let mut rest = String::new();
    log.read_to_string(&mut rest).expect("the log");
    assert_eq!((status.code(), rest.as_str()), (Some(0), ""));
}

#[test]
fn a_file_that_cannot_be_read_is_wrong_usage() {
    for arguments in [
        &["config", "check", "/nonexistent.toml"][..],
        &["config", "--config", "/nonexistent.toml"],
        &["gateway", "--config", "/nonexistent.toml"],
        &["server", "--config", "/nonexistent.toml"],
    ] {
        let output = ferrite(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert_eq!(
            text(&output.stderr),
            "ferrite: cannot read /nonexistent.toml: No such file or directory (os error 2)\n",
            "{arguments:?}"
        );
    }
}

#[test]
fn colors_of_the_log_obey_no_color() {
    let lines = |no_color: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        // No host has this address, which is reserved for documentation. The relay logs that there
        // is no RDMA, then fails.
        command.args(["relay", "--to", "127.0.0.1:1", "--listen", "192.0.2.1:7000"]);
        command.env("NO_COLOR", no_color);
        let (status, text) = Terminal::start(&command, 500, 30).finish();
        assert_eq!(status.code(), Some(1), "{text}");
        text
    };
    let hint = "; this host has no such address (`ip addr` lists those it has)";
    let plain = lines("1");
    assert!(!plain.contains('\x1b') && plain.contains(hint), "{plain}");
    if !has_device() {
        assert!(plain.contains(" WARN RDMA is unavailable"), "{plain}");
        assert!(lines("").contains('\x1b'), "an empty NO_COLOR counts as unset");
    }
}

#[test]
fn the_gateway_needs_the_address_of_its_engine() {
    for engine in ["auto", "127.0.0.1"] {
        let output = ferrite(&["gateway", "--listen", "127.0.0.1:0", "--engine", engine]);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains("HOST:PORT"), "{message}");
    }
}

#[test]
fn a_benchmark_names_the_socket_that_it_cannot_open() {
    let output = ferrite(&["bench", "kv", "--unix", "/nonexistent/socket"]);
    let message = text(&output.stderr);
    assert!(message.contains("cannot connect: /nonexistent/socket: No such file"), "{message}");
    assert_eq!(output.status.code(), Some(1));
}
