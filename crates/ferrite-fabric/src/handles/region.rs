//! [`Region`]: a buffer that its owner has opened to peers.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::link::Link;
use crate::device::shared_device::SharedDevice;
use crate::error::{Error, ErrorKind};
use crate::fabric::Fabric;
use crate::fabric::regions::RegionShared;
use crate::fabric::timers::Timer;
use crate::mem::BufMut;
use crate::policy::Rdma;
use crate::wire::{GrantToken, Rights};

/// A buffer that peers with a grant may access, until the region is revoked.
///
/// Dropping the region revokes it at once. If the device is still binding the memory window of a
/// grant, the region is revoked as soon as the device has bound it.
///
/// ```
/// use ferrite_fabric::wire::Rights;
/// # use ferrite_fabric::Fabric;
/// # use ferrite_verbs::fake::{DeviceSpec, World};
/// # let world = World::new();
/// # world.add_device(DeviceSpec::new("fake1", "127.0.0.1".parse()?));
/// # let fabric = Fabric::builder(&world.verbs()).build()?;
/// # let mut listener = fabric.listen("127.0.0.1:0".parse()?)?;
/// # let (there, here) = fabric.block_on(async {
/// #     let connecting = fabric.connect(listener.local_addr());
/// #     let (there, here) = futures_util::join!(connecting, listener.accept());
/// #     Ok::<_, ferrite_fabric::Error>((there?, here?))
/// # })?;
/// let mut buf = fabric.buffer(4096)?;
/// buf.fill(7);
/// let region = here.register_memory(buf, Rights::READ).map_err(|(_, error)| error)?;
/// let token = region.grant(&here); // to be sent to the peer in a message
///
/// let copy = fabric.block_on(there.rdma_read(&token, 100, fabric.buffer(8)?)?)?;
/// assert_eq!(&copy[..], [7; 8]);
///
/// let buf = fabric.block_on(region.revoke())?; // nobody reads it any more
/// assert_eq!(buf.len(), 4096);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Region {
    shared: Arc<RegionShared>,
    fabric: Fabric,
}

impl Fabric {
    /// Registers `buf` on a device, so that peers with a grant ([`Region::grant`]) can access it
    /// within `rights`.
    ///
    /// **Peers see the contents of the buffer**, so overwrite the data of its previous user.
    ///
    /// # Errors
    /// Returns the buffer with the error if the registration fails, for example because of the
    /// locked-memory limit.
    pub fn register_memory(
        &self,
        device: &str,
        buf: BufMut,
        rights: Rights,
    ) -> Result<Region, (BufMut, Error)> {
        match self.shared().devices.iter().find(|shared| shared.name == device) {
            Some(device) => self.register_on(Some(device), buf, rights),
            None => Err((
                buf,
                Error::new(ErrorKind::Misuse, format!("the fabric has no device {device}")),
            )),
        }
    }

    fn register_on(
        &self,
        device: Option<&Arc<SharedDevice>>,
        buf: BufMut,
        rights: Rights,
    ) -> Result<Region, (BufMut, Error)> {
        if let Some(device) = device.filter(|device| device.is_gone()) {
            return Err((buf, device.absence()));
        }
        let (pool, stays) = (self.pool(), self.config().rdma == Rdma::Prefer);
        let shared = self.shared().regions.register(pool, device, buf, rights, stays)?;
        Ok(Region { shared, fabric: self.clone() })
    }
}

impl Link {
    /// Registers `buf` so that peers may access it: see [`Fabric::register_memory`]. Registers it
    /// on this link's device, or at first on no device if the link is on TCP.
    ///
    /// # Errors
    /// Returns the buffer with the error if the registration fails, for example because of the
    /// locked-memory limit.
    pub fn register_memory(&self, buf: BufMut, rights: Rights) -> Result<Region, (BufMut, Error)> {
        self.fabric().register_on(self.shared().device().as_ref(), buf, rights)
    }
}

impl Region {
    /// Returns the token that the peer of `link` needs. Send it to the peer over this link. The
    /// link is informed when the region is revoked.
    ///
    /// If the device has memory windows, the token is valid on this link only, and each grant uses
    /// one of the device's windows.
    ///
    /// A peer without [`Features::ONE_SIDED`](crate::wire::Features::ONE_SIDED) does not use
    /// grants: its token gives no access.
    #[must_use]
    pub fn grant(&self, link: &Link) -> GrantToken {
        self.shared.grant_to(self.fabric.pool(), link.shared())
    }

    /// Revokes the region after `time`, like [`Region::revoke`].
    #[must_use]
    pub fn expires_in(self, time: Duration) -> Self {
        let id = self.shared.id;
        self.fabric.shared().with_poller(|poller, _| {
            poller.timers.add(Instant::now() + time, Timer::Expiry(id));
        });
        self
    }

    /// Returns the length of the region in bytes, which is never 0.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> usize {
        self.shared.remote.len as usize
    }

    /// Returns the device that the region was created on, or `None` if it was created for a link on
    /// TCP. A link with a grant that is on another device accesses the region through that device.
    #[must_use]
    pub fn device(&self) -> Option<&str> {
        self.shared.device.as_ref().map(|device| device.name.as_str())
    }

    /// Returns whether the region is neither revoked nor being revoked.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.shared.is_live()
    }

    /// Copies bytes out of the region. Returns `false` if it is revoked. A concurrent write of a
    /// peer may be visible in part.
    ///
    /// # Panics
    /// If the range exceeds the region.
    #[must_use]
    pub fn read(&self, offset: usize, out: &mut [u8]) -> bool {
        self.shared.read(offset, out)
    }

    /// Copies bytes into the region. Returns `false` if it is revoked. A peer that reads
    /// concurrently may see only a part of the bytes.
    ///
    /// # Panics
    /// If the range exceeds the region.
    #[must_use]
    pub fn write(&self, offset: usize, bytes: &[u8]) -> bool {
        self.shared.write(offset, bytes)
    }

    /// Revokes the region. When the future is ready, no peer can read or write any byte of it.
    /// Peers have `peer_timeout` to finish operations in progress.
    ///
    /// # Errors
    /// Returns the device's error if the device did not end the registration. The memory then goes
    /// into quarantine: it is not used again before the device releases it.
    pub fn revoke(self) -> Revoking {
        self.fabric.shared().with_poller(|poller, shared| {
            poller.revoke_region(shared, &self.shared);
        });
        Revoking { region: self }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.fabric.shared().regions.forget(self.shared.id);
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("grant", &self.shared.id)
            .field("len", &self.len())
            .field("rights", &self.shared.rights)
            .finish_non_exhaustive()
    }
}

/// A region that is being revoked: see [`Region::revoke`]. Dropping this future revokes the region
/// at once.
#[derive(Debug)]
#[must_use = "only this future returns the buffer"]
pub struct Revoking {
    region: Region,
}

impl Future for Revoking {
    type Output = Result<BufMut, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.region.shared.poll_revoked(cx.waker())
    }
}
