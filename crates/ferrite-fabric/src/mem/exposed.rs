//! Memory that a peer may read or write.
//!
//! The peer needs no consent for each access and can be stopped only by taking the key away. So
//! there is never a `&[u8]` into it: bytes are copied in and out. Only when the device has
//! confirmed that the key is dead it is a buffer again.
#![expect(
    unsafe_code,
    reason = "registers memory for remote access: the block states its obligations"
)]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ferrite_verbs::{Access, ProtectionDomain, RemoteSlice};

use super::buf::BufMut;
use super::error::PoolError;
use super::window::{Ways, Window};

/// A buffer that was exposed to a peer by [`Pool::expose`](super::Pool::expose).
///
/// Dropping it revokes too. If the device does not let go then, the buffer goes into quarantine: it
/// is never used again while the device may write it, and is counted in the statistics.
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
/// buf.fill(0); // what the last user left is not for the peer
/// let exposed = pool.expose(buf, 0, Access::REMOTE_WRITE).map_err(|(_, error)| error)?;
/// let for_the_peer = exposed.remote(); // send these numbers
/// let mut header = [0; 8];
/// exposed.read(0, &mut header); // a copy: the peer may write at any moment
/// let buf = exposed.revoke().map_err(|(_, error)| error)?; // the key is dead
/// assert_eq!((for_the_peer.len, buf.len()), (4096, 4096));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Exposed {
    /// `None` only after `revoke` has taken it.
    held: Option<Held>,
}

struct Held {
    /// How devices reach it. None: only by asking this process.
    ways: Ways,
    buf: BufMut,
}

impl Exposed {
    /// For peers that this process serves: no device knows of it.
    pub(super) fn new(buf: BufMut) -> Self {
        let counters = &buf.core().counters;
        counters.exposed_regions.fetch_add(1, Ordering::Relaxed);
        counters.exposed_bytes.fetch_add(buf.len() as u64, Ordering::Relaxed);
        Self { held: Some(Held { ways: Ways::default(), buf }) }
    }

    /// For peers on a device too; where it is for them.
    pub(super) fn register(
        &mut self,
        index: usize,
        domain: &ProtectionDomain,
        access: Access,
    ) -> Result<RemoteSlice, PoolError> {
        let Held { ways: Ways { regions, .. }, buf } =
            self.held.as_mut().expect("held until it is revoked");
        if !regions.iter().any(|(on, _)| *on == index) {
            // SAFETY: the buffer's bytes are mapped while its lease lives. We own it until every
            // region is deregistered, give no reference into it, and put it away for ever if that
            // fails. The region is never given to a queue.
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

    /// For the peer of one queue pair on a device: a window that is still to be bound to it. What
    /// is under it is registered without remote rights, unless it was with such.
    pub(super) fn open_window(
        &mut self,
        index: usize,
        domain: &ProtectionDomain,
        access: Access,
    ) -> Result<Arc<Window>, PoolError> {
        self.register(index, domain, Access::WINDOWS)?;
        let Held { ways: Ways { regions, windows }, buf } =
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
        windows.retain(|(_, window)| window.is_open()); // those of links that are gone are not
        windows.push((index, Arc::clone(&window)));
        Ok(window)
    }

    /// The device of a domain goes: it is not reached there any more. What the device does not let
    /// go stays registered.
    pub(crate) fn unregister(&mut self, index: usize) {
        let Held { ways: Ways { regions, windows }, .. } =
            self.held.as_mut().expect("held until it is revoked");
        windows.retain(|(on, window)| *on != index || window.close().is_err());
        let Some(at) = regions.iter().position(|(on, _)| *on == index) else { return };
        let (_, region) = regions.swap_remove(at);
        if let Err((region, _)) = region.deregister() {
            // of no domain that there is: tried again at the end
            regions.push((usize::MAX, region));
        }
    }

    /// The buffer, as it was given; for a caller whose registration failed, or the window on it:
    /// nobody has heard of it, so that nothing reaches the buffer even where the registration
    /// stays.
    pub(super) fn into_buf(mut self) -> BufMut {
        let Held { buf, .. } = self.held.take().expect("held until it is revoked");
        not_exposed(&buf);
        buf
    }

    fn held(&self) -> &Held {
        self.held.as_ref().expect("held until it is revoked")
    }

    /// What the peer needs to address it: send it these numbers. Without a device, all but the
    /// length are 0.
    #[must_use]
    pub fn remote(&self) -> RemoteSlice {
        let ways = &self.held().ways;
        match (ways.windows.first(), ways.regions.first()) {
            (Some((_, window)), _) => window.remote(),
            (None, Some((_, region))) => region.remote(0..self.len()),
            (None, None) => RemoteSlice { addr: 0, len: self.len() as u64, rkey: 0 },
        }
    }

    /// Its length in bytes; never 0.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "what is exposed is never empty")]
    pub fn len(&self) -> usize {
        self.held().buf.len()
    }

    /// Copies bytes out. What the peer writes meanwhile may be seen in part.
    ///
    /// # Panics
    /// If they are not within it.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        match self.held() {
            Held { ways, buf } if ways.regions.is_empty() => {
                out.copy_from_slice(&buf[offset..offset + out.len()]);
            }
            Held { ways, .. } => ways.regions[0].1.read(offset, out),
        }
    }

    /// Copies bytes in. A peer that reads meanwhile may see a part.
    ///
    /// # Panics
    /// If they are not within it.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) {
        match self.held.as_mut().expect("held until it is revoked") {
            Held { ways, buf } if ways.regions.is_empty() => {
                buf[offset..offset + bytes.len()].copy_from_slice(bytes);
            }
            Held { ways, .. } => ways.regions[0].1.write(offset, bytes),
        }
    }

    /// Takes the keys away and gives the buffer back: no access of the peer's is under way or can
    /// come any more.
    ///
    /// # Errors
    /// What the device said if it did not let go; it is still exposed then.
    pub fn revoke(mut self) -> Result<BufMut, (Self, PoolError)> {
        let Held { mut ways, buf } = self.held.take().expect("held until it is revoked");
        match ways.close() {
            None => {
                not_exposed(&buf);
                Ok(buf)
            }
            Some(error) => {
                buf.core().counters.failed_deregister.fetch_add(1, Ordering::Relaxed);
                self.held = Some(Held { ways, buf });
                Err((self, error.into()))
            }
        }
    }
}

impl Drop for Exposed {
    fn drop(&mut self) {
        let Some(Held { ways, buf }) = self.held.take() else { return };
        not_exposed(&buf);
        let core = Arc::clone(buf.core());
        core.elsewhere(move || ways.let_go(buf));
    }
}

fn not_exposed(buf: &BufMut) {
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
