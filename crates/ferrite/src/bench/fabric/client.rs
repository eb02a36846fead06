//! The client: connects, measures one case after the other, prints the result.

use std::net::SocketAddr;
use std::time::Instant;

use anyhow::{Context as _, bail, ensure};
use ferrite_fabric::{ConnectOptions, Fabric, Link};
use ferrite_verbs::Verbs;

use super::ends::{self, Ends};
use super::idle::Idle;
use super::plan::{self, Case, Room};
use super::progress::Progress;
use super::report::{Figures, Report, Row, Way};
use super::talk::{Holding, Reply, Request, Test, Work, hear, say};
use super::{Measure, Options, bandwidth, latency};
use crate::choice::{Mode, Op};
use crate::latency::Latency;

pub(super) fn run(options: &Options, peer: SocketAddr) -> anyhow::Result<()> {
    let verbs = Verbs::system()?;
    let fabric = ends::fabric(&verbs, options.local.map(|local| local.ip()), options)?;
    let config = fabric.config();
    let room = Room { messages: config.send_queue_messages, bytes: config.send_queue_bytes };
    let (cases, notes) = plan::cases(options, room);
    let progress = Progress::new(cases.len(), !options.json);
    progress.now(&format!("waiting for {peer}"));
    let (ends, server) = fabric.block_on(meet(&fabric, options, peer))?;
    let way = Way::of(&verbs, ends.talk())?;
    let idle = match options.idle {
        0 => None,
        count => {
            progress.now(&format!("opening {count} idle links"));
            let open = Idle::open(&ends, count, (peer, options.local), server);
            Some(fabric.block_on(open)?)
        }
    };
    let mut results = Vec::new();
    for case in &cases {
        progress.case(case);
        results.push(measure(&ends, case, options.mode)?);
    }
    ends.set_mode(Mode::Event);
    progress.now("closing");
    let idle = fabric.block_on(part(&ends, idle))?;
    progress.finish();
    Report::new(options.mode, options.links, way, server, idle, results, notes).print(options.json)
}

/// Opens the links; what the server has then.
async fn meet(
    fabric: &Fabric,
    options: &Options,
    peer: SocketAddr,
) -> anyhow::Result<(Ends, Holding)> {
    let to = options.local.into_iter().fold(ConnectOptions::new(), ConnectOptions::local);
    let missing = || format!("no link to {peer} (`ferrite bench fabric --listen` must run there)");
    let first = fabric.connect_with(peer, &to).await.with_context(missing)?;
    say(&first, &Request::begin(options.links))?;
    let mut ends = Ends { fabric: fabric.clone(), links: vec![first] };
    for number in 1..options.links {
        let link = fabric.connect_with(peer, &to).await.with_context(missing)?;
        say(&link, &Request::Join { link: number })?;
        ends.links.push(link);
    }
    match reply(&ends).await? {
        Reply::Holding(holding) => Ok((ends, holding)),
        other => bail!("{other:?} where the server's holdings were due"),
    }
}

/// What the server answers; a refusal is an error.
pub(super) async fn reply(ends: &Ends) -> anyhow::Result<Reply> {
    match hear(ends.talk()).await? {
        Reply::Refused { why } => bail!("the server refused: {why}"),
        reply => Ok(reply),
    }
}

fn measure(ends: &Ends, case: &Case, mode: Mode) -> anyhow::Result<Row> {
    let Case { op, measure, size, .. } = *case;
    ends.set_mode(mode);
    say(ends.talk(), &Request::Test(Test { op, measure, size_bytes: size, mode }))?;
    let ready = ends.fabric.block_on(reply(ends))?;
    ensure!(ready == Reply::Ready, "{ready:?} where the server should be ready");
    let before = Work::of(&ends.fabric);
    let begun = Instant::now();
    let (figures, seconds, sent) = match measure {
        Measure::Latency => {
            let round_trips = latency::client(ends, case)?;
            let (latency_of, parts) = op.latency_measure();
            let iterations = round_trips.ticks.len();
            let latency_us = Latency::of(&round_trips, parts);
            let figures =
                Figures::Latency { latency_of, iterations, warmup: case.warmup, latency_us };
            (figures, begun.elapsed().as_secs_f64(), None)
        }
        Measure::Bandwidth => {
            let (moved, all) = bandwidth::client(ends, case)?;
            (Figures::of_bandwidth(case, moved), moved.time.as_secs_f64(), Some(all))
        }
    };
    let client = Work::of(&ends.fabric).since(before);
    match ends.fabric.block_on(reply(ends))? {
        Reply::Done { messages, work, .. } => {
            if let (Op::Send, Some(sent)) = (op, sent) {
                ensure!(messages == sent, "{sent} messages were sent and {messages} arrived");
            }
            Ok(Row { op, measure, size_bytes: size, figures, seconds, client, server: work })
        }
        other => bail!("{other:?} where the server should be done"),
    }
}

/// Closes everything in good order.
async fn part(ends: &Ends, idle: Option<Idle>) -> anyhow::Result<Option<super::idle::Figures>> {
    let figures = match idle {
        Some(idle) => Some(idle.close().await),
        None => None,
    };
    say(ends.talk(), &Request::End)?;
    for link in ends.links.iter().map(Link::close) {
        link.await?;
    }
    Ok(figures)
}
