//! The client: connects, runs the rounds, prints the result.

use std::net::SocketAddr;
use std::time::Instant;

use anyhow::Context as _;
use ferrite_verbs::{CmId, ConnectParams, QueuePair, Verbs, cm};

use super::Options;
use super::endpoint;
use super::report::{Link, Report};
use super::rounds;
use super::watch::Watch;
use super::wire::{Memory, Request};
use crate::latency::Recorder;

pub(super) fn run(options: &Options, server: SocketAddr) -> anyhow::Result<()> {
    let verbs = Verbs::system()?;
    // Checked first: without a device, the CM would only report that there is no route.
    verbs.devices()?;
    let id = cm::resolve(&verbs, options.bind, server, options.timeout)
        .with_context(|| format!("cannot find a route to {server}"))?;
    // Detects a dead path within half a second instead of a minute: eight tries of 67 ms.
    id.set_ack_timeout(14)?;
    let (device, port) = id.device().context("RDMA CM named no device")?;
    let context = verbs.device(&device)?.open()?;

    let rounds = options.iters + u64::from(options.warmup);
    let (qp, mut endpoint) =
        endpoint::open(&context, &id, options.op, options.mode, options.size, options.inline)?;
    let request = Request {
        op: options.op,
        mode: options.mode,
        size: options.size,
        inline: options.inline,
        rounds,
        memory: endpoint.incoming(),
    };
    let mut recorder = Recorder::new(options.warmup.into())?;
    let memory = connect(options, server, &id, &qp, &request)?;
    let link = Link::of(&context, port, &id, &qp)?;
    let watch = Watch::new(rounds, options.timeout, !options.json);
    let started = Instant::now();
    watch.over(&id, &qp, || {
        rounds::client(options.op, rounds, (&qp, &mut endpoint), memory, &watch, &mut recorder)
    })?;
    let elapsed = started.elapsed();
    Report::new(options, &endpoint, link, &recorder.finish(), elapsed).print(options.json)
}

fn connect(
    options: &Options,
    server: SocketAddr,
    id: &CmId,
    qp: &QueuePair,
    request: &Request,
) -> anyhow::Result<Memory> {
    let params = ConnectParams { private_data: &request.encode(), ..params() };
    let reply =
        cm::connect(id, qp, endpoint::access(), &params, options.timeout).with_context(|| {
            format!("cannot connect to {server} (`ferrite pingpong --listen` must run there)")
        })?;
    Ok(Memory::decode(&reply)?)
}

/// Returns the connection parameters that both sides use.
pub(super) fn params() -> ConnectParams<'static> {
    ConnectParams {
        qp_num: 0, // taken from the queue pair
        srq: false,
        private_data: &[],
        reads_in: 1,
        reads_out: 1,
        retries: 7,
        // 7 means to retry forever. A peer without posted receives is stuck, and then the watcher
        // ends the connection.
        rnr_retries: 7,
    }
}
