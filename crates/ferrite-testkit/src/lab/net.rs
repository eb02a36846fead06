//! Breaks the guest's network with an operator's tools (ip, tc, rdma). Restores the network even if
//! the test fails.

use std::process::Command;

use ferrite_verbs::{CmEventKind, cm};

use super::{HOSTS, TEST_TIMEOUT, any_port, verbs};
use crate::process::exit_within;
use crate::wait::comes_true;

/// Runs a shell command.
///
/// # Panics
/// If the command fails.
#[track_caller]
pub fn sh(command: &str) {
    let status = Command::new("sh").args(["-c", command]).status().expect("sh");
    assert!(status.success(), "{command}: {status}");
}

/// Breaks a part of the network with the shell command `cause`. Dropping the result restores it.
///
/// # Panics
/// If `cause` fails.
#[track_caller]
#[must_use]
pub fn fault(cause: &str, restore: &'static str) -> Restore {
    let restore = Restore(restore);
    sh(cause);
    restore
}

/// Runs a shell command when it is dropped, to restore the network. Then waits until the hosts are
/// up.
#[derive(Debug)]
pub struct Restore(pub &'static str);

impl Drop for Restore {
    fn drop(&mut self) {
        // Starts the shell directly. The helper `sh()` panics on failure, and a second panic while
        // a test unwinds would hide the first one.
        let restored =
            Command::new("sh").args(["-c", self.0]).status().is_ok_and(|status| status.success());
        assert!(restored || std::thread::panicking(), "cannot restore the network: {}", self.0);
        wait_for_hosts();
    }
}

/// A wire on which a test can inject faults under traffic. The fault is on the bridge's port to the
/// peer's host, not on the sending interface. Replacing the queueing discipline of the sending
/// interface makes sends fail for a moment. When a send fails, Soft-RoCE ends the queue pair for
/// good. If that is the queue pair of the connection manager (GSI), the device cannot make
/// connections any more.
#[derive(Debug)]
pub struct Wire {
    netdevs: &'static [&'static str],
    _restore: Restore,
}

impl Wire {
    /// Prepares faults for the packets that these interfaces send.
    #[must_use]
    pub fn new(netdevs: &'static [&'static str]) -> Self {
        let restore = Restore(
            "tc qdisc del dev p1 root 2>/dev/null; tc qdisc del dev p2 root 2>/dev/null; true",
        );
        let wire = Self { netdevs, _restore: restore };
        wire.tc("add", "delay 0");
        wire
    }

    /// Applies a netem setting, such as `loss 5%`.
    pub fn set(&self, netem: &str) {
        self.tc("change", netem);
    }

    fn tc(&self, verb: &str, netem: &str) {
        for netdev in self.netdevs {
            let port = if *netdev == "h1" { "p2" } else { "p1" };
            sh(&format!("tc qdisc {verb} dev {port} root netem {netem}"));
        }
    }
}

/// Waits until ports and addresses are back, a moment after their interfaces come up.
fn wait_for_hosts() {
    // If they do not come back, a test that needs them fails with a better message.
    let _ = comes_true(TEST_TIMEOUT, hosts_are_up);
}

fn hosts_are_up() -> bool {
    HOSTS.into_iter().all(|(device, ip)| {
        let Ok(context) = verbs().device(device).and_then(|device| device.open()) else {
            return false;
        };
        context.active_port().is_ok()
            && context
                .gids()
                .is_ok_and(|gids| gids.iter().any(|entry| entry.gid.ip().to_string() == ip))
    })
}

/// Recreates the devices when the test ends. A test begins with this if the connection manager may
/// send a message while an interface is down.
///
/// If the interface is down, the kernel cannot send the messages of its connection manager.
/// Soft-RoCE then ends the queue pair for these messages (GSI) and never recovers it, so the device
/// cannot make connections any more.
#[derive(Debug)]
pub struct RecreateDevices;

impl Drop for RecreateDevices {
    fn drop(&mut self) {
        for (host, netdev) in HOSTS.into_iter().zip(["h1", "h2"]) {
            let recreated = recreate(host, netdev);
            assert!(recreated.is_some() || std::thread::panicking(), "cannot recreate {host:?}");
        }
        wait_for_hosts();
    }
}

fn recreate(host: (&str, &str), netdev: &str) -> Option<()> {
    // librdmacm holds the device, too. Dropping an identifier whose channel got the removal event
    // makes librdmacm release the device.
    let listener = cm::Listener::bind(&verbs(), any_port(host), 1).ok()?;
    let mut removal = Command::new("rdma").args(["link", "delete", host.0]).spawn().ok()?;
    let event = listener.id().channel().wait_event(TEST_TIMEOUT).ok()??;
    drop(listener);
    if event.kind != CmEventKind::DEVICE_REMOVAL {
        return None;
    }
    // Fabrics that the test left behind end within seconds.
    exit_within(&mut removal, TEST_TIMEOUT)?;
    let add = ["link", "add", host.0, "type", "rxe", "netdev", netdev];
    Command::new("rdma").args(add).status().ok()?.success().then_some(())
}
