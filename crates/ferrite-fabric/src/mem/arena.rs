//! An arena: one mapping, registered once with every domain of the pool whose device is present.
//!
//! An arena is registered for local use only, because a remote key for an arena would expose every
//! buffer in it. Memory for peers is registered separately (`exposed.rs`).
#![expect(unsafe_code, reason = "maps and registers memory; each block states its obligations")]

use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use ferrite_verbs::{Access, MemoryRegion, ProtectionDomain};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::class::CHUNK_BYTES;
use super::error::PoolError;
use super::lock;

/// The kind of pages under an arena. [`Pages::Normal`] although huge pages were requested means
/// that the host provided neither kind of huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pages {
    /// The system's ordinary pages.
    Normal,
    /// Ordinary pages that the kernel was asked to merge into huge ones (`madvise`). It is not
    /// known whether the kernel has done so.
    Transparent,
    /// 2 MiB pages from the host's reserve (`vm.nr_hugepages`).
    Huge,
}

/// Mapped and registered memory. The arena never accesses its bytes; only the owners of its blocks
/// do.
pub(super) struct Arena {
    /// The registrations, in the order of the pool's domains; `None` where the device is gone. The
    /// regions must be released before the memory: see `drop`.
    regions: Mutex<Vec<Option<MemoryRegion>>>,
    /// The local keys of the regions; 0 where the device is gone. They are not under the lock of
    /// `regions`, because a key is read for each posted request.
    lkeys: Box<[AtomicU32]>,
    memory: Mapping,
    pages: Pages,
}

impl Arena {
    /// Maps `len` bytes, a multiple of the chunk size, and registers them with all `domains` whose
    /// device is present.
    pub(super) fn new(
        len: usize,
        domains: &[Option<ProtectionDomain>],
        huge_pages: bool,
        numa_node: Option<u32>,
    ) -> Result<Self, PoolError> {
        let (memory, pages) = Mapping::new(len, huge_pages)
            .map_err(|source| PoolError::Map { bytes: len as u64, source: source.into() })?;
        memory.exclude_from_fork();
        if let Some(node) = numa_node {
            memory.prefer_node(node); // before the first touch, which is the registration
        }
        let regions = Mutex::new(domains.iter().map(|_| None).collect());
        let lkeys = domains.iter().map(|_| AtomicU32::new(0)).collect();
        let arena = Self { regions, lkeys, memory, pages };
        for (index, domain) in domains.iter().enumerate() {
            let Some(domain) = domain else { continue };
            match arena.register(domain) {
                Ok(region) => arena.restore(index, region),
                // The device was removed a moment ago, and its domain is not retired yet. The other
                // devices, and TCP, need the memory.
                Err(_) if domain.context().is_dead() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(arena)
    }

    /// Registers the arena with a domain. Pass the region to [`Arena::restore`] or
    /// [`Arena::release`]: it must not outlive the arena.
    pub(super) fn register(&self, domain: &ProtectionDomain) -> Result<MemoryRegion, PoolError> {
        // SAFETY: the mapping is valid for its length and outlives the region: `drop` releases the
        // regions first, and keeps the mapping if a release fails. A caller that does not store the
        // region with the others calls `release`, which keeps the mapping in the same way. The
        // owner of each buffer keeps Rust references into the buffer and the device's accesses
        // apart, as the contract of `Sge::from_raw` demands. Without remote rights there is no
        // other way to access the buffer.
        Ok(unsafe { domain.register(self.memory.at, self.memory.len, Access::LOCAL) }?)
    }

    /// Stores the registration for the pool's domain with this index, which must have none.
    pub(super) fn restore(&self, domain: usize, region: MemoryRegion) {
        // Relaxed is enough: a thread that posts on the domain's queues gets the queues later,
        // through locks.
        self.lkeys[domain].store(region.lkey(), Ordering::Relaxed);
        if let Some(before) = lock(&self.regions)[domain].replace(region) {
            self.release(before);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.memory.len
    }

    pub(super) fn pages(&self) -> Pages {
        self.pages
    }

    /// Returns the local key for the pool's `domain`.
    pub(super) fn lkey(&self, domain: usize) -> u32 {
        self.lkeys[domain].load(Ordering::Relaxed)
    }

    /// Ends the registration with one domain. Nothing of that domain may use the arena any more.
    pub(super) fn retire(&self, domain: usize) {
        let region = lock(&self.regions).get_mut(domain).and_then(Option::take);
        if let Some(region) = region {
            self.lkeys[domain].store(0, Ordering::Relaxed);
            self.release(region);
        }
    }

    /// Ends a registration.
    pub(super) fn release(&self, region: MemoryRegion) {
        if let Err((region, _)) = region.deregister() {
            // The device may still write. Dropping the region tries once more to release it, and
            // counts a leak if that fails.
            self.memory.is_leaked.store(true, Ordering::Relaxed);
            drop(region);
        }
    }

    /// Returns the address of a byte in the arena.
    pub(super) fn at(&self, offset: usize) -> NonNull<u8> {
        assert!(offset < self.memory.len, "{offset} is not within the arena");
        // SAFETY: the offset is within the mapping, as was just checked.
        unsafe { self.memory.at.add(offset) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        for region in std::mem::take(&mut *lock(&self.regions)).into_iter().flatten() {
            self.release(region);
        }
    }
}

/// A mapping of zeroed memory from the system.
struct Mapping {
    at: NonNull<u8>,
    len: usize,
    is_leaked: AtomicBool,
}

// SAFETY: a mapping is an address range that is valid anywhere in the process. The leases cut from
// it control access to the bytes.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(len: usize, huge_pages: bool) -> rustix::io::Result<(Self, Pages)> {
        if !huge_pages {
            return Ok((Self::map(len, MapFlags::empty())?, Pages::Normal));
        }
        if let Ok(mapping) = Self::map(len, MapFlags::HUGETLB | MapFlags::HUGE_2MB) {
            return Ok((mapping, Pages::Huge));
        }
        let mapping = Self::aligned(len)?;
        // SAFETY: the mapping is ours; the advice does not change its contents.
        let advised = unsafe { madvise(mapping.at.as_ptr().cast(), len, Advice::LinuxHugepage) };
        Ok((mapping, if advised.is_ok() { Pages::Transparent } else { Pages::Normal }))
    }

    fn map(len: usize, flags: MapFlags) -> rustix::io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let at = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, protection, MapFlags::PRIVATE | flags)
        }?;
        let at = NonNull::new(at.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        Ok(Self { at, len, is_leaked: AtomicBool::new(false) })
    }

    /// Maps memory at a multiple of 2 MiB, because the kernel can merge pages only there.
    fn aligned(len: usize) -> rustix::io::Result<Self> {
        let with_room = len.checked_add(CHUNK_BYTES).ok_or(rustix::io::Errno::NOMEM)?;
        let mut mapping = Self::map(with_room, MapFlags::empty())?;
        let before = mapping.at.as_ptr().align_offset(CHUNK_BYTES);
        let after = CHUNK_BYTES - before;
        // SAFETY: `before + len + after` is the length of the mapping, so all three parts lie in
        // it. Nobody uses the two parts that are cut off. A cut that fails only leaves a few unused
        // addresses behind.
        unsafe {
            let start = mapping.at;
            mapping.at = start.add(before);
            mapping.len = len;
            for (at, len) in [(start, before), (mapping.at.add(len), after)] {
                if len > 0 {
                    let _ = munmap(at.as_ptr().cast(), len);
                }
            }
        }
        Ok(mapping)
    }

    /// Excludes the memory from forked children: otherwise copy-on-write could move the parent's
    /// pages away from the device.
    fn exclude_from_fork(&self) {
        #[cfg(not(miri))] // Miri has neither forks nor this call
        // SAFETY: the mapping is ours; the advice changes only what forked children inherit.
        let _ = unsafe { madvise(self.at.as_ptr().cast(), self.len, Advice::LinuxDontFork) };
    }

    /// Asks the kernel for pages of this NUMA node, which is the device's own. If the host refuses,
    /// accesses are only slower.
    fn prefer_node(&self, node: u32) {
        const BITS: usize = u64::BITS as usize;
        let mut nodes = [0_u64; 16];
        let Some(word) = nodes.get_mut(node as usize / BITS) else { return };
        *word = 1 << (node as usize % BITS);
        // The kernel uses one bit less than the number that it is given.
        let bits = nodes.len() * BITS + 1;
        // SAFETY: mbind(2) gets our own mapping, a mask that is valid for `bits - 1` bits, and no
        // flags. The call changes where pages will come from, not their contents.
        let _ = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.at.as_ptr(),
                self.len,
                libc::MPOL_PREFERRED,
                nodes.as_ptr(),
                bits,
                0,
            )
        };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if !*self.is_leaked.get_mut() {
            // SAFETY: mapped by us with this length. The arena was the only owner, and is dropped
            // when no lease on its blocks is left and the device has lost its permission.
            let _ = unsafe { munmap(self.at.as_ptr().cast(), self.len) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no partial unmapping")]
    fn huge_page_mappings_are_aligned_and_writable() {
        let (mapping, pages) = Mapping::new(2 * CHUNK_BYTES, true).expect("memory");
        assert_eq!(mapping.at.as_ptr().align_offset(CHUNK_BYTES), 0, "{pages:?}");
        assert_eq!(mapping.len, 2 * CHUNK_BYTES);
        // SAFETY: the mapping is ours, and the byte is within it.
        unsafe {
            let last = mapping.at.add(mapping.len - 1).as_ptr();
            last.write(7);
            assert_eq!(last.read(), 7);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no mbind")]
    fn accepts_memory_nodes_that_do_not_exist() {
        let (mapping, _) = Mapping::new(CHUNK_BYTES, false).expect("memory");
        for node in [0, 63, 1023, 5000] {
            mapping.prefer_node(node);
        }
    }
}
