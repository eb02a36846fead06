//! The settings of a fabric, with their defaults.

use std::time::Duration;

use crate::mem::PoolConfig;
use crate::policy::{ConnectMode, Rdma};
use crate::wire::Program;

/// The settings of a [`Fabric`](crate::Fabric). Many of the names are those that other RDMA
/// software uses.
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
    /// Whether links use RDMA: `prefer`, `require` or `forbid`. Listeners and connects may override
    /// it. Default: `prefer`.
    pub rdma: Rdma,
    /// The port of the devices to use. A link whose local address belongs to another port cannot
    /// use RDMA. Default: any.
    pub device_port: Option<u8>,
    /// The entry of the port's GID table to use. A link with another local address cannot use RDMA.
    /// Default: the entry of the local address, RoCE v2 if there is one.
    pub gid_index: Option<u32>,
    /// How RDMA connections are established: `cm`, `tcp-first` or `auto`. A connect may override
    /// it. Default: `auto`.
    pub connect: ConnectMode,
    /// How long to poll for completions before sleeping, in microseconds. A longer time reduces
    /// latency and uses more CPU. A time of 1 s or more is not adapted (see `adaptive_polling`).
    /// Default: 500.
    pub busy_poll_us: u32,
    /// Adapts the polling time. A driver polls for twice as long as answers take, at most
    /// `busy_poll_us`. Each wait that is longer than `busy_poll_us` halves that time. So a fabric
    /// that is idle, or whose answers take longer, soon sleeps at once. Default: true.
    pub adaptive_polling: bool,
    /// Maximum number of completions to take at a time. Default: 32.
    pub poll_batch: usize,
    /// Maximum number of requests of a link that are posted to the device. Default: 128.
    pub send_queue_depth: u32,
    /// Number of posted receives of a device, shared by all its links. If the fabric has several
    /// devices, they divide this number, but each has at least 64. Default: 512, which is 4 MiB
    /// with the default `recv_buffer_size`.
    pub recv_queue_depth: u32,
    /// Size of a receive in bytes, which is also the size of the largest frame that peers may send.
    /// Default: 8 KiB.
    ///
    /// Receives of 8 KiB, 64 KiB and 2 MiB fill their memory block exactly. Use 64 KiB for links
    /// that carry large messages. They then need fewer frames, but small messages take eight times
    /// the memory.
    pub recv_buffer_size: u32,
    /// Maximum number of frames, for each link, that the peer has sent and this side has not
    /// consumed. Default: 64. With many links, a new link gets fewer: at most its share of half of
    /// the receive reserve. Links that exist keep theirs.
    pub window: u16,
    /// Number of channels of a link. Messages on one channel keep their order. A large message does
    /// not delay messages on other channels. Default: 64.
    pub channels: u16,
    /// The largest message that peers may send, at most a quarter of the receive reserve. Default:
    /// 64 MiB.
    pub max_message_bytes: u64,
    /// Maximum number of messages and operations that wait on a link before it reports that it is
    /// full. Default: 1,024.
    pub send_queue_messages: usize,
    /// Maximum number of bytes that wait on a link. One message may always wait. Default: 16 MiB.
    pub send_queue_bytes: u64,
    /// Payloads up to this size are sent inline, with the request, if the device supports it.
    /// Default: 220.
    pub inline_threshold: u32,
    /// Number of queue pairs that each device creates in advance. Used ones are replaced. Default:
    /// 0.
    pub prepared_queue_pairs: usize,
    /// Logs each RDMA connection: its peer, device, port, queue pair and MTU. Default: false.
    pub trace_connections: bool,
    /// Number of entries of a device's completion queue, or the device's maximum. It limits the
    /// requests in flight of all links together. Default: 16,384.
    pub cq_size: u32,
    /// Maximum number of reads that a link may have outstanding at its peer, or the devices'
    /// maximum. Default: 16.
    pub max_reads: u8,
    /// Acknowledgement timeout of a queue pair: 4.096 µs × 2^`ack_timeout`. Default: 14, which is
    /// 67 ms.
    pub ack_timeout: u8,
    /// Retransmissions before the peer counts as dead. Default: 6, which takes about half a second
    /// with the default `ack_timeout`. Do not use 7, because Soft-RoCE takes it as unlimited.
    pub retries: u8,
    /// Maximum number of handshakes in progress. It applies separately to outgoing handshakes by
    /// RDMA CM, to incoming ones by RDMA CM, and to incoming ones over TCP. Default: 64.
    ///
    /// Further outgoing handshakes wait. Further incoming handshakes displace others:
    ///
    /// - One source address may use half of the limit. Beyond that, a new handshake displaces the
    ///   oldest one of the same source.
    /// - Beyond the whole limit, a new handshake displaces the oldest one of the busiest source.
    /// - A handshake that has only just started is not displaced, unless its source is busier than
    ///   the new one's. The new handshake waits (TLS), or its peer is asked to retry (RDMA CM).
    ///   Over TCP without TLS, such a handshake can be displaced.
    /// - TCP connections that have sent nothing are not counted. There may be 16 times as many of
    ///   them.
    pub max_half_open: usize,
    /// Accepts peers of other protocols on devices that cannot restrict a memory window to a single
    /// queue pair. On such a device, the memory that one peer writes to is open to all other peers,
    /// protected only by a key with 8 bits that are hard to guess. Default: false.
    pub shared_windows: bool,
    /// How long to refuse RDMA connections of a source, after devices refused two of its requests
    /// (wrong keys, or memory of others). Each further refused request doubles the time, up to 10
    /// minutes. Zero disables the exclusion. Default: 1 s.
    pub access_back_off: Duration,
    /// The program that peers see in the hello. Default: unknown.
    pub program: Program,
    /// Maximum number of links. Default: 16,384.
    pub max_connections: usize,
    /// Maximum duration of a handshake. Default: 5 s.
    pub connection_timeout: Duration,
    /// Number of retries over RDMA after the first attempt failed. After them, the connect fails or
    /// uses TCP. Default: 0, because a link that uses TCP tries to upgrade by itself.
    pub connection_retries: u32,
    /// Delay before each retry. Default: 1 s.
    pub retry_delay: Duration,
    /// How long a link that has lost its RDMA path may search for another path, if RDMA is
    /// preferred. The side that accepted the link waits longer by `keepalive`, because the other
    /// side reconnects and may not know of the loss yet. If the connection manager of the side that
    /// opened the link has disconnected, the accepting side waits at most 3 s. Default: 10 s.
    pub move_timeout: Duration,
    /// Delay before a link on TCP tries to upgrade to RDMA, if RDMA is preferred. Each failed
    /// attempt doubles the delay, up to 5 s. While attempts fail, the links to one peer take turns,
    /// with at least this delay between their attempts. Default: 1 s.
    pub upgrade_after: Duration,
    /// Keepalive interval: a peer that was silent for this long gets a keepalive. Default: 10 s.
    ///
    /// Each interval is random, between three quarters of this value and all of it, so that links
    /// do not send keepalives at the same time. The first interval is between a half and all of it.
    /// These intervals hold for the side that opened the link. The accepting side sends a keepalive
    /// only after a silence of four thirds of this value.
    pub keepalive: Duration,
    /// How long a peer may leave a keepalive unanswered before its path or the link counts as down.
    /// Also how long peers may take to release a grant that this side revokes. Default: 5 s.
    ///
    /// Over TCP, each part of a frame is a sign of life, at most for eight times `keepalive` and
    /// `peer_timeout` together. Default: 120 s.
    pub peer_timeout: Duration,
    /// Over TCP, how long a peer may leave a keepalive unanswered while the peer's kernel is
    /// silent, too: the network or the peer's host is down, and TCP itself would wait until the
    /// network is back. As soon as the kernel acknowledges data, the process has `peer_timeout` to
    /// answer. Default: `None`, `peer_timeout` holds in both cases.
    pub tcp_silence_timeout: Option<Duration>,
    /// How long a closing link may take to deliver the messages that were sent. Default: 5 s.
    pub close_timeout: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            memory: PoolConfig::default(),
            rdma: Rdma::default(),
            device_port: None,
            gid_index: None,
            connect: ConnectMode::default(),
            busy_poll_us: 500,
            adaptive_polling: true,
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
            prepared_queue_pairs: 0,
            trace_connections: false,
            cq_size: 16_384,
            max_reads: 16,
            ack_timeout: 14,
            retries: 6,
            max_half_open: 64,
            shared_windows: false,
            access_back_off: Duration::from_secs(1),
            program: Program::UNKNOWN,
            max_connections: 16_384,
            connection_timeout: Duration::from_secs(5),
            connection_retries: 0,
            retry_delay: Duration::from_secs(1),
            move_timeout: Duration::from_secs(10),
            upgrade_after: Duration::from_secs(1),
            keepalive: Duration::from_secs(10),
            peer_timeout: Duration::from_secs(5),
            tcp_silence_timeout: None,
            close_timeout: Duration::from_secs(5),
        }
    }
}
