//! Memory that a peer may read or write.
//!
//! The peer does not ask before an access, and can be stopped only by invalidating its key. So
//! there is never a `&[u8]` into this memory: bytes are copied in and out. The memory becomes a
//! buffer again only after the device has confirmed that the key is invalid.
#![expect(
    unsafe_code,
    reason = "registers memory for remote access; the block states its obligations"
)]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ferrite_verbs::{Access, ProtectionDomain, RemoteSlice};

use super::core::buf::BufMut;
use super::core::window::{Registrations, Window};
use super::error::PoolError;

/// A buffer that is exposed to peers: see [`Pool::expose`](super::Pool::expose) and
/// [`Pool::expose_without_device`](super::Pool::expose_without_device).
///
/// Dropping an exposed buffer revokes it, too. If the device does not release the memory then, the
/// buffer goes into quarantine. The statistics count the buffer, and it is not reused while the
/// device may write it.
///
/// ```
/// use ferrite_fabric::mem::Purpose;
/// use ferrite_verbs::Access;
/// # use ferrite_fabric::mem::Pool;
/// # use ferrite_verbs::fake::{DeviceSpec, World};
/// # let world = World::new();
/// # world.add_device(DeviceSpec::new("fake1", "127.0.0.1".parse()?));
/// # let domain = world.verbs().device("fake1")?.open()?.allocate_protection_domain()?;
/// # let pool = Pool::builder(&[domain]).build()?;
/// let mut buf = pool.take_uncharged(4096, Purpose::Receive)?;
/// buf.fill(0); // otherwise it contains data of the previous user
/// let exposed = pool.expose(buf, 0, Access::REMOTE_WRITE).map_err(|(_, error)| error)?;
/// let for_the_peer = exposed.remote(); // send these numbers
/// let mut header = [0; 8];
/// exposed.read(0, &mut header); // a copy: the peer may write at any moment
/// let buf = exposed.revoke().map_err(|(_, error)| error)?; // the key is now invalid
/// assert_eq!((for_the_peer.len, buf.len()), (4096, 4096));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Exposed {
    /// The memory. `revoke`, `into_buf` and `drop` take it, and leave `None`.
    held: Option<Held>,
}

struct Held {
    /// The registrations on devices. Without any, peers can access the buffer only through this
    /// process.
    registrations: Registrations,
    buf: BufMut,
}

impl Exposed {
    /// Exposes a buffer to peers whose requests this process executes. No device has access.
    pub(super) fn new(buf: BufMut) -> Self {
        let counters = &buf.core().counters;
        counters.exposed_regions.fetch_add(1, Ordering::Relaxed);
        counters.exposed_bytes.fetch_add(buf.len() as u64, Ordering::Relaxed);
        Self { held: Some(Held { registrations: Registrations::default(), buf }) }
    }

    /// Also exposes the buffer to peers on a device. Returns how they address it.
    pub(super) fn register(
        &mut self,
        index: usize,
        domain: &ProtectionDomain,
        access: Access,
    ) -> Result<RemoteSlice, PoolError> {
        let Held { registrations: Registrations { regions, .. }, buf } =
            self.held.as_mut().expect("held until it is revoked");
        if !regions.iter().any(|(on, _)| *on == index) {
            // SAFETY: the buffer's bytes are mapped while its lease lives. We own it until every
            // region is deregistered, hand out no reference into it, and never use it again if that
            // fails. The region is never passed to a queue.
            let region =
                unsafe { domain.register(buf.at(), buf.len(), access) }.map_err(|error| {
                    let error = PoolError::from(error);
                    buf.core().counters.count_failure(&error);
                    error
                })?;
            regions.push((index, region));
        }
        let region = regions.iter().find(|(on, _)| *on == index);
        Ok(region.map_or(RemoteSlice { addr: 0, len: 0, rkey: 0 }, |(_, region)| {
            region.remote(0..buf.len())
        }))
    }

    /// Exposes the buffer to the peer of one queue pair on a device, through a window. The window
    /// must be bound to that queue pair. The memory is registered without remote rights, unless the
    /// device already has a registration of it.
    pub(super) fn open_window(
        &mut self,
        index: usize,
        domain: &ProtectionDomain,
        access: Access,
    ) -> Result<Arc<Window>, PoolError> {
        self.register(index, domain, Access::WINDOWS)?;
        let Held { registrations: Registrations { regions, windows }, buf } =
            self.held.as_mut().expect("held until it is revoked");
        let Some((_, region)) = regions.iter().find(|(on, _)| *on == index) else {
            return Err(PoolError::NoDomain { index });
        };
        let window = region.window(0..buf.len(), access).map_err(|error| {
            let error = PoolError::from(error);
            buf.core().counters.count_failure(&error);
            error
        })?;
        let window = Window::new(window);
        windows.retain(|(_, window)| window.is_open()); // windows of links that are gone are closed
        windows.push((index, Arc::clone(&window)));
        Ok(window)
    }

    /// Ends the registration on a device that is gone. If the device does not release the memory,
    /// the registration stays.
    pub(crate) fn unregister(&mut self, index: usize) {
        let Held { registrations: Registrations { regions, windows }, .. } =
            self.held.as_mut().expect("held until it is revoked");
        windows.retain(|(on, window)| *on != index || window.close().is_err());
        let Some(at) = regions.iter().position(|(on, _)| *on == index) else { return };
        let (_, region) = regions.swap_remove(at);
        if let Err((region, _)) = region.deregister() {
            // The region is kept under an index that no domain has. The final release tries again.
            regions.push((usize::MAX, region));
        }
    }

    /// Returns the buffer unchanged, for a caller whose registration or window failed. Nobody has
    /// learned a key, so nothing can access the buffer even if a registration remains.
    pub(super) fn into_buf(mut self) -> BufMut {
        let Held { buf, .. } = self.held.take().expect("held until it is revoked");
        count_unexposed(&buf);
        buf
    }

    fn held(&self) -> &Held {
        self.held.as_ref().expect("held until it is revoked")
    }

    /// Returns the numbers that the peer needs to address the memory: through the first window, or
    /// else on the first device to which the memory is exposed. Send them to the peer. Without a
    /// device, all but the length are 0.
    #[must_use]
    pub fn remote(&self) -> RemoteSlice {
        let registrations = &self.held().registrations;
        match (registrations.windows.first(), registrations.regions.first()) {
            (Some((_, window)), _) => window.remote(),
            (None, Some((_, region))) => region.remote(0..self.len()),
            (None, None) => RemoteSlice { addr: 0, len: self.len() as u64, rkey: 0 },
        }
    }

    /// Returns the length in bytes, which is never 0.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "an exposed buffer is never empty")]
    pub fn len(&self) -> usize {
        self.held().buf.len()
    }

    /// Copies bytes out of the memory. A concurrent write of the peer may be visible in part.
    ///
    /// # Panics
    /// If the range exceeds the memory.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        match self.held() {
            Held { registrations, buf } if registrations.regions.is_empty() => {
                out.copy_from_slice(&buf[offset..offset + out.len()]);
            }
            Held { registrations, .. } => registrations.regions[0].1.read(offset, out),
        }
    }

    /// Copies bytes into the memory. A peer that reads concurrently may see only a part.
    ///
    /// # Panics
    /// If the range exceeds the memory.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) {
        match self.held.as_mut().expect("held until it is revoked") {
            Held { registrations, buf } if registrations.regions.is_empty() => {
                buf[offset..offset + bytes.len()].copy_from_slice(bytes);
            }
            Held { registrations, .. } => registrations.regions[0].1.write(offset, bytes),
        }
    }

    /// Invalidates the keys and returns the buffer. No access of the peer is in progress or can
    /// start any more.
    ///
    /// # Errors
    /// Returns the device's error if the device did not release the memory. Some of the keys may
    /// then still be valid.
    pub fn revoke(mut self) -> Result<BufMut, (Self, PoolError)> {
        let Held { mut registrations, buf } = self.held.take().expect("held until it is revoked");
        match registrations.close() {
            None => {
                count_unexposed(&buf);
                Ok(buf)
            }
            Some(error) => {
                buf.core().counters.failed_deregister.fetch_add(1, Ordering::Relaxed);
                self.held = Some(Held { registrations, buf });
                Err((self, error.into()))
            }
        }
    }
}

impl Drop for Exposed {
    fn drop(&mut self) {
        let Some(Held { registrations, buf }) = self.held.take() else { return };
        count_unexposed(&buf);
        let core = Arc::clone(buf.core());
        core.run_in_background(move || registrations.release(buf));
    }
}

fn count_unexposed(buf: &BufMut) {
    let counters = &buf.core().counters;
    counters.exposed_regions.fetch_sub(1, Ordering::Relaxed);
    counters.exposed_bytes.fetch_sub(buf.len() as u64, Ordering::Relaxed);
}

impl fmt::Debug for Exposed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exposed")
            .field("len", &self.len())
            .field("rkey", &self.remote().rkey)
            .finish()
    }
}
