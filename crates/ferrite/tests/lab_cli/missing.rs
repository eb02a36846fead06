//! The messages of the commands if a library, the connection manager, a device, a permission or
//! memory is missing, or if a port is down.

use std::process::{Command, Output};

use ferrite_testkit::TIMEOUT;
use ferrite_testkit::wait::comes_true;

use crate::{output, text};

/// Runs the command in a mount namespace of its own, after the shell command `hide` has hidden
/// something.
fn without(hide: &str, arguments: &[&str]) -> Output {
    let line = format!("{hide} && exec {} {}", env!("CARGO_BIN_EXE_ferrite"), arguments.join(" "));
    Command::new("unshare").args(["--mount", "sh", "-c", &line]).output().expect("unshare")
}

fn expect_missing(output: &Output, part: &str, remedy: &str) {
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(69), "{message}");
    assert!(message.contains(&format!("{part} missing: ")), "{message}");
    assert!(message.contains("What to do: ") && message.contains(remedy), "{message}");
    assert_eq!(message.trim_end().lines().count(), 1, "{message}");
}

const LISTEN: [&str; 3] = ["pingpong", "--listen", "10.0.0.1:7490"];

#[test]
fn explains_a_missing_library() {
    let hide = "mount --bind /dev/null /usr/lib/x86_64-linux-gnu/libibverbs.so.1";
    expect_missing(&without(hide, &["devices"]), "the library is", "apt-get install libibverbs1");
    expect_missing(&without(hide, &LISTEN), "the library is", "apt-get install libibverbs1");
}

/// Without the connection manager, devices can be listed, but no connection can be made.
#[test]
fn explains_a_missing_connection_manager() {
    let hide = "mount --bind /dev/null /dev/infiniband/rdma_cm";
    let output = without(hide, &["devices"]);
    assert!(
        output.status.success() && text(&output.stdout).contains("modprobe rdma_ucm"),
        "{output:?}"
    );
    expect_missing(&without(hide, &LISTEN), "the connection manager is", "modprobe rdma_ucm");
    let hide = "mount --bind /dev/null /usr/lib/x86_64-linux-gnu/librdmacm.so.1";
    expect_missing(&without(hide, &LISTEN), "the library is", "librdmacm1");
}

/// On drop, restores both devices and waits until they have their addresses.
struct RestoreDevices;

impl Drop for RestoreDevices {
    fn drop(&mut self) {
        let line = "for i in 1 2; do ip link set h$i up; rdma link show rxe$i/1 >/dev/null 2>&1 ||
                      rdma link add rxe$i type rxe netdev h$i; done";
        let _ = Command::new("sh").args(["-c", line]).status();
        let ready = || {
            let shown = text(&output(&["devices"]).stdout);
            shown.contains("  10.0.0.1 ")
                && shown.contains("  10.0.0.2 ")
                && !shown.contains("DOWN")
        };
        let _ = comes_true(TIMEOUT, ready);
    }
}

#[test]
fn explains_a_missing_device() {
    let _restore = RestoreDevices;
    for device in ["rxe1", "rxe2"] {
        assert!(
            Command::new("rdma").args(["link", "delete", device]).status().expect("rdma").success()
        );
    }
    expect_missing(&output(&["devices"]), "a device is", "rdma link add");
    expect_missing(&output(&LISTEN), "a device is", "rdma link add");
}

#[test]
fn shows_a_port_that_is_down_with_its_remedy() {
    let _restore = RestoreDevices;
    assert!(Command::new("ip").args(["link", "set", "h1", "down"]).status().expect("ip").success());
    let shown = text(&output(&["devices"]).stdout);
    assert!(shown.contains("port 1: DOWN") && shown.contains("ip link set h1 up"), "{shown}");
}

/// Runs the command as a user without rights, after `prepare`, in a mount namespace of its own.
fn as_nobody(prepare: &str, arguments: &[&str]) -> Output {
    let nobody = "exec setpriv --reuid=65534 --regid=65534 --clear-groups";
    let program = env!("CARGO_BIN_EXE_ferrite");
    let line = format!("{prepare} && {nobody} {program} {}", arguments.join(" "));
    Command::new("unshare").args(["--mount", "sh", "-c", &line]).output().expect("unshare")
}

#[test]
fn explains_a_missing_permission() {
    // Copies of the device files that only root may use.
    let close = "cp -a /dev/infiniband /tmp/closed-$$ && chmod 600 /tmp/closed-$$/* &&
                 mount --bind /tmp/closed-$$ /dev/infiniband";
    let remedy = "What to do: add the user to the group of the files in /dev/infiniband (usually \
                  rdma), or write a udev rule (KERNEL==\"uverbs*|rdma_cm\", MODE=\"0666\"); then log \
                  in again, or restart the service.";
    for (arguments, file) in [
        (&["pingpong", "--listen", "10.0.0.1:7490"][..], "/dev/infiniband/rdma_cm"),
        // The gateway asks the connection manager which device has the address.
        (&["gateway", "--rdma", "require", "--listen", "10.0.0.1"], "/dev/infiniband/rdma_cm"),
        (&["gateway", "--rdma", "require", "--listen", "0.0.0.0"], "/dev/infiniband/uverbs0"),
        (&["devices"], "/dev/infiniband/uverbs0"),
    ] {
        let output = as_nobody(close, arguments);
        let message = text(&output.stderr) + &text(&output.stdout);
        assert_eq!(output.status.code(), Some(69), "{arguments:?}: {message}");
        assert!(message.contains(&format!("permission denied on {file}")), "{message}");
        assert!(message.contains(remedy), "{arguments:?}: {message}");
        assert!(!message.contains("modprobe"), "{arguments:?}: {message}");
    }
}

/// The message says how much memory is needed in all. The command works with that much.
#[test]
fn names_the_whole_memory_that_is_needed() {
    let open = "chmod 666 /dev/infiniband/*";
    let limited = |mib: u64, arguments: &[&str]| {
        let limit = format!("{open} && ulimit -l {}", mib << 10);
        as_nobody(&limit, arguments)
    };
    let gateway = ["gateway", "--rdma", "require", "--listen", "0.0.0.0:7491"];
    let output = limited(8, &gateway);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(69), "{message}");
    assert!(
        message.contains("the locked-memory limit is 8 MiB") && message.contains("for 2 devices"),
        "{message}"
    );
    let needed = message.split("about ").nth(1).and_then(|rest| rest.split(' ').next());
    let needed: u64 = needed.and_then(|number| number.parse().ok()).expect("a number of MiB");
    assert!(needed > 8, "{message}");
    // With this much memory, the gateway runs until `timeout` stops it.
    let short = [&["timeout", "-s", "TERM", "5", env!("CARGO_BIN_EXE_ferrite")][..], &gateway];
    let line = format!(
        "{open} && ulimit -l {} && exec setpriv --reuid=65534 --regid=65534 --clear-groups {}",
        needed << 10,
        short.concat().join(" ")
    );
    let enough = Command::new("sh").args(["-c", &line]).output().expect("sh");
    let message = text(&enough.stderr);
    assert!(message.contains("RDMA on rxe1, rxe2"), "{message}");
}
