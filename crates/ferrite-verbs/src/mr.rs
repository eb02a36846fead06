//! Registered memory, which the device may read and write.
//!
//! The device, and any peer that has the key, may change this memory at any moment. So this module
//! never gives out a `&[u8]` into the memory, but copies bytes in and out. A higher layer may be
//! able to prove that the device has finished with a buffer, because it owns the buffer until the
//! completion. Then it can register its own memory with [`ProtectionDomain::register`], and is
//! responsible for that proof.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering, fence};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::error::{Error, ErrorKind, check};
use crate::pd::ProtectionDomain;
use crate::sys;

/// The access rights of a region, a window or the peer of a queue pair. Local reads are always
/// allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access(u32);

impl Access {
    /// The device may only read the region: a source of sends and writes.
    pub const READ_ONLY: Self = Self(0);
    /// The device may write to the region: a target of receives and of reads from a peer.
    pub const LOCAL: Self = Self(sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0);
    /// A peer that has the key may read the region, and the device may write to it.
    pub const REMOTE_READ: Self =
        Self(Self::LOCAL.0 | sys::ibv_access_flags::IBV_ACCESS_REMOTE_READ.0);
    /// A peer that has the key may write to the region, and so may the device.
    pub const REMOTE_WRITE: Self =
        Self(Self::LOCAL.0 | sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0);
    /// Memory windows may be bound to the region ([`MemoryRegion::window`]), and the device may
    /// write to it. Without a window, peers cannot access the region.
    pub const WINDOWS: Self = Self(Self::LOCAL.0 | sys::ibv_access_flags::IBV_ACCESS_MW_BIND.0);
    /// The device may write out of order, which is faster on some hosts. Devices and libraries that
    /// do not support this ignore the flag. Poll completions, never the memory itself.
    pub const RELAXED_ORDERING: Self = Self(sys::ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0);

    /// Flags that a device or a library may ignore (IBV_ACCESS_OPTIONAL_RANGE).
    const OPTIONAL: u32 = 0x3ff0_0000;

    /// Returns the flags without the optional ones, which a queue pair does not accept.
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
/// Dropping the region first deregisters it from the device and then frees the memory. If a part of
/// the region was posted to a queue, the queue keeps the region alive until the queue is destroyed.
/// A window on the region keeps it alive until the window is released.
#[derive(Debug)]
pub struct MemoryRegion(Arc<Registration>);

/// A part of registered memory, described by the numbers with which a peer addresses it. Only the
/// device of the memory's owner checks them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteSlice {
    /// Address in the process that owns the memory.
    pub addr: u64,
    /// Length in bytes, for the caller's bookkeeping; work requests do not use it.
    pub len: u64,
    /// The remote key of the memory.
    pub rkey: u32,
}

/// A registration, which queues and windows keep alive. It gives no access to the bytes. Only
/// [`MemoryRegion`] reads and writes them.
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

// SAFETY: the registration is a handle that any thread may use. Only `MemoryRegion` accesses its
// memory, and writes need `&mut self`.
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
    /// Deregisters the memory and frees it; returns the error number. If the device refuses, the
    /// memory stays mapped, because the device may still write to it. The registration is
    /// unchanged.
    fn release(&mut self) -> i32 {
        let ibv = self.domain.context().verbs().ibv;
        // SAFETY: we registered the memory, and it is not released yet: a success sets `released`.
        // Both callers have the only reference to this registration.
        let rc = unsafe { (ibv.ibv_dereg_mr)(self.raw.as_ptr()) };
        let rc = self.domain.context().destroy_result(rc);
        if rc != 0 {
            return rc;
        }
        self.released = true;
        if let Memory::Mapped(at) = self.memory {
            // SAFETY: `allocate` mapped the memory with this length. The device has lost its
            // permission, no reference into the memory was ever given out, and no queue pair uses
            // the memory any more.
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
    /// [`ErrorKind::Misuse`] if `len` is 0; [`ErrorKind::Memlock`], with the numbers, if the
    /// locked-memory limit is too low; otherwise, for example, [`ErrorKind::OutOfMemory`] or
    /// [`ErrorKind::CgroupLimit`].
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
        // After a fork, copy-on-write would give the parent new pages, and the device would keep
        // using the old ones.
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
    /// - `memory` must be valid for reads and writes of `len` bytes until the region and every
    ///   queue that it was posted to are gone.
    /// - No Rust reference into `memory` may be live while the device or a peer may access the same
    ///   bytes.
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
        // SAFETY: the domain is alive. The memory is valid for `len` bytes: `allocate` mapped it,
        // or the caller of `register` guarantees it. The provenance is exposed because the fake
        // provider keeps the address as a number.
        let raw = unsafe {
            let addr = at.as_ptr().expose_provenance();
            let memory = std::ptr::with_exposed_provenance_mut(addr);
            match ibv.ibv_reg_mr_iova2 {
                // Only `ibv_reg_mr_iova2` treats optional flags as optional. The inline function in
                // C makes the same choice.
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

    /// Returns the numbers with which a peer addresses a part of the region. Send them to the peer.
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
    /// If the bytes do not fit at `offset`.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.checked_len(&(offset..offset.saturating_add(bytes.len())));
        // SAFETY: the range is within the region, which is valid while the registration is. `&mut
        // self` keeps other threads out, and the device is not part of Rust's memory model.
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
        // SAFETY: the range is within the region, which is valid while the registration is. If the
        // device writes at the same time, the copy may mix old and new bytes, but any byte is
        // valid.
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
    /// If the bytes are not within the region.
    #[must_use]
    pub fn to_vec(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.read(offset, &mut out);
        out
    }

    /// Returns one byte of the region with an atomic load. A caller can wait for a change of this
    /// byte by the device, instead of waiting for a completion.
    ///
    /// # Panics
    /// If `offset` is not within the region.
    #[must_use]
    pub fn load(&self, offset: usize) -> u8 {
        self.checked_len(&(offset..offset.saturating_add(1)));
        // SAFETY: the byte is within the region. An atomic load is sound while the byte is written.
        unsafe { AtomicU8::from_ptr(self.0.at().as_ptr().add(offset)) }.load(Ordering::Acquire)
    }

    /// Deregisters the region now and reports whether the device released it. After `Ok`, no peer
    /// can access the memory. Dropping the region also deregisters it, but can only count a
    /// failure.
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] while a window on the region, or a queue that a part of the region was
    /// posted to, is alive. Otherwise the error of `ibv_dereg_mr`. The region is returned
    /// unchanged, because the device may still access its memory.
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

        // If the device refuses, the region is returned unchanged, and the call can be repeated.
        world.fail_next("ibv_dereg_mr", 5);
        let (region, error) = region.deregister().expect_err("injected failure");
        assert_eq!(error.kind(), ErrorKind::DeviceGone, "{error}");
        assert_eq!((region.to_vec(0, 4), world.objects().memory_regions), (b"mine".to_vec(), 1));

        // The queue pair may still make the device access the region.
        let cq = context.create_completion_queue(4, None, 0).expect("queue");
        let qp = domain.create_queue_pair(&QueuePairConfig::new(&cq)).expect("queue pair");
        qp.modify(&QueuePairAttributes::init(1, Access::LOCAL)).expect("init");
        qp.post_recv(&[RecvRequest::new(1, &[region.sge(0..64)])]).expect("post");
        let (region, error) = region.deregister().expect_err("a queue pair uses the region");
        assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
        assert!(error.to_string().contains("still alive"), "{error}");

        drop(qp);
        region.deregister().expect("deregister");
        assert_eq!(world.objects().memory_regions, 0);
    }
}
