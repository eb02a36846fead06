//! Queues of the devices, and how completions are polled.

use std::time::Duration;

use super::{CHUNK, alias, setting};
use crate::kind::Kind;
use crate::setting::{AliasForm, Program, Setting, TakesEffect};
use crate::time::Unit;

pub(super) const SETTINGS: &[&Setting] = &[
    &SEND_QUEUE_DEPTH,
    &RECV_QUEUE_DEPTH,
    &RECV_BUFFER_SIZE,
    &RECV_BUFFER_POOL_SIZE,
    &CQ_SIZE,
    &POLL_BATCH,
    &INLINE_THRESHOLD,
    &PREPARED_QP_COUNT,
    &RECV_ZEROCOPY,
    &ZEROCOPY_MIN_SIZE,
    &BUSY_POLL_US,
    &ADAPTIVE_POLLING,
];

/// The largest number of requests that a link posts to the device.
pub static SEND_QUEUE_DEPTH: Setting = setting(
    "send-queue-depth",
    "network.rdma.send_queue_depth",
    Kind::Number { min: 16, max: 32_768 },
    "128",
    "Maximum number of requests that a link has posted to the device at a time, and so the size of \
     its send queue. The device's own limit applies.",
)
.memory("64 to 256 bytes for each entry and link, in the device's queues")
.aliases(&[
    alias("rdma_sq_size", AliasForm::Same),
    alias("rdma_prepared_qp_size", AliasForm::Same),
]);

/// The number of receives to post on a device, or on several devices together.
pub static RECV_QUEUE_DEPTH: Setting = setting(
    "recv-queue-depth",
    "network.rdma.recv_queue_depth",
    Kind::Number { min: 16, max: 65_536 },
    "512",
    "Number of receives to post on a device, shared by all its links. Several devices divide the \
     number among them, at least 64 for each.",
)
.default_in_program(&[(Program::Relay, "64")])
.memory("this many times `recv-buffer-size` for each device")
.aliases(&[alias("rdma_rq_size", AliasForm::Same)]);

/// The size of a receive.
pub static RECV_BUFFER_SIZE: Setting = setting(
    "recv-buffer-size",
    "network.rdma.recv_buffer_size",
    Kind::Size { min: 256, max: CHUNK },
    "64kb",
    "Size of a receive, and so of the largest frame that Ferrite peers may send. Sizes other \
     than 256, 1kb, 8kb, 64kb, 512kb and 2mb leave a part of their memory block unused.",
)
.memory("`recv-queue-depth` times this for each device")
.aliases(&[alias(
    "rdma_recv_block_type",
    AliasForm::Words(&[("default", "8kb"), ("large", "64kb"), ("huge", "2mb")]),
)]);

/// The number of receive buffers that are registered at start and kept.
pub static RECV_BUFFER_POOL_SIZE: Setting = setting(
    "recv-buffer-pool-size",
    "network.rdma.recv_buffer_pool_size",
    Kind::Number { min: 0, max: 1_000_000 },
    "0",
    "Number of receive buffers to register at start and to keep. 0: as many as there are posted \
     receives. More are registered when they are needed.",
)
.memory("this many times `recv-buffer-size`");

/// The number of entries of a completion queue.
pub static CQ_SIZE: Setting = setting(
    "cq-size",
    "network.rdma.cq_size",
    Kind::Number { min: 64, max: 4_194_304 },
    "16384",
    "Entries of a device's completion queue. It limits the requests in flight of all links \
     together. The device's own limit applies.",
)
.memory("64 to 128 bytes for each entry and device");

/// The largest number of completions to take at a time.
pub static POLL_BATCH: Setting = setting(
    "poll-batch",
    "network.rdma.poll_batch",
    Kind::Number { min: 1, max: 4096 },
    "32",
    "Maximum number of completions to take from the device at a time.",
)
.aliases(&[alias("rdma_cqe_poll_once", AliasForm::Same)]);

/// The largest payload that is sent with its request.
pub static INLINE_THRESHOLD: Setting = setting(
    "inline-threshold",
    "network.rdma.inline_threshold",
    Kind::Size { min: 0, max: 4096 },
    "220",
    "Payloads up to this size are sent inline, within the request, if the device supports it.",
)
.memory("this much for each entry of a send queue");

/// The number of queue pairs that are created in advance on each device.
pub static PREPARED_QP_COUNT: Setting = setting(
    "prepared-qp-count",
    "network.rdma.prepared_qp_count",
    Kind::Number { min: 0, max: 16_384 },
    "0",
    "Number of queue pairs to create in advance on each device, so that new connections need not \
     wait for theirs. Each one that is used is replaced.",
)
.memory("`send-queue-depth` entries of 64 to 256 bytes for each queue pair")
.aliases(&[alias("rdma_prepared_qp_cnt", AliasForm::Same)]);

/// Whether receives are handed on without a copy.
pub static RECV_ZEROCOPY: Setting = setting(
    "recv-zerocopy",
    "network.rdma.recv_zerocopy",
    Kind::Switch,
    "yes",
    "`yes`: a received message of at least `zerocopy-min-size` is handed on in its receive \
     buffer. `no`: every message is copied, and its receive buffer is free at once.",
)
.aliases(&[alias("rdma_recv_zerocopy", AliasForm::Same)]);

/// The smallest message that is handed on without a copy.
pub static ZEROCOPY_MIN_SIZE: Setting = setting(
    "zerocopy-min-size",
    "network.rdma.zerocopy_min_size",
    Kind::Size { min: 0, max: CHUNK },
    "0",
    "Received messages below this size are copied, because a small message would hold a whole \
     receive buffer for as long as it is used.",
)
.aliases(&[alias("rdma_zerocopy_min_size", AliasForm::Same)]);

/// How long to poll before sleeping.
pub static BUSY_POLL_US: Setting = setting(
    "busy-poll-us",
    "network.rdma.busy_poll_us",
    Kind::Time { bare: Some(Unit::Microseconds), min: Duration::ZERO, max: Duration::from_secs(1) },
    "0us",
    "Busy-poll for completions for at most this long before sleeping: less latency for more CPU \
     time. `adaptive-polling` shortens this time, unless the time is set to 1 s. In the module, \
     busy-polling is useful only with `poller-thread yes` or `call-path no`; otherwise the \
     engine's event loop calls the module when something has arrived.",
)
.takes_effect(TakesEffect::AtOnce);

/// Whether busy-polling depends on traffic.
pub static ADAPTIVE_POLLING: Setting = setting(
    "adaptive-polling",
    "network.rdma.adaptive_polling",
    Kind::Switch,
    "yes",
    "`yes`: busy-poll for twice as long as answers usually take, but at most for `busy-poll-us`. \
     Each wait longer than `busy-poll-us` halves the time, so an idle program soon does not poll at \
     all. `no`: busy-poll for `busy-poll-us` before every sleep.",
);
