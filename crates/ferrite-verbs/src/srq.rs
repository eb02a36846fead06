//! Shared receive queues: one set of posted receives for many queue pairs.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use crate::context::exceeded;
use crate::error::{ENTRY_BYTES, Error, ErrorKind, check, set_errno};
use crate::mr::Registration;
use crate::pd::ProtectionDomain;
use crate::sys;
use crate::wr::{PostError, RecvRequest, Request, Sge, post_chained};

/// A queue of receives that any of its queue pairs may consume. Clones share it.
///
/// When a queue pair fails, the remaining receives stay in the queue. They are not flushed.
#[derive(Clone)]
pub struct SharedReceiveQueue(Arc<Inner>);

struct Inner {
    raw: NonNull<sys::ibv_srq>,
    /// Set by [`SharedReceiveQueue::destroy`], so that `Drop` does not destroy the queue again.
    destroyed: bool,
    domain: ProtectionDomain,
    held: PostedRegistrations,
}

// SAFETY: providers lock a shared receive queue internally.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Inner {
    fn release(&mut self) -> i32 {
        let ibv = self.domain.context().verbs().ibv;
        // SAFETY: we created the queue, and it is destroyed once, after every queue pair on it
        // (each holds an `Arc`).
        let rc = unsafe { (ibv.ibv_destroy_srq)(self.raw.as_ptr()) };
        self.domain.context().destroy_result(rc)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.destroyed && !crate::leak::count_unless_released(self.release()) {
            self.held.leak();
        }
    }
}

impl ProtectionDomain {
    /// Creates a shared receive queue for `max_wr` receives of up to `max_sge` scatter/gather
    /// elements.
    ///
    /// # Errors
    /// [`ErrorKind::DeviceLimit`] if a limit of the device is exceeded; otherwise lack of memory or
    /// a cgroup's limit.
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
            let error = Error::last(
                "ibv_create_srq",
                format!("{max_wr} receives of {max_sge} scatter/gather elements"),
            );
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
            held: PostedRegistrations::default(),
        })))
    }
}

impl SharedReceiveQueue {
    pub(crate) fn raw(&self) -> *mut sys::ibv_srq {
        self.0.raw.as_ptr()
    }

    /// Destroys the queue and reports failure. After `Ok`, the device accesses none of the memory
    /// that was posted to it.
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] while a queue pair or another clone uses the queue; otherwise the
    /// error that the device reported.
    pub fn destroy(mut self) -> Result<(), (Self, Error)> {
        let Some(inner) = Arc::get_mut(&mut self.0) else {
            let error = Error::new(
                ErrorKind::Misuse,
                "ibv_destroy_srq",
                "a queue pair or another clone still uses the queue",
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
    /// [`ErrorKind::QueueFull`] if there is no room. The error tells how many requests were posted.
    pub fn post_recv(&self, requests: &[RecvRequest<'_>]) -> Result<(), PostError> {
        self.0.held.hold(requests);
        let (raw, post) = (self.raw(), {
            // SAFETY: the queue is alive; the provider filled the operations when the context was
            // opened.
            unsafe { (*(*self.raw()).context).ops.post_srq_recv }
        });
        post_chained("ibv_post_srq_recv", requests, |head, refused| match post {
            // SAFETY: the chain is valid for the call. The memory that it names outlives its use:
            // `hold` keeps it registered, or the caller of `Sge::from_raw` does.
            Some(post) => unsafe { post(raw, head, refused) },
            None => rustix::io::Errno::NOSYS.raw_os_error(),
        })
    }

    /// Requests one async event, which the device raises when fewer than `limit` receives are left.
    ///
    /// # Errors
    /// If the device does not support limits, or was removed.
    pub fn arm_limit(&self, limit: u32) -> Result<(), Error> {
        let mut attr = sys::ibv_srq_attr { srq_limit: limit, ..Default::default() };
        let mask = sys::ibv_srq_attr_mask::IBV_SRQ_LIMIT.0.cast_signed();
        // SAFETY: the queue is alive and `attr` is valid for the call.
        let rc = unsafe {
            (self.0.domain.context().verbs().ibv.ibv_modify_srq)(self.raw(), &raw mut attr, mask)
        };
        check("ibv_modify_srq", rc, || format!("limit {limit}"))
    }

    /// Returns the armed limit. It is 0 if no limit is armed, for example after the event.
    ///
    /// # Errors
    /// If the device was removed.
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

/// Registrations that were posted to a queue, kept alive until the device has released the queue.
#[derive(Default)]
pub(crate) struct PostedRegistrations(Mutex<Vec<Arc<Registration>>>);

impl PostedRegistrations {
    /// Keeps every registration in `requests` alive. A queue uses few regions, so a linear scan is
    /// faster than a set. An [`Sge::from_raw`] has no registration and is skipped.
    pub(crate) fn hold<R: Request>(&self, requests: &[R]) {
        // These loops run for every request of a busy connection, so they must stay short.
        for request in requests {
            for owner in request.local().iter().filter_map(Sge::owner) {
                self.hold_one(owner);
            }
        }
    }

    fn hold_one(&self, owner: &Arc<Registration>) {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !held.iter().any(|known| Arc::ptr_eq(known, owner)) {
            held.push(Arc::clone(owner));
        }
    }

    /// Leaks the registrations, because the device did not release the queue.
    pub(crate) fn leak(&mut self) {
        let held = std::mem::take(self.0.get_mut().unwrap_or_else(PoisonError::into_inner));
        std::mem::forget(held);
    }
}
