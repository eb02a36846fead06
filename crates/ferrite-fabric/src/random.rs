//! Unpredictable numbers, from the operating system's generator.
//!
//! These numbers must be secret. Anybody who knows the session ids of a link can take it over.
//! Anybody who knows a queue pair's next packet number can forge packets. Anybody who knows the
//! token of a module's session can impersonate the session's connection to the engine. The standard
//! library's `RandomState` is not secret: it is seeded once per thread and counts from there.

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::error::{Error, ErrorKind};

/// Returns 64 random bits.
///
/// # Errors
/// [`ErrorKind::System`] if the system call fails, for example because a sandbox forbids it.
pub fn random() -> Result<u64, Error> {
    let mut bytes = [0; 8];
    loop {
        // The kernel returns so few bytes all at once. A signal can interrupt the call only early
        // during boot.
        match getrandom(&mut bytes, GetRandomFlags::empty()) {
            Ok(filled) if filled == bytes.len() => return Ok(u64::from_ne_bytes(bytes)),
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => {
                let what = format!("getrandom: {errno}; allow this system call");
                return Err(Error::new(ErrorKind::System, what));
            }
        }
    }
}

/// Returns a random packet sequence number, of 24 bits.
///
/// # Errors
/// Like [`random`].
pub(crate) fn random_psn() -> Result<u32, Error> {
    random().map(|bits| (bits >> 40) as u32) // the upper 24 bits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packet_sequence_numbers_use_all_24_bits() {
        let numbers: Vec<_> = (0..256).map(|_| random_psn().expect("a number")).collect();
        assert!(numbers.iter().all(|number| *number < 1 << 24), "{numbers:x?}");
        assert_eq!(numbers.iter().fold(0, |all, number| all | number), (1 << 24) - 1);
    }
}
