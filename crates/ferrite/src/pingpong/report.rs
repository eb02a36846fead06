//! The result of a run, as text and as JSON.

use std::net::SocketAddr;
use std::time::Duration;

use ferrite_verbs::{CmId, Context, GidEntry, QueuePair, choose_gid};
use serde::Serialize;

use super::endpoint::Endpoint;
use super::{Mode, Op, Options};
use crate::choice::name;
use crate::latency::{self, Latency, RoundTrips};
use crate::output;

/// The path of the messages.
#[derive(Debug, Serialize)]
pub(super) struct Link {
    local: Option<SocketAddr>,
    peer: Option<SocketAddr>,
    device: String,
    /// Whether the device is emulated in software.
    software: bool,
    port: u8,
    gid: Option<GidRow>,
    mtu_bytes: u32,
}

#[derive(Debug, Serialize)]
struct GidRow {
    index: u32,
    address: String,
    #[serde(rename = "type")]
    kind: String,
}

impl Link {
    /// Describes the path of a connected queue pair.
    pub(super) fn of(
        context: &Context,
        port: u8,
        id: &CmId,
        qp: &QueuePair,
    ) -> anyhow::Result<Self> {
        let gids = context.gids()?;
        let local = id.local_addr();
        // On RoCE the CM uses the GID of the local address. On InfiniBand the address belongs to an
        // IPoIB interface and matches no GID, so all GIDs are candidates.
        let is_local = |entry: &&GidEntry| {
            entry.port == port && local.is_some_and(|local| entry.gid.ip() == local.ip())
        };
        let local_gids: Vec<_> = gids.iter().filter(is_local).cloned().collect();
        let candidates = if local_gids.is_empty() { gids } else { local_gids };
        let gid = choose_gid(&context.port(port)?, &candidates).map(|choice| GidRow {
            index: choice.entry.index,
            address: choice.entry.gid.ip().to_string(),
            kind: choice.entry.kind.to_string(),
        });
        Ok(Self {
            local,
            peer: id.peer_addr(),
            device: context.device().name(),
            software: context.device().quirks().is_software,
            port,
            gid,
            mtu_bytes: qp.path()?.mtu.bytes(),
        })
    }
}

/// The result of a client.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    format: u32,
    role: &'static str,
    op: Op,
    mode: Mode,
    size_bytes: u32,
    iterations: u64,
    warmup: u32,
    inline: bool,
    #[serde(flatten)]
    link: Link,
    measure: &'static str,
    latency_us: Latency,
    seconds: f64,
}

impl Report {
    pub(super) fn new(
        options: &Options,
        endpoint: &Endpoint,
        link: Link,
        round_trips: &RoundTrips,
        elapsed: Duration,
    ) -> Self {
        let (measure, parts) = options.op.latency_measure();
        Self {
            format: 1,
            role: "client",
            op: options.op,
            mode: options.mode,
            size_bytes: options.size,
            iterations: options.iters,
            warmup: options.warmup,
            inline: endpoint.inline(),
            link,
            measure,
            latency_us: Latency::of(round_trips, parts),
            seconds: elapsed.as_secs_f64(),
        }
    }

    pub(super) fn print(&self, json: bool) -> anyhow::Result<()> {
        output::print(self, json, Self::text)
    }

    fn text(&self) -> String {
        let Self { link, latency_us: latency, .. } = self;
        let addr = |addr: Option<SocketAddr>| addr.map_or("?".to_owned(), |addr| addr.to_string());
        let gid = link.gid.as_ref().map_or("no GID".to_owned(), |gid| {
            format!("GID {} ({}, {})", gid.index, gid.address, gid.kind)
        });
        let inline = if self.inline { ", inline" } else { "" };
        let measure = self.measure.replace('_', " ");
        let caveat = if link.software {
            "\nThis is a software device: it shows that RDMA works, not how fast it is. \
             Compare ratios only.\n"
        } else {
            ""
        };
        format!(
            "{} → {} over {} port {}, {gid}, MTU {}\n\
             {} of {} bytes, {} mode{inline}: {} rounds after {} of warm-up, {:.2} s, \
             every message checked\n\n\
             {measure}{}\n\
             {:>width$}{}\n{caveat}",
            addr(link.local),
            addr(link.peer),
            link.device,
            link.port,
            link.mtu_bytes,
            name(&self.op),
            self.size_bytes,
            name(&self.mode),
            self.iterations,
            self.warmup,
            self.seconds,
            latency::heading(),
            "µs",
            latency.row(),
            width = measure.len(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_a_report_as_text_and_json() {
        let report = Report {
            format: 1,
            role: "client",
            op: Op::Send,
            mode: Mode::Poll,
            size_bytes: 64,
            iterations: 1000,
            warmup: 100,
            inline: true,
            link: Link {
                local: "10.0.0.2:4711".parse().ok(),
                peer: "10.0.0.1:7471".parse().ok(),
                device: "rxe2".to_owned(),
                software: true,
                port: 1,
                gid: Some(GidRow { index: 1, address: "10.0.0.2".into(), kind: "RoCE v2".into() }),
                mtu_bytes: 4096,
            },
            measure: "half_round_trip",
            latency_us: Latency {
                min: 1.0,
                p50: 2.0,
                p90: 3.0,
                p99: 4.0,
                p99_9: 5.0,
                max: 6.0,
                mean: 2.5,
            },
            seconds: 0.25,
        };
        let expected = "\
10.0.0.2:4711 → 10.0.0.1:7471 over rxe2 port 1, GID 1 (10.0.0.2, RoCE v2), MTU 4096
send of 64 bytes, poll mode, inline: 1000 rounds after 100 of warm-up, 0.25 s, every message checked

half round trip     min      p50      p90      p99    p99.9      max     mean
             µs    1.00     2.00     3.00     4.00     5.00     6.00     2.50

This is a software device: it shows that RDMA works, not how fast it is. Compare ratios only.
";
        assert_eq!(report.text(), expected);
        let json = serde_json::to_value(&report).expect("a report");
        assert_eq!((&json["device"], &json["latency_us"]["p99_9"]), (&"rxe2".into(), &5.0.into()));
    }
}
