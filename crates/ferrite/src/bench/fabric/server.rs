//! The server: waits for clients, and does its part of what each of them measures.

use std::future::{Future as _, poll_fn};
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::task::Poll;

use anyhow::{Context as _, anyhow, bail, ensure};
use ferrite_fabric::wire::Rights;
use ferrite_fabric::{Error, Fabric, Link, Listener, Message};
use ferrite_verbs::Verbs;
use serde::Serialize;

use super::ends::{self, Ends, name};
use super::talk::{Holding, Reply, Request, Test, Work, hear, parse, say};
use super::{Measure, Options, bandwidth, latency};
use crate::choice::Op;

pub(super) fn run(options: &Options, listen: SocketAddr) -> anyhow::Result<()> {
    let verbs = Verbs::system()?;
    let fabric = ends::fabric(&verbs, Some(listen.ip()), options)?;
    let listener = fabric.listen(listen).with_context(|| format!("cannot listen on {listen}"))?;
    // On stderr, so that stdout carries results only.
    eprintln!("ferrite: listening on {}", listener.local_addr());
    let mut lobby = Lobby { listener, waiting: Vec::new() };
    loop {
        fabric.set_busy_poll_us(0);
        let (first, message) = fabric.block_on(lobby.next_client())?;
        let peer = first.peer_addr();
        let outcome = serve(&fabric, &mut lobby, first, &message);
        match outcome.with_context(|| format!("serving {}", name(peer))) {
            Ok(served) => served.print(options.json)?,
            Err(error) if options.once => return Err(error),
            // One bad client must not end a server.
            Err(error) => eprintln!("ferrite: {error:#}"),
        }
        if options.once {
            return Ok(());
        }
    }
}

/// Where links wait until they are somebody's.
struct Lobby {
    listener: Listener,
    waiting: Vec<Link>,
}

impl Lobby {
    /// The link that says something first, and what it says: a silent one keeps nobody waiting.
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
                    Poll::Ready(Err(_)) => drop(self.waiting.swap_remove(at)), // left again
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Another link of the process that `of` leads to.
    async fn another(&mut self, of: &Link) -> Result<Link, Error> {
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
    lobby: &mut Lobby,
    first: Link,
    message: &Message,
) -> anyhow::Result<Served> {
    let talk = first.clone();
    let session = Session::begin(fabric, lobby, first, message);
    let outcome = session.and_then(|session| session.run(lobby));
    match &outcome {
        Ok(_) => {}
        Err(_) if talk.failure().is_some() => {}
        Err(error) => {
            // Told why, and closed when it has heard it.
            let _ = say(&talk, &Reply::Refused { why: format!("{error:#}") });
            let _ = fabric.block_on(talk.close());
        }
    }
    outcome
}

struct Session {
    ends: Ends,
    idle: Vec<Link>,
    served: Served,
}

impl Session {
    fn begin(
        fabric: &Fabric,
        lobby: &mut Lobby,
        first: Link,
        message: &Message,
    ) -> anyhow::Result<Self> {
        let count = Request::begun(message)? as usize;
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
                let link = lobby.another(&first).await?;
                match hear(&link).await? {
                    Request::Join { link: number } => {
                        let place = links.get_mut(number as usize).filter(|_| number > 0);
                        let place = place.with_context(|| format!("link {number} of {count}"))?;
                        ensure!(place.replace(link).is_none(), "two links are called {number}");
                    }
                    other => bail!("{other:?} on a link that should join"),
                }
            }
            Ok(())
        })?;
        links[0] = Some(first);
        let ends = Ends { fabric: fabric.clone(), links: links.into_iter().flatten().collect() };
        say(ends.talk(), &Reply::Holding(Holding::of(fabric)))?;
        Ok(Self { ends, idle: Vec::new(), served })
    }

    /// Does what the client asks for, until it has enough.
    fn run(mut self, lobby: &mut Lobby) -> anyhow::Result<Served> {
        let fabric = self.ends.fabric.clone();
        loop {
            fabric.set_busy_poll_us(0);
            match fabric.block_on(hear(self.ends.talk()))? {
                Request::Test(test) => self.test(&test)?,
                Request::Idle => fabric.block_on(self.take_idle(lobby))?,
                Request::End => break,
                other => bail!("{other:?} where a test was due"),
            }
        }
        // The client closes; what it sent is all there.
        fabric.block_on(async {
            for link in &self.ends.links {
                let _ = link.ended().await; // how it left is its own affair
            }
        });
        Ok(self.served)
    }

    fn test(&mut self, test: &Test) -> anyhow::Result<()> {
        test.check()?;
        let Test { op, measure, size_bytes: size, mode } = *test;
        let ends = &self.ends;
        say(ends.talk(), &Reply::Ready)?;
        let before = Work::of(&ends.fabric);
        let messages = match (measure, op) {
            (Measure::Latency, Op::Send | Op::Write) => {
                ends.set_mode(mode);
                latency::server(ends, op, size)?
            }
            (Measure::Bandwidth, Op::Send) => {
                ends.set_mode(mode);
                bandwidth::server(ends, op, size)?
            }
            (Measure::Bandwidth, Op::Write) => lend(ends, size, Rights::WRITE)?,
            (_, Op::Read) => lend(ends, size, Rights::READ)?,
        };
        self.served.cases += 1;
        let work = Work::of(&ends.fabric).since(before);
        say(ends.talk(), &Reply::Done { messages, bytes: messages * u64::from(size), work })
    }

    /// Takes the client's idle links until it says that there are no more, and all of them are
    /// here.
    async fn take_idle(&mut self, lobby: &mut Lobby) -> anyhow::Result<()> {
        let talk = self.ends.talk();
        let mut expected = None;
        poll_fn(|cx| {
            while let Poll::Ready(link) = pin!(lobby.another(talk)).poll(cx) {
                self.idle.push(link?);
            }
            if expected.is_none() {
                let Poll::Ready(message) = Pin::new(&mut talk.recv()).poll(cx) else {
                    return Poll::Pending;
                };
                match parse(&message?)? {
                    Request::IdleOpen { links } => expected = Some(links),
                    other => {
                        return Poll::Ready(Err(anyhow!("{other:?} while idle links were due")));
                    }
                }
            }
            // The connection manager's last word on a link may be slower than ours on another.
            if expected.is_some_and(|expected| self.idle.len() < expected) {
                Poll::Pending
            } else {
                Poll::Ready(Ok(()))
            }
        })
        .await?;
        self.served.idle = self.idle.len();
        say(talk, &Reply::Holding(Holding::of(&self.ends.fabric)))
    }
}

/// Memory for the client to reach, until it says that it is done. This side sleeps meanwhile.
fn lend(ends: &Ends, size: u32, rights: Rights) -> anyhow::Result<u64> {
    let regions = ends.expose(size, rights)?;
    let word: Request = ends.fabric.block_on(hear(ends.talk()))?;
    ensure!(word == Request::Stop, "{word:?} where the end of a test was due");
    drop(regions);
    Ok(0)
}

impl Served {
    fn print(&self, json: bool) -> anyhow::Result<()> {
        if json {
            println!("{}", serde_json::to_string(self)?);
            return Ok(());
        }
        let Self { peer, device, links, idle, cases } = self;
        let idle = if *idle == 0 { String::new() } else { format!(" and {idle} idle") };
        println!("served {} on {device}: links {links}{idle}, cases {cases}", name(*peer));
        Ok(())
    }
}
