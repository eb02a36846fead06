//! The `ferrite` command on a host without RDMA devices, as build hosts are. It starts, names the
//! missing part and the remedy, and exits with its own code. rdma-core may be installed or not.

use std::path::Path;
use std::process::{Command, Output};

use ferrite_testkit::TempDir;
use serde_json::Value;

/// This host has no usable RDMA.
const UNAVAILABLE: i32 = 69;

fn ferrite(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ferrite")).args(arguments).output().expect("ferrite starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Invocations that need RDMA.
const COMMANDS: [&[&str]; 5] = [
    &["devices"],
    &["pingpong", "10.0.0.1"],
    &["pingpong", "--listen", "10.0.0.1:7471"],
    &["bench", "fabric", "10.0.0.1"],
    &["bench", "fabric", "--listen", "10.0.0.1:7472"],
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
        let missing = error["missing"].as_str().expect("which part");
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
        assert!(!written.contains("write-manuals"), "{name} has what users do not need");
    }
    for name in ["ferrite-help.1", "ferrite-bench-help-kv.1"] {
        assert!(!directory.path().join(name).exists(), "{name} has what another page has");
    }
}

#[test]
fn prints_help_and_version() {
    let version = text(&ferrite(&["--version"]).stdout);
    assert!(version.starts_with("ferrite 0."), "{version}");
    for line in ["\ncommit: ", "\nbuild: ", "-linux-", "\nrdma-core: "] {
        assert!(version.contains(line), "{line:?} is not in {version}");
    }
    assert!(text(&ferrite(&["--help"]).stdout).contains("69 this host has no usable RDMA"));
    for command in [&["devices"][..], &["pingpong"], &["bench", "fabric"]] {
        let help = ferrite(&[command, &["--help"]].concat());
        assert!(help.status.success() && text(&help.stdout).contains("JSON fields"), "{command:?}");
    }
}
