//! The channel that delivers the events of CM identifiers.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use super::removal::{self, OpenedDevices};
use super::{CmId, CmKey};
use crate::cm_abi::from_raw;
use crate::context::{borrow_fd, set_nonblocking};
use crate::denied::{self, denied_file};
use crate::error::{Absence, Error, last_errno};
use crate::sys;
use crate::table::{Verbs, text};

/// A channel that delivers the events of identifiers. Clones share it.
#[derive(Clone)]
pub struct EventChannel(Arc<ChannelInner>);

struct ChannelInner {
    raw: NonNull<sys::rdma_event_channel>,
    cm: &'static sys::CmFunctions,
    /// Held while an event is fetched and copied. Copying a connection request gives the new
    /// identifier its key. Until then, no other thread may fetch an event of that identifier. Calls
    /// on identifiers do not take this lock, so fetching never waits for them.
    fetching: Mutex<()>,
    /// Addresses and device of each identifier, as a copy that any thread may read. librdmacm
    /// writes the originals to the identifier's struct without a lock, while it fetches an event.
    /// The lock of this map is never held across a call to librdmacm.
    id_infos: Mutex<HashMap<CmKey, IdInfo>>,
    opened_devices: Mutex<OpenedDevices>,
}

/// The addresses and the device of an identifier, as far as they are known.
#[derive(Debug, Clone, Default)]
pub(super) struct IdInfo {
    pub(super) local: Option<SocketAddr>,
    pub(super) peer: Option<SocketAddr>,
    pub(super) device: Option<(String, u8)>,
    /// The address of librdmacm's context of the device, or 0. Never dereferenced.
    pub(super) context: usize,
    /// Whether the identifier got the event that its device is being removed.
    pub(super) device_removed: bool,
}

impl IdInfo {
    /// Copies this side's address and device out of an identifier's struct.
    ///
    /// # Safety
    /// The identifier is alive, and no other thread changes these fields meanwhile.
    pub(super) unsafe fn copy_local(&mut self, raw: *const sys::rdma_cm_id) {
        // SAFETY: the caller guarantees that the identifier is alive and that no other thread
        // changes these fields. The storage member covers the union. librdmacm's own context of the
        // device lives as long as the identifier.
        unsafe {
            self.local = from_raw(&(*raw).route.addr.__bindgen_anon_1.src_storage);
            let verbs = (*raw).verbs;
            self.context = verbs.addr();
            self.device = (!verbs.is_null())
                .then(|| (text((*(*verbs).device).name.as_ptr()), (*raw).port_num));
        }
    }

    /// Copies the peer's address out of an identifier's struct.
    ///
    /// # Safety
    /// As [`IdInfo::copy_local`].
    pub(super) unsafe fn copy_peer(&mut self, raw: *const sys::rdma_cm_id) {
        // SAFETY: as above.
        self.peer = from_raw(unsafe { &(*raw).route.addr.__bindgen_anon_2.dst_storage });
    }
}

// SAFETY: librdmacm's calls on a channel may come from any thread.
unsafe impl Send for ChannelInner {}
// SAFETY: as above.
unsafe impl Sync for ChannelInner {}

impl Drop for ChannelInner {
    fn drop(&mut self) {
        // SAFETY: we created the channel, and it is destroyed once, after every identifier on it
        // (each holds an `Arc`).
        unsafe { (self.cm.rdma_destroy_event_channel)(self.raw.as_ptr()) };
    }
}

impl Verbs {
    /// Opens a channel to the connection manager.
    ///
    /// # Errors
    /// [`Absence::NoCm`] without rdma_ucm, [`Absence::NoLibrary`] without librdmacm,
    /// [`Absence::OldLibrary`] if librdmacm is too old,
    /// [`ErrorKind::Permission`](crate::ErrorKind::Permission) if the user may not use RDMA CM.
    pub fn open_event_channel(&self) -> Result<EventChannel, Error> {
        let cm = self.cm()?;
        // SAFETY: no preconditions.
        let raw = self.call_global(|| unsafe { (cm.rdma_create_event_channel)() });
        let Some(raw) = NonNull::new(raw) else {
            let errno = last_errno();
            if let Some(file) = denied_file(denied::CM) {
                return Err(Error::denied("rdma_create_event_channel", file));
            }
            return Err(match errno {
                errno @ (Errno::NODEV | Errno::NOENT | Errno::NOSYS) => {
                    Absence::NoCm { detail: std::io::Error::from(errno).to_string() }.into()
                }
                errno => Error::os("rdma_create_event_channel", errno, ""),
            });
        };
        let channel = EventChannel(Arc::new(ChannelInner {
            raw,
            cm,
            fetching: Mutex::new(()),
            id_infos: Mutex::default(),
            opened_devices: Mutex::default(),
        }));
        set_nonblocking(channel.as_fd(), "CM event channel")?;
        Ok(channel)
    }
}

impl EventChannel {
    /// Creates an identifier: one end of a future connection, or a listener.
    ///
    /// # Errors
    /// If the kernel has no memory.
    pub fn create_id(&self) -> Result<CmId, Error> {
        let key = CmKey::next();
        let mut raw = std::ptr::null_mut();
        // SAFETY: the channel is alive, `raw` is valid for the write, and the context is only a
        // number that is never dereferenced.
        let rc = unsafe {
            (self.0.cm.rdma_create_id)(
                self.0.raw.as_ptr(),
                &raw mut raw,
                key.as_context(),
                sys::rdma_port_space::RDMA_PS_TCP,
            )
        };
        match NonNull::new(raw) {
            Some(raw) if rc == 0 => Ok(CmId::new(raw, key, self.clone(), IdInfo::default())),
            _ => Err(Error::last("rdma_create_id", "")),
        }
    }

    /// Closes the devices that were removed without an event to any identifier, and that librdmacm
    /// still holds open. To do so, librdmacm opens all other devices of the host. If no device was
    /// removed in this way, the call does nothing.
    pub fn close_removed_devices(&self) {
        if self.opened_devices().forget_removed() {
            removal::close_removed_devices(self.functions());
        }
    }

    pub(super) fn functions(&self) -> &'static sys::CmFunctions {
        self.0.cm
    }

    /// Locks and returns the addresses and devices of all identifiers of this channel.
    pub(super) fn id_infos(&self) -> MutexGuard<'_, HashMap<CmKey, IdInfo>> {
        self.0.id_infos.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn raw(&self) -> *mut sys::rdma_event_channel {
        self.0.raw.as_ptr()
    }

    /// Keeps other threads from fetching events until the guard is dropped.
    pub(super) fn start_fetching(&self) -> MutexGuard<'_, ()> {
        self.0.fetching.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks and returns the devices that librdmacm has opened for this channel.
    pub(super) fn opened_devices(&self) -> MutexGuard<'_, OpenedDevices> {
        self.0.opened_devices.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for EventChannel {
    /// Returns the file descriptor that is readable while an event is pending.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the fd belongs to the channel, which `self` keeps alive.
        unsafe { borrow_fd((*self.0.raw.as_ptr()).fd) }
    }
}

impl std::fmt::Debug for EventChannel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("EventChannel").field(&self.as_fd()).finish()
    }
}
