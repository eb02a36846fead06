//! The memory that the peer writes to: small at first, large for who writes much at a time.
//!
//! Whoever fills a window waits for the next to be announced, a round trip. For requests of a
//! hundred bytes that is seldom, and thousands of connections cost little; a value of megabytes
//! would wait at every turn. So a client that has filled its window by a few writes is given a
//! large one, as large as there is memory for, and a small one again when its writes are small: at
//! the next announcement, the only moment when nobody writes.
//!
//! Other memory is registered elsewhere if the engine has threads for that
//! (`RawConnection::prepare`). Until it is ready the window stays what it is, and goes on at an
//! announcement after that.

use ferrite_fabric::mem::{Exposed, Purpose, SizeClass};
use ferrite_fabric::{Preparing, RawConnection};
use ferrite_proto::{Registration, Role};

use super::ValkeyConfig;

/// Who fills a window by so many writes, or fewer, gets a larger one. For others it would not be
/// worth what each step costs: memory is registered and cleared, which takes as long as many
/// requests.
const FEW: u64 = 2;
/// Bytes of a write, on average, below which a window need not be larger than at first.
const SMALL: u64 = 512;

/// A window may become at most this part of the memory that is left for large ones, so that many
/// clients come to have the same; it stays what it is until it is twice that part.
const SHARE: u64 = 16;

pub(super) struct Window {
    memory: Exposed,
    bytes: u32,
    /// What it becomes, and how large that is.
    next: Option<(Preparing, u32)>,
    /// Writes since it was announced.
    notices: u64,
    /// What it may be.
    small_bytes: u32,
    large_bytes: u32,
}

impl Window {
    /// Of memory that was made ready for it: [`ValkeyConfig::window_bytes`] of it.
    pub(super) fn new(memory: Exposed, role: Role, config: &ValkeyConfig) -> Self {
        let small_bytes = config.window_bytes;
        let large_bytes = match role {
            Role::Server => config.window_max_bytes.max(small_bytes),
            Role::Client => small_bytes, // a Valkey server dies of another length
        };
        Self { memory, bytes: small_bytes, next: None, notices: 0, small_bytes, large_bytes }
    }

    /// What the peer is told.
    pub(super) fn registration(&self) -> Registration {
        let remote = self.memory.remote();
        Registration { addr: remote.addr, length: self.bytes, rkey: remote.rkey }
    }

    pub(super) fn on_written(&mut self, notices: u64) {
        self.notices += notices;
    }

    /// Copies out what the peer wrote at `from`.
    pub(super) fn read(&self, from: u32, out: &mut [u8]) {
        self.memory.read(from as usize, out);
    }

    /// It is full and everything was taken: makes it what it should be from now on, and says
    /// whether that is other memory.
    pub(super) fn renew(&mut self, raw: &RawConnection) -> bool {
        let writes = std::mem::take(&mut self.notices).max(1);
        if self.next.is_some() {
            return self.take_next();
        }
        let bytes = if writes <= FEW {
            self.fitting(self.step_up(), raw)
        } else if u64::from(self.bytes) / writes < SMALL {
            self.small_bytes
        } else {
            self.fitting(self.bytes, raw)
        };
        if bytes == self.bytes {
            return false;
        }
        self.next = Some((raw.prepare(bytes as usize), bytes));
        self.take_next()
    }

    /// Goes on with the memory that is made ready for it, if it is; else it stays as it is.
    fn take_next(&mut self) -> bool {
        let Some((preparing, bytes)) = &mut self.next else { return false };
        let (Some(prepared), bytes) = (preparing.try_take(), *bytes) else { return false };
        self.next = None;
        let Ok(memory) = prepared else { return false };
        (self.memory, self.bytes) = (memory, bytes);
        true
    }

    /// One step at a time: what the first of many clients take is theirs until they have filled it.
    fn step_up(&self) -> u32 {
        class_bytes()
            .find(|&bytes| bytes > self.bytes)
            .map_or(self.large_bytes, |it| it.min(self.large_bytes))
    }

    /// What there is memory for, of what is wanted: that, or the block of a smaller class.
    fn fitting(&self, wanted: u32, raw: &RawConnection) -> u32 {
        let (used, max) =
            (raw.pool().in_use_bytes(Purpose::Receive), raw.pool().max_bytes(Purpose::Receive));
        let others = used.saturating_sub(block_bytes(self.bytes));
        // Half is for messages and small windows, whoever sends large values.
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

/// What a window takes of the pool.
fn block_bytes(window: u32) -> u64 {
    SizeClass::holding(window as usize).map_or(window.into(), |class| class.bytes() as u64)
}

fn class_bytes() -> impl DoubleEndedIterator<Item = u32> {
    SizeClass::ALL.into_iter().map(|class| class.bytes() as u32)
}
