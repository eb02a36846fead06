//! Memory that peers access directly: regions, grants and their revocation.
//!
//! A [`Region`] is a buffer registered for remote access. A peer learns of it through a
//! [`GrantToken`], which the application sends like any other bytes. Revocation has two steps,
//! because a device cannot stop an access in the middle without breaking the peer's connection:
//!
//! 1. The fabric informs every link that has the grant. The peer's fabric starts no new operation
//!    with it, waits for those in progress, and confirms.
//! 2. When all have confirmed, or their time is over, the registration ends. From then on the
//!    device refuses the key, whoever uses it. A peer that ignored the revocation loses its link
//!    with its next access; others are not affected.
//!
//! If the device has memory windows of type 2, each link with a grant gets a window of its own,
//! bound to its queue pair: a token that is passed on is worthless on another link. On other
//! devices keys are valid for all links of the device. There a grant only says who *should* use it:
//! a peer that passes its token on gives its own rights away, until they are revoked for all.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use ferrite_verbs::{Access, RemoteSlice};

use crate::error::{Error, ErrorKind};
use crate::fabric::poller::Poller;
use crate::fabric::shared_device::SharedDevice;
use crate::fabric::timers::Timer;
use crate::fabric::{Fabric, Shared};
use crate::link::Link;
use crate::link::core::{Wakes, keep};
use crate::link::shared::LinkShared;
use crate::link::state::Request;
use crate::mem::{BufMut, Exposed, Pool, Window, lock};
use crate::policy::Rdma;
use crate::wire::{GrantToken, Rights};

/// A buffer that peers with a grant may access, until it is revoked.
///
/// Dropping it revokes it at once, or as soon as the device has executed a grant that was issued
/// just before.
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

pub(crate) struct RegionShared {
    id: u64,
    rights: Rights,
    remote: RemoteSlice,
    /// `None` if it is only accessible over TCP.
    device: Option<Arc<SharedDevice>>,
    state: Mutex<State>,
}

enum State {
    Live {
        exposed: Exposed,
        granted: Vec<Weak<LinkShared>>,
    },
    /// Waits until links (by number) have released the grant, at most until the timer expires.
    Revoking {
        exposed: Exposed,
        waiting: Vec<u32>,
        wakes: Wakes,
    },
    Revoked(Option<BufMut>),
    Failed(Option<Error>),
}

/// How the peer of a link accesses a region.
pub(crate) enum RegionAccess {
    /// With a key that is valid on every link of the device.
    Shared(RemoteSlice),
    /// Through a window, which must be bound to the link's queue pair.
    Window(Arc<Window>),
}

impl RegionAccess {
    /// Opens the region on `device`. Returns `None` if the device or the host refuses.
    fn open(
        pool: &Pool,
        exposed: &mut Exposed,
        device: &SharedDevice,
        access: Access,
    ) -> Option<Self> {
        match device.has_windows() {
            true => pool.open_window(exposed, device.index, access).ok().map(Self::Window),
            false => pool.expose_also(exposed, device.index, access).ok().map(Self::Shared),
        }
    }

    fn remote(&self) -> RemoteSlice {
        match self {
            Self::Shared(remote) => *remote,
            Self::Window(window) => window.remote(),
        }
    }
}

/// The regions of a fabric, by the number of their grant.
#[derive(Default)]
pub(crate) struct Regions {
    by_id: Mutex<HashMap<u64, Weak<RegionShared>>>,
    next: AtomicU64,
}

impl Region {
    pub(crate) fn new(
        fabric: Fabric,
        device: Option<&Arc<SharedDevice>>,
        buf: BufMut,
        rights: Rights,
    ) -> Result<Self, (BufMut, Error)> {
        let exposed = match device {
            // Each link with a grant gets a window of its own on it.
            Some(device) if device.has_windows() => {
                fabric.pool().expose(buf, device.index, Access::WINDOWS)
            }
            Some(device) => fabric.pool().expose(buf, device.index, access_of(rights)),
            None => fabric.pool().expose_without_device(buf),
        };
        let exposed = exposed.map_err(|(buf, error)| (buf, Error::from(error)))?;
        let regions = &fabric.shared().regions;
        let id = regions.next.fetch_add(1, Ordering::Relaxed) + 1; // 0 means no grant
        let shared = Arc::new(RegionShared {
            id,
            rights,
            remote: exposed.remote(),
            device: device.cloned(),
            state: Mutex::new(State::Live { exposed, granted: Vec::new() }),
        });
        lock(&regions.by_id).insert(id, Arc::downgrade(&shared));
        if let Some(device) = device.filter(|device| device.is_gone()) {
            // It has disappeared since the pool returned its domain, so this region may have been
            // registered too late to be ended with the others.
            let mut wakes = Wakes::new();
            regions.on_device_gone(device, fabric.shared().config.rdma == Rdma::Prefer, &mut wakes);
            wakes.into_iter().for_each(Waker::wake);
        }
        Ok(Self { shared, fabric })
    }

    /// Returns the token that the peer of `link` needs, to be sent to it over this link. The link
    /// is informed when the region is revoked.
    ///
    /// If the device has memory windows, the token is valid on this link only, and each grant uses
    /// one of the device's windows.
    #[must_use]
    pub fn grant(&self, link: &Link) -> GrantToken {
        let mut token = self.token();
        let link = link.shared();
        let access = access_of(self.shared.rights);
        // The link may be on another device than the region, or may have been on none when the
        // region was created.
        let device = link.with(|state, _, _| {
            state.allow(access);
            state.next_device()
        });
        let mut opened = None;
        if let State::Live { granted, exposed } = &mut *lock(&self.shared.state) {
            opened = device
                .as_ref()
                .and_then(|device| RegionAccess::open(self.fabric.pool(), exposed, device, access));
            let known = granted.iter().any(|known| known.as_ptr() == Arc::as_ptr(link));
            if !known {
                granted.retain(|link| link.strong_count() > 0);
                granted.push(Arc::downgrade(link));
            }
        }
        if let (Some(device), Some(RegionAccess::Window(window))) = (&device, &opened) {
            link.with(|state, env, wakes| state.bind(device, window, env, wakes));
        }
        if let Some(opened) = opened {
            let remote = opened.remote();
            (token.addr, token.rkey) = (remote.addr, remote.rkey);
        }
        token
    }

    fn token(&self) -> GrantToken {
        let RemoteSlice { addr, len, rkey } = self.shared.remote;
        GrantToken { grant: self.shared.id, addr, len, rkey, rights: self.shared.rights }
    }

    /// Revokes it after `time`, like [`Region::revoke`].
    #[must_use]
    pub fn expires_in(self, time: Duration) -> Self {
        let id = self.shared.id;
        self.fabric.shared().with_poller(|poller, _| {
            poller.timers.add(Instant::now() + time, Timer::Expiry(id));
        });
        self
    }

    /// Returns its length in bytes, which is never 0.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> usize {
        self.shared.remote.len as usize
    }

    /// Returns the device through which it is accessible; `None` if only over TCP.
    #[must_use]
    pub fn device(&self) -> Option<&str> {
        self.shared.device.as_ref().map(|device| device.name.as_str())
    }

    /// Returns whether peers can still access it.
    #[must_use]
    pub fn is_live(&self) -> bool {
        matches!(&*lock(&self.shared.state), State::Live { .. })
    }

    /// Copies bytes out of it. Returns `false` if it is revoked. A concurrent write of a peer may
    /// be visible in part.
    ///
    /// # Panics
    /// If the range exceeds the region.
    #[must_use]
    pub fn read(&self, offset: usize, out: &mut [u8]) -> bool {
        match &*lock(&self.shared.state) {
            State::Live { exposed, .. } | State::Revoking { exposed, .. } => {
                exposed.read(offset, out);
                true
            }
            State::Revoked(_) | State::Failed(_) => false,
        }
    }

    /// Copies bytes into it. Returns `false` if it is revoked. A peer that reads concurrently may
    /// see only a part.
    ///
    /// # Panics
    /// If the range exceeds the region.
    #[must_use]
    pub fn write(&self, offset: usize, bytes: &[u8]) -> bool {
        match &mut *lock(&self.shared.state) {
            State::Live { exposed, .. } | State::Revoking { exposed, .. } => {
                exposed.write(offset, bytes);
                true
            }
            State::Revoked(_) | State::Failed(_) => false,
        }
    }

    /// Revokes the region: when the future is ready, no peer can read or write any byte of it.
    /// Peers have `peer_timeout` to finish operations in progress.
    ///
    /// # Errors
    /// Returns the device's error if it did not end the registration; the memory is then never used
    /// again.
    pub fn revoke(self) -> Revoking {
        let shared = Arc::clone(&self.shared);
        self.fabric
            .shared()
            .with_poller(|poller, fabric| fabric.regions.begin(poller, fabric, &shared));
        Revoking { region: self }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        lock(&self.fabric.shared().regions.by_id).remove(&self.shared.id);
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

/// A region that is being revoked: see [`Region::revoke`]. Dropping it revokes at once.
#[derive(Debug)]
#[must_use = "only this future returns the buffer"]
pub struct Revoking {
    region: Region,
}

impl Future for Revoking {
    type Output = Result<BufMut, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let over = || Error::new(ErrorKind::Misuse, "a future was polled again after it was ready");
        match &mut *lock(&self.region.shared.state) {
            State::Revoking { wakes, .. } => {
                keep(wakes, cx.waker());
                Poll::Pending
            }
            State::Revoked(buf) => Poll::Ready(buf.take().ok_or_else(over)),
            State::Failed(error) => Poll::Ready(Err(error.take().unwrap_or_else(over))),
            State::Live { .. } => Poll::Ready(Err(over())),
        }
    }
}

impl Regions {
    fn get(&self, id: u64) -> Option<Arc<RegionShared>> {
        lock(&self.by_id).get(&id).and_then(Weak::upgrade)
    }

    /// Executes a request of the peer of `link` that came over TCP. Returns `false` if no grant
    /// allows it.
    pub(crate) fn serve(&self, link: &Arc<LinkShared>, request: Request<'_>) -> bool {
        let (grant, offset, len, needs) = match &request {
            Request::Write { grant, offset, bytes } => {
                (*grant, *offset, bytes.len(), Rights::WRITE)
            }
            Request::Read { grant, offset, into } => (*grant, *offset, into.len(), Rights::READ),
        };
        let Some(region) = self.get(grant).filter(|region| region.rights.contains(needs)) else {
            return false;
        };
        let within = offset.checked_add(len as u64).is_some_and(|end| end <= region.remote.len);
        let state = &mut *lock(&region.state);
        let exposed = match state {
            State::Live { exposed, granted } => {
                let given = granted.iter().any(|given| given.as_ptr() == Arc::as_ptr(link));
                given.then_some(exposed)
            }
            // A link may use the grant until it has released it.
            State::Revoking { exposed, waiting, .. } => {
                waiting.contains(&link.index).then_some(exposed)
            }
            State::Revoked(_) | State::Failed(_) => None,
        };
        let Some(exposed) = exposed.filter(|_| within) else { return false };
        match request {
            Request::Write { bytes, .. } => exposed.write(offset as usize, bytes),
            Request::Read { into, .. } => exposed.read(offset as usize, into),
        }
        true
    }

    /// Returns how the peer of `link` can access its granted regions on `device`. Registers them
    /// there if necessary.
    pub(crate) fn access_for(
        &self,
        shared: &Shared,
        link: &Arc<LinkShared>,
        device: &SharedDevice,
    ) -> Vec<(u64, RegionAccess)> {
        let regions: Vec<_> = lock(&self.by_id).values().filter_map(Weak::upgrade).collect();
        let keys = regions.iter().filter_map(|region| {
            let State::Live { exposed, granted } = &mut *lock(&region.state) else { return None };
            granted.iter().any(|given| given.as_ptr() == Arc::as_ptr(link)).then_some(())?;
            Some((
                region.id,
                RegionAccess::open(&shared.pool, exposed, device, access_of(region.rights))?,
            ))
        });
        keys.collect()
    }

    /// First step of a revocation: informs the links that have the grant.
    fn begin(&self, poller: &mut Poller, shared: &Shared, region: &RegionShared) {
        let granted = match &mut *lock(&region.state) {
            State::Live { granted, .. } => std::mem::take(granted),
            _ => return,
        };
        let mut informed = Vec::new();
        for link in granted.iter().filter_map(Weak::upgrade) {
            let is_up = link.with_wakes(&mut poller.wakes, |state, env, wakes| {
                if state.failure().is_some() {
                    return false;
                }
                state.core.revoke(region.id);
                state.pump(env, wakes);
                true
            });
            if is_up {
                informed.push(link.index);
            }
        }
        region.wait_for(informed);
        region.finish_if_released(&mut poller.wakes, false);
        poller
            .timers
            .add(Instant::now() + shared.config.peer_timeout, Timer::Revocation(region.id));
    }

    /// Revokes a region whose time is over.
    pub(crate) fn expire(&self, poller: &mut Poller, shared: &Shared, id: u64) {
        if let Some(region) = self.get(id) {
            self.begin(poller, shared, &region);
        }
    }

    /// Records that a link has released a grant.
    pub(crate) fn on_released(&self, id: u64, link: Option<u32>, wakes: &mut Wakes) {
        let Some(region) = self.get(id) else { return };
        if let State::Revoking { waiting, .. } = &mut *lock(&region.state) {
            waiting.retain(|waiting| Some(*waiting) != link);
        }
        region.finish_if_released(wakes, false);
    }

    /// Releases all grants of a link that is down.
    pub(crate) fn on_link_down(&self, link: u32, wakes: &mut Wakes) {
        let ids: Vec<u64> = lock(&self.by_id).keys().copied().collect();
        for id in ids {
            self.on_released(id, Some(link), wakes);
        }
    }

    /// Ends all registrations on a device that is gone. With `stays`, regions remain accessible
    /// over TCP.
    pub(crate) fn on_device_gone(&self, device: &SharedDevice, stays: bool, wakes: &mut Wakes) {
        let regions: Vec<_> = lock(&self.by_id).values().filter_map(Weak::upgrade).collect();
        for region in &regions {
            // Peers that continue over TCP can still be served.
            if stays && let State::Live { exposed, .. } = &mut *lock(&region.state) {
                exposed.unregister(device.index);
                continue;
            }
            if !region.is_on(device) {
                continue;
            }
            region.wait_for(Vec::new());
            region.finish_if_released(wakes, true);
        }
    }

    /// Ends a revocation whose links had enough time.
    pub(crate) fn revocation_due(&self, id: u64, wakes: &mut Wakes) {
        if let Some(region) = self.get(id) {
            region.finish_if_released(wakes, true);
        }
    }
}

fn access_of(rights: Rights) -> Access {
    let mut access = Access::LOCAL;
    if rights.contains(Rights::READ) {
        access = access | Access::REMOTE_READ;
    }
    if rights.contains(Rights::WRITE) {
        access = access | Access::REMOTE_WRITE;
    }
    access
}

impl RegionShared {
    fn is_on(&self, device: &SharedDevice) -> bool {
        self.device.as_ref().is_some_and(|on| on.index == device.index)
    }

    fn wait_for(&self, links: Vec<u32>) {
        let state = &mut *lock(&self.state);
        let live = std::mem::replace(state, State::Revoked(None));
        *state = match live {
            State::Live { exposed, .. } => {
                State::Revoking { exposed, waiting: links, wakes: Wakes::new() }
            }
            other => other,
        };
    }

    /// Second step of a revocation: ends the registration if no link is waited for, or if
    /// `by_force`.
    fn finish_if_released(&self, wakes: &mut Wakes, by_force: bool) {
        let state = &mut *lock(&self.state);
        match state {
            State::Revoking { waiting, .. } if waiting.is_empty() || by_force => {}
            _ => return,
        }
        let State::Revoking { exposed, wakes: waiting, .. } =
            std::mem::replace(state, State::Revoked(None))
        else {
            return;
        };
        *state = match exposed.revoke() {
            Ok(buf) => State::Revoked(Some(buf)),
            // Dropping the exposed buffer puts it into quarantine.
            Err((_, error)) => State::Failed(Some(error.into())),
        };
        wakes.extend(waiting);
    }
}
