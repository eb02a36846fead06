//! The errors of a pool.

use std::fmt;
use std::io;
use std::sync::Arc;

use super::class::Purpose;

/// Why a pool cannot satisfy a request.
///
/// ```
/// use ferrite_fabric::mem::{Account, ErrorKind, PoolError, Purpose};
/// # use ferrite_fabric::mem::Pool;
/// # use ferrite_verbs::fake::{DeviceSpec, World};
/// # let world = World::new();
/// # world.add_device(DeviceSpec::new("fake1", "127.0.0.1".parse()?));
/// # let domain = world.verbs().device("fake1")?.open()?.allocate_protection_domain()?;
/// # let pool = Pool::builder(&[domain]).build()?;
/// let greedy = Account::new("peer 10.0.0.7", 16 << 10);
/// let kept = pool.take(10_000, Purpose::Receive, &greedy).unwrap_err(); // a block of 64 KiB
/// assert!(matches!(kept, PoolError::OverBudget { asked: 65_536, limit: 16_384, used: 0, .. }));
/// assert_eq!(kept.kind(), ErrorKind::Exhausted);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// A limit is reached (back-pressure). Room becomes available when buffers are returned.
    #[error("{which} is exhausted: {asked} bytes requested, {used} of {limit} in use")]
    OverBudget {
        /// The limit that was reached.
        which: Budget,
        /// Size of the requested block in bytes.
        asked: u64,
        /// The limit in bytes.
        limit: u64,
        /// Bytes in use.
        used: u64,
    },
    /// No block is large enough.
    #[error("{asked} bytes do not fit into one buffer of at most {max}")]
    TooLarge {
        /// Requested bytes.
        asked: u64,
        /// Size of the largest block in bytes.
        max: u64,
    },
    /// The system has no memory.
    #[error("mmap of {bytes} bytes failed: {source}")]
    Map {
        /// Requested bytes.
        bytes: u64,
        /// The error of the system call.
        source: io::Error,
    },
    /// The device or the kernel did not register (or release) the memory. The text has the cause
    /// and the remedy.
    #[error(transparent)]
    Register(#[from] ferrite_verbs::Error),
    /// The pool has no such domain, or its device is gone.
    #[error("the pool has no domain {index}, or its device is gone")]
    NoDomain {
        /// The requested index.
        index: usize,
    },
    /// The request was invalid.
    #[error("{0}")]
    Misuse(String),
}

/// A limit.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Budget {
    /// The maximum size of the memory for sends or for receives.
    Heap(Purpose),
    /// An account, by its name.
    Account(Arc<str>),
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Heap(purpose) => write!(f, "{purpose} memory"),
            Self::Account(name) => write!(f, "the budget of {name}"),
        }
    }
}

/// How to react to a [`PoolError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Slow down, and retry when buffers were returned.
    Exhausted,
    /// The host does not provide more pinned memory. Continue with the available memory, fall back,
    /// or raise the limit.
    Refused,
    /// The device is gone. Reconnect over another, or fall back.
    DeviceGone,
    /// The caller made a mistake. Retrying is useless.
    Misuse,
}

impl PoolError {
    /// Returns the category, which decides how to react.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::OverBudget { .. } => ErrorKind::Exhausted,
            Self::TooLarge { .. } | Self::Misuse(_) => ErrorKind::Misuse,
            Self::NoDomain { .. } => ErrorKind::DeviceGone,
            Self::Map { .. } => ErrorKind::Refused,
            Self::Register(error) => match error.kind() {
                ferrite_verbs::ErrorKind::DeviceGone | ferrite_verbs::ErrorKind::Absent => {
                    ErrorKind::DeviceGone
                }
                ferrite_verbs::ErrorKind::Misuse => ErrorKind::Misuse,
                _ => ErrorKind::Refused,
            },
        }
    }

    /// Returns a remedy for the error, if one is known.
    #[must_use]
    pub fn remedy(&self) -> Option<String> {
        match self {
            Self::OverBudget { which: Budget::Heap(Purpose::Send), .. } => {
                Some("raise memory_pool_max".into())
            }
            Self::OverBudget { which: Budget::Heap(Purpose::Receive), .. } => {
                Some("raise receive_reserve (and memory_pool_max by as much)".into())
            }
            Self::Register(error) => error.remedy(),
            _ => None,
        }
    }
}
