//! The settings of a pool, and how they are divided between sends and receives.

use super::class::{CHUNK_BYTES, Purpose, SizeClass};
use super::error::PoolError;

/// The settings of a pool. Sizes are in bytes. The sizes of the pool, of its parts and of regions
/// are rounded to chunks of 2 MiB: limits down, the others up.
///
/// ```
/// use ferrite_fabric::mem::PoolConfig;
///
/// let config = PoolConfig {
///     memory_pool_max: 64 << 20,
///     receive_reserve: 16 << 20,
///     ..PoolConfig::default()
/// };
/// assert_eq!(config.memory_pool_initial, 4 << 20);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolConfig {
    /// Bytes to register when the pool is built. They are divided between sends and receives in
    /// proportion to their limits, with at least 2 MiB for each unless this is 0. Default: 4 MiB.
    pub memory_pool_initial: usize,
    /// Bytes to register at a time when a heap has no free chunk left. Default: 4 MiB.
    pub memory_pool_increase: usize,
    /// Maximum number of bytes of the pool, for sends and receives together. Every device of the
    /// pool pins all of them, and each registration counts against the locked-memory limit. So a
    /// fabric divides its setting by the number of its devices. Default: 1 GiB.
    pub memory_pool_max: usize,
    /// The part of `memory_pool_max` that only receives may use; sends may use only the rest. Each
    /// part is at least 2 MiB. Default: 512 MiB.
    pub receive_reserve: usize,
    /// Bytes to register for receives when the pool is built, and to keep. The receives' part of
    /// `memory_pool_initial` is registered instead if it is larger. Default: 0.
    pub receive_initial: usize,
    /// The largest region to register. A larger amount is registered in several regions. Default:
    /// no limit.
    pub max_region: usize,
    /// Maximum number of regions, half of them for sends and half for receives. Default: no limit.
    pub max_regions: usize,
    /// A received message below this size is copied out of its receive buffer, so that the buffer
    /// is free at once. Default: 0.
    pub copy_below: usize,
    /// Number of caches of free blocks, at most 64. A thread always uses the same cache. 0: one for
    /// each CPU, at most 64. Default: 0.
    pub cache_shards: usize,
    /// Whether to use 2 MiB pages: from the host's reserve, or else merged by the kernel. Default:
    /// false.
    pub huge_pages: bool,
    /// Maximum number of free blocks of one class and purpose in one cache. Default: 128.
    pub thread_cache_blocks: usize,
    /// Maximum total size in bytes of the free blocks of one class and purpose in one cache. So
    /// larger classes keep fewer blocks, or none. Default: 256 KiB.
    pub thread_cache_bytes: usize,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            memory_pool_initial: 4 << 20,
            memory_pool_increase: 4 << 20,
            memory_pool_max: 1 << 30,
            receive_reserve: 512 << 20,
            receive_initial: 0,
            max_region: usize::MAX,
            max_regions: usize::MAX,
            copy_below: 0,
            cache_shards: 0,
            huge_pages: false,
            thread_cache_blocks: 128,
            thread_cache_bytes: 256 << 10,
        }
    }
}

impl PoolConfig {
    /// Rounds the sizes to whole chunks. Returns an error if a setting is invalid.
    pub(super) fn checked(mut self) -> Result<Self, PoolError> {
        for limit in [&mut self.memory_pool_max, &mut self.receive_reserve, &mut self.max_region] {
            *limit = *limit / CHUNK_BYTES * CHUNK_BYTES;
        }
        for size in [&mut self.memory_pool_initial, &mut self.memory_pool_increase] {
            *size = size.saturating_add(CHUNK_BYTES - 1) / CHUNK_BYTES * CHUNK_BYTES;
        }
        self.receive_initial =
            self.receive_initial.saturating_add(CHUNK_BYTES - 1) / CHUNK_BYTES * CHUNK_BYTES;
        self.memory_pool_increase = self.memory_pool_increase.min(self.max_region).max(CHUNK_BYTES);
        let Self {
            memory_pool_initial: initial,
            memory_pool_max: max,
            receive_reserve: reserve,
            ..
        } = self;
        let wrong = if reserve < CHUNK_BYTES {
            format!("receive_reserve must be at least {CHUNK_BYTES} bytes")
        } else if max < reserve.saturating_add(CHUNK_BYTES) {
            format!(
                "memory_pool_max ({max}) must exceed receive_reserve ({reserve}) by 2 MiB for sends"
            )
        } else if self.max_region < CHUNK_BYTES {
            format!("max_region must be at least {CHUNK_BYTES} bytes")
        } else if let Some(purpose) = Purpose::ALL.into_iter().find(|purpose| {
            self.initial_of(*purpose).div_ceil(self.max_region) > self.regions_of(*purpose)
        }) {
            format!(
                "the initial memory for {purpose}s needs more regions than max_regions ({}) allows; \
                 only half of max_regions is for {purpose}s",
                self.max_regions
            )
        } else if self.receive_initial > reserve {
            format!(
                "receive_initial ({}) is more than receive_reserve ({reserve})",
                self.receive_initial
            )
        } else if initial > max {
            format!("memory_pool_initial ({initial}) is more than memory_pool_max ({max})")
        } else {
            return Ok(self);
        };
        Err(PoolError::Misuse(wrong))
    }

    pub(super) fn max_of(&self, purpose: Purpose) -> usize {
        match purpose {
            Purpose::Send => self.memory_pool_max - self.receive_reserve,
            Purpose::Receive => self.receive_reserve,
        }
    }

    /// Returns the maximum number of regions for a purpose.
    pub(super) fn regions_of(&self, _: Purpose) -> usize {
        self.max_regions / Purpose::ALL.len()
    }

    /// Returns how many bytes a heap keeps even if they are unused.
    pub(super) fn kept_of(&self, purpose: Purpose) -> usize {
        if purpose == Purpose::Receive { self.receive_initial } else { 0 }
    }

    /// Returns how many bytes are registered with each device once `receives` receives of `bytes`
    /// bytes are posted.
    pub(crate) fn registered_at_start(&self, receives: usize, bytes: usize) -> usize {
        let Ok(config) = self.clone().checked() else { return 0 };
        let block = SizeClass::holding(bytes).map_or(bytes, SizeClass::bytes);
        let initial = config.initial_of(Purpose::Receive);
        let more = receives.saturating_mul(block).saturating_sub(initial);
        let grown = more.div_ceil(config.memory_pool_increase) * config.memory_pool_increase;
        let receive = (initial + grown).min(config.max_of(Purpose::Receive));
        config.initial_of(Purpose::Send) + receive
    }

    /// Returns how many bytes to register for a purpose when the pool is built. Unless
    /// `memory_pool_initial` is 0, that is at least a chunk: a host that refuses even a chunk is
    /// then detected early.
    pub(super) fn initial_of(&self, purpose: Purpose) -> usize {
        if self.memory_pool_initial == 0 {
            return self.kept_of(purpose);
        }
        let share = self.memory_pool_initial as u128 * self.max_of(purpose) as u128;
        let share = (share / self.memory_pool_max as u128) as usize;
        let share = (share.div_ceil(CHUNK_BYTES).max(1) * CHUNK_BYTES).min(self.max_of(purpose));
        share.max(self.kept_of(purpose))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn rounds_sizes_to_whole_chunks() {
        let config = PoolConfig {
            memory_pool_initial: 1,
            memory_pool_increase: 0,
            memory_pool_max: 9 * MIB,
            receive_reserve: 3 * MIB,
            ..PoolConfig::default()
        };
        let config = config.checked().expect("valid settings");
        assert_eq!((config.memory_pool_initial, config.memory_pool_increase), (2 * MIB, 2 * MIB));
        assert_eq!(Purpose::ALL.map(|purpose| config.max_of(purpose)), [6 * MIB, 2 * MIB]);
    }

    #[test]
    fn divides_the_initial_memory_by_the_limits() {
        let config = PoolConfig {
            memory_pool_initial: 64 * MIB,
            receive_reserve: 256 * MIB,
            ..PoolConfig::default()
        };
        let config = config.checked().expect("valid settings");
        assert_eq!(Purpose::ALL.map(|purpose| config.initial_of(purpose)), [48 * MIB, 16 * MIB]);
        let default = PoolConfig::default().checked().expect("valid settings");
        assert_eq!(Purpose::ALL.map(|purpose| default.initial_of(purpose)), [2 * MIB; 2]);
        let lopsided = PoolConfig { receive_reserve: 2 * MIB, ..PoolConfig::default() };
        assert_eq!(Purpose::ALL.map(|purpose| lopsided.initial_of(purpose)), [4 * MIB, 2 * MIB]);
        let lazy = PoolConfig { memory_pool_initial: 0, ..PoolConfig::default() };
        assert_eq!(Purpose::ALL.map(|purpose| lazy.initial_of(purpose)), [0; 2]);
    }

    #[test]
    fn refuses_contradictory_sizes() {
        for (wrong, word) in [
            (PoolConfig { receive_reserve: 0, ..PoolConfig::default() }, "receive_reserve must be"),
            (
                PoolConfig { receive_initial: 513 << 20, ..PoolConfig::default() },
                "more than receive_reserve",
            ),
            (PoolConfig { max_region: 1, ..PoolConfig::default() }, "max_region must be"),
            (
                PoolConfig {
                    memory_pool_initial: 64 << 20,
                    max_region: 4 << 20,
                    max_regions: 8,
                    ..PoolConfig::default()
                },
                "the initial memory for sends needs more regions than max_regions (8) allows",
            ),
            (PoolConfig { receive_reserve: 1 << 30, ..PoolConfig::default() }, "for sends"),
            (PoolConfig { receive_reserve: usize::MAX, ..PoolConfig::default() }, "for sends"),
            (
                PoolConfig { memory_pool_initial: 2 << 30, ..PoolConfig::default() },
                "memory_pool_initial",
            ),
            (
                PoolConfig { memory_pool_initial: usize::MAX, ..PoolConfig::default() },
                "memory_pool_initial",
            ),
        ] {
            let error = wrong.checked().expect_err(word);
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}
