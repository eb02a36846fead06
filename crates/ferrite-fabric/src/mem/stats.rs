//! The statistics of a pool, as plain numbers.

use std::sync::atomic::{AtomicU64, Ordering};

use super::arena::Pages;
use super::class::{Purpose, SizeClass};
use super::core::Core;
use super::counters::Counters;

/// A snapshot of a pool: see [`Pool::stats`](super::Pool::stats).
///
/// For each purpose, `mapped = in use + cached + free`. Buffers that are exposed or in quarantine
/// are in use.
///
/// ```
/// use ferrite_fabric::mem::Purpose;
/// # use ferrite_fabric::mem::Pool;
/// # use ferrite_verbs::fake::{DeviceSpec, World};
/// # let world = World::new();
/// # world.add_device(DeviceSpec::new("fake1", "127.0.0.1".parse()?));
/// # let domain = world.verbs().device("fake1")?.open()?.allocate_protection_domain()?;
/// # let pool = Pool::builder(&[domain]).build()?;
/// let _buf = pool.take_uncharged(5000, Purpose::Send)?;
/// let stats = pool.stats();
/// assert_eq!((stats.send.in_use_bytes, stats.receive.in_use_bytes), (8192, 0));
/// for (name, value) in stats.counters() {
///     println!("ferrite_memory_{name} {value}");
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Bytes that are mapped from the system.
    pub mapped_bytes: u64,
    /// Registered bytes: the mapped bytes, once for every domain whose device is present. The
    /// registrations of exposed buffers are not included.
    pub registered_bytes: u64,
    /// Maximum number of registered bytes: the sum of both heaps' maximums, once for every domain.
    pub registered_max_bytes: u64,
    /// Number of mappings.
    pub arenas: u64,
    /// How often the pool has grown since it was built.
    pub growths: u64,
    /// The mapped bytes by kind of page. Shows whether the host provided huge pages.
    pub pages: PageStats,
    /// The memory node that is preferred for arenas.
    pub numa_node: Option<u32>,
    /// Memory for sends.
    pub send: HeapStats,
    /// Memory for receives.
    pub receive: HeapStats,
    /// Number of buffers that are exposed to peers.
    pub exposed_regions: u64,
    /// Bytes that are exposed to peers.
    pub exposed_bytes: u64,
    /// Bytes of blocks that cannot be used because a device has not released them. Normally 0.
    pub quarantined_bytes: u64,
    /// Failures by cause, since the pool was built.
    pub failures: Failures,
}

/// Bytes by kind of page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "see `Pages`")]
pub struct PageStats {
    pub normal_bytes: u64,
    pub transparent_bytes: u64,
    pub huge_bytes: u64,
}

/// The memory of one purpose.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeapStats {
    /// The maximum number of bytes.
    pub max_bytes: u64,
    /// Bytes that are mapped.
    pub mapped_bytes: u64,
    /// Bytes of blocks in use.
    pub in_use_bytes: u64,
    /// Bytes of free blocks in the caches.
    pub cached_bytes: u64,
    /// Bytes of free blocks and chunks that are in no cache.
    pub free_bytes: u64,
    /// Number of blocks in use by [`SizeClass`], the smallest first.
    pub in_use_blocks: [u64; SizeClass::ALL.len()],
}

/// Numbers of failures, by cause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failures {
    /// The send heap was at its maximum.
    pub send_exhausted: u64,
    /// The receive heap was at its maximum.
    pub receive_exhausted: u64,
    /// An account was at its limit.
    pub account_exhausted: u64,
    /// The request was larger than the largest block.
    pub too_large: u64,
    /// The system had no memory.
    pub map: u64,
    /// The device or the kernel refused to register an arena or an exposed buffer, or to allocate a
    /// memory window.
    pub register: u64,
    /// A device did not release an exposed buffer.
    pub deregister: u64,
}

impl PoolStats {
    pub(super) fn of(core: &Core) -> Self {
        let counters = &core.counters;
        let tallies = core.cache.tally();
        let mut stats = Self {
            growths: load(&counters.growths),
            numa_node: core.numa_node,
            exposed_regions: load(&counters.exposed_regions),
            exposed_bytes: load(&counters.exposed_bytes),
            quarantined_bytes: load(&counters.quarantined_bytes),
            failures: counters.into(),
            ..Self::default()
        };
        for purpose in Purpose::ALL {
            let heap = &core.heaps[purpose.index()];
            let holdings = heap.holdings();
            for arena in &holdings.arenas {
                let bytes = match arena.pages() {
                    Pages::Normal => &mut stats.pages.normal_bytes,
                    Pages::Transparent => &mut stats.pages.transparent_bytes,
                    Pages::Huge => &mut stats.pages.huge_bytes,
                };
                *bytes += arena.len() as u64;
            }
            stats.arenas += holdings.arenas.len() as u64;
            stats.mapped_bytes += holdings.mapped_bytes as u64;
            let mut of = HeapStats {
                max_bytes: heap.max_bytes as u64,
                mapped_bytes: holdings.mapped_bytes as u64,
                free_bytes: holdings.free_bytes as u64,
                ..HeapStats::default()
            };
            for (class, tally) in SizeClass::ALL.into_iter().zip(tallies[purpose.index()]) {
                of.in_use_blocks[class.index()] = tally.in_use;
                of.in_use_bytes += tally.in_use * class.bytes() as u64;
                of.cached_bytes += tally.cached * class.bytes() as u64;
            }
            match purpose {
                Purpose::Send => stats.send = of,
                Purpose::Receive => stats.receive = of,
            }
        }
        let max_bytes = stats.send.max_bytes + stats.receive.max_bytes;
        stats.registered_max_bytes = max_bytes * core.domains() as u64;
        stats.registered_bytes = stats.mapped_bytes * core.live_domains().len() as u64;
        stats
    }

    /// Returns the statistics of one purpose.
    #[must_use]
    pub fn heap(&self, purpose: Purpose) -> &HeapStats {
        match purpose {
            Purpose::Send => &self.send,
            Purpose::Receive => &self.receive,
        }
    }

    /// Returns every number except the memory node, with its name, for an exporter.
    #[must_use]
    pub fn counters(&self) -> Vec<(String, u64)> {
        // The pattern has no `..`, so that a new field must be given a name here.
        let Self {
            mapped_bytes,
            registered_bytes,
            registered_max_bytes,
            arenas,
            growths,
            pages,
            numa_node: _,
            send,
            receive,
            exposed_regions,
            exposed_bytes,
            quarantined_bytes,
            failures,
        } = self;
        let PageStats { normal_bytes, transparent_bytes, huge_bytes } = pages;
        let mut out = vec![
            ("mapped_bytes".to_owned(), *mapped_bytes),
            ("registered_bytes".to_owned(), *registered_bytes),
            ("registered_max_bytes".to_owned(), *registered_max_bytes),
            ("arenas".to_owned(), *arenas),
            ("growths_total".to_owned(), *growths),
            ("normal_pages_bytes".to_owned(), *normal_bytes),
            ("transparent_pages_bytes".to_owned(), *transparent_bytes),
            ("huge_pages_bytes".to_owned(), *huge_bytes),
            ("exposed_regions".to_owned(), *exposed_regions),
            ("exposed_bytes".to_owned(), *exposed_bytes),
            ("quarantined_bytes".to_owned(), *quarantined_bytes),
        ];
        for (purpose, heap) in [(Purpose::Send, send), (Purpose::Receive, receive)] {
            heap.counters(purpose, &mut out);
        }
        failures.counters(&mut out);
        out
    }
}

impl HeapStats {
    fn counters(&self, purpose: Purpose, out: &mut Vec<(String, u64)>) {
        let Self { max_bytes, mapped_bytes, in_use_bytes, cached_bytes, free_bytes, in_use_blocks } =
            self;
        let bytes = [
            ("max", max_bytes),
            ("mapped", mapped_bytes),
            ("in_use", in_use_bytes),
            ("cached", cached_bytes),
            ("free", free_bytes),
        ];
        out.extend(bytes.map(|(name, value)| (format!("{purpose}_{name}_bytes"), *value)));
        for (class, blocks) in SizeClass::ALL.into_iter().zip(in_use_blocks) {
            out.push((format!("{purpose}_in_use_blocks_of_{}", class.bytes()), *blocks));
        }
    }
}

impl Failures {
    fn counters(&self, out: &mut Vec<(String, u64)>) {
        let Self {
            send_exhausted,
            receive_exhausted,
            account_exhausted,
            too_large,
            map,
            register,
            deregister,
        } = self;
        let counts = [
            ("send_exhausted", send_exhausted),
            ("receive_exhausted", receive_exhausted),
            ("account_exhausted", account_exhausted),
            ("too_large", too_large),
            ("map", map),
            ("register", register),
            ("deregister", deregister),
        ];
        out.extend(counts.map(|(name, value)| (format!("failures_{name}_total"), *value)));
    }
}

impl From<&Counters> for Failures {
    fn from(counters: &Counters) -> Self {
        Self {
            send_exhausted: load(&counters.send_exhausted),
            receive_exhausted: load(&counters.receive_exhausted),
            account_exhausted: load(&counters.account_exhausted),
            too_large: load(&counters.too_large),
            map: load(&counters.map),
            register: load(&counters.register),
            deregister: load(&counters.failed_deregister),
        }
    }
}

fn load(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}
