//! Breaking the guest's network by the tools an operator has (ip, tc, rdma), and mending it,
//! however the test ends.

use std::process::Command;
use std::time::{Duration, Instant};

use ferrite_verbs::{CmEventKind, cm};

use crate::harness::{HOSTS, TEST_TIMEOUT, any_port, verbs};

/// Runs a command line of the system's tools.
#[track_caller]
pub(crate) fn sh(command: &str) {
    let status = Command::new("sh").args(["-c", command]).status().expect("sh");
    assert!(status.success(), "{command}: {status}");
}

/// Breaks something; it is mended when the result is dropped.
#[track_caller]
pub(crate) fn fault(cause: &str, mend: &'static str) -> Mend {
    let mended_later = Mend(mend);
    sh(cause);
    mended_later
}

pub(crate) struct Mend(pub(crate) &'static str);

impl Drop for Mend {
    fn drop(&mut self) {
        // Not `sh`: a second panic would hide the first.
        let mended =
            Command::new("sh").args(["-c", self.0]).status().is_ok_and(|status| status.success());
        assert!(mended || std::thread::panicking(), "cannot mend: {}", self.0);
        hosts_come_up();
    }
}

/// A wire that can be made bad under traffic: on the bridge's port to the other host, not where the
/// packets are sent. There, to put a queueing discipline in the place of another makes sends fail
/// for a moment, and Soft-RoCE ends a queue pair for good when a send fails, that of the connection
/// manager (GSI) too: no connection can be made through the device any more.
pub(crate) struct Wire {
    netdevs: &'static [&'static str],
    _mend: Mend,
}

impl Wire {
    /// For what these interfaces send.
    pub(crate) fn new(netdevs: &'static [&'static str]) -> Self {
        let mend = Mend(
            "tc qdisc del dev p1 root 2>/dev/null; tc qdisc del dev p2 root 2>/dev/null; true",
        );
        let wire = Self { netdevs, _mend: mend };
        wire.tc("add", "delay 0");
        wire
    }

    /// Makes it so: `loss 5%`.
    pub(crate) fn set(&self, netem: &str) {
        self.tc("change", netem);
    }

    fn tc(&self, verb: &str, netem: &str) {
        for netdev in self.netdevs {
            let port = if *netdev == "h1" { "p2" } else { "p1" };
            sh(&format!("tc qdisc {verb} dev {port} root netem {netem}"));
        }
    }
}

/// Ports come back, and with them the addresses, a moment after their interfaces.
fn hosts_come_up() {
    let deadline = Instant::now() + TEST_TIMEOUT;
    while Instant::now() < deadline && !hosts_are_up() {
        std::thread::sleep(Duration::from_millis(20));
    }
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

/// Makes the devices anew when the test ends. When the kernel cannot send a message of its
/// connection manager, because the interface is down, Soft-RoCE ends the queue pair that carries
/// such messages (GSI) and nothing ever brings it back: no connection can be made through the
/// device any more. So a test that takes an interface down begins with this.
pub(crate) struct Renewal;

impl Drop for Renewal {
    fn drop(&mut self) {
        for (host, netdev) in HOSTS.into_iter().zip(["h1", "h2"]) {
            let renewed = renew(host, netdev);
            assert!(renewed.is_some() || std::thread::panicking(), "{host:?} cannot be made anew");
        }
        hosts_come_up();
    }
}

fn renew(host: (&str, &str), netdev: &str) -> Option<()> {
    // librdmacm holds the device too, and lets go when it loses an identifier that has heard of the
    // removal.
    let listener = cm::Listener::bind(&verbs(), any_port(host), 1).ok()?;
    let mut removal = Command::new("rdma").args(["link", "delete", host.0]).spawn().ok()?;
    let event = listener.id().channel().wait_event(TEST_TIMEOUT).ok()??;
    drop(listener);
    let deadline = Instant::now() + TEST_TIMEOUT;
    while removal.try_wait().ok()?.is_none() {
        // The fabrics that a test has left behind end within seconds.
        if event.kind != CmEventKind::DEVICE_REMOVAL || Instant::now() > deadline {
            return None;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let add = ["link", "add", host.0, "type", "rxe", "netdev", netdev];
    Command::new("rdma").args(add).status().ok()?.success().then_some(())
}
