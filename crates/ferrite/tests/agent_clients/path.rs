//! Cuts of the path between one host and all others, on the bridge.

use std::io::Write as _;
use std::process::{Command, Stdio};

use ferrite_testkit::netns::Hosts;

/// The UDP port of RoCE.
const ROCE: u16 = 4791;

/// A cut. Packets that the rules match get lost in both directions. Drop mends everything.
pub(crate) struct Cut<'a> {
    hosts: &'a Hosts,
    device: String,
}

impl<'a> Cut<'a> {
    /// Loses the RoCE packets of a host, and the TCP packets with these ports.
    pub(crate) fn new(hosts: &'a Hosts, host: usize, tcp_ports: &[u16]) -> Self {
        let cut = Self { hosts, device: hosts.bridge_port(host) };
        let device = &cut.device;
        let mut lines = format!("qdisc add dev {device} clsact\n");
        for direction in ["ingress", "egress"] {
            let mut add = |priority, protocol, port: &str| {
                lines += &format!(
                    "filter add dev {device} {direction} protocol ip prio {priority} u32 \
                     match ip protocol {protocol} 0xff match ip {port} 0xffff action drop\n"
                );
            };
            add(1, 17, &format!("dport {ROCE}"));
            for port in tcp_ports {
                add(2, 6, &format!("dport {port}"));
                add(2, 6, &format!("sport {port}"));
            }
        }
        tc(hosts, &lines);
        cut
    }

    /// Loses no more TCP packets.
    pub(crate) fn mend_tcp(&self) {
        let delete = |direction| format!("filter del dev {} {direction} prio 2\n", self.device);
        tc(self.hosts, &(delete("ingress") + &delete("egress")));
    }
}

impl Drop for Cut<'_> {
    fn drop(&mut self) {
        tc(self.hosts, &format!("qdisc del dev {} clsact\n", self.device));
    }
}

/// Runs the lines as commands of tc, in the namespace of the bridge.
#[track_caller]
fn tc(hosts: &Hosts, lines: &str) {
    let status = hosts.within_bridge(|| {
        let mut command = Command::new("tc");
        let mut tc = command.args(["-batch", "-"]).stdin(Stdio::piped()).spawn().expect("tc");
        let written = tc.stdin.take().expect("piped").write_all(lines.as_bytes());
        written.and_then(|()| tc.wait()).expect("tc reads its commands")
    });
    assert!(status.success() || std::thread::panicking(), "tc: {status}: {lines}");
}
