//! Certificates and keys as files that servers read.

/// Encodes a certificate or key as PEM, which redis-server reads. rcgen's own PEM support would
/// need a second version of a crate that is already used here.
#[must_use]
pub fn pem(label: &str, der: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = format!("-----BEGIN {label}-----");
    for (number, group) in der.chunks(3).enumerate() {
        if number % 16 == 0 {
            text.push('\n');
        }
        let bits =
            (0..3).fold(0, |bits, at| bits << 8 | usize::from(group.get(at).copied().unwrap_or(0)));
        for digit in 0..4 {
            let is_padding = digit > group.len();
            text.push(if is_padding { '=' } else { DIGITS[bits >> (18 - 6 * digit) & 63].into() });
        }
    }
    format!("{text}\n-----END {label}-----\n")
}
