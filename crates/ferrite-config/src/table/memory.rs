//! Registered memory.

use super::{CHUNK, alias, setting};
use crate::kind::Kind;
use crate::setting::{AliasForm, Setting};

pub(super) const SETTINGS: &[&Setting] = &[
    &MEMORY_POOL_INITIAL,
    &MEMORY_POOL_INCREASE,
    &MEMORY_POOL_MAX,
    &RECEIVE_RESERVE,
    &MEMORY_POOL_MAX_REGIONS,
    &MAX_MR_SIZE,
    &MEMORY_POOL_BUCKETS,
    &THREAD_CACHE_BLOCKS,
    &HUGE_PAGES,
    &PIN_MEMORY,
];

/// The largest size that a setting of the pool's memory may have.
const POOL_MAX: u64 = 1 << 40;

/// The memory that is registered at start.
pub static MEMORY_POOL_INITIAL: Setting = setting(
    "memory-pool-initial",
    "network.rdma.memory_pool_initial",
    Kind::Size { min: 0, max: POOL_MAX },
    "4mb",
    "Memory to register at start, for sends and receives together. Rounded up to a multiple \
     of 2mb.",
)
.memory("this much for each device, from the start")
.aliases(&[alias("rdma_memory_pool_initial_size_mb", AliasForm::Mebibytes)]);

/// The memory that is added whenever the pool is exhausted.
pub static MEMORY_POOL_INCREASE: Setting = setting(
    "memory-pool-increase",
    "network.rdma.memory_pool_increase",
    Kind::Size { min: 1, max: POOL_MAX },
    "4mb",
    "Memory to add whenever the pool is exhausted. Rounded up to a multiple of 2mb.",
)
.aliases(&[alias("rdma_memory_pool_increase_size_mb", AliasForm::Mebibytes)]);

/// The largest amount of registered memory.
pub static MEMORY_POOL_MAX: Setting = setting(
    "memory-pool-max",
    "network.rdma.memory_pool_max",
    Kind::Size { min: 2 * CHUNK, max: POOL_MAX },
    "1gb",
    "Maximum amount of registered memory, for all devices together.",
)
.memory("this much");

/// The part of the memory that only receives and windows may use.
pub static RECEIVE_RESERVE: Setting = setting(
    "receive-reserve",
    "network.rdma.receive_reserve",
    Kind::Size { min: CHUNK, max: POOL_MAX },
    "512mb",
    "The part of `memory-pool-max` that only receives and windows may use; sends have the rest.",
)
.memory("part of `memory-pool-max`");

/// The largest number of memory regions.
pub static MEMORY_POOL_MAX_REGIONS: Setting = setting(
    "memory-pool-max-regions",
    "network.rdma.memory_pool_max_regions",
    Kind::Number { min: 2, max: 1_000_000 },
    "1024",
    "Maximum number of memory regions of the pool: half for sends, half for receives and windows. \
     The pool does not grow beyond this number.",
)
.memory("this many times `memory-pool-increase`, within `memory-pool-max`")
.aliases(&[alias("rdma_memory_pool_max_regions", AliasForm::Same)]);

/// The size of the largest memory region.
pub static MAX_MR_SIZE: Setting = setting(
    "max-mr-size",
    "network.rdma.max_mr_size",
    Kind::Size { min: CHUNK, max: POOL_MAX },
    "1gb",
    "Maximum size of one registered region. A larger amount is registered in several regions.",
);

/// The number of caches of free buffers.
pub static MEMORY_POOL_BUCKETS: Setting = setting(
    "memory-pool-buckets",
    "network.rdma.memory_pool_buckets",
    Kind::Number { min: 0, max: 64 },
    "0",
    "Number of caches of free buffers. Each has its own lock, and a thread always uses the same \
     one. 0: one cache for each CPU.",
)
.memory("at most 256 KiB for each combination of cache, purpose (send or receive) and buffer size")
.aliases(&[alias("rdma_memory_pool_buckets", AliasForm::Same)]);

/// The largest number of free buffers of one size and purpose in each cache.
pub static THREAD_CACHE_BLOCKS: Setting = setting(
    "thread-cache-blocks",
    "network.rdma.thread_cache_blocks",
    Kind::Number { min: 0, max: 1_000_000 },
    "128",
    "Maximum number of free buffers that each cache of `memory-pool-buckets` keeps for each \
     combination of purpose (send or receive) and buffer size. Each combination is also limited to \
     256 KiB.",
)
.aliases(&[alias("rdma_memory_pool_tls_cache_num", AliasForm::Same)]);

/// Whether to use huge pages.
pub static HUGE_PAGES: Setting = setting(
    "huge-pages",
    "network.rdma.huge_pages",
    Kind::Switch,
    "no",
    "Use huge pages of 2 MiB for registered memory. If the host has too few \
     reserved (`vm.nr_hugepages`), ask the kernel for transparent huge pages instead.",
);

/// Whether memory is pinned. Only `yes` is valid.
pub static PIN_MEMORY: Setting = setting(
    "pin-memory",
    "network.rdma.pin_memory",
    Kind::Switch,
    "yes",
    "Registered memory is always pinned, because a device accesses it. `no` is refused; to \
     pin no memory, use `rdma forbid`.",
);
