//! The settings of a fabric, with their defaults.

use std::time::Duration;

use crate::mem::PoolConfig;
use crate::policy::{Meet, Rdma};

/// How an [`Fabric`](crate::Fabric) works. The names are those that people know from other RDMA
/// software.
///
/// ```
/// use ferrite_fabric::Config;
///
/// let config = Config { busy_poll_us: 0, ..Config::default() };
/// assert_eq!((config.recv_buffer_size, config.send_queue_depth), (8 << 10, 128));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Registered memory: sizes and limits.
    pub memory: PoolConfig,
    /// Whether RDMA carries links: `prefer`, `require` or `forbid`. Listeners and connects may say
    /// otherwise. Prefer.
    pub rdma: Rdma,
    /// How peers are met on RDMA: `cm`, `tcp-first` or `auto`. A connect may say otherwise. Auto.
    pub connect: Meet,
    /// How long to look for completions before sleeping, in microseconds. 50. More costs CPU, and
    /// answers sooner.
    pub busy_poll_us: u32,
    /// Completions taken at a time. 32.
    pub poll_batch: usize,
    /// Requests that a link may have with the device. 128.
    pub send_queue_depth: u32,
    /// Receives that wait on a device, shared by all links. 512: with the size below, 4 MiB for
    /// each device.
    pub recv_queue_depth: u32,
    /// Bytes of a receive, and so of the largest frame that peers may send. 8 KiB. One of 8 KiB, 64
    /// KiB and 2 MiB fills its block. 64 KiB for links that carry large messages: fewer frames,
    /// eight times the memory for small ones.
    pub recv_buffer_size: u32,
    /// Frames that a peer may have sent and this side not taken, for each link. 64; fewer when
    /// there are so many links that they could ask for more than the receive reserve.
    pub window: u16,
    /// Channels of a link: messages on one keep their order, a large one does not hold up another
    /// channel. 64.
    pub channels: u16,
    /// The largest message that peers may send. 64 MiB; at most a quarter of the receive reserve.
    pub max_message_bytes: u64,
    /// Messages and operations that may wait on a link before it says that it is full. 1,024.
    pub send_queue_messages: usize,
    /// The same in bytes; one message may always wait. 16 MiB.
    pub send_queue_bytes: u64,
    /// Payload up to this goes to the device with the request, if the device can. 220.
    pub inline_threshold: u32,
    /// Completions that a device has room for. 16,384, or what it can. Bounds what all links
    /// together have with it.
    pub cq_size: u32,
    /// Reads and writes that a link may have outstanding at its peer. 16, or what the devices can.
    pub max_reads: u8,
    /// How long to wait for an acknowledgement: 4.096 µs × 2^this. 14, which is 67 ms.
    pub ack_timeout: u8,
    /// Resends before the peer counts as dead. 6: with the timeout above about half a second. (Not
    /// 7, which Soft-RoCE takes for "for ever".)
    pub retries: u8,
    /// Handshakes under way at a time, each way. More wait for their turn, or are told to come
    /// again. 64. Half of them for one source address: beyond that, and beyond all, the oldest of
    /// the busiest source makes place for others. Connections over TCP that have said nothing are
    /// none; there may be 16 times as many.
    pub max_half_open: usize,
    /// Takes peers of other protocols on devices that have no memory windows for one queue pair.
    /// There the memory that one of them writes to is open to all others, by a key of which 8 bits
    /// are hard to guess. No.
    pub shared_windows: bool,
    /// A source whose requests devices refused twice (wrong keys, memory that is not its own) is
    /// not let in over RDMA for this long, and for twice as long after each that follows, up to 10
    /// minutes. 1 s; zero never turns anybody away.
    pub access_back_off: Duration,
    /// Links of this fabric at most. 16,384.
    pub max_connections: usize,
    /// A handshake longer than this failed. 5 s.
    pub connection_timeout: Duration,
    /// Further tries at RDMA when the first has failed, before the connect fails or goes over TCP.
    /// 0: a link that went over TCP tries again by itself.
    pub connection_retries: u32,
    /// Before each of them. 1 s.
    pub retry_delay: Duration,
    /// A link that has lost its RDMA path, where RDMA is preferred, has this long to find another.
    /// 10 s.
    pub move_timeout: Duration,
    /// A link on TCP that would rather be on RDMA tries that after this time, and after twice as
    /// long each time that it does not work, up to 30 s. 1 s.
    pub upgrade_after: Duration,
    /// A link that was silent for this long is asked for a sign of life: after three quarters of it
    /// to all of it (a half for the first time), so that links do not ask together. The caller
    /// asks, the other side if it did not, a third later. 10 s.
    pub keepalive: Duration,
    /// A peer that has not answered for this long is dead or stuck, and the link is down. 5 s.
    pub peer_timeout: Duration,
    /// How long a closing link may take to deliver what was sent. 5 s.
    pub close_timeout: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            memory: PoolConfig::default(),
            rdma: Rdma::default(),
            connect: Meet::default(),
            busy_poll_us: 50,
            poll_batch: 32,
            send_queue_depth: 128,
            recv_queue_depth: 512,
            recv_buffer_size: 8 << 10,
            window: 64,
            channels: 64,
            max_message_bytes: 64 << 20,
            send_queue_messages: 1024,
            send_queue_bytes: 16 << 20,
            inline_threshold: 220,
            cq_size: 16_384,
            max_reads: 16,
            ack_timeout: 14,
            retries: 6,
            max_half_open: 64,
            shared_windows: false,
            access_back_off: Duration::from_secs(1),
            max_connections: 16_384,
            connection_timeout: Duration::from_secs(5),
            connection_retries: 0,
            retry_delay: Duration::from_secs(1),
            move_timeout: Duration::from_secs(10),
            upgrade_after: Duration::from_secs(1),
            keepalive: Duration::from_secs(10),
            peer_timeout: Duration::from_secs(5),
            close_timeout: Duration::from_secs(5),
        }
    }
}
