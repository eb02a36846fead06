//! The key path: GET without a call. It copies the value once, from the engine's memory to the
//! session's replies. A call makes three copies for that.
//!
//! The key path gives the same reply as GET, checks the same rights, and counts as a keyspace hit
//! or miss. It is not a command, so it does not appear in MONITOR, the slow log or the command
//! statistics.
//!
//! Only long values can be read this way; short ones need a call. If the key path opened the key of
//! a short value before the call, the read would count twice. So the key path is used only for keys
//! whose value was long at the last call.

use ferrite_session::Replies;

use crate::api::Server;
use crate::api::calls::{EngineString, UserCalls};
use crate::api::keys::Found;

/// The number of slots that keys are hashed to. Keys that share a slot are treated alike.
const SLOTS: usize = 1 << 16;

/// Reads long strings by key.
pub(crate) struct Keys {
    /// The command that the user must be allowed to run: GET.
    command: EngineString,
    /// The length from which a string always has the encoding `raw`, whatever its key.
    long_from: usize,
    /// One bit per slot: whether the last value there was long.
    long: Box<[u64; SLOTS / 64]>,
}

impl Keys {
    pub(crate) fn new(server: Server) -> Option<Self> {
        let long_from = long_from(server);
        Some(Self {
            command: EngineString::new("GET")?,
            long_from,
            long: Box::new([0; SLOTS / 64]),
        })
    }

    /// Appends the reply to GET of this key and returns whether the key exists. Returns `None` if
    /// it appended nothing and GET has to be called.
    pub(crate) fn read(
        &mut self,
        user_calls: &mut UserCalls<'_>,
        key: &[u8],
        resp3: bool,
        out: &mut Replies,
    ) -> Option<bool> {
        let (word, bit) = slot(key);
        if self.long[word] & bit == 0 {
            return None;
        }
        let found = user_calls
            .read_string(&self.command, key, self.long_from, |value| out.push_string(value));
        if found != Found::Long {
            self.long[word] &= !bit;
        }
        if found == Found::Nothing {
            out.bytes().extend_from_slice(if resp3 { b"_\r\n" } else { b"$-1\r\n" });
        }
        (found != Found::Other).then_some(found == Found::Long)
    }

    /// Notes the length of the reply to a call of GET.
    pub(crate) fn learn(&mut self, key: &[u8], reply_len: usize) {
        const FRAME: usize = "$512\r\n\r\n".len();
        if reply_len >= self.long_from + FRAME {
            let (word, bit) = slot(key);
            self.long[word] |= bit;
        }
    }
}

/// Returns the length from which a string always has the encoding `raw`. The engine stores strings
/// of up to 44 bytes in one block with their metadata (`embstr`). Since Valkey 8.1 and Redis 8.0,
/// longer strings may be in one block with their key.
fn long_from(server: Server) -> usize {
    let embeds_keys = server.version >= if server.is_valkey { 0x0008_0100 } else { 0x0008_0000 };
    if embeds_keys { 257 } else { 45 }
}

/// Returns the slot of a key, as an index into [`Keys::long`] and a bit.
fn slot(key: &[u8]) -> (usize, u64) {
    // A hash of the length and of eight bytes from each end, where the names of keys usually
    // differ. A client that chooses keys with equal slots slows down only reads of keys in these
    // slots.
    let (first, last) = match (key.first_chunk(), key.last_chunk()) {
        (Some(first), Some(last)) => (u64::from_le_bytes(*first), u64::from_le_bytes(*last)),
        _ => (0, key.iter().fold(0, |all, byte| all << 8 | u64::from(*byte))),
    };
    let mixed =
        (first ^ key.len() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32) ^ last;
    let slot = (mixed.wrapping_mul(0xf39c_c060_5ced_c835) >> 48) as usize; // 16 bits
    (slot / 64, 1 << (slot % 64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_of_encoded_strings_depends_on_the_engine() {
        for (is_valkey, version, long) in [
            (false, 0x0007_000f, 45),
            (false, 0x0008_0006, 257),
            (true, 0x0008_0001, 45),
            (true, 0x0009_0102, 257),
        ] {
            assert_eq!(long_from(Server { is_valkey, version }), long, "{version:x}");
        }
    }

    #[test]
    fn keys_spread_over_the_slots() {
        let mut slots = std::collections::BTreeSet::new();
        for number in 0..1000 {
            slots.insert(slot(format!("key:{number:012}").as_bytes()));
            slots.insert(slot(format!("{number}").as_bytes()));
        }
        assert!(slots.len() > 1900, "{}", slots.len());
        assert_eq!(slot(b""), slot(b""));
    }
}
