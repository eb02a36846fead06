//! Invalidations of CLIENT TRACKING BCAST, which may come in other messages, or not at all.

use std::collections::BTreeSet;

use ferrite_proto::resp::Value;

use super::is_about_a_flood;
use crate::session::Setup;

/// How invalidations of CLIENT TRACKING BCAST may reach a client.
///
/// Engines collect the keys until the end of an event-loop iteration
/// (`trackingBroadcastInvalidationMessages` in `beforeSleep`). Then they send the keys according to
/// the client's protocol and tracking at that time. Both depend on how the input was split into
/// reads, also at the engine's own port.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) enum Broadcasts {
    /// The client has not requested broadcasts.
    #[default]
    None,
    /// The same keys may be in one message or in several.
    Gathered,
    /// The client has just changed its protocol or its tracking. One engine may not have sent the
    /// earlier keys, since RESP2 has no pushes.
    MayBeMissing,
}

impl Broadcasts {
    /// Returns how broadcasts may reach a client that has sent these bytes. The replies to the
    /// first `compared` bytes have already been compared.
    pub(crate) fn of(setup: &Setup, sent: &[u8], compared: usize) -> Self {
        let has_sent = |word: &str, from: usize| {
            sent[from..].windows(word.len()).any(|part| part.eq_ignore_ascii_case(word.as_bytes()))
        };
        let changes = ["HELLO", "RESET", "TRACKING"].map(|name| setup.typed(name));
        // Returns whether this word ends after `compared`.
        let is_new =
            |word: &str| has_sent(word, compared.saturating_sub(word.len().saturating_sub(1)));
        match has_sent("BCAST", 0) {
            false => Self::None,
            true if changes.iter().any(|word| is_new(word)) => Self::MayBeMissing,
            true => Self::Gathered,
        }
    }

    /// Returns whether [`Self::are_same`] compares this reply. If so, its position among the pushes
    /// is not compared.
    pub(crate) fn covers(self, reply: &[u8]) -> bool {
        self != Self::None && !invalidated(reply).is_empty()
    }

    /// Returns whether the keys that these replies invalidate differ at most as this value allows.
    /// With [`Self::None`], nothing is compared. With [`Self::MayBeMissing`], one side may lack
    /// keys.
    pub(crate) fn are_same(self, one: &[&[u8]], other: &[&[u8]]) -> bool {
        let [one, other] = [one, other].map(|replies| {
            let keys = replies.iter().flat_map(|reply| invalidated(reply));
            keys.filter(|key| !is_about_a_flood(key)).collect::<BTreeSet<_>>()
        });
        match self {
            Self::None => true,
            Self::Gathered => one == other,
            Self::MayBeMissing => one.is_subset(&other) || other.is_subset(&one),
        }
    }
}

/// Returns the keys of an invalidation. The invalidation of FLUSHALL has no keys; engines send it
/// at once, so the result is empty.
fn invalidated(reply: &[u8]) -> Vec<Vec<u8>> {
    let Ok(Value::Push(values)) = Value::parse(reply) else { return Vec::new() };
    match &values[..] {
        [Value::Bulk(b"invalidate"), Value::Array(keys)] => {
            let keys = keys
                .iter()
                .filter_map(|key| if let Value::Bulk(key) = key { Some(key) } else { None });
            keys.map(|key| key.to_vec()).collect()
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broadcasts_may_be_missing_only_while_the_client_changes_protocol_or_tracking() {
        let setup = Setup { renames: vec![("HELLO", "hi")], ..Setup::default() };
        let request = b"CLIENT TRACKING ON BCAST\r\n";
        let of = |more: &[u8]| Broadcasts::of(&setup, &[request, more].concat(), request.len());
        assert_eq!(of(b"SET k v\r\n"), Broadcasts::Gathered);
        assert_eq!(of(b"SET k v\r\nHi 3\r\n"), Broadcasts::MayBeMissing);
        assert_eq!(of(b"SET k v\r\nCLIENT TRACKING OFF\r\n"), Broadcasts::MayBeMissing);
        let cut = [request, &b"SET k v\r\nRES"[..], b"ET\r\n"].concat();
        assert_eq!(Broadcasts::of(&setup, &cut, cut.len() - 4), Broadcasts::MayBeMissing);
        assert_eq!(
            Broadcasts::of(&setup, &cut, cut.len()),
            Broadcasts::Gathered,
            "the reply to RESET has been compared"
        );
        assert_eq!(Broadcasts::of(&setup, b"HI 3\r\nCLIENT TRACKING ON\r\n", 0), Broadcasts::None);
    }
}
