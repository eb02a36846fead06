//! The client over RDMA: connects, runs one test after the other and prints the result.

use std::net::SocketAddr;

use anyhow::Context as _;
use ferrite_fabric::{Config, ConnectOptions, Stream};
use ferrite_verbs::Verbs;

use super::exchange::{self, Test};
use super::fabric::{Measure, PathInfo};
use super::report::{Report, Row};
use super::{Options, Over, fabric};

pub(super) fn run(options: &Options, peer: SocketAddr) -> anyhow::Result<()> {
    let verbs = Verbs::system()?;
    let fabric = fabric(&verbs, options.local.map(|local| local.ip()), options)?;
    let to = options.local.into_iter().fold(ConnectOptions::new(), ConnectOptions::local);
    let mut stream =
        fabric.block_on(Stream::connect_with(&fabric, peer, &to)).with_context(|| {
            format!("cannot connect to {peer} (`ferrite bench stream --listen` must run there)")
        })?;
    let path = PathInfo::of(&verbs, stream.link())?;
    let busy_poll_us = options.busy_poll_us.unwrap_or(Config::default().busy_poll_us);
    fabric.set_busy_poll_us(busy_poll_us);
    let mut results = Vec::new();
    for (measure, test) in tests(options, busy_poll_us) {
        let measured = fabric.block_on(exchange::run_client(&mut stream, &test))?;
        results.push(Row::new(measure, test, &measured));
    }
    fabric.set_busy_poll_us(0);
    fabric.block_on(stream.link().close())?;
    Report::new(busy_poll_us, Over::Rdma, Some(path), results).print(options.json)
}

/// Returns the tests that the options ask for.
pub(super) fn tests(options: &Options, busy_poll_us: u32) -> Vec<(Measure, Test)> {
    let of = |measure: &Measure| {
        let sizes: &[u32] = match measure {
            _ if !options.size.is_empty() => &options.size,
            Measure::Latency => &[64],
            Measure::Bandwidth => &[64 << 10, 1 << 20],
        };
        let measure = *measure;
        sizes.iter().map(move |size| {
            let (rounds, transfers) = match measure {
                Measure::Latency => (options.rounds, 1),
                Measure::Bandwidth => (1, ((options.mib << 20) / u64::from(*size)).max(1)),
            };
            (measure, Test { size_bytes: *size, rounds, transfers, busy_poll_us })
        })
    };
    options.measure.iter().flat_map(of).collect()
}
