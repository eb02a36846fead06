//! Memory that peers access directly: regions, grants and their revocation.
//!
//! A region ([`Region`](crate::Region)) is a buffer registered for remote access. A peer learns of
//! it through a [`GrantToken`], which the application sends like any other bytes. A device cannot
//! stop an access in the middle without breaking the peer's connection. So a revocation has two
//! steps:
//!
//! 1. The fabric informs every link that has the grant. The peer's fabric starts no new operation
//!    with the grant, waits for operations in progress, and confirms.
//! 2. When all links have confirmed, or their time is over, the registration ends. From then on the
//!    device refuses the key for every peer. A peer that ignored the revocation loses its link with
//!    its next access. Other links are not affected.
//!
//! If the device has memory windows of type 2, each link with a grant gets its own window, bound to
//! its queue pair. A token that is passed on is then worthless on another link. On other devices,
//! keys are valid for all links of the device. A grant then only says which peer *should* use the
//! key. A peer that passes its token on gives its own rights away, until the grant is revoked for
//! all.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Poll, Waker};

use ferrite_verbs::{Access, RemoteSlice};

use crate::device::shared_device::SharedDevice;
use crate::error::{Error, ErrorKind};
use crate::link::core::{Wakes, keep};
use crate::link::shared::LinkShared;
use crate::link::state::Request;
use crate::mem::{BufMut, Exposed, Pool, Window, lock};
use crate::wire::{Features, GrantToken, Rights};

/// A region, shared between its owner and the fabric.
pub(crate) struct RegionShared {
    pub(crate) id: u64,
    pub(crate) rights: Rights,
    pub(crate) remote: RemoteSlice,
    /// The device that the region was created on; `None` if it was created without one. Links on
    /// other devices can access the region, too: see [`RegionAccess`].
    pub(crate) device: Option<Arc<SharedDevice>>,
    state: Mutex<State>,
}

enum State {
    Live {
        exposed: Exposed,
        granted: Vec<Weak<LinkShared>>,
    },
    /// The revocation has begun. The links with the numbers in `waiting` have not released the
    /// grant yet. A timer limits the wait.
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

impl Regions {
    /// Registers `buf` on `device`, or at first for peers over TCP only. If `stays` is set
    /// and the device disappears during this call, the region remains accessible over TCP.
    pub(crate) fn register(
        &self,
        pool: &Pool,
        device: Option<&Arc<SharedDevice>>,
        buf: BufMut,
        rights: Rights,
        stays: bool,
    ) -> Result<Arc<RegionShared>, (BufMut, Error)> {
        let exposed = match device {
            // Each link with a grant gets its own window into the region.
            Some(device) if device.has_windows() => pool.expose(buf, device.index, Access::WINDOWS),
            Some(device) => pool.expose(buf, device.index, access_of(rights)),
            None => pool.expose_without_device(buf),
        };
        let exposed = exposed.map_err(|(buf, error)| (buf, Error::from(error)))?;
        let id = self.next.fetch_add(1, Ordering::Relaxed) + 1; // 0 means no grant
        let region = Arc::new(RegionShared {
            id,
            rights,
            remote: exposed.remote(),
            device: device.cloned(),
            state: Mutex::new(State::Live { exposed, granted: Vec::new() }),
        });
        lock(&self.by_id).insert(id, Arc::downgrade(&region));
        if let Some(device) = device.filter(|device| device.is_gone()) {
            // The device has disappeared during this call. Its regions may have been ended before
            // this region was in the table, so end them again.
            let mut wakes = Wakes::new();
            self.on_device_gone(device, stays, &mut wakes);
            wakes.into_iter().for_each(Waker::wake);
        }
        Ok(region)
    }

    /// Forgets a region that its owner has dropped.
    pub(crate) fn forget(&self, id: u64) {
        lock(&self.by_id).remove(&id);
    }

    pub(crate) fn get(&self, id: u64) -> Option<Arc<RegionShared>> {
        lock(&self.by_id).get(&id).and_then(Weak::upgrade)
    }

    /// Executes a request that the peer of `link` sent over TCP. Returns `false` if no grant allows
    /// it.
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
            // A link may use the grant until it has released the grant.
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

    /// Returns how the peer of `link` can access its granted regions on `device`. Registers the
    /// regions on `device` if necessary.
    pub(crate) fn access_for(
        &self,
        pool: &Pool,
        link: &Arc<LinkShared>,
        device: &SharedDevice,
    ) -> Vec<(u64, RegionAccess)> {
        let regions: Vec<_> = lock(&self.by_id).values().filter_map(Weak::upgrade).collect();
        let keys = regions.iter().filter_map(|region| {
            let State::Live { exposed, granted } = &mut *lock(&region.state) else { return None };
            granted.iter().any(|given| given.as_ptr() == Arc::as_ptr(link)).then_some(())?;
            Some((region.id, RegionAccess::open(pool, exposed, device, access_of(region.rights))?))
        });
        keys.collect()
    }

    /// Records that a link has released a grant.
    pub(crate) fn on_released(&self, id: u64, link: Option<u32>, wakes: &mut Wakes) {
        let Some(region) = self.get(id) else { return };
        if let State::Revoking { waiting, .. } = &mut *lock(&region.state) {
            waiting.retain(|waiting| Some(*waiting) != link);
        }
        region.finish_if_released(wakes, false);
    }

    /// Makes all revocations stop waiting for a link that is down.
    pub(crate) fn on_link_down(&self, link: u32, wakes: &mut Wakes) {
        let ids: Vec<u64> = lock(&self.by_id).keys().copied().collect();
        for id in ids {
            self.on_released(id, Some(link), wakes);
        }
    }

    /// Handles a device that is gone. If `stays`, live regions lose their registration on the
    /// device and remain accessible over TCP. All other regions that were created on the device are
    /// revoked at once.
    pub(crate) fn on_device_gone(&self, device: &SharedDevice, stays: bool, wakes: &mut Wakes) {
        let regions: Vec<_> = lock(&self.by_id).values().filter_map(Weak::upgrade).collect();
        for region in &regions {
            // Peers whose links continue over TCP can still access the region.
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

    /// Ends a revocation, because the links had enough time to release the grant.
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
    /// Grants the peer of `link` access. Returns the token that the peer needs. If the peer does
    /// not use grants, the token has no key and gives no access.
    pub(crate) fn grant_to(&self, pool: &Pool, link: &Arc<LinkShared>) -> GrantToken {
        let RemoteSlice { addr, len, rkey } = self.remote;
        let mut token = GrantToken { grant: self.id, addr, len, rkey, rights: self.rights };
        if !link.with(|state, _, _| state.core.uses(Features::ONE_SIDED)) {
            return GrantToken { addr: 0, rkey: 0, ..token };
        }
        let access = access_of(self.rights);
        // The link may be on another device than the region. Or it may have had no device when the
        // region was created.
        let device = link.with(|state, _, _| {
            state.allow(access);
            state.next_device()
        });
        let mut opened = None;
        if let State::Live { granted, exposed } = &mut *lock(&self.state) {
            opened = device
                .as_ref()
                .and_then(|device| RegionAccess::open(pool, exposed, device, access));
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

    pub(crate) fn is_live(&self) -> bool {
        matches!(&*lock(&self.state), State::Live { .. })
    }

    /// Copies bytes out of the region. Returns `false` if it is revoked.
    pub(crate) fn read(&self, offset: usize, out: &mut [u8]) -> bool {
        match &*lock(&self.state) {
            State::Live { exposed, .. } | State::Revoking { exposed, .. } => {
                exposed.read(offset, out);
                true
            }
            State::Revoked(_) | State::Failed(_) => false,
        }
    }

    /// Copies bytes into the region. Returns `false` if it is revoked.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) -> bool {
        match &mut *lock(&self.state) {
            State::Live { exposed, .. } | State::Revoking { exposed, .. } => {
                exposed.write(offset, bytes);
                true
            }
            State::Revoked(_) | State::Failed(_) => false,
        }
    }

    /// Returns the region's buffer once the revocation is complete.
    pub(crate) fn poll_revoked(&self, waker: &Waker) -> Poll<Result<BufMut, Error>> {
        let over = || Error::new(ErrorKind::Misuse, "a future was polled again after it was ready");
        match &mut *lock(&self.state) {
            State::Revoking { wakes, .. } => {
                keep(wakes, waker);
                Poll::Pending
            }
            State::Revoked(buf) => Poll::Ready(buf.take().ok_or_else(over)),
            State::Failed(error) => Poll::Ready(Err(error.take().unwrap_or_else(over))),
            State::Live { .. } => Poll::Ready(Err(over())),
        }
    }

    /// First step of a revocation: informs the links that have the grant. Returns `false` if a
    /// revocation has already begun. Otherwise the links have some time to release the grant
    /// ([`Regions::revocation_due`]).
    pub(crate) fn begin_revocation(&self, wakes: &mut Wakes) -> bool {
        let granted = match &mut *lock(&self.state) {
            State::Live { granted, .. } => std::mem::take(granted),
            _ => return false,
        };
        let mut informed = Vec::new();
        for link in granted.iter().filter_map(Weak::upgrade) {
            let is_up = link.with_wakes(wakes, |state, env, wakes| {
                if state.failure().is_some() {
                    return false;
                }
                state.core.revoke(self.id);
                state.pump(env, wakes);
                true
            });
            if is_up {
                informed.push(link.index);
            }
        }
        self.wait_for(informed);
        self.finish_if_released(wakes, false);
        true
    }

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

    /// Second step of a revocation: ends the registration if all links have released the grant, or
    /// if `by_force`.
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
