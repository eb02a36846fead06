//! The memory that the peer writes to: small at first, larger for clients that write much at once.
//!
//! A peer that has filled its window waits one round trip until a window is announced again. With
//! requests of a hundred bytes that is rare, and small windows keep thousands of connections cheap.
//! A value of several megabytes would wait again and again.
//!
//! So a client that fills its window in one or two writes gets a larger one, as far as memory
//! allows. It gets a small one again when its writes become small. The window changes only at an
//! announcement, because the peer does not write then.
//!
//! If the fabric has threads for registering memory (`RawConnection::prepare`), the new memory is
//! registered there. Until it is ready, the old window is announced again.

use ferrite_fabric::mem::{Exposed, Purpose, SizeClass};
use ferrite_fabric::{Preparing, RawConnection};
use ferrite_proto::{Registration, Role};

use super::ValkeyConfig;

/// A client that fills its window in at most this many writes gets a larger one. For other clients
/// growing is not worth its cost: registering and clearing memory takes as long as many requests.
const FEW_WRITES: u64 = 2;
/// The average size of a write below which a window shrinks to its initial size.
const SMALL_WRITE_BYTES: u64 = 512;

/// A window may grow to 1/16 of the memory that is left for large windows, so that many clients end
/// up with equal shares. It keeps its size as long as its size is at most 1/8 of that memory.
const SHARE: u64 = 16;

pub(super) struct Window {
    memory: Exposed,
    bytes: u32,
    /// The memory that replaces `memory` at an announcement once it is registered, and its size.
    next: Option<(Preparing, u32)>,
    /// The number of writes since the last announcement.
    notices: u64,
    /// The smallest and the largest size.
    small_bytes: u32,
    large_bytes: u32,
}

impl Window {
    /// Creates a window in registered memory of [`ValkeyConfig::window_bytes`].
    pub(super) fn new(memory: Exposed, role: Role, config: &ValkeyConfig) -> Self {
        let small_bytes = config.window_bytes;
        let large_bytes = match role {
            Role::Server => config.window_max_bytes.max(small_bytes),
            Role::Client => small_bytes, // a Valkey server crashes if the length changes
        };
        Self { memory, bytes: small_bytes, next: None, notices: 0, small_bytes, large_bytes }
    }

    /// Returns the registration to announce to the peer.
    pub(super) fn registration(&self) -> Registration {
        let remote = self.memory.remote();
        Registration { addr: remote.addr, length: self.bytes, rkey: remote.rkey }
    }

    pub(super) fn on_written(&mut self, notices: u64) {
        self.notices += notices;
    }

    /// Copies out what the peer has written at offset `from`.
    pub(super) fn read(&self, from: u32, out: &mut [u8]) {
        self.memory.read(from as usize, out);
    }

    /// Resizes the window if necessary, and returns whether it is in other memory now. Must be
    /// called when the window is full and everything was read from it.
    pub(super) fn resize(&mut self, raw: &RawConnection) -> bool {
        let writes = std::mem::take(&mut self.notices).max(1);
        if self.next.is_some() {
            return self.take_next();
        }
        let bytes = if writes <= FEW_WRITES {
            self.affordable_bytes(self.next_larger(), raw)
        } else if u64::from(self.bytes) / writes < SMALL_WRITE_BYTES {
            self.small_bytes
        } else {
            self.affordable_bytes(self.bytes, raw)
        };
        if bytes == self.bytes {
            return false;
        }
        self.next = Some((raw.prepare(bytes as usize), bytes));
        self.take_next()
    }

    /// Switches to the next memory if it is ready, and returns whether it has done so.
    fn take_next(&mut self) -> bool {
        let Some((preparing, bytes)) = &mut self.next else { return false };
        let (Some(prepared), bytes) = (preparing.try_take(), *bytes) else { return false };
        self.next = None;
        let Ok(memory) = prepared else { return false };
        (self.memory, self.bytes) = (memory, bytes);
        true
    }

    /// Returns the next larger size. Windows grow by one size class at a time, so that the first
    /// clients do not take all the memory: a window can shrink only when the client has filled it
    /// again.
    fn next_larger(&self) -> u32 {
        class_bytes()
            .find(|&bytes| bytes > self.bytes)
            .map_or(self.large_bytes, |it| it.min(self.large_bytes))
    }

    /// Returns the wanted size if there is memory for it. Otherwise returns the largest smaller
    /// size class for which there is memory, or else the initial size.
    fn affordable_bytes(&self, wanted: u32, raw: &RawConnection) -> u32 {
        let (used, max) =
            (raw.pool().in_use_bytes(Purpose::Receive), raw.pool().max_bytes(Purpose::Receive));
        let others = used.saturating_sub(block_bytes(self.bytes));
        // Half of the memory is reserved for messages and small windows.
        let left = (max / 2).saturating_sub(others);
        let smaller =
            class_bytes().rev().filter(|&bytes| self.small_bytes < bytes && bytes < wanted);
        [wanted]
            .into_iter()
            .chain(smaller)
            .find(|&bytes| {
                let share = if bytes == self.bytes { SHARE / 2 } else { SHARE };
                block_bytes(bytes) * share <= left
            })
            .unwrap_or(self.small_bytes)
    }
}

/// Returns how much of the pool's memory a window takes.
fn block_bytes(window: u32) -> u64 {
    SizeClass::holding(window as usize).map_or(window.into(), |class| class.bytes() as u64)
}

fn class_bytes() -> impl DoubleEndedIterator<Item = u32> {
    SizeClass::ALL.into_iter().map(|class| class.bytes() as u32)
}
