//! Digests, the names of blobs. They come from the network and become names of files, so a
//! [`Digest`] holds bytes, not text: a path is always made of hexadecimal digits.

use std::fmt;
use std::str::FromStr;

use ring::digest::{Context, SHA256, SHA512};

use crate::error::{Error, ErrorKind};

/// The size of the longest digest.
const MAX_BYTES: usize = 64;

/// A hash algorithm of digests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Algorithm {
    /// SHA-256, which nearly all registries use.
    Sha256,
    /// SHA-512.
    Sha512,
}

impl Algorithm {
    /// All algorithms.
    pub const ALL: [Self; 2] = [Self::Sha256, Self::Sha512];

    /// Returns the name in a digest, for example `sha256`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Sha512 => "sha512",
        }
    }

    /// Returns the size of a hash in bytes.
    #[must_use]
    pub fn hash_bytes(self) -> usize {
        match self {
            Self::Sha256 => 32,
            Self::Sha512 => MAX_BYTES,
        }
    }
}

/// The digest of a blob, for example `sha256:e3b0c442…`.
///
/// ```
/// use ferrite_blob::{Algorithm, Digest};
///
/// let text = format!("sha256:{}", "0f".repeat(32));
/// let digest: Digest = text.parse()?;
/// assert_eq!(digest.algorithm(), Algorithm::Sha256);
/// assert_eq!(digest.to_string(), text);
/// assert!("sha256:../../etc/passwd".parse::<Digest>().is_err());
/// # Ok::<(), ferrite_blob::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest {
    algorithm: Algorithm,
    /// The hash, then zeros.
    bytes: [u8; MAX_BYTES],
}

impl Digest {
    /// Returns the digest with this hash. Returns `None` if the hash has another length.
    #[must_use]
    pub fn new(algorithm: Algorithm, hash: &[u8]) -> Option<Self> {
        if hash.len() != algorithm.hash_bytes() {
            return None;
        }
        let mut bytes = [0; MAX_BYTES];
        bytes[..hash.len()].copy_from_slice(hash);
        Some(Self { algorithm, bytes })
    }

    /// Reads lower-case hexadecimal digits. Returns `None` for any other text: two spellings of one
    /// digest would be two files.
    #[must_use]
    pub(crate) fn from_hex(algorithm: Algorithm, hex: &str) -> Option<Self> {
        let digit = |c: &u8| match c {
            b'0'..=b'9' => Some(c - b'0'),
            b'a'..=b'f' => Some(c - b'a' + 10),
            _ => None,
        };
        let (pairs, rest) = hex.as_bytes().as_chunks::<2>();
        if pairs.len() != algorithm.hash_bytes() || !rest.is_empty() {
            return None;
        }
        let mut bytes = [0; MAX_BYTES];
        for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
            *byte = digit(high)? << 4 | digit(low)?;
        }
        Some(Self { algorithm, bytes })
    }

    /// Returns the algorithm.
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Returns the hash.
    #[must_use]
    pub fn hash(&self) -> &[u8] {
        &self.bytes[..self.algorithm.hash_bytes()]
    }

    /// Returns the hash in lower-case hexadecimal digits.
    #[must_use]
    pub fn hex(&self) -> String {
        let mut hex = String::with_capacity(self.hash().len() * 2);
        for byte in self.hash() {
            for digit in [byte >> 4, byte & 15] {
                hex.push(char::from(b"0123456789abcdef"[usize::from(digit)]));
            }
        }
        hex
    }
}

impl FromStr for Digest {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let digest = text.split_once(':').and_then(|(name, hex)| {
            let algorithm = Algorithm::ALL.into_iter().find(|known| known.name() == name)?;
            Self::from_hex(algorithm, hex)
        });
        digest.ok_or_else(|| {
            // The text comes from the network and may be long.
            let shown: String = text.chars().take(160).collect();
            let expected = "expected sha256 or sha512, a colon and lower-case hex digits";
            Error::new(ErrorKind::InvalidDigest, format!("invalid digest {shown:?}: {expected}"))
        })
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.algorithm.name(), self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Computes a digest from bytes in order.
#[derive(Clone)]
pub struct Hasher {
    algorithm: Algorithm,
    context: Context,
}

impl Hasher {
    /// Starts with no bytes.
    #[must_use]
    pub fn new(algorithm: Algorithm) -> Self {
        let ring = match algorithm {
            Algorithm::Sha256 => &SHA256,
            Algorithm::Sha512 => &SHA512,
        };
        Self { algorithm, context: Context::new(ring) }
    }

    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.context.update(bytes);
    }

    /// Returns the digest of all bytes.
    #[must_use]
    pub fn finish(self) -> Digest {
        let hash = self.context.finish();
        let mut bytes = [0; MAX_BYTES];
        for (byte, value) in bytes.iter_mut().zip(hash.as_ref()) {
            *byte = *value;
        }
        Digest { algorithm: self.algorithm, bytes }
    }
}

impl fmt::Debug for Hasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hasher").field("algorithm", &self.algorithm).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(algorithm: Algorithm, bytes: &[u8]) -> String {
        let mut hasher = Hasher::new(algorithm);
        hasher.update(bytes);
        hasher.finish().to_string()
    }

    #[test]
    fn hashes_the_published_examples() {
        assert_eq!(
            of(Algorithm::Sha256, b"abc"),
            "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert!(
            of(Algorithm::Sha512, b"abc").starts_with("sha512:ddaf35a193617abacc417349ae204131")
        );
    }

    #[test]
    fn text_and_digest_are_one_to_one() {
        for algorithm in Algorithm::ALL {
            let text = of(algorithm, b"x");
            assert_eq!(text.parse::<Digest>().expect("a digest").to_string(), text);
        }
    }

    #[test]
    fn rejects_text_that_is_no_digest() {
        let hex = "0f".repeat(32);
        let wrong = [
            String::new(),
            ":".into(),
            hex.clone(),
            "sha256:".into(),
            format!("sha256:{}", hex.to_uppercase()),
            format!("SHA256:{hex}"),
            format!("sha512:{hex}"),
            format!("sha256:{hex}0"),
            format!("sha256:{hex}00"),
            format!("sha256: {hex}"),
            format!("sha256:{hex}\n"),
            format!("sha256:{}\0", &hex[1..]),
            format!("sha256:../{}", &hex[3..]),
            format!("sha256:{}/..", &hex[3..]),
            format!("sha256:{}é", &hex[2..]),
            format!("../sha256:{hex}"),
            format!("md5:{}", &hex[..32]),
            "x".repeat(1 << 20),
        ];
        for text in wrong {
            let error = text.parse::<Digest>().expect_err(&text);
            assert_eq!(error.kind(), ErrorKind::InvalidDigest);
            assert!(error.to_string().len() < 1000);
        }
    }

    #[test]
    fn a_hash_has_the_length_of_its_algorithm() {
        assert!(Digest::new(Algorithm::Sha256, &[1; 32]).is_some());
        assert!(Digest::new(Algorithm::Sha256, &[1; 64]).is_none());
        assert!(Digest::new(Algorithm::Sha512, &[1; 65]).is_none());
    }
}
