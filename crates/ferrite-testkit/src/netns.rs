//! Hosts in network namespaces of this machine, joined by a bridge. Each has loopback addresses of
//! its own. Needs root.
//!
//! ```text
//!   namespace 1: lo, eth0 10.77.0.1 ──┐
//!   namespace 2: lo, eth0 10.77.0.2 ──┤ bridge, in a namespace of its own
//!   namespace 3: lo, eth0 10.77.0.3 ──┘
//! ```

use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::wait::until;

/// Hosts in network namespaces, numbered from 1. Drop removes them.
#[derive(Debug)]
pub struct Hosts {
    name: String,
    count: usize,
}

impl Hosts {
    /// Creates hosts.
    ///
    /// # Errors
    /// Returns why this process may not create namespaces, for example because it is not root.
    ///
    /// # Panics
    /// If this process may create namespaces, but not the interfaces in them.
    pub fn start(count: usize) -> Result<Self, String> {
        let name = format!("fe{}", std::process::id());
        try_ip(&["netns", "add", &format!("{name}-0")])?;
        let hosts = Self { name, count };
        let bridge = hosts.namespace(0);
        ip(&["-n", &bridge, "link", "add", "br0", "type", "bridge", "mcast_snooping", "0"]);
        ip(&["-n", &bridge, "link", "set", "br0", "up"]);
        for host in 1..=count {
            let (own, port, address) =
                (hosts.namespace(host), format!("p{host}"), format!("{}/24", hosts.ip(host)));
            ip(&["netns", "add", &own]);
            ip(&["-n", &own, "link", "set", "lo", "up"]);
            let veth = ["link", "add", "eth0", "type", "veth", "peer", "name", &port, "netns"];
            ip(&[&["-n", &own][..], &veth, &[&bridge]].concat());
            ip(&["-n", &bridge, "link", "set", &port, "up", "master", "br0"]);
            ip(&["-n", &own, "addr", "add", &address, "dev", "eth0"]);
            ip(&["-n", &own, "link", "set", "eth0", "up"]);
        }
        Ok(hosts)
    }

    /// Creates hosts, as [`Hosts::start`] does. Prints that the test is skipped and returns `None`
    /// if this process may not create namespaces.
    #[must_use]
    #[expect(clippy::print_stderr, reason = "reports that the test is skipped")]
    pub fn start_or_skip(count: usize) -> Option<Self> {
        Self::start(count)
            .inspect_err(|why| eprintln!("SKIPPED: this test needs network namespaces: {why}"))
            .ok()
    }

    /// Gives each host a Soft-RoCE device, which [`Hosts::device`] names. Needs a kernel whose
    /// Soft-RoCE works in namespaces.
    ///
    /// # Panics
    /// If a device cannot be added, or does not get the address of its host.
    pub fn add_devices(&self) {
        (1..=self.count).for_each(|host| self.add_device(host));
        // The kernel's RDMA address lookup can miss the moment when a neighbour becomes known. So
        // each host sends to all others here, before any lookup.
        for host in 1..=self.count {
            self.within(host, || {
                let socket = std::net::UdpSocket::bind("0.0.0.0:0").expect("a socket");
                for other in (1..=self.count).filter(|other| *other != host) {
                    let _ = socket.send_to(b"x", (self.ip(other).as_str(), 9));
                }
            });
        }
    }

    /// Gives a host its Soft-RoCE device, as [`Hosts::add_devices`] does for all hosts.
    ///
    /// # Panics
    /// If the device cannot be added, or does not get the address of its host.
    pub fn add_device(&self, host: usize) {
        let (namespace, device) = (self.namespace(host), self.device(host));
        let add = ["netns", "exec", &namespace, "rdma", "link", "add", &device];
        ip(&[&add[..], &["type", "rxe", "netdev", "eth0"]].concat());
        let gids = format!("/sys/class/infiniband/{device}/ports/1/gids");
        let gid = format!(":ffff:0a4d:00{host:02x}");
        until(Duration::from_secs(30), "a GID of the device", || {
            (0..4).any(|index| {
                let read = std::fs::read_to_string(Path::new(&gids).join(index.to_string()));
                read.is_ok_and(|text| text.trim().ends_with(&gid))
            })
        });
    }

    /// Returns the address of a host.
    #[must_use]
    pub fn ip(&self, host: usize) -> String {
        format!("10.77.0.{host}")
    }

    /// Returns the name of a host's RDMA device.
    #[must_use]
    pub fn device(&self, host: usize) -> String {
        format!("fe_rxe{host}")
    }

    /// Returns the name of the bridge's interface to a host. It is in the namespace of the bridge
    /// ([`Hosts::within_bridge`]).
    #[must_use]
    pub fn bridge_port(&self, host: usize) -> String {
        format!("p{host}")
    }

    /// Runs code on a thread in the namespace of the bridge.
    ///
    /// # Panics
    /// If the code panics.
    pub fn within_bridge<T: Send>(&self, run: impl FnOnce() -> T + Send) -> T {
        self.within_namespace(0, run)
    }

    /// Runs code on a thread of a host. Processes that it starts, and sockets that it opens, belong
    /// to the host.
    ///
    /// # Panics
    /// If the code panics, or the host does not exist.
    pub fn within<T: Send>(&self, host: usize, run: impl FnOnce() -> T + Send) -> T {
        assert!((1..=self.count).contains(&host), "host {host} does not exist");
        self.within_namespace(host, run)
    }

    /// Returns the number of hosts.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    fn within_namespace<T: Send>(&self, host: usize, run: impl FnOnce() -> T + Send) -> T {
        let path = Path::new("/run/netns").join(self.namespace(host));
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let namespace = File::open(&path).expect("a namespace");
                let kind = Some(LinkNameSpaceType::Network);
                move_into_link_name_space(namespace.as_fd(), kind).expect("enter a namespace");
                run()
            });
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn namespace(&self, host: usize) -> String {
        format!("{}-{host}", self.name)
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in 0..=self.count {
            let delete = ["netns", "del", &self.namespace(host)];
            let _ = Command::new("ip").args(delete).status();
        }
    }
}

#[track_caller]
fn ip(words: &[&str]) {
    if let Err(why) = try_ip(words) {
        panic!("{why}");
    }
}

fn try_ip(words: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(words).output();
    let output =
        output.map_err(|error| format!("cannot run ip (Debian's package iproute2): {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("ip {words:?}: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}
