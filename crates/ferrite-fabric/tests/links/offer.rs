//! An offer to upgrade to RDMA, made by hand. Tests of other crates use it, too.

use std::net::IpAddr;

use ferrite_fabric::wire::{ADDRESS_BYTES, Address, TcpFrame, TcpFrameKind};

/// Encodes an offer at this address of a queue pair that does not exist.
pub(crate) fn offer(ip: IpAddr) -> Vec<u8> {
    let gid = match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    let address = Address { qp_num: 0x11, psn: 1, lid: 0, mtu: 3, reads_in: 1, reads_out: 1, gid };
    let len = ADDRESS_BYTES as u32;
    let tcp_frame = TcpFrame { kind: TcpFrameKind::Offer, imm: 0, len, op: 0, grant: 0, offset: 0 };
    [&tcp_frame.encode()[..], &address.encode()].concat()
}
