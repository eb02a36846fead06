//! An arena: one mapping, registered once with every domain of the pool.
//!
//! Registered for local use only: a remote key on an arena would expose every buffer in it. What a
//! peer may reach is registered again, by itself (`exposed.rs`).
#![expect(unsafe_code, reason = "maps and registers memory: each block states its obligations")]

use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use ferrite_verbs::{Access, MemoryRegion, ProtectionDomain};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::class::CHUNK_BYTES;
use super::error::PoolError;
use super::lock;

/// The pages under an arena. [`Pages::Normal`] where huge ones were asked for means that the host
/// has neither kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pages {
    /// The system's ordinary pages.
    Normal,
    /// Ordinary pages that the kernel was asked to join (`madvise`): likely, not certain.
    Transparent,
    /// 2 MiB pages out of the host's reserve (`vm.nr_hugepages`).
    Huge,
}

/// Mapped and registered memory. What happens to its bytes is the business of the blocks cut from
/// it: the arena itself never looks at them.
pub(super) struct Arena {
    /// In the order of the pool's domains; `None` where the device is gone. They go before the
    /// memory: see `drop`.
    regions: Mutex<Vec<Option<MemoryRegion>>>,
    /// Those of the regions; 0 where the device is gone. Read for each request that is posted, so
    /// not under their lock.
    lkeys: Box<[AtomicU32]>,
    memory: Mapping,
    pages: Pages,
}

impl Arena {
    /// Maps `len` bytes, a multiple of the chunk, and registers them with those of `domains` that
    /// are there.
    pub(super) fn new(
        len: usize,
        domains: &[Option<ProtectionDomain>],
        huge_pages: bool,
        numa_node: Option<u32>,
    ) -> Result<Self, PoolError> {
        let (memory, pages) = Mapping::new(len, huge_pages)
            .map_err(|source| PoolError::Map { bytes: len as u64, source: source.into() })?;
        memory.keep_from_children();
        if let Some(node) = numa_node {
            memory.prefer_node(node); // before the first touch, which is the registration
        }
        let regions = Mutex::new(domains.iter().map(|_| None).collect());
        let lkeys = domains.iter().map(|_| AtomicU32::new(0)).collect();
        let arena = Self { regions, lkeys, memory, pages };
        for (index, domain) in domains.iter().enumerate() {
            if let Some(domain) = domain {
                arena.restore(index, arena.register(domain)?);
            }
        }
        Ok(arena)
    }

    /// Registers it with a domain. The region is for [`Arena::restore`] or [`Arena::let_go`]: it
    /// must not outlive the arena.
    pub(super) fn register(&self, domain: &ProtectionDomain) -> Result<MemoryRegion, PoolError> {
        // SAFETY: the mapping is valid for its length and outlives the region: `drop` releases the
        // regions first, and keeps the mapping if one is not released; a caller who does not put
        // the region among them lets go of it, which keeps the mapping in the same way. Rust
        // references into it and the device's accesses are kept apart by the owner of each buffer,
        // as the contract of `Sge::from_raw` demands; without remote rights there is no other way
        // to reach it.
        Ok(unsafe { domain.register(self.memory.at, self.memory.len, Access::LOCAL) }?)
    }

    /// Makes a registration that of the pool's `domain`, which has none.
    pub(super) fn restore(&self, domain: usize, region: MemoryRegion) {
        // Relaxed: who posts on the domain's queues got them later, through locks.
        self.lkeys[domain].store(region.lkey(), Ordering::Relaxed);
        if let Some(before) = lock(&self.regions)[domain].replace(region) {
            self.let_go(before);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.memory.len
    }

    pub(super) fn pages(&self) -> Pages {
        self.pages
    }

    /// The local key under the pool's `domain`.
    pub(super) fn lkey(&self, domain: usize) -> u32 {
        self.lkeys[domain].load(Ordering::Relaxed)
    }

    /// Ends the registration with one domain. Nothing of that domain may use the arena any more.
    pub(super) fn retire(&self, domain: usize) {
        let region = lock(&self.regions).get_mut(domain).and_then(Option::take);
        if let Some(region) = region {
            self.lkeys[domain].store(0, Ordering::Relaxed);
            self.let_go(region);
        }
    }

    /// Ends a registration.
    pub(super) fn let_go(&self, region: MemoryRegion) {
        if let Err((region, _)) = region.deregister() {
            // The device may still write. Dropping the region tries once more and counts the leak.
            self.memory.keep_for_ever.store(true, Ordering::Relaxed);
            drop(region);
        }
    }

    /// The address of a byte within it.
    pub(super) fn at(&self, offset: usize) -> NonNull<u8> {
        assert!(offset < self.memory.len, "{offset} is not within the arena");
        // SAFETY: within the mapping, as was just checked.
        unsafe { self.memory.at.add(offset) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        for region in std::mem::take(&mut *lock(&self.regions)).into_iter().flatten() {
            self.let_go(region);
        }
    }
}

/// Memory of our own from the system, zeroed.
struct Mapping {
    at: NonNull<u8>,
    len: usize,
    keep_for_ever: AtomicBool,
}

// SAFETY: it is an address range that is valid wherever in the process it is used; access to the
// bytes is ruled by the leases cut from it.
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
        Ok(Self { at, len, keep_for_ever: AtomicBool::new(false) })
    }

    /// At a multiple of 2 MiB, where alone the kernel can join pages.
    fn aligned(len: usize) -> rustix::io::Result<Self> {
        let with_room = len.checked_add(CHUNK_BYTES).ok_or(rustix::io::Errno::NOMEM)?;
        let mut mapping = Self::map(with_room, MapFlags::empty())?;
        let before = mapping.at.as_ptr().align_offset(CHUNK_BYTES);
        let after = CHUNK_BYTES - before;
        // SAFETY: `before + len + after` is the length of the mapping, so all three parts lie in
        // it; nobody knows the two that are cut off. A cut that fails leaves a few unused addresses
        // behind.
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

    /// After a fork, copy-on-write would move the parent's pages away from under the device.
    fn keep_from_children(&self) {
        #[cfg(not(miri))] // which has neither forks nor this call
        // SAFETY: the mapping is ours; a kernel that refuses costs only children of this process.
        let _ = unsafe { madvise(self.at.as_ptr().cast(), self.len, Advice::LinuxDontFork) };
    }

    /// Pages from the device's own memory node, while it has some. Best effort: a host that refuses
    /// is slower.
    fn prefer_node(&self, node: u32) {
        const BITS: usize = u64::BITS as usize;
        let mut nodes = [0_u64; 16];
        let Some(word) = nodes.get_mut(node as usize / BITS) else { return };
        *word = 1 << (node as usize % BITS);
        // The kernel takes one bit less than it is told.
        let bits = nodes.len() * BITS + 1;
        // SAFETY: mbind(2) with our own mapping, a mask that is valid for `bits - 1` bits, and no
        // flags: it changes where pages will come from, not what they hold.
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
        if !*self.keep_for_ever.get_mut() {
            // SAFETY: mapped by us with this length. The arena was the only owner, and goes when no
            // lease on its blocks is left and the device has lost its permission.
            let _ = unsafe { munmap(self.at.as_ptr().cast(), self.len) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "no partial unmapping there")]
    fn huge_pages_or_the_next_best() {
        let (mapping, pages) = Mapping::new(2 * CHUNK_BYTES, true).expect("memory");
        assert_eq!(mapping.at.as_ptr().align_offset(CHUNK_BYTES), 0, "{pages:?}");
        assert_eq!(mapping.len, 2 * CHUNK_BYTES);
        // SAFETY: ours, and within the mapping.
        unsafe {
            let last = mapping.at.add(mapping.len - 1).as_ptr();
            last.write(7);
            assert_eq!(last.read(), 7);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "no such call there")]
    fn a_memory_node_is_a_wish() {
        let (mapping, _) = Mapping::new(CHUNK_BYTES, false).expect("memory");
        for node in [0, 63, 1023, 5000] {
            mapping.prefer_node(node);
        }
    }
}
