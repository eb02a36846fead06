//! The client: connects, measures one case after the other and prints the result.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use ferrite_fabric::{ConnectOptions, Fabric, Link};
use ferrite_verbs::Verbs;
use futures_util::future::{Either, select};

use super::super::progress::Progress;
use super::idle::Idle;
use super::plan::{self, Case, QueueLimits};
use super::protocol::{Reply, Request, Resources, Test, Work, send_control};
use super::report::{Figures, PathInfo, Report, Row, size_text};
use super::side::{self, Side};
use super::{Measure, Options, bandwidth, latency};
use crate::choice::{Mode, Op, name};
use crate::exit;
use crate::latency::Latency;

/// How long the server may take for its first answer, plus [`LINK_TIMEOUT`] for each link.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
const LINK_TIMEOUT: Duration = Duration::from_millis(20);

/// Measures all cases. If a case fails, prints the results of the cases before it. If the first
/// case fails, returns its error.
pub(super) fn run(options: &Options, peer: SocketAddr) -> anyhow::Result<ExitCode> {
    let verbs = Verbs::system()?;
    let fabric = side::fabric(&verbs, options.local.map(|local| local.ip()), options)?;
    let config = fabric.config();
    let limits =
        QueueLimits { messages: config.send_queue_messages, bytes: config.send_queue_bytes };
    let (cases, notes) = plan::cases(options, limits);
    let progress =
        Progress::new(cases.len() as u64, "{spinner} {pos}/{len} {bar:20} {msg} {elapsed}");
    progress.step(format!("waiting for {peer}"));
    let (side, server) = fabric.block_on(connect(&fabric, options, peer))?;
    let path = PathInfo::of(&verbs, side.control_link())?;
    let idle = match options.idle {
        0 => None,
        count => {
            progress.step(format!("opening {count} idle links"));
            let open = Idle::open(&side, count, (peer, options.local), server);
            Some(fabric.block_on(open)?)
        }
    };
    let (mut results, mut failure) = (Vec::new(), None);
    for case in &cases {
        let Case { op, measure: quantity, size, .. } = case;
        progress.step(format!("{} of {}, {}", name(quantity), name(op), size_text(*size)));
        progress.advance();
        match measure(&side, case, options.mode) {
            Ok(row) => results.push(row),
            Err(error) if results.is_empty() => return Err(error),
            Err(error) => {
                failure = Some(error);
                break;
            }
        }
    }
    side.set_mode(Mode::Event);
    progress.step("closing");
    let idle = match failure {
        None => fabric.block_on(close(&side, idle))?,
        Some(_) => None,
    };
    progress.finish();
    let error = failure.as_ref().map(exit::Failure::from_error);
    Report::new(options.mode, options.links, path, server, idle, results, notes, error)
        .print(options.json)?;
    Ok(failure.map_or(ExitCode::SUCCESS, |failure| exit::report(&failure, false)))
}

/// Opens the links. Returns them, and the resources that the server holds when all are open.
async fn connect(
    fabric: &Fabric,
    options: &Options,
    peer: SocketAddr,
) -> anyhow::Result<(Side, Resources)> {
    let to = options.local.into_iter().fold(ConnectOptions::new(), ConnectOptions::local);
    let missing =
        || format!("cannot connect to {peer} (`ferrite bench fabric --listen` must run there)");
    let first = fabric.connect_with(peer, &to).await.with_context(missing)?;
    send_control(&first, &Request::begin(options.links))?;
    let mut side = Side { fabric: fabric.clone(), links: vec![first] };
    for number in 1..options.links {
        let link = fabric.connect_with(peer, &to).await.with_context(missing)?;
        send_control(&link, &Request::Join { link: number })?;
        side.links.push(link);
    }
    let answer = within(ANSWER_TIMEOUT + LINK_TIMEOUT * options.links, side.receive_reply());
    match answer.await.with_context(|| peer.to_string())? {
        Reply::Holding(resources) => Ok((side, resources)),
        other => bail!("received {other:?}, expected the server's resources"),
    }
}

/// Waits for the first reply, but not for ever: a server that serves another client, or a program
/// of another protocol, sends none.
async fn within<T>(
    time: Duration,
    reply: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    let (timer, expired) = tokio::sync::oneshot::channel::<()>();
    // The thread is never joined: it ends after `time`, or with the process.
    std::thread::spawn(move || {
        std::thread::sleep(time);
        drop(timer);
    });
    match select(pin!(reply), expired).await {
        Either::Left((reply, _)) => reply,
        Either::Right(_) => bail!(
            "connected, but no answer within {} s: `ferrite bench fabric --listen` serves another \
             client there, or another program listens on that port",
            time.as_secs()
        ),
    }
}

fn measure(side: &Side, case: &Case, mode: Mode) -> anyhow::Result<Row> {
    let Case { op, measure, size, .. } = *case;
    side.set_mode(mode);
    send_control(
        side.control_link(),
        &Request::Test(Test { op, measure, size_bytes: size, mode }),
    )?;
    let ready = side.fabric.block_on(side.receive_reply())?;
    ensure!(ready == Reply::Ready, "received {ready:?}, expected Ready");
    let before = Work::of(&side.fabric);
    let started = Instant::now();
    let (figures, seconds, sent) = match measure {
        Measure::Latency => {
            let round_trips = latency::client(side, case)?;
            let (latency_of, parts) = op.latency_measure();
            let iterations = round_trips.ticks.len();
            let latency_us = Latency::of(&round_trips, parts);
            let figures =
                Figures::Latency { latency_of, iterations, warmup: case.warmup, latency_us };
            (figures, started.elapsed().as_secs_f64(), None)
        }
        Measure::Bandwidth => {
            let (transferred, all) = bandwidth::client(side, case)?;
            (Figures::of_bandwidth(case, transferred), transferred.time.as_secs_f64(), Some(all))
        }
    };
    let client = Work::of(&side.fabric).since(before);
    match side.fabric.block_on(side.receive_reply())? {
        Reply::Done { messages, work, .. } => {
            if let (Op::Send, Some(sent)) = (op, sent) {
                ensure!(messages == sent, "sent {sent} messages, but {messages} arrived");
            }
            Ok(Row { op, measure, size_bytes: size, figures, seconds, client, server: work })
        }
        other => bail!("received {other:?}, expected Done"),
    }
}

/// Closes all links in an orderly way.
async fn close(side: &Side, idle: Option<Idle>) -> anyhow::Result<Option<super::idle::Figures>> {
    let figures = match idle {
        Some(idle) => Some(idle.close().await),
        None => None,
    };
    send_control(side.control_link(), &Request::End)?;
    for link in side.links.iter().map(Link::close) {
        link.await?;
    }
    Ok(figures)
}
