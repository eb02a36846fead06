//! The metrics of a fabric: operations, latency, links, errors and memory.

use ferrite_fabric::{Fabric, FabricStats, LatencyStats, Status};

use crate::exposition::{Exposition, Histogram};

/// The upper bounds of the smallest and of the largest bucket, as powers of two in nanoseconds:
/// 256 ns and 17 s. One more bucket, without a bound, follows.
const BOUNDS: std::ops::RangeInclusive<u32> = 8..=34;

/// Failures that hosts, networks and peers cause. The others are faults of a device or of Ferrite.
const EXPECTED_ERRORS: [Status; 7] = [
    Status::FLUSHED,
    Status::LOCAL_QP_OPERATION,
    Status::RETRY_EXCEEDED,
    Status::RNR_RETRY_EXCEEDED,
    Status::REMOTE_ACCESS,
    Status::REMOTE_INVALID_REQUEST,
    Status::REMOTE_OPERATION,
];

/// Writes the metrics of a fabric.
pub fn fabric_metrics(fabric: &Fabric, out: &mut Exposition) {
    let stats = fabric.stats();
    operations(&stats, out);
    links(&stats, out);
    driver(&stats, out);
    for (name, value) in stats.memory.counters() {
        let words = name.trim_end_matches("_total").replace('_', " ");
        let help = format!("Registered memory: {words}");
        match name.strip_suffix("_total") {
            Some(name) => out.counter(&format!("memory_{name}"), &help, value),
            None => out.gauge(&format!("memory_{name}"), &help, value),
        }
    }
}

fn operations(stats: &FabricStats, out: &mut Exposition) {
    let totals = &stats.totals;
    let by_type = |numbers: [u64; 4]| {
        let types = ["send", "recv", "read", "write"];
        types.into_iter().zip(numbers).map(|(kind, n)| (vec![("type", kind)], n)).collect()
    };
    let operations: Vec<_> =
        by_type([totals.send_ops, totals.recv_ops, totals.read_ops, totals.write_ops]);
    out.counters("rdma_operations", "Operations of links over RDMA and TCP, by type", &operations);
    let bytes: Vec<_> =
        by_type([totals.send_bytes, totals.recv_bytes, totals.read_bytes, totals.write_bytes]);
    let help = "Bytes of the operations of links over RDMA and TCP, by type";
    out.counters("rdma_bytes", help, &bytes);
    let help = "Bytes sent, read and written over TCP; they are part of ferrite_rdma_bytes_total";
    out.counter("rdma_tcp_bytes", help, totals.tcp_bytes);
    let latencies = [
        ("send", &stats.send_latency),
        ("write", &stats.write_latency),
        ("read", &stats.read_latency),
    ];
    let help = "Time of an operation from post to completion; measured for all operations that a \
                caller waited for and a sample of the others; the sum is estimated from the buckets";
    let latencies = latencies.into_iter().map(|(op, latency)| histogram(op, latency)).collect();
    out.histograms("rdma_latency_seconds", help, latencies);
    let errors = errors(stats);
    let errors: Vec<_> =
        errors.iter().map(|(status, count)| (vec![("status", status.as_str())], *count)).collect();
    let help =
        "Work requests that failed, by status; the flushed ones were pending when a link ended";
    out.counters("rdma_completion_errors", help, &errors);
}

/// Returns how often each status occurred. Expected errors are listed from the start, with 0,
/// because Prometheus sees no increase in a counter whose first value is 1.
fn errors(stats: &FabricStats) -> Vec<(String, u64)> {
    let seen = &stats.errors;
    let count = |status| seen.iter().find(|(other, _)| *other == status).map_or(0, |(_, n)| *n);
    let expected = EXPECTED_ERRORS.map(|status| (status, count(status)));
    let others = seen.iter().filter(|(status, _)| !EXPECTED_ERRORS.contains(status));
    let all = expected.iter().chain(others);
    all.map(|(status, count)| (status.to_string(), *count)).collect()
}

/// Returns a histogram with the same bounds at each scrape.
fn histogram<'a>(op: &'a str, latency: &LatencyStats) -> Histogram<'a> {
    let bounds = BOUNDS.map(|power| (1_u64 << power) as f64 / 1e9).chain([f64::INFINITY]);
    let mut buckets: Vec<_> = bounds.map(|bound| (bound, 0)).collect();
    let mut sum = 0.0;
    for (bound, count) in latency.buckets() {
        let bound = bound.as_nanos() as f64 / 1e9;
        // A bucket begins at half of its bound, so its middle is at three quarters of the bound.
        sum += bound * 0.75 * count as f64;
        if let Some(bucket) = buckets.iter_mut().find(|(upper, _)| bound <= *upper) {
            bucket.1 += count;
        }
    }
    Histogram { op, sum, buckets }
}

fn links(stats: &FabricStats, out: &mut Exposition) {
    out.gauge(
        "rdma_links",
        "Links over RDMA or TCP, including those that are closing",
        stats.links,
    );
    let ways = [("accepted", stats.accepted), ("connected", stats.connected)];
    let ways = ways.map(|(by, count)| (vec![("by", by)], count));
    out.counters(
        "rdma_links_opened",
        "Links opened, by a peer (accepted) or by this program (connected)",
        &ways,
    );
    out.counter("rdma_links_failed", "Links that ended with an error", stats.failed_links);
    out.counter("rdma_peers_refused", "Peers that were rejected", stats.refused);
    let help = "Requests by RDMA CM that were refused, because links begin over TCP";
    out.counter("rdma_cm_requests_refused", help, stats.cm_requests_refused);
    out.counter("rdma_tls_failures", "TLS handshakes of peers that failed", stats.tls_failures);
    let help = "Links that ended because the peer accessed memory without a right to it";
    out.counter("rdma_remote_access_errors", help, stats.remote_access_errors);
    let causes = stats.fallbacks.map(|(cause, count)| (cause.to_string(), count));
    let fallbacks: Vec<_> =
        causes.iter().map(|(cause, count)| (vec![("cause", cause.as_str())], *count)).collect();
    out.counters("rdma_fallbacks", "Links over TCP although RDMA was preferred", &fallbacks);
    out.counter("rdma_upgrades", "Links that were upgraded from TCP to RDMA", stats.upgrades);
    let help =
        "Migrations of links from RDMA to TCP, because RDMA failed or the application left it";
    out.counter("rdma_migrations", help, stats.totals.moves);
    out.counter("rdma_connect_retries", "Retries of handshakes", stats.connect_retries);
    let help = "Failures to accept a connection, for lack of descriptors or memory";
    out.counter("rdma_accept_failures", help, stats.accept_failures);
    out.counter("rdma_devices_lost", "Devices removed or failed", stats.devices_lost);
    out.counter("rdma_devices_back", "Devices that came back", stats.devices_back);
    let help = "Devices without type 2 memory windows, which restrict memory to one peer";
    out.gauge("rdma_devices_without_windows", help, stats.devices_without_windows);
}

fn driver(stats: &FabricStats, out: &mut Exposition) {
    out.gauge(
        "rdma_requests_in_flight",
        "Requests posted to devices and not completed",
        stats.in_flight,
    );
    out.gauge("rdma_receives_posted", "Receives posted and not completed", stats.receives_posted);
    out.gauge(
        "rdma_receives_overdue",
        "Receives that a link had taken when it failed, and that have not completed",
        stats.receives_overdue,
    );
    out.counter(
        "rdma_passes",
        "Passes of the loop that polls completions and handles events",
        stats.passes,
    );
    out.counter("rdma_completions", "Completions that were polled", stats.completions);
    let help = "Polls of a completion queue that found completions";
    out.counter("rdma_batches", help, stats.batches);
    let help = "Times that the loop that polls completions went to sleep";
    out.counter("rdma_sleeps", help, stats.sleeps);
}
