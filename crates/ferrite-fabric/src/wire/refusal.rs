//! The refusal: why a peer does not accept a link, and when to try again.
//!
//! ```text
//!   0          4     5     6      8                12            13             13 + length
//!   ┌──────────┬─────┬─────┬──────┬────────────────┬─────────────┬──────────────┐
//!   │ "FRNO"   │major│minor│ code │ retry_after_ms │ text length │ text (UTF-8) │
//!   │    4     │  1  │  1  │  2   │       4        │      1      │    0..120    │
//!   └──────────┴─────┴─────┴──────┴────────────────┴─────────────┴──────────────┘
//! ```
//!
//! The layout is the same in every version, because a peer that speaks another version must be able
//! to read the reason. A refusal must fit into the 148 bytes of private data of a CM rejection.

use std::fmt;

use super::hello::Version;
use super::{field, put};
use crate::deceptive::is_deceptive;

/// The first bytes of a [`Refusal`].
pub const REFUSAL_MAGIC: [u8; 4] = *b"FRNO";

/// The largest size of a [`Refusal`].
pub const REFUSAL_BYTES_MAX: usize = TEXT_AT + Refusal::TEXT_BYTES_MAX;

const TEXT_AT: usize = 13;

/// Why a link was refused. Numbers that this version does not know are kept.
///
/// ```
/// use ferrite_fabric::wire::RefusalCode;
///
/// assert_eq!(RefusalCode::LIMIT.to_string(), "too many links");
/// assert_eq!(RefusalCode(999).to_string(), "refused with code 999");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RefusalCode(pub u16);

impl RefusalCode {
    /// There is no common version of the protocol.
    pub const VERSION: Self = Self(1);
    /// Too many handshakes in progress, or too many links that wait to be accepted.
    pub const BUSY: Self = Self(2);
    /// Too many links.
    pub const LIMIT: Self = Self(3);
    /// The refusing side does not admit the link, because its configuration forbids that or for
    /// another reason, which the text gives.
    pub const POLICY: Self = Self(4);
    /// The refusing side is shutting down.
    pub const SHUTDOWN: Self = Self(5);
    /// The hello was invalid, or the greeting wants to resume a link that does not exist.
    pub const PROTOCOL: Self = Self(6);
    /// There is no memory for another link, or another resource for it is exhausted.
    pub const MEMORY: Self = Self(7);
    /// The request did not come from a Ferrite peer.
    pub const FOREIGN_PEER: Self = Self(8);
}

impl fmt::Display for RefusalCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self {
            Self::VERSION => "no common protocol version",
            Self::BUSY => "busy",
            Self::LIMIT => "too many links",
            Self::POLICY => "forbidden by policy",
            Self::SHUTDOWN => "shutting down",
            Self::PROTOCOL => "invalid handshake",
            Self::MEMORY => "no memory for another link",
            Self::FOREIGN_PEER => "not a Ferrite peer",
            Self(code) => return write!(f, "refused with code {code}"),
        })
    }
}

/// Why a peer does not accept a link.
///
/// ```
/// use ferrite_fabric::wire::{Refusal, RefusalCode, Version};
///
/// let refusal = Refusal {
///     version: Version::CURRENT,
///     code: RefusalCode::LIMIT,
///     retry_after_ms: 500,
///     text: "10000 links of 10000".into(),
/// };
/// let mut private_data = refusal.encode();
/// private_data.resize(148, 0); // as the CM does
/// let refusal = Refusal::decode(&private_data).unwrap();
/// assert_eq!(refusal.to_string(), "too many links: 10000 links of 10000");
/// assert_eq!(Refusal::decode(b""), None); // for example a rejection by the kernel
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The version of the refusing side.
    pub version: Version,
    /// The reason, for programs.
    pub code: RefusalCode,
    /// The shortest time to wait before another attempt, in milliseconds; 0 if unknown.
    pub retry_after_ms: u32,
    /// The reason, for people. Truncated to [`Refusal::TEXT_BYTES_MAX`].
    pub text: String,
}

impl Refusal {
    /// Maximum length of the text in bytes.
    pub const TEXT_BYTES_MAX: usize = 120;

    /// Encodes the refusal, in at most [`REFUSAL_BYTES_MAX`] bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let text = truncate(&self.text);
        let mut bytes = vec![0; TEXT_AT];
        put(&mut bytes, 0, REFUSAL_MAGIC);
        put(&mut bytes, 4, [self.version.major, self.version.minor]);
        put(&mut bytes, 6, self.code.0.to_le_bytes());
        put(&mut bytes, 8, self.retry_after_ms.to_le_bytes());
        put(&mut bytes, 12, [u8::try_from(text.len()).unwrap_or(0)]); // at most 120
        bytes.extend_from_slice(text.as_bytes());
        bytes
    }

    /// Decodes a refusal of any version. Returns `None` if the bytes are not a refusal. The text is
    /// for logs: it is truncated where the bytes end, and made printable.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        if !bytes.starts_with(&REFUSAL_MAGIC) {
            return None;
        }
        let [major, minor] = field(bytes, 4)?;
        let code = RefusalCode(u16::from_le_bytes(field(bytes, 6)?));
        let retry_after_ms = u32::from_le_bytes(field(bytes, 8)?);
        let [text_bytes] = field(bytes, 12)?;
        let text = bytes.get(TEXT_AT..)?;
        let text = &text[..text.len().min(text_bytes.into()).min(Self::TEXT_BYTES_MAX)];
        let mut text = String::from_utf8_lossy(text).replace(is_deceptive, "?");
        // A replacement character may be longer than the bytes that it replaces.
        text.truncate(truncate(&text).len());
        Some(Self { version: Version { major, minor }, code, retry_after_ms, text })
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { code, text, .. } = self;
        if text.is_empty() { code.fmt(f) } else { write!(f, "{code}: {text}") }
    }
}

/// Returns as many whole characters as fit into [`Refusal::TEXT_BYTES_MAX`].
fn truncate(text: &str) -> &str {
    &text[..text.floor_char_boundary(Refusal::TEXT_BYTES_MAX)]
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn refusal(text: &str) -> Refusal {
        let version = Version { major: 1, minor: 2 };
        Refusal {
            version,
            code: RefusalCode(0x0304),
            retry_after_ms: 0x0506_0708,
            text: text.into(),
        }
    }

    /// Decodes a refusal with an arbitrary text, as a hostile peer may send it.
    fn decoded_text(text: &[u8]) -> Option<String> {
        let mut bytes = refusal("").encode();
        bytes[12] = u8::try_from(text.len()).expect("a short text");
        bytes.extend(text);
        Refusal::decode(&bytes).map(|refusal| refusal.text)
    }

    #[test]
    fn golden_bytes() {
        let bytes = b"FRNO\x01\x02\x04\x03\x08\x07\x06\x05\x05b\xC3\xBCsy";
        assert_eq!(refusal("büsy").encode(), bytes);
        assert_eq!(Refusal::decode(bytes), Some(refusal("büsy")));
    }

    #[test]
    fn rejects_truncated_and_foreign_bytes() {
        let bytes = refusal("").encode();
        for len in 0..bytes.len() {
            assert_eq!(Refusal::decode(&bytes[..len]), None, "{len}");
        }
        assert_eq!(Refusal::decode(&bytes), Some(refusal("")));
        assert_eq!(Refusal::decode(&[0; 148]), None);
    }

    #[test]
    fn truncates_long_texts_at_a_character() {
        let long = refusal(&"ü€".repeat(40)); // 5 bytes each, so 24 of them are 120 bytes
        let bytes = long.encode();
        assert_eq!((bytes.len(), bytes[12]), (REFUSAL_BYTES_MAX, 120));
        assert_eq!(Refusal::decode(&bytes), Some(refusal(&"ü€".repeat(24))));
        let bytes = refusal(&format!("a{}", long.text)).encode();
        assert_eq!(bytes.len(), TEXT_AT + 118);
        const { assert!(REFUSAL_BYTES_MAX <= 148, "a CM rejection carries 148 bytes") };
    }

    #[test]
    fn makes_hostile_texts_printable() {
        assert_eq!(decoded_text(b"a\r\n\x1B[2Jb\x7F\xC2\x9B").as_deref(), Some("a???[2Jb??"));
        let reordered = "ok\u{202E}gnih\u{2028} \u{2066}\u{200B}\u{E0041}";
        assert_eq!(decoded_text(reordered.as_bytes()).as_deref(), Some("ok?gnih? ???"));
        assert_eq!(decoded_text(b"\xFFok\xC3").as_deref(), Some("\u{FFFD}ok\u{FFFD}"));
        assert_eq!(decoded_text(&[0xFF; 200]), Some("\u{FFFD}".repeat(40)));
        let mut truncated = refusal("abc").encode();
        truncated.truncate(15);
        assert_eq!(Refusal::decode(&truncated), Some(refusal("ab")));
    }

    #[test]
    fn every_code_has_a_text() {
        let texts: std::collections::HashSet<_> =
            (1..=8).map(|n| RefusalCode(n).to_string()).collect();
        assert_eq!(texts.len(), 8);
        assert!(texts.iter().all(|text| !text.contains("code")));
        assert_eq!(refusal("").to_string(), "refused with code 772");
    }

    proptest! {
        #[test]
        fn decodes_what_it_encodes(
            major: u8,
            minor: u8,
            code: u16,
            retry_after_ms: u32,
            text in "[^\\pC\\p{Zl}\\p{Zp}]{0,30}",
            padding in 0..9_usize
        ) {
            let version = Version { major, minor };
            let refusal = Refusal { version, code: RefusalCode(code), retry_after_ms, text };
            let mut bytes = refusal.encode();
            bytes.resize(bytes.len() + padding, 0);
            prop_assert_eq!(Refusal::decode(&bytes), Some(refusal));
        }

        #[test]
        fn decodes_only_valid_refusals(mut bytes in vec(any::<u8>(), 0..200), ours: bool) {
            if ours && bytes.len() >= 4 {
                bytes[..4].copy_from_slice(&REFUSAL_MAGIC);
            }
            if let Some(refusal) = Refusal::decode(&bytes) {
                prop_assert!(refusal.encode().len() <= REFUSAL_BYTES_MAX);
                prop_assert!(!refusal.text.contains(is_deceptive));
                prop_assert_eq!(Refusal::decode(&refusal.encode()), Some(refusal));
            }
        }
    }
}
