//! The server: waits for clients and does its part of their measurements.

use std::future::{Future as _, poll_fn};
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::task::Poll;

use anyhow::{Context as _, anyhow, bail, ensure};
use ferrite_fabric::wire::Rights;
use ferrite_fabric::{Error, Fabric, Link, Listener, Message};
use ferrite_verbs::Verbs;
use serde::Serialize;

use super::protocol::{
    Reply, Request, Resources, Test, Work, parse, receive_control, send_control,
};
use super::side::{self, Side, name};
use super::{Measure, Options, bandwidth, latency};
use crate::choice::Op;
use crate::output;

pub(super) fn run(options: &Options, listen: SocketAddr) -> anyhow::Result<()> {
    let verbs = Verbs::system()?;
    let fabric = side::fabric(&verbs, Some(listen.ip()), options)?;
    let listener = fabric.listen(listen).with_context(|| format!("cannot listen on {listen}"))?;
    // On stderr, so that stdout has results only.
    eprintln!("ferrite: listening on {}", listener.local_addr());
    let mut pending = PendingLinks { listener, waiting: Vec::new() };
    loop {
        fabric.set_busy_poll_us(0);
        let (first, message) = fabric.block_on(pending.next_client())?;
        let peer = first.peer_addr();
        let outcome = serve(&fabric, &mut pending, first, &message);
        match outcome.with_context(|| format!("serving {}", name(peer))) {
            Ok(served) => served.print(options.json),
            Err(error) if options.once => return Err(error),
            // A failed client does not stop the server.
            Err(error) => eprintln!("ferrite: {error:#}"),
        }
        if options.once {
            return Ok(());
        }
    }
}

/// Accepted links that do not belong to a session yet.
struct PendingLinks {
    listener: Listener,
    waiting: Vec<Link>,
}

impl PendingLinks {
    /// Returns the first link with a message, and the message. Silent links do not block others.
    async fn next_client(&mut self) -> Result<(Link, Message), Error> {
        poll_fn(|cx| {
            while let Poll::Ready(link) = Pin::new(&mut self.listener.accept()).poll(cx) {
                self.waiting.push(link?);
            }
            let mut at = 0;
            while at < self.waiting.len() {
                let polled = Pin::new(&mut self.waiting[at].recv()).poll(cx);
                match polled {
                    Poll::Pending => at += 1,
                    Poll::Ready(Ok(message)) => {
                        return Poll::Ready(Ok((self.waiting.swap_remove(at), message)));
                    }
                    // The client has disconnected.
                    Poll::Ready(Err(_)) => drop(self.waiting.swap_remove(at)),
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Returns another link from the process that opened the link `of`.
    async fn next_of_process(&mut self, of: &Link) -> Result<Link, Error> {
        let instance = of.peer_hello().instance;
        if let Some(at) =
            self.waiting.iter().position(|link| link.peer_hello().instance == instance)
        {
            return Ok(self.waiting.swap_remove(at));
        }
        loop {
            let link = self.listener.accept().await?;
            if link.peer_hello().instance == instance {
                return Ok(link);
            }
            self.waiting.push(link);
        }
    }
}

/// A client that was served.
#[derive(Debug, Serialize)]
struct Served {
    peer: Option<SocketAddr>,
    device: String,
    links: usize,
    idle: usize,
    cases: usize,
}

fn serve(
    fabric: &Fabric,
    pending: &mut PendingLinks,
    first: Link,
    message: &Message,
) -> anyhow::Result<Served> {
    let control = first.clone();
    let session = Session::begin(fabric, pending, first, message);
    let outcome = session.and_then(|session| session.run(pending));
    match &outcome {
        Ok(_) => {}
        Err(_) if control.failure().is_some() => {}
        Err(error) => {
            // Sends the reason, and closes the link when the client has received it.
            let _ = send_control(&control, &Reply::Refused { why: format!("{error:#}") });
            let _ = fabric.block_on(control.close());
        }
    }
    outcome
}

struct Session {
    side: Side,
    idle: Vec<Link>,
    served: Served,
}

impl Session {
    fn begin(
        fabric: &Fabric,
        pending: &mut PendingLinks,
        first: Link,
        message: &Message,
    ) -> anyhow::Result<Self> {
        let count = Request::parse_begin(message)? as usize;
        let served = Served {
            peer: first.peer_addr(),
            device: first.device().unwrap_or_default(),
            links: count,
            idle: 0,
            cases: 0,
        };
        let mut links: Vec<Option<Link>> = vec![None; count];
        fabric.block_on(async {
            for _ in 1..count {
                let link = pending.next_of_process(&first).await?;
                match receive_control(&link).await? {
                    Request::Join { link: number } => {
                        let slot = links.get_mut(number as usize).filter(|_| number > 0);
                        let slot = slot.with_context(|| {
                            format!("invalid link number {number}, expected 1 to {}", count - 1)
                        })?;
                        ensure!(slot.replace(link).is_none(), "two links have number {number}");
                    }
                    other => bail!("received {other:?}, expected Join"),
                }
            }
            Ok(())
        })?;
        links[0] = Some(first);
        let side = Side { fabric: fabric.clone(), links: links.into_iter().flatten().collect() };
        send_control(side.control_link(), &Reply::Holding(Resources::of(fabric)))?;
        Ok(Self { side, idle: Vec::new(), served })
    }

    /// Handles the client's requests until it ends the session.
    fn run(mut self, pending: &mut PendingLinks) -> anyhow::Result<Served> {
        let fabric = self.side.fabric.clone();
        loop {
            fabric.set_busy_poll_us(0);
            match fabric.block_on(receive_control(self.side.control_link()))? {
                Request::Test(test) => self.test(&test)?,
                Request::Idle => fabric.block_on(self.take_idle(pending))?,
                Request::IdleOpen { .. } => {} // the client sent this before it received our reply
                Request::End => break,
                other => bail!("received {other:?}, expected a test"),
            }
        }
        // Waits until the client has closed its links. How they end does not matter.
        fabric.block_on(async {
            for link in &self.side.links {
                let _ = link.ended().await;
            }
        });
        Ok(self.served)
    }

    fn test(&mut self, test: &Test) -> anyhow::Result<()> {
        test.check()?;
        let Test { op, measure, size_bytes: size, mode } = *test;
        let side = &self.side;
        send_control(side.control_link(), &Reply::Ready)?;
        let before = Work::of(&side.fabric);
        let messages = match (measure, op) {
            (Measure::Latency, Op::Send | Op::Write) => {
                side.set_mode(mode);
                latency::server(side, op, size)?
            }
            (Measure::Bandwidth, Op::Send) => {
                side.set_mode(mode);
                bandwidth::server(side, op, size)?
            }
            (Measure::Bandwidth, Op::Write) => expose_until_stop(side, size, Rights::WRITE)?,
            (_, Op::Read) => expose_until_stop(side, size, Rights::READ)?,
        };
        self.served.cases += 1;
        let work = Work::of(&side.fabric).since(before);
        send_control(
            side.control_link(),
            &Reply::Done { messages, bytes: messages * u64::from(size), work },
        )
    }

    /// Accepts the client's idle links until it reports their number and all have arrived.
    async fn take_idle(&mut self, pending: &mut PendingLinks) -> anyhow::Result<()> {
        let control = self.side.control_link();
        let mut expected = None;
        poll_fn(|cx| {
            while let Poll::Ready(link) = pin!(pending.next_of_process(control)).poll(cx) {
                self.idle.push(link?);
            }
            // The client reports a smaller number if it loses links.
            while let Poll::Ready(message) = Pin::new(&mut control.recv()).poll(cx) {
                match parse(&message?)? {
                    Request::IdleOpen { links } => expected = Some(links),
                    other => {
                        return Poll::Ready(Err(anyhow!("received {other:?}, expected IdleOpen")));
                    }
                }
            }
            // The connection manager may report the last links after the client's message arrives.
            if expected.is_some_and(|expected| self.idle.len() >= expected) {
                Poll::Ready(Ok(()))
            } else {
                Poll::Pending
            }
        })
        .await?;
        self.served.idle = self.idle.len();
        send_control(control, &Reply::Holding(Resources::of(&self.side.fabric)))
    }
}

/// Exposes memory to the client until the client ends the test. This side sleeps meanwhile.
fn expose_until_stop(side: &Side, size: u32, rights: Rights) -> anyhow::Result<u64> {
    let regions = side.expose(size, rights)?;
    let request: Request = side.fabric.block_on(receive_control(side.control_link()))?;
    ensure!(request == Request::Stop, "received {request:?}, expected Stop");
    drop(regions);
    Ok(0)
}

impl Served {
    fn print(&self, json: bool) {
        if json {
            output::print_event(self);
            return;
        }
        let Self { peer, device, links, idle, cases } = self;
        let idle = if *idle == 0 { String::new() } else { format!(" and {idle} idle") };
        let peer = name(*peer);
        output::write_line(&format!(
            "served {peer} on {device}: links {links}{idle}, cases {cases}"
        ));
    }
}
