//! Converts the settings of `ferrite-config` to the fabric's [`Config`] and to [`ValkeyConfig`],
//! and opens the fabric with them. Used by the module and by the commands of `ferrite` that accept
//! clients.

use std::time::Duration;

use ferrite_config::table::{
    ADAPTIVE_POLLING, BUSY_POLL_US, CONNECTION_RETRIES, CONNECTION_TIMEOUT, CQ_SIZE, HUGE_PAGES,
    INLINE_THRESHOLD, LINKS_MAX, MAX_MR_SIZE, MEMORY_POOL_BUCKETS, MEMORY_POOL_INCREASE,
    MEMORY_POOL_INITIAL, MEMORY_POOL_MAX, MEMORY_POOL_MAX_REGIONS, POLL_BATCH, PREPARED_QP_COUNT,
    RDMA_DEVICE, RDMA_DEVICE_PORT, RDMA_GID_INDEX, RECEIVE_RESERVE, RECV_BUFFER_POOL_SIZE,
    RECV_BUFFER_SIZE, RECV_QUEUE_DEPTH, RECV_ZEROCOPY, RETRY_DELAY, RX_SIZE, RX_SIZE_MAX,
    SEND_QUEUE_DEPTH, SHARED_WINDOWS, THREAD_CACHE_BLOCKS, TRACE_VERBOSE, ZEROCOPY_MIN_SIZE,
};
use ferrite_config::{Policy, Values};
use ferrite_fabric::mem::{PoolConfig, SizeClass};
use ferrite_fabric::{Builder, Config, Error, ErrorKind, Fabric, Rdma};

use crate::frames::{IN_FLIGHT_BYTES, MESSAGE_BYTES, server_config};
use crate::stream::ValkeyConfig;

/// Returns the fabric's settings.
#[must_use]
pub fn fabric_config(values: &Values) -> Config {
    let recv_buffer_size: u32 = values.size(&RECV_BUFFER_SIZE);
    let frames = (IN_FLIGHT_BYTES / recv_buffer_size.max(1)).clamp(2, 1024);
    Config {
        memory: pool_config(values, recv_buffer_size),
        rdma: rdma_policy(values),
        device_port: Some(values.number(&RDMA_DEVICE_PORT)).filter(|port| *port > 0),
        gid_index: u32::try_from(values.number::<i64>(&RDMA_GID_INDEX)).ok(),
        busy_poll_us: microseconds(values.time(&BUSY_POLL_US)),
        adaptive_polling: values.switch(&ADAPTIVE_POLLING),
        poll_batch: values.number(&POLL_BATCH),
        send_queue_depth: values.number(&SEND_QUEUE_DEPTH),
        recv_queue_depth: values.number(&RECV_QUEUE_DEPTH),
        recv_buffer_size,
        window: u16::try_from(frames).unwrap_or(u16::MAX),
        max_message_bytes: MESSAGE_BYTES.max(recv_buffer_size.into()),
        inline_threshold: values.size(&INLINE_THRESHOLD),
        prepared_queue_pairs: values.number(&PREPARED_QP_COUNT),
        trace_connections: values.switch(&TRACE_VERBOSE),
        cq_size: values.number(&CQ_SIZE),
        shared_windows: values.switch(&SHARED_WINDOWS),
        // More than the maximum number of clients, so that rejected clients can receive the reason.
        max_connections: LINKS_MAX as usize,
        connection_timeout: values.time(&CONNECTION_TIMEOUT),
        connection_retries: values.number(&CONNECTION_RETRIES),
        retry_delay: values.time(&RETRY_DELAY),
        ..server_config()
    }
}

fn pool_config(values: &Values, recv_buffer_size: u32) -> PoolConfig {
    let block = SizeClass::holding(recv_buffer_size as usize).map_or(0, SizeClass::bytes);
    let buffers: usize = values.number(&RECV_BUFFER_POOL_SIZE);
    PoolConfig {
        memory_pool_initial: values.size(&MEMORY_POOL_INITIAL),
        memory_pool_increase: values.size(&MEMORY_POOL_INCREASE),
        memory_pool_max: values.size(&MEMORY_POOL_MAX),
        receive_reserve: values.size(&RECEIVE_RESERVE),
        receive_initial: buffers.saturating_mul(block),
        max_region: values.size(&MAX_MR_SIZE),
        max_regions: values.number(&MEMORY_POOL_MAX_REGIONS),
        copy_below: match values.switch(&RECV_ZEROCOPY) {
            true => values.size(&ZEROCOPY_MIN_SIZE),
            false => usize::MAX,
        },
        cache_shards: values.number(&MEMORY_POOL_BUCKETS),
        huge_pages: values.switch(&HUGE_PAGES),
        thread_cache_blocks: values.number(&THREAD_CACHE_BLOCKS),
        ..PoolConfig::default()
    }
}

/// Returns the settings for clients of Valkey Over RDMA: the sizes of their windows.
#[must_use]
pub fn valkey_config(values: &Values) -> ValkeyConfig {
    let (first, largest) = (values.size(&RX_SIZE), values.size::<u32>(&RX_SIZE_MAX));
    ValkeyConfig {
        window_bytes: first,
        window_max_bytes: largest.max(first),
        ..ValkeyConfig::default()
    }
}

/// Returns whether links may use RDMA. Contradictory settings, which were reported when they were
/// read, give [`Rdma::Prefer`].
#[must_use]
pub fn rdma_policy(values: &Values) -> Rdma {
    match values.policy() {
        Ok(Policy::Require) => Rdma::Require,
        Ok(Policy::Forbid) => Rdma::Forbid,
        Ok(Policy::Prefer) | Err(_) => Rdma::Prefer,
    }
}

fn microseconds(time: Duration) -> u32 {
    u32::try_from(time.as_micros()).unwrap_or(u32::MAX)
}

/// Opens the devices for a program that accepts clients, with these settings.
///
/// If RDMA is unavailable or the fabric cannot be built, tries again up to `connection-retries`
/// times, because a device may need a while after the host has started. Blocks for `retry-delay-ms`
/// before each retry. Does not retry if RDMA is forbidden, or after [`ErrorKind::Misuse`].
///
/// # Errors
/// Returns the error of [`Builder::build`] at the last attempt. Also returns an error if
/// `rdma-device` names a device that this host does not have, although it has others.
pub fn open_fabric(
    values: &Values,
    config: &Config,
    begin: impl Fn() -> Builder,
) -> Result<Fabric, Error> {
    let mut retries: u32 = values.number(&CONNECTION_RETRIES);
    loop {
        let builder = values.list(&RDMA_DEVICE).iter().fold(begin(), Builder::device);
        let built = builder.config(config.clone()).build();
        let may_help = config.rdma != Rdma::Forbid
            && match &built {
                Ok(fabric) => fabric.absence().is_some(),
                Err(error) => error.kind() != ErrorKind::Misuse,
            };
        if retries == 0 || !may_help {
            let fabric = built?;
            // A named device that does not exist is an error, not a reason to fall back to TCP.
            return match fabric.absence().filter(|error| error.is_unknown_device()) {
                Some(error) => Err(error.clone()),
                None => Ok(fabric),
            };
        }
        retries -= 1;
        drop(built);
        std::thread::sleep(values.time(&RETRY_DELAY));
    }
}
