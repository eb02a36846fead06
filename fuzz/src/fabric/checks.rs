//! Properties that must hold for any bytes. There is a check for each decoder, one for the
//! reassembly of messages, and two for whole links, one over RDMA and one over TCP. A check panics
//! if a property does not hold.
//!
//! A test of ferrite-fabric (`tests/corpus.rs`) includes this file, too, and runs the same checks
//! on the committed corpora. So this file must not depend on the fuzzer.
//!
//! A new target needs a check, a line in [`CHECKS`] and in `lib.rs`, a `[[bin]]`, a file in
//! `fuzz_targets`, and a folder in `corpus`.

mod connection;
mod inbox;
mod link;

use ferrite_fabric::wire::{
    ADDRESS_BYTES, Address, CONTROL_BYTES, Control, ControlError, Features, GRANT_BYTES,
    GREETING_BYTES, GrantError, GrantToken, Greeting, HELLO_BYTES, Hello, HelloError, MAGIC,
    REFUSAL_BYTES_MAX, REFUSAL_MAGIC, Refusal, TCP_FRAME_HEADER_BYTES, TcpFrame, TcpFrameKind,
    Version,
};

/// A check that any bytes must pass.
pub type Check = fn(&[u8]);

pub use connection::connection;
pub use inbox::inbox;
pub use link::link;

/// All checks, by the names of their targets.
pub const CHECKS: &[(&str, Check)] = &[
    ("hello", hello),
    ("refusal", refusal),
    ("control", control),
    ("grant", grant),
    ("tcp_frame", tcp_frame),
    ("inbox", inbox),
    ("link", link),
    ("connection", connection),
];

/// Checks that a hello is accepted only with limits that we can serve, and survives re-encoding.
pub fn hello(bytes: &[u8]) {
    let hello = match Hello::decode(bytes) {
        Ok(hello) => hello,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            assert_eq!(error == HelloError::ForeignPeer, !bytes.starts_with(&MAGIC));
            if let HelloError::Short { got } = error {
                assert!(got == bytes.len() && got < HELLO_BYTES);
            }
            return;
        }
    };
    assert_eq!(hello.version.major, Version::CURRENT.major);
    assert_eq!(hello.check(), Ok(()));
    assert!(Hello::SEGMENT_BYTES.contains(&hello.segment_bytes));
    assert!(Hello::WINDOW.contains(&hello.window) && Hello::CHANNELS.contains(&hello.channels));
    assert!(hello.max_message_bytes >= hello.segment_bytes.into());
    let agreed = hello.features & (Features::WRITE_IMM | Features::ONE_SIDED | Features::MOVE);
    assert!(hello.features.contains(agreed) && agreed.bits() <= 7);

    let again = hello.encode();
    assert_eq!(Hello::decode(&again), Ok(hello));
    assert_eq!(
        (&again[..6], &again[8..]),
        (&bytes[..6], &bytes[8..HELLO_BYTES]),
        "re-encoding must keep all but the reserved bytes"
    );
    assert_eq!(Hello::decode(&padded(bytes)), Ok(hello));
}

/// Checks that a refusal of any version can be decoded, and contains no control characters.
pub fn refusal(bytes: &[u8]) {
    let ours = bytes.starts_with(&REFUSAL_MAGIC) && bytes.len() >= 13;
    let decoded = Refusal::decode(bytes);
    assert_eq!(decoded.is_some(), ours);
    let Some(refusal) = decoded else { return };
    assert!(refusal.text.len() <= Refusal::TEXT_BYTES_MAX);
    assert!(!refusal.to_string().contains(char::is_control));

    let again = refusal.encode();
    assert!(again.len() <= REFUSAL_BYTES_MAX);
    assert_eq!(again[..12], bytes[..12]);
    assert_eq!(Refusal::decode(&padded(&again)).as_ref(), Some(&refusal));
}

/// Checks that a control message survives re-encoding.
pub fn control(bytes: &[u8]) {
    match Control::decode(bytes) {
        Ok(message) => {
            let again = message.encode();
            assert_eq!(again[0], bytes[0]);
            assert!(again[8..] == bytes[8..CONTROL_BYTES] || again[8..] == [0; 8]);
            assert_eq!(Control::decode(&again), Ok(message));
            assert_eq!(Control::decode(&padded(bytes)), Ok(message));
        }
        Err(ControlError::Short { got }) => assert!(got == bytes.len() && got < CONTROL_BYTES),
        Err(ControlError::Unknown { kind }) => {
            assert!(kind == bytes[0] && !(1..=7).contains(&kind));
        }
        Err(error) => panic!("no decoding of a control message may fail with: {error}"),
    }
}

/// Checks that a grant survives re-encoding, and that no range of it leaves the granted memory. The
/// bytes are tried as they are, and with a matching checksum, which a fuzzer would hardly guess.
pub fn grant(bytes: &[u8]) {
    check_grant(bytes);
    if let Some((head, tail)) = bytes.split_first_chunk::<32>() {
        let sealed = [head, &fnv_1a_64(head).to_le_bytes()[..], tail].concat();
        assert_ne!(GrantToken::decode(&sealed), Err(GrantError::Check));
        check_grant(&sealed);
    }
}

fn check_grant(bytes: &[u8]) {
    let token = match GrantToken::decode(bytes) {
        Ok(token) => token,
        Err(GrantError::Short { got }) => return assert!(got == bytes.len() && got < GRANT_BYTES),
        Err(GrantError::Rights { bits }) => {
            return assert!(bits == bytes[28] && !(1..=3).contains(&bits));
        }
        Err(error) => return assert_eq!(error, GrantError::Check),
    };
    let again = token.encode();
    assert_eq!(again[..29], bytes[..29], "re-encoding must keep all but the reserved bytes");
    assert_eq!(GrantToken::decode(&padded(&again)), Ok(token));

    // Tries ranges that the fuzzer chooses, and ranges at the boundaries.
    let chosen = |at: usize| {
        bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |n| u64::from_le_bytes(*n))
    };
    let (offset, len) = (chosen(40), chosen(48));
    for offset in [0, 1, offset, token.len, token.len.wrapping_add(1), u64::MAX] {
        for len in [0, 1, len, token.len, token.len.wrapping_sub(offset), u64::MAX] {
            let Some(addr) = token.range(offset, len) else { continue };
            assert_eq!(addr, token.addr + offset);
            let end = u128::from(addr) + u128::from(len);
            assert!(
                end <= u128::from(token.addr) + u128::from(token.len) && end <= u64::MAX.into()
            );
        }
    }
}

/// Checks that data over TCP survives re-encoding: the header of a TCP frame, the address that may
/// follow it, and the greeting before all frames.
pub fn tcp_frame(bytes: &[u8]) {
    if let Some(head) = bytes.first_chunk::<TCP_FRAME_HEADER_BYTES>() {
        let decoded = TcpFrame::decode(head);
        assert_eq!(decoded.is_some(), (1..=13).contains(&head[0]));
        if let Some(tcp_frame) = decoded {
            let again = tcp_frame.encode();
            assert_eq!(
                (again[0], &again[4..]),
                (head[0], &head[4..]),
                "re-encoding must keep all but the reserved bytes"
            );
            assert_eq!(TcpFrame::decode(&again), Some(tcp_frame));
            let follows = tcp_frame.follows();
            assert!(follows == 0 || follows == tcp_frame.len as usize);
            assert!(
                follows == 0 || tcp_frame.kind != TcpFrameKind::Read,
                "a read request has no payload"
            );
        }
    }
    address(bytes);
    greeting(bytes);
}

fn address(bytes: &[u8]) {
    let ours = bytes.len() >= ADDRESS_BYTES && (1..=5).contains(&bytes[10]);
    let decoded = Address::decode(bytes);
    assert_eq!(decoded.is_some(), ours);
    let Some(address) = decoded else { return };
    assert!(address.qp_num < 1 << 24 && address.psn < 1 << 24);
    let again = address.encode();
    assert_eq!((&again[8..13], &again[16..32]), (&bytes[8..13], &bytes[16..32]));
    assert_eq!(Address::decode(&padded(&again)), Some(address));
}

fn greeting(bytes: &[u8]) {
    let greeting = match Greeting::decode(bytes) {
        Ok(greeting) => greeting,
        Err(HelloError::Value { field: "kind", value }) => {
            return assert!(value == bytes[48].into() && !(1..=2).contains(&value));
        }
        Err(HelloError::Short { got }) => {
            return assert!(got < GREETING_BYTES && got == bytes.len());
        }
        Err(error) => {
            return assert_eq!(
                Hello::decode(bytes),
                Err(error),
                "the error must be that of the hello"
            );
        }
    };
    assert_eq!(Hello::decode(bytes), Ok(greeting.hello));
    let again = greeting.encode();
    assert_eq!(again[48], bytes[48]);
    match greeting.resume {
        Some(_) => assert_eq!(again[56..], bytes[56..GREETING_BYTES]),
        None => assert_eq!(again[56..], [0; 24]),
    }
    assert_eq!(Greeting::decode(&padded(&again)), Ok(greeting));
}

/// Appends zeros, as the CM does when it delivers private data.
fn padded(bytes: &[u8]) -> Vec<u8> {
    [bytes, &[0; 8]].concat()
}

/// Computes the checksum of a grant, independently of the crate under test.
fn fnv_1a_64(bytes: &[u8]) -> u64 {
    let mut hash: u64 = 0xCBF2_9CE4_8422_2325;
    for byte in bytes {
        hash ^= u64::from(*byte);
        hash = hash.wrapping_mul(0x100_0000_01B3);
    }
    hash
}
