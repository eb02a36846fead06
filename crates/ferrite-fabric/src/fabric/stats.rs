//! The counters of a fabric and the snapshot that programs read.

use std::sync::atomic::{AtomicU64, Ordering};

use ferrite_verbs::Status;

use super::Fabric;
use crate::latency::LatencyStats;
use crate::link::LinkStats;
use crate::mem::{PoolStats, lock};
use crate::policy::FallbackCause;

/// Larger than the number of completion statuses that verbs define.
const STATUSES: usize = 32;

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) passes: AtomicU64,
    pub(crate) completions: AtomicU64,
    pub(crate) sleeps: AtomicU64,
    pub(crate) accepted: AtomicU64,
    pub(crate) connected: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) cm_requests_refused: AtomicU64,
    pub(crate) tls_failures: AtomicU64,
    pub(crate) foreign_peers: AtomicU64,
    pub(crate) handshakes_displaced: AtomicU64,
    pub(crate) misdirected: AtomicU64,
    pub(crate) accept_failures: AtomicU64,
    pub(crate) failed_links: AtomicU64,
    pub(crate) unknown_receives: AtomicU64,
    /// Indexed by [`FallbackCause::index`].
    pub(crate) fallbacks: [AtomicU64; FallbackCause::ALL.len()],
    pub(crate) upgrades: AtomicU64,
    pub(crate) offers_refused: AtomicU64,
    /// Polls of a completion queue that found completions.
    pub(crate) batches: AtomicU64,
    pub(crate) connect_retries: AtomicU64,
    /// Indexed by completion status, including flushed requests.
    pub(crate) errors: [AtomicU64; STATUSES],
    pub(crate) devices_lost: AtomicU64,
    pub(crate) devices_back: AtomicU64,
    pub(crate) remote_access_errors: AtomicU64,
    pub(crate) refused_after_access_errors: AtomicU64,
    pub(crate) refused_without_windows: AtomicU64,
    pub(crate) shared_windows: AtomicU64,
}

/// A snapshot of a fabric's counters and of its resources.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FabricStats {
    /// Number of links, including those that are closing and those that are down but not yet
    /// released.
    pub links: u64,
    /// Totals of all links, including those that are gone.
    pub totals: LinkStats,
    /// Requests that are posted to the devices and not completed.
    pub in_flight: u64,
    /// Receives that are posted and wait for messages.
    pub receives_posted: u64,
    /// Receives that a failed link took without completing them. On Soft-RoCE, their memory is
    /// reclaimed when no link is left that could hold them. On other devices, it is reclaimed only
    /// when the device is gone or the fabric ends.
    pub receives_overdue: u64,
    /// Receives that may be lost: a link ended, and the device did not report in time that the
    /// link's queue pair had taken its last receive. The same number of receives was posted in
    /// their place.
    pub receives_missing: u64,
    /// Passes of the driver. Each pass polls every completion queue.
    pub passes: u64,
    /// Completions that were polled.
    pub completions: u64,
    /// Times that the driver found nothing to do and went to sleep.
    pub sleeps: u64,
    /// Links that peers opened.
    pub accepted: u64,
    /// Links that this side opened.
    pub connected: u64,
    /// Peers that were refused.
    pub refused: u64,
    /// Requests by RDMA CM that were refused, because the listener accepts RDMA only for links that
    /// begin over TCP. Included in [`FabricStats::refused`].
    pub cm_requests_refused: u64,
    /// TLS handshakes of peers that failed: the peer has no certificate that this side accepts, or
    /// does not accept the certificate of this side, or does not use TLS.
    pub tls_failures: u64,
    /// Peers that the fabric treated as speakers of another protocol: they sent no hello, or
    /// nothing in time, or the listener treats all RDMA peers in this way.
    pub foreign_peers: u64,
    /// Unfinished handshakes that were ended to make room for other handshakes. A TCP
    /// connection that has sent nothing goes to the program that accepts foreign peers, if there is
    /// one.
    pub handshakes_displaced: u64,
    /// Peers that were refused because they connected over RDMA to an address that the listener
    /// does not have.
    pub misdirected: u64,
    /// Times that a TCP connection could not be accepted, for example because descriptors or memory
    /// had run out.
    pub accept_failures: u64,
    /// Links that ended with an error.
    pub failed_links: u64,
    /// Receive completions for a queue pair that no link has, or for a receive that is not posted.
    pub unknown_receives: u64,
    /// Times that a link used TCP although RDMA was preferred, by cause. Includes the connections
    /// that the program reported with [`Fabric::fell_back_to_tcp`].
    pub fallbacks: [(FallbackCause, u64); FallbackCause::ALL.len()],
    /// Polls of a completion queue that found completions. The mean batch size is `completions /
    /// batches`.
    pub batches: u64,
    /// Times that this side tried to connect by RDMA CM again.
    pub connect_retries: u64,
    /// Requests that failed, by status, including flushed ones.
    pub errors: Vec<(Status, u64)>,
    /// Latency of sends.
    pub send_latency: LatencyStats,
    /// Latency of one-sided writes.
    pub write_latency: LatencyStats,
    /// Latency of one-sided reads.
    pub read_latency: LatencyStats,
    /// Times that a link was upgraded from TCP to RDMA.
    pub upgrades: u64,
    /// Upgrade offers, and answers to offers, that were refused because they named an address that
    /// is not the peer's.
    pub offers_refused: u64,
    /// Times that a device was removed or failed.
    pub devices_lost: u64,
    /// Times that a device came back.
    pub devices_back: u64,
    /// The devices that are missing or have a port that is down, each with the reason.
    pub device_faults: Vec<String>,
    /// Links that ended because the peer requested memory or an operation that it had no right to.
    /// Includes links whose queue pair failed without a reported cause, because not every device
    /// reports this one.
    pub remote_access_errors: u64,
    /// Handshakes that were refused because their source had caused several access errors (see
    /// [`FabricStats::remote_access_errors`]). Included in [`FabricStats::refused`].
    pub refused_after_access_errors: u64,
    /// Peers of other protocols that were refused because the device cannot isolate them from each
    /// other. Included in [`FabricStats::refused`].
    pub refused_without_windows: u64,
    /// Memory regions of raw connections that were opened to every peer of a device, because the
    /// device has no memory windows for a single queue pair.
    pub shared_windows: u64,
    /// Number of the fabric's devices that cannot restrict memory to a single queue pair.
    pub devices_without_windows: u64,
    /// The memory pool.
    pub memory: PoolStats,
}

impl Fabric {
    /// Returns a snapshot of the fabric's counters.
    #[must_use]
    pub fn stats(&self) -> FabricStats {
        let shared = self.shared();
        let [receives_posted, receives_overdue, receives_missing] = lock(&shared.poller).receives();
        let links = shared.links.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut totals = links.retired;
        for link in links.iter() {
            totals.add(&link.with(|state, _, _| state.core.stats));
        }
        let counters = &shared.counters;
        FabricStats {
            links: links.iter().count() as u64,
            totals,
            in_flight: shared.devices.iter().map(|device| u64::from(device.in_flight())).sum(),
            receives_posted,
            receives_overdue,
            receives_missing,
            passes: counters.passes.load(Ordering::Relaxed),
            completions: counters.completions.load(Ordering::Relaxed),
            sleeps: counters.sleeps.load(Ordering::Relaxed),
            accepted: counters.accepted.load(Ordering::Relaxed),
            connected: counters.connected.load(Ordering::Relaxed),
            refused: counters.refused.load(Ordering::Relaxed),
            cm_requests_refused: counters.cm_requests_refused.load(Ordering::Relaxed),
            tls_failures: counters.tls_failures.load(Ordering::Relaxed),
            foreign_peers: counters.foreign_peers.load(Ordering::Relaxed),
            handshakes_displaced: counters.handshakes_displaced.load(Ordering::Relaxed),
            misdirected: counters.misdirected.load(Ordering::Relaxed),
            accept_failures: counters.accept_failures.load(Ordering::Relaxed),
            failed_links: counters.failed_links.load(Ordering::Relaxed),
            unknown_receives: counters.unknown_receives.load(Ordering::Relaxed),
            fallbacks: FallbackCause::ALL
                .map(|cause| (cause, counters.fallbacks[cause.index()].load(Ordering::Relaxed))),
            upgrades: counters.upgrades.load(Ordering::Relaxed),
            offers_refused: counters.offers_refused.load(Ordering::Relaxed),
            batches: counters.batches.load(Ordering::Relaxed),
            connect_retries: counters.connect_retries.load(Ordering::Relaxed),
            errors: counters
                .errors
                .iter()
                .enumerate()
                .map(|(code, count)| {
                    (Status::from_code(code as u32), count.load(Ordering::Relaxed))
                })
                .filter(|(_, count)| *count > 0)
                .collect(),
            send_latency: shared.latencies.send.snapshot(),
            write_latency: shared.latencies.write.snapshot(),
            read_latency: shared.latencies.read.snapshot(),
            devices_lost: counters.devices_lost.load(Ordering::Relaxed),
            devices_back: counters.devices_back.load(Ordering::Relaxed),
            device_faults: shared.devices.iter().filter_map(|device| device.fault()).collect(),
            remote_access_errors: counters.remote_access_errors.load(Ordering::Relaxed),
            refused_after_access_errors: counters
                .refused_after_access_errors
                .load(Ordering::Relaxed),
            refused_without_windows: counters.refused_without_windows.load(Ordering::Relaxed),
            shared_windows: counters.shared_windows.load(Ordering::Relaxed),
            devices_without_windows: shared
                .devices
                .iter()
                .filter(|device| !device.has_windows())
                .count() as u64,
            memory: shared.pool.stats(),
        }
    }
}
