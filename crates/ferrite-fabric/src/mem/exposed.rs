//! Memory that a peer may read or write.
//!
//! The peer needs no consent for each access and can be stopped only by taking the key away. So there is never a `&[u8]`
//! into it: bytes are copied in and out. Only when the device has confirmed that the key is dead it is a buffer again.
#![expect(unsafe_code, reason = "registers memory for remote access: the block states its obligations")]

use std::fmt;
use std::sync::atomic::Ordering;

use ferrite_verbs::{Access, MemoryRegion, ProtectionDomain, RemoteSlice};

use super::buf::BufMut;
use super::error::PoolError;

/// A buffer that was exposed to a peer by [`Pool::expose`](super::Pool::expose).
///
/// Dropping it revokes too. If the device does not let go then, the buffer goes into quarantine: it is never used again
/// while the device may write it, and is counted in the statistics.
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
    held: Option<(Key, BufMut)>,
}

/// How a peer gets at it.
enum Key {
    /// By the device, without asking.
    Device(MemoryRegion),
    /// By asking this process.
    Process,
}

impl Exposed {
    pub(super) fn new(
        mut buf: BufMut,
        domain: &ProtectionDomain,
        access: Access,
    ) -> Result<Self, (BufMut, PoolError)> {
        // SAFETY: the buffer's bytes are mapped while its lease lives. We own it until the region is deregistered,
        // give no reference into it, and put it away for ever if that fails. The region is never given to a queue.
        match unsafe { domain.register(buf.at(), buf.len(), access) } {
            Ok(region) => {
                let counters = &buf.core().counters;
                counters.exposed_regions.fetch_add(1, Ordering::Relaxed);
                counters.exposed_bytes.fetch_add(buf.len() as u64, Ordering::Relaxed);
                Ok(Self { held: Some((Key::Device(region), buf)) })
            }
            Err(error) => {
                let error = PoolError::from(error);
                buf.core().counters.count_failure(&error);
                Err((buf, error))
            }
        }
    }

    /// For peers that this process serves: no device knows of it.
    pub(super) fn without_device(buf: BufMut) -> Self {
        let counters = &buf.core().counters;
        counters.exposed_regions.fetch_add(1, Ordering::Relaxed);
        counters.exposed_bytes.fetch_add(buf.len() as u64, Ordering::Relaxed);
        Self { held: Some((Key::Process, buf)) }
    }

    fn held(&self) -> &(Key, BufMut) {
        self.held.as_ref().expect("held until it is revoked")
    }

    /// What the peer needs to address it: send it these numbers. Without a device, all but the length are 0.
    #[must_use]
    pub fn remote(&self) -> RemoteSlice {
        match &self.held().0 {
            Key::Device(region) => region.remote(0..self.len()),
            Key::Process => RemoteSlice { addr: 0, len: self.len() as u64, rkey: 0 },
        }
    }

    /// Its length in bytes; never 0.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "what is exposed is never empty")]
    pub fn len(&self) -> usize {
        self.held().1.len()
    }

    /// Copies bytes out. What the peer writes meanwhile may be seen in part.
    ///
    /// # Panics
    /// If they are not within it.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        match self.held() {
            (Key::Device(region), _) => region.read(offset, out),
            (Key::Process, buf) => out.copy_from_slice(&buf[offset..offset + out.len()]),
        }
    }

    /// Copies bytes in. A peer that reads meanwhile may see a part.
    ///
    /// # Panics
    /// If they are not within it.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) {
        match self.held.as_mut().expect("held until it is revoked") {
            (Key::Device(region), _) => region.write(offset, bytes),
            (Key::Process, buf) => buf[offset..offset + bytes.len()].copy_from_slice(bytes),
        }
    }

    /// Takes the key away and gives the buffer back: no access of the peer's is under way or can come any more.
    ///
    /// # Errors
    /// What the device said if it did not let go; it is still exposed then.
    pub fn revoke(mut self) -> Result<BufMut, (Self, PoolError)> {
        let (key, buf) = self.held.take().expect("held until it is revoked");
        let Key::Device(region) = key else {
            not_exposed(&buf);
            return Ok(buf);
        };
        match region.deregister() {
            Ok(()) => {
                not_exposed(&buf);
                Ok(buf)
            }
            Err((region, error)) => {
                buf.core().counters.failed_deregister.fetch_add(1, Ordering::Relaxed);
                self.held = Some((Key::Device(region), buf));
                Err((self, error.into()))
            }
        }
    }
}

impl Drop for Exposed {
    fn drop(&mut self) {
        let Some((key, buf)) = self.held.take() else { return };
        not_exposed(&buf);
        if let Key::Device(region) = key
            && let Err((region, _)) = region.deregister()
        {
            let core = std::sync::Arc::clone(buf.core());
            core.counters.failed_deregister.fetch_add(1, Ordering::Relaxed);
            core.quarantine(region, buf);
        }
    }
}

fn not_exposed(buf: &BufMut) {
    let counters = &buf.core().counters;
    counters.exposed_regions.fetch_sub(1, Ordering::Relaxed);
    counters.exposed_bytes.fetch_sub(buf.len() as u64, Ordering::Relaxed);
}

impl fmt::Debug for Exposed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exposed").field("len", &self.len()).field("rkey", &self.remote().rkey).finish()
    }
}
