//! GET by its key: the value is copied from where it lies to where it leaves from, where a call
//! makes three copies of it.
//!
//! It answers what GET answers, with the same rights, and counts as a hit or a miss of the
//! keyspace. It is not a command: it is not in MONITOR, the slow log and the statistics of
//! commands. A short value has to be called for, and a look at its key before would count it twice;
//! so a key is looked at only if it was long when it was last called for.

use ferrite_session::Replies;

use crate::api::Server;
use crate::api::calls::{Acting, Text};
use crate::api::keys::Found;

/// Places for what is known of keys. Those that share one are taken for alike.
const PLACES: usize = 1 << 16;

/// Reads by key.
pub(crate) struct Keys {
    /// What a user must be allowed.
    command: Text,
    /// From here on no string is encoded, whatever its key.
    long_from: usize,
    /// A bit for each place: it was long.
    long: Box<[u64; PLACES / 64]>,
}

impl Keys {
    pub(crate) fn new(server: Server) -> Option<Self> {
        let long_from = long_from(server);
        Some(Self { command: Text::new("GET")?, long_from, long: Box::new([0; PLACES / 64]) })
    }

    /// Appends the answer to GET of this key, and says whether it is there. `None`: nothing was
    /// appended, and it has to be called for.
    pub(crate) fn read(
        &mut self,
        acting: &mut Acting<'_>,
        key: &[u8],
        resp3: bool,
        out: &mut Replies,
    ) -> Option<bool> {
        let (word, bit) = place(key);
        if self.long[word] & bit == 0 {
            return None;
        }
        let found =
            acting.read_string(&self.command, key, self.long_from, |value| out.push_string(value));
        if found != Found::Long {
            self.long[word] &= !bit;
        }
        if found == Found::Nothing {
            out.bytes().extend_from_slice(if resp3 { b"_\r\n" } else { b"$-1\r\n" });
        }
        (found != Found::Other).then_some(found == Found::Long)
    }

    /// A call was answered in so many bytes.
    pub(crate) fn learn(&mut self, key: &[u8], answered: usize) {
        const FRAME: usize = "$512\r\n\r\n".len();
        if answered >= self.long_from + FRAME {
            let (word, bit) = place(key);
            self.long[word] |= bit;
        }
    }
}

/// Strings of up to 44 bytes lie in one piece with what the engine knows of them; since Valkey 8.1,
/// longer ones together with their key.
fn long_from(server: Server) -> usize {
    let embeds_keys = server.version >= if server.is_valkey { 0x0008_0100 } else { 0x0008_0000 };
    if embeds_keys { 257 } else { 45 }
}

fn place(key: &[u8]) -> (usize, u64) {
    // A mix of the length and eight bytes from either end: names differ there. Who chooses keys
    // that share a place makes them slow for himself.
    let (first, last) = match (key.first_chunk(), key.last_chunk()) {
        (Some(first), Some(last)) => (u64::from_le_bytes(*first), u64::from_le_bytes(*last)),
        _ => (0, key.iter().fold(0, |all, byte| all << 8 | u64::from(*byte))),
    };
    let mixed =
        (first ^ key.len() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32) ^ last;
    let place = (mixed.wrapping_mul(0xf39c_c060_5ced_c835) >> 48) as usize; // 16 bits
    (place / 64, 1 << (place % 64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_encoded_up_to_a_length() {
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
    fn keys_are_spread() {
        let mut places = std::collections::BTreeSet::new();
        for number in 0..1000 {
            places.insert(place(format!("key:{number:012}").as_bytes()));
            places.insert(place(format!("{number}").as_bytes()));
        }
        assert!(places.len() > 1900, "{}", places.len());
        assert_eq!(place(b""), place(b""));
    }
}
