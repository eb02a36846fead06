//! The RDMA address of one end of a TCP connection: which of ours may carry a link, and which the
//! peer may name.
//!
//! Peers exchange these addresses over TCP, before either has proved anything. A GID that the
//! kernel does not know makes it look for a hardware address, for a second, and whatever has that
//! address gets packets from us. So each side may name one address only: the GID that stands for
//! its end of the TCP connection. GIDs that stand for no IP address are refused: those of
//! InfiniBand, and the link-local ones of RoCE unless TCP itself uses that link-local address.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ferrite_verbs::{
    Access, Gid, GidEntry, GidType, Mtu, Path, PeerAddress, Port, QueuePair, QueuePairAttributes,
};

use super::{RNR_RETRIES, RNR_TIMER, reads};
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::shared_device::SharedDevice;
use crate::wire::Address;

/// From where a link can go on over RDMA.
pub(super) struct Way {
    pub(super) device: Arc<SharedDevice>,
    pub(super) port: Port,
    pub(super) gid: GidEntry,
}

/// The search for a way, where it may wait: the device is asked for its port and addresses.
pub(super) struct Search {
    devices: Vec<Arc<SharedDevice>>,
    no_rdma: Error,
}

impl Search {
    pub(super) fn new(shared: &Shared) -> Self {
        Self { devices: shared.devices.clone(), no_rdma: shared.no_rdma() }
    }

    /// Finds the device with the local address of the TCP connection; RoCE v2 before v1.
    ///
    /// # Errors
    /// No device has that address, or the device with it cannot be used now.
    pub(super) fn find(&self, local: Option<SocketAddr>) -> Result<Way, Error> {
        let local = local.map(|local| local.ip().to_canonical());
        let mut best: Option<Way> = None;
        let mut why = None;
        for device in self.devices.iter().filter(|device| !device.is_gone()) {
            let Some(context) = device.context() else { continue };
            let found = context.active_port().and_then(|port| Ok((port, context.gids()?)));
            let (port, gids) = match found {
                Ok(found) => found,
                Err(error) => {
                    why = Some(Error::from(error));
                    continue;
                }
            };
            for gid in gids.into_iter().filter(|gid| gid.port == port.number) {
                let is_better = match &best {
                    None => true,
                    Some(best) => gid.kind == GidType::ROCE_V2 && best.gid.kind != GidType::ROCE_V2,
                };
                if is_better && Some(gid.gid.ip()) == local {
                    best = Some(Way { device: Arc::clone(device), port: port.clone(), gid });
                }
            }
        }
        best.ok_or_else(|| match (why, local) {
            (Some(why), _) => why,
            (None, Some(local)) if !self.devices.is_empty() => {
                let what =
                    format!("no RDMA device has the address of the TCP connection ({local})");
                Error::new(ErrorKind::Unreachable, what)
            }
            _ => self.no_rdma.clone(),
        })
    }
}

impl Way {
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

/// How a queue pair gets to where it can send and receive.
pub(super) struct Up {
    pub(super) path: Path,
    to: PeerAddress,
    port: u8,
    gid_index: u8,
    reads_in: u8,
    reads_out: u8,
    /// The number of our first packet.
    psn: u32,
    /// What the peer may do to our memory.
    rights: Access,
}

impl Up {
    pub(super) fn new(
        shared: &Shared,
        way: &Way,
        peer: &Address,
        psn: u32,
        rights: Access,
    ) -> Self {
        let config = &shared.config;
        let path = Path {
            mtu: way.port.active_mtu.min(Mtu::from_code(peer.mtu)),
            ack_timeout: config.ack_timeout,
            retries: config.retries,
            rnr_retries: RNR_RETRIES,
            rnr_timer: RNR_TIMER,
        };
        let ours = way.address(shared, 0, psn);
        let to =
            PeerAddress { qp_num: peer.qp_num, psn: peer.psn, gid: Gid(peer.gid), lid: peer.lid };
        Self {
            path,
            to,
            port: way.port.number,
            gid_index: u8::try_from(way.gid.index).unwrap_or(0),
            reads_in: ours.reads_in.min(peer.reads_out),
            reads_out: ours.reads_out.min(peer.reads_in),
            psn,
            rights,
        }
    }

    /// Ready to receive, then to send. The kernel may look for the peer's hardware address.
    pub(super) fn bring(&self, qp: &QueuePair) -> Result<(), Error> {
        let Self { path, to, port, gid_index, reads_in, reads_out, psn, rights } = self;
        let connect = QueuePairAttributes::connect_to(to, *port, *gid_index, path, *reads_in);
        qp.modify(&connect.access(*rights))?;
        Ok(qp.modify(&QueuePairAttributes::ready_to_send(*psn, path, *reads_out))?)
    }
}

/// Checks that the RDMA address a peer names is the one that its TCP connection comes from.
///
/// # Errors
/// [`ErrorKind::Denied`]: it is another, or stands for no IP address.
pub(super) fn check_peer(named: &Address, peer: Option<SocketAddr>) -> Result<(), Error> {
    let named = Gid(named.gid);
    match peer.map(|peer| peer.ip().to_canonical()) {
        Some(peer) if stands_for(named, peer) => Ok(()),
        peer => {
            let peer = peer.map_or_else(|| "an unknown address".into(), |peer| peer.to_string());
            let what =
                format!("the peer at {peer} names the RDMA address {named}, which is not its own");
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
