//! One side of a session: its fabric, its links, and the memory that the peer may access.

use std::net::{IpAddr, SocketAddr};

use ferrite_fabric::mem::Buf;
use ferrite_fabric::wire::{GrantToken, Rights};
use ferrite_fabric::{Config, Fabric, Link, Rdma, Region};
use ferrite_verbs::Verbs;

use super::protocol::{CONTROL, Reply, receive_control, receive_grant};
use super::{IDLE_MAX, LINKS_MAX, Options, SIZE_MAX};
use crate::choice::Mode;

/// One side of a session.
pub(super) struct Side {
    pub(super) fabric: Fabric,
    /// The links, in the same order on both sides. The first link carries the control messages.
    pub(super) links: Vec<Link>,
}

impl Side {
    /// Returns the link for control messages.
    pub(super) fn control_link(&self) -> &Link {
        &self.links[0]
    }

    /// Receives the server's reply. A refusal is an error.
    pub(super) async fn receive_reply(&self) -> anyhow::Result<Reply> {
        match receive_control(self.control_link()).await? {
            Reply::Refused { why } => anyhow::bail!("the server rejected the request: {why}"),
            reply => Ok(reply),
        }
    }

    /// Returns the link of a round. The rounds use the links in turn.
    pub(super) fn link_of_round(&self, round: u64) -> &Link {
        let count = self.links.len() as u64;
        &self.links[usize::try_from(round % count).unwrap_or(0)]
    }

    /// Registers memory of `size` bytes for each link and sends the grant over that link.
    pub(super) fn expose(&self, size: u32, rights: Rights) -> anyhow::Result<Vec<Region>> {
        let regions = self.links.iter().map(|link| {
            let mut buf = self.fabric.buffer(size as usize)?;
            buf.fill(0); // the peer must not see what the buffer held before
            let region = link.register_memory(buf, rights).map_err(|(_, error)| error)?;
            link.post_bytes(CONTROL, &region.grant(link).encode())?;
            Ok(region)
        });
        regions.collect()
    }

    /// Receives the grants of the peer, one from each link.
    pub(super) async fn grants(&self) -> anyhow::Result<Vec<GrantToken>> {
        let mut grants = Vec::with_capacity(self.links.len());
        for link in &self.links {
            grants.push(receive_grant(link).await?);
        }
        Ok(grants)
    }

    /// Builds a message of `size` bytes that ends in `last`.
    pub(super) fn message(&self, size: u32, last: u8) -> anyhow::Result<Buf> {
        let mut buf = self.fabric.buffer(size as usize)?;
        buf.fill(0x5a);
        if let Some(byte) = buf.last_mut() {
            *byte = last;
        }
        Ok(buf.freeze())
    }

    /// Sets how the fabric waits from now on.
    pub(super) fn set_mode(&self, mode: Mode) {
        self.fabric.set_busy_poll_us(match mode {
            Mode::Poll => u32::MAX,
            Mode::Event => 0,
        });
    }
}

/// Builds a fabric that requires RDMA, allows the largest messages and the most links of a
/// benchmark, and sleeps while it waits. It uses the device with the address `local`, or all
/// devices if `local` is `None` or no device has this address.
pub(super) fn fabric(
    verbs: &Verbs,
    local: Option<IpAddr>,
    options: &Options,
) -> anyhow::Result<Fabric> {
    let default = Config::default();
    let config = Config {
        busy_poll_us: 0,
        recv_buffer_size: options.recv_buffer_size.unwrap_or(default.recv_buffer_size),
        max_message_bytes: SIZE_MAX.into(),
        max_connections: (IDLE_MAX + LINKS_MAX) as usize,
        ..default
    };
    let builder = Fabric::builder(verbs).rdma(Rdma::Require).config(config);
    let builder = match local.map(|local| device_of(verbs, local)).transpose()?.flatten() {
        Some(device) => builder.device(device),
        None => builder,
    };
    Ok(builder.build()?)
}

/// Returns the RoCE device with this address.
pub(in crate::bench) fn device_of(verbs: &Verbs, local: IpAddr) -> anyhow::Result<Option<String>> {
    for device in verbs.devices()? {
        let Ok(gids) = device.open().and_then(|context| context.gids()) else { continue };
        if gids.iter().any(|entry| entry.gid.ip() == local) {
            return Ok(Some(device.name()));
        }
    }
    Ok(None)
}

/// Formats an address for the output.
pub(in crate::bench) fn name(addr: Option<SocketAddr>) -> String {
    addr.map_or("?".to_owned(), |addr| addr.to_string())
}
