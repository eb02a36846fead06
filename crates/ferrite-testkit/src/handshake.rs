//! Handshake messages of a peer that a test simulates.

use std::net::IpAddr;

use ferrite_fabric::wire::{
    ADDRESS_BYTES, Address, Features, Hello, Program, TcpFrame, TcpFrameKind, Version,
};

/// A valid hello of a new session.
pub const HELLO: Hello = Hello {
    version: Version::CURRENT,
    features: Features::from_bits(3), // WRITE_IMM and ONE_SIDED
    segment_bytes: 8 << 10,
    window: 64,
    channels: 64,
    max_message_bytes: 64 << 20,
    instance: 1,
    session: 0,
    mtu: 0,
    program: Program::UNKNOWN,
};

/// Encodes an offer of a queue pair at this address. The queue pair does not exist.
#[must_use]
pub fn offer(ip: IpAddr) -> Vec<u8> {
    let gid = match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    let address = Address { qp_num: 0x11, psn: 1, lid: 0, mtu: 3, reads_in: 1, reads_out: 1, gid };
    let len = ADDRESS_BYTES as u32;
    let tcp_frame = TcpFrame { kind: TcpFrameKind::Offer, imm: 0, len, op: 0, grant: 0, offset: 0 };
    [&tcp_frame.encode()[..], &address.encode()].concat()
}
