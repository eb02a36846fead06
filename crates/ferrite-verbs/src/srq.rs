//! Shared receive queue: one stock of receives for many queue pairs.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use crate::context::exceeded;
use crate::error::{ENTRY_BYTES, Error, ErrorKind, check, set_errno};
use crate::mr::Registration;
use crate::pd::ProtectionDomain;
use crate::sys;
use crate::wr::{PostError, RecvRequest, Request, Sge, post_chained};

/// Receives that any of its queue pairs may take. Clones share it.
///
/// When a queue pair dies its unused receives stay here; nothing is flushed.
#[derive(Clone)]
pub struct SharedReceiveQueue(Arc<Inner>);

struct Inner {
    raw: NonNull<sys::ibv_srq>,
    /// By [`SharedReceiveQueue::destroy`]; nothing but `Drop` comes after that.
    destroyed: bool,
    domain: ProtectionDomain,
    held: Held,
}

// SAFETY: providers lock a shared receive queue inside.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Inner {
    fn release(&mut self) -> i32 {
        let ibv = self.domain.context().verbs().ibv;
        // SAFETY: created by us and destroyed once, after every queue pair on it (each holds an
        // `Arc`).
        let rc = unsafe { (ibv.ibv_destroy_srq)(self.raw.as_ptr()) };
        crate::leak::outcome(rc, self.domain.context())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.destroyed && !crate::leak::unless_released(self.release()) {
            self.held.leak();
        }
    }
}

impl ProtectionDomain {
    /// Makes a shared receive queue for `max_wr` receives of up to `max_sge` pieces each.
    ///
    /// # Errors
    /// [`ErrorKind::DeviceLimit`] if the device cannot; lack of memory otherwise.
    pub fn create_shared_receive_queue(
        &self,
        max_wr: u32,
        max_sge: u32,
    ) -> Result<SharedReceiveQueue, Error> {
        let mut attr = sys::ibv_srq_init_attr {
            srq_context: std::ptr::null_mut(),
            attr: sys::ibv_srq_attr { max_wr, max_sge, srq_limit: 0 },
        };
        set_errno(0);
        // SAFETY: the domain is alive and `attr` is valid for the call.
        let raw = unsafe { (self.context().verbs().ibv.ibv_create_srq)(self.raw(), &raw mut attr) };
        let raw = NonNull::new(raw).ok_or_else(|| {
            let error =
                Error::last("ibv_create_srq", format!("{max_wr} receives of {max_sge} pieces"));
            let limit = self.context().limits().ok().and_then(|l| {
                exceeded(&[("max_wr", max_wr, l.max_srq_wr), ("max_sge", max_sge, l.max_srq_sge)])
            });
            match limit {
                Some(limit) => error.with_kind(ErrorKind::DeviceLimit).because(limit),
                None => error.or_memlock(u64::from(max_wr) * ENTRY_BYTES),
            }
        })?;
        Ok(SharedReceiveQueue(Arc::new(Inner {
            raw,
            destroyed: false,
            domain: self.clone(),
            held: Held::default(),
        })))
    }
}

impl SharedReceiveQueue {
    pub(crate) fn raw(&self) -> *mut sys::ibv_srq {
        self.0.raw.as_ptr()
    }

    /// Destroys it, for callers that must know: after `Ok` the device touches none of the memory
    /// that was posted to it.
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] while a queue pair or another clone has it, or what the device said.
    pub fn destroy(mut self) -> Result<(), (Self, Error)> {
        let Some(inner) = Arc::get_mut(&mut self.0) else {
            let error = Error::new(
                ErrorKind::Misuse,
                "ibv_destroy_srq",
                "a queue pair still takes from it",
            );
            return Err((self, error));
        };
        match check("ibv_destroy_srq", inner.release(), String::new) {
            Ok(()) => {
                inner.destroyed = true;
                Ok(())
            }
            Err(error) => Err((self, error)),
        }
    }

    /// Posts receives.
    ///
    /// # Errors
    /// [`ErrorKind::QueueFull`] when there is no room; how many were posted before comes along.
    pub fn post_recv(&self, requests: &[RecvRequest<'_>]) -> Result<(), PostError> {
        self.0.held.hold(requests);
        let (raw, post) = (self.raw(), {
            // SAFETY: the queue is alive; the provider filled the operations when it was opened.
            unsafe { (*(*self.raw()).context).ops.post_srq_recv }
        });
        post_chained("ibv_post_srq_recv", requests, |head, refused| match post {
            // SAFETY: the chain is valid for the call, and the memory it names outlives its use:
            // held above, or promised by whoever called `Sge::from_raw`.
            Some(post) => unsafe { post(raw, head, refused) },
            None => rustix::io::Errno::NOSYS.raw_os_error(),
        })
    }

    /// Asks for one async event when fewer than `limit` receives are left.
    ///
    /// # Errors
    /// When the device does not support it, or has gone.
    pub fn arm_limit(&self, limit: u32) -> Result<(), Error> {
        let mut attr = sys::ibv_srq_attr { srq_limit: limit, ..Default::default() };
        let mask = sys::ibv_srq_attr_mask::IBV_SRQ_LIMIT.0.cast_signed();
        // SAFETY: the queue is alive and `attr` is valid for the call.
        let rc = unsafe {
            (self.0.domain.context().verbs().ibv.ibv_modify_srq)(self.raw(), &raw mut attr, mask)
        };
        check("ibv_modify_srq", rc, || format!("limit {limit}"))
    }

    /// The limit that is armed; 0 after it fired.
    ///
    /// # Errors
    /// When the device has gone.
    pub fn armed_limit(&self) -> Result<u32, Error> {
        let mut attr = sys::ibv_srq_attr::default();
        // SAFETY: the queue is alive and `attr` is valid for the write.
        let rc = unsafe {
            (self.0.domain.context().verbs().ibv.ibv_query_srq)(self.raw(), &raw mut attr)
        };
        check("ibv_query_srq", rc, String::new)?;
        Ok(attr.srq_limit)
    }
}

impl std::fmt::Debug for SharedReceiveQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("SharedReceiveQueue").field(&self.raw()).finish()
    }
}

/// Registrations that a queue was given: alive until the device has let go of the queue.
#[derive(Default)]
pub(crate) struct Held(Mutex<Vec<Arc<Registration>>>);

impl Held {
    /// Remembers every owner in `requests`. A queue sees few regions, so a scan beats a set; memory
    /// that a caller vouches for costs nothing here.
    pub(crate) fn hold<R: Request>(&self, requests: &[R]) {
        let owners = requests.iter().flat_map(|request| request.local()).filter_map(Sge::owner);
        let mut held = None;
        for owner in owners {
            let held =
                held.get_or_insert_with(|| self.0.lock().unwrap_or_else(PoisonError::into_inner));
            if !held.iter().any(|known| Arc::ptr_eq(known, owner)) {
                held.push(Arc::clone(owner));
            }
        }
    }

    /// Keeps them for ever: the device would not let go.
    pub(crate) fn leak(&mut self) {
        let held = std::mem::take(self.0.get_mut().unwrap_or_else(PoisonError::into_inner));
        std::mem::forget(held);
    }
}
