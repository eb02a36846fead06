//! Registered memory, which the device may read and write.
//!
//! The device, and any peer that has the key, may change this memory at any moment. So this module
//! never gives out a `&[u8]` into it: bytes are copied in and out. Higher layers that can prove
//! that the device has finished (slots that own buffers until their completion) register their own
//! memory with [`ProtectionDomain::register`] and are responsible for that proof.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering, fence};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::error::{Error, ErrorKind, check};
use crate::pd::ProtectionDomain;
use crate::sys;

/// The access rights of a region. Local reads are always allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access(u32);

impl Access {
    /// The device may only read the region: a source of sends and writes.
    pub const READ_ONLY: Self = Self(0);
    /// The device may write to the region: a target of receives and of reads from a peer.
    pub const LOCAL: Self = Self(sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0);
    /// A peer that has the key may read the region.
    pub const REMOTE_READ: Self =
        Self(Self::LOCAL.0 | sys::ibv_access_flags::IBV_ACCESS_REMOTE_READ.0);
    /// A peer that has the key may write to the region.
    pub const REMOTE_WRITE: Self =
        Self(Self::LOCAL.0 | sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0);
    /// Memory windows may be bound to the region ([`MemoryRegion::window`]), and the device may
    /// write to it. Without a window, peers cannot access the region.
    pub const WINDOWS: Self = Self(Self::LOCAL.0 | sys::ibv_access_flags::IBV_ACCESS_MW_BIND.0);
    /// The device may write out of order: faster on some hosts, ignored where it is not supported.
    /// Poll completions, never the memory itself.
    pub const RELAXED_ORDERING: Self = Self(sys::ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0);

    /// Flags that a device or a library may ignore (IBV_ACCESS_OPTIONAL_RANGE).
    const OPTIONAL: u32 = 0x3ff0_0000;

    /// Returns the flags for a queue pair: without the optional ones, which only a registration may
    /// have.
    pub(crate) fn queue_pair_flags(self) -> u32 {
        self.0 & !Self::OPTIONAL
    }

    /// Returns the rights that a window gives to a peer.
    pub(crate) fn window_flags(self) -> u32 {
        use sys::ibv_access_flags as flag;
        self.0 & (flag::IBV_ACCESS_REMOTE_READ.0 | flag::IBV_ACCESS_REMOTE_WRITE.0)
    }
}

impl std::ops::BitOr for Access {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// A registered region and, if this crate allocated it, its memory.
///
/// Dropping it first deregisters it from the device and then frees the memory. Queues that were
/// given a part of it keep it alive until they are destroyed.
#[derive(Debug)]
pub struct MemoryRegion(Arc<Registration>);

/// A part of the peer's memory, described by numbers that the peer sent. Only the peer's device
/// checks them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteSlice {
    /// Address in the peer's process.
    pub addr: u64,
    /// Length in bytes, for our own bookkeeping; it is not sent with a request.
    pub len: u64,
    /// The peer's key.
    pub rkey: u32,
}

/// The registration itself, which queues keep alive. It gives no access to the bytes, so
/// [`MemoryRegion`] stays their only owner.
pub(crate) struct Registration {
    raw: NonNull<sys::ibv_mr>,
    memory: Memory,
    len: usize,
    domain: ProtectionDomain,
    /// Whether the device has released the memory; `Drop` then has nothing to do.
    released: bool,
}

enum Memory {
    /// Mapped by us, and unmapped with the region.
    Mapped(NonNull<u8>),
    /// Owned by the caller.
    Borrowed(NonNull<u8>),
}

// SAFETY: the registration is a handle that any thread may use. Its memory is reached only through
// `MemoryRegion`, which writes with `&mut self`.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Drop for Registration {
    fn drop(&mut self) {
        if !self.released {
            crate::leak::count_unless_released(self.release());
        }
    }
}

impl Registration {
    /// Deregisters the memory and frees it; returns the error number. If the device refuses, it may
    /// still write: the memory stays mapped, and the registration is unchanged.
    fn release(&mut self) -> i32 {
        let ibv = self.domain.context().verbs().ibv;
        // SAFETY: registered by us and not released yet: a success sets `released`, and both
        // callers have the only reference.
        let rc = unsafe { (ibv.ibv_dereg_mr)(self.raw.as_ptr()) };
        let rc = self.domain.context().destroy_result(rc);
        if rc != 0 {
            return rc;
        }
        self.released = true;
        if let Memory::Mapped(at) = self.memory {
            // SAFETY: mapped by `allocate` with this length; the device has lost its permission, no
            // reference into it was ever given out, and no queue pair uses it any more.
            let _ = unsafe { munmap(at.as_ptr().cast(), self.len) };
        }
        rc
    }
}

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registration").field("len", &self.len).finish_non_exhaustive()
    }
}

impl ProtectionDomain {
    /// Allocates `len` zeroed bytes, which forked children do not inherit, and registers them.
    ///
    /// # Errors
    /// [`ErrorKind::Memlock`], with the numbers, if the locked-memory limit is too low; otherwise
    /// [`ErrorKind::OutOfMemory`] or [`ErrorKind::CgroupLimit`].
    pub fn allocate(&self, len: usize, access: Access) -> Result<MemoryRegion, Error> {
        if len == 0 {
            return Err(Error::new(ErrorKind::Misuse, "ibv_reg_mr", "0 bytes"));
        }
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let at = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .map_err(|errno| Error::os("mmap", errno, format!("{len} bytes")))?;
        // After a fork, copy-on-write would move the parent's pages away from under the device.
        #[cfg(not(miri))] // Miri has neither forks nor this call
        // SAFETY: the mapping is ours. If the kernel refuses, only processes that fork are
        // affected.
        let _ = unsafe { rustix::mm::madvise(at, len, rustix::mm::Advice::LinuxDontFork) };
        let Some(memory) = NonNull::new(at.cast()) else {
            return Err(Error::new(ErrorKind::OutOfMemory, "mmap", format!("{len} bytes")));
        };
        self.register_memory(Memory::Mapped(memory), len, access).inspect_err(|_| {
            // SAFETY: registration failed, so nothing else uses the mapping.
            let _ = unsafe { munmap(at, len) };
        })
    }

    /// Registers memory that the caller owns.
    ///
    /// # Errors
    /// As [`ProtectionDomain::allocate`].
    ///
    /// # Safety
    /// `memory` must be valid for reads and writes of `len` bytes until the region and every queue
    /// pair it was posted to are gone, and no Rust reference into it may be live while the device
    /// or a peer may access the same bytes.
    pub unsafe fn register(
        &self,
        memory: NonNull<u8>,
        len: usize,
        access: Access,
    ) -> Result<MemoryRegion, Error> {
        self.register_memory(Memory::Borrowed(memory), len, access)
    }

    fn register_memory(
        &self,
        memory: Memory,
        len: usize,
        access: Access,
    ) -> Result<MemoryRegion, Error> {
        let (Memory::Mapped(at) | Memory::Borrowed(at)) = memory;
        let ibv = self.context().verbs().ibv;
        // SAFETY: the domain is alive and the memory is valid for `len` bytes: by `allocate`, or as
        // the caller of `register` promised. The fake provider keeps the address as a number.
        let raw = unsafe {
            let addr = at.as_ptr().expose_provenance();
            let memory = std::ptr::with_exposed_provenance_mut(addr);
            match ibv.ibv_reg_mr_iova2 {
                // Like the inline function in C: only this call treats optional flags as optional.
                Some(register) if access.0 & Access::OPTIONAL != 0 => {
                    register(self.raw(), memory, len, addr as u64, access.0)
                }
                _ => (ibv.ibv_reg_mr)(
                    self.raw(),
                    memory,
                    len,
                    access.queue_pair_flags().cast_signed(),
                ),
            }
        };
        let raw = NonNull::new(raw).ok_or_else(|| {
            let what = format!("{len} bytes on {}", self.context().device().name());
            Error::last("ibv_reg_mr", what).or_memlock(len as u64)
        })?;
        Ok(MemoryRegion(Arc::new(Registration {
            raw,
            memory,
            len,
            domain: self.clone(),
            released: false,
        })))
    }
}

impl Registration {
    pub(crate) fn raw(&self) -> *mut sys::ibv_mr {
        self.raw.as_ptr()
    }

    pub(crate) fn domain(&self) -> &ProtectionDomain {
        &self.domain
    }

    fn at(&self) -> NonNull<u8> {
        let (Memory::Mapped(at) | Memory::Borrowed(at)) = self.memory;
        at
    }
}

#[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
impl MemoryRegion {
    pub(crate) fn registration(&self) -> &Arc<Registration> {
        &self.0
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Returns the key for local use.
    #[must_use]
    pub fn lkey(&self) -> u32 {
        // SAFETY: the registration is alive; the field is constant.
        unsafe { (*self.0.raw.as_ptr()).lkey }
    }

    /// Returns the key that a peer needs.
    #[must_use]
    pub fn rkey(&self) -> u32 {
        // SAFETY: the registration is alive; the field is constant.
        unsafe { (*self.0.raw.as_ptr()).rkey }
    }

    /// Returns a part of the region as a peer addresses it: send these numbers to the peer.
    ///
    /// # Panics
    /// If the range is not within the region.
    #[must_use]
    pub fn remote(&self, range: Range<usize>) -> RemoteSlice {
        let len = self.checked_len(&range);
        RemoteSlice { addr: self.address(range.start), len: len as u64, rkey: self.rkey() }
    }

    /// Returns the address of a byte of the region.
    pub(crate) fn address(&self, offset: usize) -> u64 {
        self.0.at().as_ptr().addr() as u64 + offset as u64
    }

    /// Copies bytes into the region.
    ///
    /// # Panics
    /// If they do not fit at `offset`.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.checked_len(&(offset..offset.saturating_add(bytes.len())));
        // SAFETY: within the region, which is valid while the registration is; `&mut self` keeps
        // other threads out, and the device is not part of Rust's memory model.
        unsafe {
            std::ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                self.0.at().as_ptr().add(offset),
                bytes.len(),
            );
        }
        fence(Ordering::Release);
    }

    /// Copies bytes out of the region.
    ///
    /// # Panics
    /// If `offset..offset + out.len()` is not within the region.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        self.checked_len(&(offset..offset.saturating_add(out.len())));
        fence(Ordering::Acquire);
        // SAFETY: within the region, which is valid while the registration is. If the device writes
        // at the same time, the bytes may be torn, but they are still valid bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.0.at().as_ptr().add(offset),
                out.as_mut_ptr(),
                out.len(),
            );
        };
    }

    /// Returns `len` bytes from `offset` as a vector.
    ///
    /// # Panics
    /// If they are not within the region.
    #[must_use]
    pub fn to_vec(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.read(offset, &mut out);
        out
    }

    /// Returns one byte as the device last wrote it, for waiting on memory instead of a completion.
    ///
    /// # Panics
    /// If `offset` is not within the region.
    #[must_use]
    pub fn load(&self, offset: usize) -> u8 {
        self.checked_len(&(offset..offset.saturating_add(1)));
        // SAFETY: within the region; an atomic byte may be read while another writes it.
        unsafe { AtomicU8::from_ptr(self.0.at().as_ptr().add(offset)) }.load(Ordering::Acquire)
    }

    /// Deregisters the region now and reports whether the device released it. After `Ok`, no peer
    /// can access the memory. Dropping does the same, but can only count a failure.
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] while a queue that was given a part of the region, or a window on it,
    /// is alive; otherwise the error of `ibv_dereg_mr`. The region is returned unchanged: the
    /// device may still access its memory.
    pub fn deregister(mut self) -> Result<(), (Self, Error)> {
        let context = |len| format!("{len} bytes");
        let Some(registration) = Arc::get_mut(&mut self.0) else {
            let error = Error::new(ErrorKind::Misuse, "ibv_dereg_mr", context(self.len()));
            return Err((
                self,
                error.because("a queue or a window that uses the region is still alive"),
            ));
        };
        match check("ibv_dereg_mr", registration.release(), || context(registration.len)) {
            Ok(()) => Ok(()),
            Err(error) => Err((self, error)),
        }
    }

    pub(crate) fn checked_len(&self, range: &Range<usize>) -> usize {
        assert!(
            range.start <= range.end && range.end <= self.0.len,
            "range {range:?} is not within a region of {} bytes",
            self.0.len
        );
        range.end - range.start
    }
}

#[cfg(all(test, feature = "fake"))]
mod tests {
    use super::*;
    use crate::fake::{DeviceSpec, World};
    use crate::{QueuePairAttributes, QueuePairConfig, RecvRequest};

    #[test]
    fn deregister_reports_refusals_and_live_queues() {
        let world = World::new();
        world.add_device(DeviceSpec::new("fake1", "10.0.0.1".parse().expect("an address")));
        let context =
            world.verbs().device("fake1").and_then(|device| device.open()).expect("device");
        let domain = context.allocate_protection_domain().expect("domain");
        let mut region = domain.allocate(4096, Access::LOCAL).expect("region");
        region.write(0, b"mine");

        // The device refuses: the region is returned unchanged, and the call can be repeated.
        world.fail_next("ibv_dereg_mr", 5);
        let (region, error) = region.deregister().expect_err("injected failure");
        assert_eq!(error.kind(), ErrorKind::DeviceGone, "{error}");
        assert_eq!((region.to_vec(0, 4), world.objects().memory_regions), (b"mine".to_vec(), 1));

        // The queue pair may still make the device access the region.
        let cq = context.create_completion_queue(4, None, 0).expect("queue");
        let qp = domain.create_queue_pair(&QueuePairConfig::new(&cq)).expect("queue pair");
        qp.modify(&QueuePairAttributes::init(1, Access::LOCAL)).expect("init");
        qp.post_recv(&[RecvRequest::new(1, &[region.sge(0..64)])]).expect("post");
        let (region, error) = region.deregister().expect_err("in use");
        assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
        assert!(error.to_string().contains("still alive"), "{error}");

        drop(qp);
        region.deregister().expect("deregister");
        assert_eq!(world.objects().memory_regions, 0);
    }
}
