//! What both sides have: a fabric, the links between them, and memory that the other side may
//! reach.

use std::net::{IpAddr, SocketAddr};

use ferrite_fabric::mem::Buf;
use ferrite_fabric::wire::{GrantToken, Rights};
use ferrite_fabric::{Config, Fabric, Link, Rdma, Region};
use ferrite_verbs::Verbs;

use super::talk::{TALK, hear_grant};
use super::{IDLE_MAX, LINKS_MAX, Options, SIZE_MAX};
use crate::choice::Mode;

/// One side of a session.
pub(super) struct Ends {
    pub(super) fabric: Fabric,
    /// In the same order on both sides. The first carries what is said.
    pub(super) links: Vec<Link>,
}

impl Ends {
    /// Where the two sides talk.
    pub(super) fn talk(&self) -> &Link {
        &self.links[0]
    }

    /// The link of a round: each in its turn.
    pub(super) fn turn(&self, round: u64) -> &Link {
        let count = self.links.len() as u64;
        &self.links[usize::try_from(round % count).unwrap_or(0)]
    }

    /// Registers memory of `size` bytes for each link and tells the peer of it there.
    pub(super) fn expose(&self, size: u32, rights: Rights) -> anyhow::Result<Vec<Region>> {
        let regions = self.links.iter().map(|link| {
            let mut buf = self.fabric.buffer(size as usize)?;
            buf.fill(0); // peers see what its last user left there
            let region = link.register_memory(buf, rights).map_err(|(_, error)| error)?;
            link.post_bytes(TALK, &region.grant(link).encode())?;
            Ok(region)
        });
        regions.collect()
    }

    /// What the peer exposed, link by link.
    pub(super) async fn grants(&self) -> anyhow::Result<Vec<GrantToken>> {
        let mut grants = Vec::with_capacity(self.links.len());
        for link in &self.links {
            grants.push(hear_grant(link).await?);
        }
        Ok(grants)
    }

    /// A message of `size` bytes that ends in `last`.
    pub(super) fn message(&self, size: u32, last: u8) -> anyhow::Result<Buf> {
        let mut buf = self.fabric.buffer(size as usize)?;
        buf.fill(0x5a);
        if let Some(byte) = buf.last_mut() {
            *byte = last;
        }
        Ok(buf.freeze())
    }

    /// From here on the fabric waits like this.
    pub(super) fn set_mode(&self, mode: Mode) {
        self.fabric.set_busy_poll_us(match mode {
            Mode::Poll => u32::MAX,
            Mode::Event => 0,
        });
    }
}

/// A fabric with the fabric's own settings but for what `options` say, on the device that has
/// `local`; on all if none has. It sleeps while it waits.
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

/// The device with this address, as RoCE has it.
pub(in crate::bench) fn device_of(verbs: &Verbs, local: IpAddr) -> anyhow::Result<Option<String>> {
    for device in verbs.devices()? {
        let Ok(gids) = device.open().and_then(|context| context.gids()) else { continue };
        if gids.iter().any(|entry| entry.gid.ip() == local) {
            return Ok(Some(device.name()));
        }
    }
    Ok(None)
}

/// An address for people.
pub(in crate::bench) fn name(addr: Option<SocketAddr>) -> String {
    addr.map_or("?".to_owned(), |addr| addr.to_string())
}
