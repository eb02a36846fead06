//! An open device and its limits.

use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::io::Errno;

use crate::device::Device;
use crate::error::{Error, check};
use crate::sys;
use crate::table::Verbs;

/// An open device. Clones share it. It closes when the last clone and the last object created from
/// it are dropped. In this diagram, `A ◄─ B` means that B keeps A alive:
///
/// ```text
/// Device ◄─ Context ◄─┬─ ProtectionDomain ◄─┬─ MemoryRegion ◄─ MemoryWindow
///                     │                     ├─ SharedReceiveQueue ◄─┐
///                     │                     └─ QueuePair ───────────┤
///                     ├─ CompletionChannel ◄─ CompletionQueue ◄─────┘
///                     └─ (async events)
/// ```
#[derive(Clone)]
pub struct Context(Arc<Inner>);

struct Inner {
    raw: NonNull<sys::ibv_context>,
    device: Device,
}

// SAFETY: any threads may use a verbs context at the same time: libibverbs locks internally.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: opened by us and closed once, after every child (each holds an `Arc` of us).
        let rc = unsafe { (self.device.verbs().ibv.ibv_close_device)(self.raw.as_ptr()) };
        crate::leak::count_unless_released(rc);
    }
}

impl Device {
    /// Opens the device.
    ///
    /// # Errors
    /// Fails if:
    /// - the process lacks the permission, or has no file descriptors left,
    /// - a cgroup's limit is reached,
    /// - the device was removed,
    /// - memory cannot be protected against forks.
    pub fn open(&self) -> Result<Context, Error> {
        Context::open(self)
    }
}

impl Context {
    fn open(device: &Device) -> Result<Self, Error> {
        enable_fork_safety(device.verbs())?;
        // SAFETY: the device pointer is valid while `device` holds its list.
        let raw = unsafe { (device.verbs().ibv.ibv_open_device)(device.raw()) };
        let raw = NonNull::new(raw).ok_or_else(|| {
            let error = Error::last("ibv_open_device", device.name());
            match device.denied_file() {
                Some(file) => Error::denied("ibv_open_device", file),
                None => error,
            }
        })?;
        let context = Self(Arc::new(Inner { raw, device: device.clone() }));
        set_nonblocking(context.as_fd(), "async event fd")?;
        Ok(context)
    }

    pub(crate) fn raw(&self) -> *mut sys::ibv_context {
        self.0.raw.as_ptr()
    }

    pub(crate) fn verbs(&self) -> &Verbs {
        self.0.device.verbs()
    }

    /// Returns the device that was opened.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Returns whether the kernel has taken the device away from this process, because the device
    /// was removed or its firmware was reset.
    ///
    /// From then on every command fails with EIO, including those that destroy objects. The kernel
    /// has already destroyed all objects and unpinned all memory of this context. It does so in
    /// `ib_uverbs_free_hw_resources` (`drivers/infiniband/core/uverbs_main.c`), which calls
    /// `uverbs_destroy_ufile_hw` (`rdma_core.c`). The last step closes the event files, which then
    /// report EPOLLERR (`ib_uverbs_event_poll`). When a Soft-RoCE device is removed, the kernel
    /// waits for the users of the device instead.
    #[must_use]
    pub fn is_disassociated(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        if cfg!(miri) {
            return false; // Miri cannot poll
        }
        let fd = self.as_fd();
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let gone = PollFlags::ERR | PollFlags::HUP;
        poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().intersects(gone)
    }

    /// Returns the number of completion vectors (interrupts) of the device, at least 1.
    #[must_use]
    pub fn completion_vectors(&self) -> u32 {
        // SAFETY: the context is open; the field is constant.
        u32::try_from(unsafe { (*self.raw()).num_comp_vectors }).unwrap_or(1).max(1)
    }

    /// Returns the device's limits and identity.
    ///
    /// # Errors
    /// If the device was removed.
    pub fn limits(&self) -> Result<Limits, Error> {
        let mut attr = sys::ibv_device_attr::default();
        // SAFETY: the context is open and `attr` is valid for the write.
        let rc = unsafe { (self.verbs().ibv.ibv_query_device)(self.raw(), &raw mut attr) };
        check("ibv_query_device", rc, || self.device().name())?;
        Ok(Limits::from_raw(&attr))
    }

    /// Returns the result of a destroy call, corrected for a removed device: EIO counts as success
    /// if the kernel has already destroyed all objects ([`Context::is_disassociated`]).
    pub(crate) fn destroy_result(&self, rc: i32) -> i32 {
        if rc == Errno::IO.raw_os_error() && self.is_disassociated() { 0 } else { rc }
    }
}

/// Protects registered memory against forks of this process (BGSAVE, for example). After a fork,
/// copy-on-write moves the parent's next write to another page, which the device does not see.
///
/// From version 5.12 on, the kernel copies pinned pages for the child. If libibverbs reports this,
/// this function does nothing. Otherwise it calls `ibv_fork_init` (`memory.c` in libibverbs). On
/// older kernels, libibverbs then marks all memory that it registers, including the queues of its
/// providers, so that children do not inherit it. This costs one madvise per registration, and must
/// be requested before the first registration.
fn enable_fork_safety(verbs: &Verbs) -> Result<(), Error> {
    use sys::ibv_fork_status as Status;
    let ibv = verbs.ibv;
    // rdma-core before 35 has only `ibv_fork_init`, so there it is called on every kernel.
    // SAFETY: no preconditions.
    let status = ibv.ibv_is_fork_initialized.map(|call| verbs.call_global(|| unsafe { call() }));
    if matches!(status, Some(Status::IBV_FORK_UNNEEDED | Status::IBV_FORK_ENABLED)) {
        return Ok(());
    }
    let Some(init) = ibv.ibv_fork_init else { return Ok(()) };
    // SAFETY: no preconditions.
    let rc = verbs.call_global(|| unsafe { init() });
    check("ibv_fork_init", rc, || "a kernel before 5.12".to_owned()).map_err(|error| {
        error.because(
            "after a fork, the device and the process could use different copies of the same \
             memory; use Linux 5.12 or later, or set RDMAV_FORK_SAFE=1",
        )
    })
}

impl AsFd for Context {
    /// Returns the file descriptor that is readable while an async event is pending: see
    /// [`Context::next_async_event`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: libibverbs closes the fd with the context, which `self` keeps open.
        unsafe { BorrowedFd::borrow_raw((*self.raw()).async_fd) }
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Context").field(&self.device().name()).finish()
    }
}

/// The limits of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are those of ibv_query_device(3)")]
#[non_exhaustive]
pub struct Limits {
    pub firmware: String,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub ports: u8,
    pub max_mr_size: u64,
    pub max_mr: u32,
    pub max_pd: u32,
    pub max_qp: u32,
    pub max_qp_wr: u32,
    pub max_sge: u32,
    pub max_cq: u32,
    pub max_cqe: u32,
    pub max_srq: u32,
    pub max_srq_wr: u32,
    pub max_srq_sge: u32,
    /// Maximum number of reads and atomics that a peer may have outstanding at one of our queue
    /// pairs.
    pub max_qp_rd_atom: u32,
    /// Maximum number of reads and atomics that one of our queue pairs may have outstanding.
    pub max_qp_init_rd_atom: u32,
    /// Maximum number of memory windows, or 0 if unknown: mlx4 supports windows, but does not
    /// report how many.
    pub max_mw: u32,
    /// Whether the kernel reports memory windows that can be bound to one queue pair
    /// ([`crate::MemoryWindow`]). Not every user-space provider implements them: see
    /// [`crate::ProtectionDomain::try_window`].
    pub queue_pair_windows: bool,
}

impl Limits {
    fn from_raw(attr: &sys::ibv_device_attr) -> Self {
        let count = |value: i32| u32::try_from(value).unwrap_or(0);
        let windows = sys::DEVICE_WINDOW_TYPE_2A | sys::DEVICE_WINDOW_TYPE_2B;
        // `c_char` is signed on some platforms and unsigned on others.
        let firmware =
            attr.fw_ver.iter().take_while(|c| **c != 0).map(|c| char::from(c.to_ne_bytes()[0]));
        Self {
            firmware: firmware.collect(),
            vendor_id: attr.vendor_id,
            vendor_part_id: attr.vendor_part_id,
            ports: attr.phys_port_cnt,
            max_mr_size: attr.max_mr_size,
            max_mr: count(attr.max_mr),
            max_pd: count(attr.max_pd),
            max_qp: count(attr.max_qp),
            max_qp_wr: count(attr.max_qp_wr),
            max_sge: count(attr.max_sge),
            max_cq: count(attr.max_cq),
            max_cqe: count(attr.max_cqe),
            max_srq: count(attr.max_srq),
            max_srq_wr: count(attr.max_srq_wr),
            max_srq_sge: count(attr.max_srq_sge),
            max_qp_rd_atom: count(attr.max_qp_rd_atom),
            max_qp_init_rd_atom: count(attr.max_qp_init_rd_atom),
            max_mw: count(attr.max_mw),
            queue_pair_windows: attr.device_cap_flags & windows != 0,
        }
    }
}

/// Returns a message for the first `(name, asked, maximum)` in which `asked` exceeds `maximum`.
pub(crate) fn exceeded(asked: &[(&str, u32, u32)]) -> Option<String> {
    let (name, asked, max) = asked.iter().find(|(_, asked, max)| asked > max)?;
    Some(format!("{name} is {asked}, the device allows {max}"))
}

/// Makes a file descriptor of the verbs libraries non-blocking, because callers wait with their own
/// deadline.
pub(crate) fn set_nonblocking(fd: BorrowedFd<'_>, what: &str) -> Result<(), Error> {
    if cfg!(miri) {
        return Ok(()); // Miri has no fcntl; tests under Miri read only events that exist
    }
    let flags = rustix::fs::fcntl_getfl(fd).map_err(|errno| Error::os("fcntl", errno, what))?;
    rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)
        .map_err(|errno| Error::os("fcntl", errno, what))
}

/// Waits until `fd` is readable or reports an error or a hang-up; returns `false` if `timeout`
/// passed first.
pub(crate) fn wait_readable(
    fd: BorrowedFd<'_>,
    timeout: std::time::Duration,
) -> Result<bool, Error> {
    let deadline = std::time::Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(std::time::Instant::now());
        let spec = rustix::event::Timespec {
            tv_sec: left.as_secs().cast_signed(),
            tv_nsec: left.subsec_nanos().into(),
        };
        let mut fds = [rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN)];
        match rustix::event::poll(&mut fds, Some(&spec)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(Error::os("poll", errno, "")),
        }
    }
}

/// Borrows an fd that a C object owns.
///
/// # Safety
/// `fd` is open and stays open for the lifetime that the caller gives the result.
pub(crate) unsafe fn borrow_fd<'a>(fd: RawFd) -> BorrowedFd<'a> {
    // SAFETY: the caller guarantees that `fd` is open and stays open.
    unsafe { BorrowedFd::borrow_raw(fd) }
}
