//! Finds the RDMA address that corresponds to this side's end of a TCP connection, and checks the
//! RDMA address that the peer announces.
//!
//! Peers exchange these addresses over TCP, when they may not be authenticated yet. If the kernel
//! does not know a GID, it resolves a hardware address for up to a second, and the owner of that
//! address would get packets from us. So each side may announce only one address: the GID of its
//! end of the TCP connection. GIDs that do not correspond to an IP address are refused. These are
//! the GIDs of InfiniBand, and the link-local GIDs of RoCE unless TCP itself uses that link-local
//! address.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ferrite_verbs::{
    Access, Gid, GidEntry, GidType, Mtu, Path, PeerAddress, Port, QueuePair, QueuePairAttributes,
};

use super::rdma_link::{RNR_RETRIES, reads};
use crate::device::device_choice::DeviceChoice;
use crate::device::shared_device::SharedDevice;
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::wire::Address;

/// The local end of an RDMA path for a link.
pub(super) struct RdmaEndpoint {
    pub(super) device: Arc<SharedDevice>,
    pub(super) port: Port,
    pub(super) gid: GidEntry,
}

/// The search for a local endpoint. It queries the devices for ports and addresses, so it may
/// block.
pub(super) struct EndpointSearch {
    devices: Vec<Arc<SharedDevice>>,
    choice: DeviceChoice,
    no_rdma: Error,
}

impl EndpointSearch {
    pub(super) fn new(shared: &Shared) -> Self {
        let choice = shared.device_choice;
        Self { devices: shared.devices.clone(), choice, no_rdma: shared.no_rdma() }
    }

    /// Finds the device that has the local address of the TCP connection. Prefers RoCE v2 to v1.
    ///
    /// # Errors
    /// Fails if no device has that address, or if the device that has it cannot be used now.
    pub(super) fn find(&self, local: Option<SocketAddr>) -> Result<RdmaEndpoint, Error> {
        let local = local.map(|local| local.ip().to_canonical());
        let mut best: Option<RdmaEndpoint> = None;
        let mut error = None;
        for device in self.devices.iter().filter(|device| !device.is_gone()) {
            let Some(context) = device.context() else { continue };
            let gids = match context.gids() {
                Ok(gids) => gids,
                Err(failed) => {
                    error = Some(Error::from(failed));
                    continue;
                }
            };
            let usable = |gid: &GidEntry| Some(gid.gid.ip()) == local && self.choice.allows(gid);
            for gid in gids.into_iter().filter(usable) {
                let is_better = match &best {
                    None => true,
                    Some(best) => gid.kind == GidType::ROCE_V2 && best.gid.kind != GidType::ROCE_V2,
                };
                if !is_better {
                    continue;
                }
                // Use the port that has the address, not just any active port of the device.
                match context.active_port_numbered(gid.port) {
                    Ok(port) => {
                        best = Some(RdmaEndpoint { device: Arc::clone(device), port, gid });
                    }
                    Err(failed) => error = Some(Error::from(failed)),
                }
            }
        }
        best.ok_or_else(|| match (error, local) {
            (Some(error), _) => error,
            (None, Some(local)) if !self.devices.is_empty() => {
                let what =
                    format!("no RDMA device has the address of the TCP connection ({local})");
                Error::new(ErrorKind::Unreachable, what)
            }
            _ => self.no_rdma.clone(),
        })
    }
}

impl RdmaEndpoint {
    pub(super) fn address(&self, shared: &Shared, qp_num: u32, psn: u32) -> Address {
        let (reads_in, reads_out) = reads(shared, &self.device);
        Address {
            qp_num,
            psn,
            lid: self.port.lid,
            mtu: self.port.active_mtu.code(),
            reads_in,
            reads_out,
            gid: self.gid.gid.0,
        }
    }
}

/// The parameters that connect a queue pair to the peer's queue pair.
pub(super) struct QueuePairSetup {
    pub(super) path: Path,
    to: PeerAddress,
    port: u8,
    gid_index: u8,
    reads_in: u8,
    reads_out: u8,
    /// The sequence number of our first packet.
    psn: u32,
    /// The peer's rights to our memory.
    rights: Access,
}

impl QueuePairSetup {
    pub(super) fn new(
        shared: &Shared,
        endpoint: &RdmaEndpoint,
        peer: &Address,
        psn: u32,
        rights: Access,
    ) -> Self {
        let config = &shared.config;
        let path = Path {
            mtu: endpoint.port.active_mtu.min(Mtu::from_code(peer.mtu)),
            ack_timeout: config.ack_timeout,
            retries: config.retries,
            rnr_retries: RNR_RETRIES,
            rnr_timer: endpoint.device.quirks().rnr_timer,
        };
        let ours = endpoint.address(shared, 0, psn);
        let to =
            PeerAddress { qp_num: peer.qp_num, psn: peer.psn, gid: Gid(peer.gid), lid: peer.lid };
        Self {
            path,
            to,
            port: endpoint.port.number,
            gid_index: u8::try_from(endpoint.gid.index).unwrap_or(0),
            reads_in: ours.reads_in.min(peer.reads_out),
            reads_out: ours.reads_out.min(peer.reads_in),
            psn,
            rights,
        }
    }

    /// Moves the queue pair to ready-to-receive and then to ready-to-send. The kernel may have to
    /// resolve the peer's hardware address.
    pub(super) fn apply(&self, qp: &QueuePair) -> Result<(), Error> {
        let Self { path, to, port, gid_index, reads_in, reads_out, psn, rights } = self;
        let connect = QueuePairAttributes::connect_to(to, *port, *gid_index, path, *reads_in);
        qp.modify(&connect.access(*rights))?;
        Ok(qp.modify(&QueuePairAttributes::ready_to_send(*psn, path, *reads_out))?)
    }
}

/// Checks that the RDMA address that a peer announces belongs to its end of the TCP connection.
///
/// # Errors
/// [`ErrorKind::Denied`] if it belongs to another address, or does not correspond to an IP address.
pub(super) fn check_peer(named: &Address, peer: Option<SocketAddr>) -> Result<(), Error> {
    let named = Gid(named.gid);
    match peer.map(|peer| peer.ip().to_canonical()) {
        Some(peer) if stands_for(named, peer) => Ok(()),
        peer => {
            let peer = peer.map_or_else(|| "an unknown address".into(), |peer| peer.to_string());
            let what = format!(
                "the peer at {peer} announced the RDMA address {named}, which is not its own"
            );
            Err(Error::new(ErrorKind::Denied, what))
        }
    }
}

fn stands_for(gid: Gid, ip: IpAddr) -> bool {
    gid.ip() == ip && !ip.is_unspecified() && !ip.is_multicast()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(gid: &str) -> Address {
        let gid: std::net::Ipv6Addr = gid.parse().expect("an address");
        Address { qp_num: 1, psn: 1, lid: 0, mtu: 3, reads_in: 1, reads_out: 1, gid: gid.octets() }
    }

    #[test]
    fn accepts_the_address_of_the_tcp_connection_only() {
        for (gid, peer, is_good) in [
            ("::ffff:10.0.0.2", "10.0.0.2:4711", true),
            ("::ffff:10.0.0.2", "[::ffff:10.0.0.2]:4711", true),
            ("2001:db8::7", "[2001:db8::7]:4711", true),
            ("fe80::5", "[fe80::5%3]:4711", true),
            ("::ffff:10.0.0.250", "10.0.0.2:4711", false),
            ("2001:db8::8", "[2001:db8::7]:4711", false),
            ("fe80::5054:ff:fe12:3456", "10.0.0.2:4711", false),
            ("::", "0.0.0.0:4711", false),
            ("::ffff:224.0.0.1", "224.0.0.1:4711", false),
        ] {
            let checked = check_peer(&named(gid), Some(peer.parse().expect("an address")));
            assert_eq!(checked.is_ok(), is_good, "{gid} from {peer}: {checked:?}");
        }
        assert!(check_peer(&named("::ffff:10.0.0.2"), None).is_err());
    }
}
