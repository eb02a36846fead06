//! A window at a time: the loops behind the bandwidths.
//!
//! Each link has up to `window` operations in flight; when the oldest is acknowledged, the next one
//! is posted. First the warm-up, to its last acknowledgement; then the clock runs from the first
//! post to the last acknowledgement.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use anyhow::ensure;
use ferrite_fabric::mem::{Buf, BufMut};
use ferrite_fabric::wire::GrantToken;
use ferrite_fabric::{Error, Link, Reading, Sending, Writing};
use futures_util::stream::{FuturesUnordered, StreamExt as _};

use super::ends::Ends;
use super::plan::{Amount, Case, Pace};
use super::talk::{DATA, Request, TALK, say};
use crate::choice::Op;

/// What got through.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moved {
    pub(super) messages: u64,
    pub(super) time: Duration,
}

/// The client's side. Returns also how many operations there were in all.
pub(super) fn client(ends: &Ends, case: &Case) -> anyhow::Result<(Moved, u64)> {
    ends.fabric.block_on(async {
        let mut streams = Stream::all(ends, case).await?;
        pour(&mut streams, Pace::new(0, Amount::Operations(case.warmup))).await?;
        let begun = Instant::now();
        let messages = pour(&mut streams, Pace::new(0, case.amount)).await?;
        let time = begun.elapsed();
        // To every link whose messages the server counts, else where it waits.
        let links = if case.op == Op::Send { &ends.links[..] } else { &ends.links[..1] };
        for link in links {
            say(link, &Request::Stop)?;
        }
        Ok((Moved { messages, time }, messages + case.warmup))
    })
}

/// The server's side of what it takes part in: takes all messages, and counts them.
pub(super) fn server(ends: &Ends, op: Op, size: u32) -> anyhow::Result<u64> {
    if op != Op::Send {
        return Ok(0);
    }
    ends.fabric.block_on(async {
        let mut total = 0;
        let mut links: FuturesUnordered<_> =
            ends.links.iter().map(|link| drain(link, size)).collect();
        while let Some(taken) = links.next().await {
            total += taken?;
        }
        Ok(total)
    })
}

async fn drain(link: &Link, size: u32) -> anyhow::Result<u64> {
    let mut taken = 0;
    loop {
        let message = link.recv().await?;
        if message.channel() == TALK {
            return Ok(taken);
        }
        ensure!(
            message.len() == size as usize,
            "a message of {} bytes, {size} were due",
            message.len()
        );
        taken += 1;
    }
}

/// As many operations as `pace` allows, over all streams; how many that were.
async fn pour(streams: &mut [Stream<'_>], pace: Pace) -> anyhow::Result<u64> {
    let (pace, acknowledged) = (RefCell::new(pace), Cell::new(0));
    match streams {
        [one] => one.run(&pace, &acknowledged).await?,
        many => {
            let mut running: FuturesUnordered<_> =
                many.iter_mut().map(|stream| stream.run(&pace, &acknowledged)).collect();
            while let Some(ended) = running.next().await {
                ended?;
            }
        }
    }
    Ok(acknowledged.get())
}

/// The operations of one link.
struct Stream<'a> {
    link: &'a Link,
    work: Work,
    window: usize,
    flying: VecDeque<Flight>,
}

/// What is done again and again.
enum Work {
    Send(Buf),
    Write(GrantToken, Buf),
    /// Into these buffers, as long as they are not in flight.
    Read(GrantToken, Vec<BufMut>),
}

/// An operation that is under way.
enum Flight {
    Sending(Sending),
    Writing(Writing),
    Reading(Reading),
    Landed,
}

impl<'a> Stream<'a> {
    async fn all(ends: &'a Ends, case: &Case) -> anyhow::Result<Vec<Self>> {
        let grants = if case.op == Op::Send { Vec::new() } else { ends.grants().await? };
        let streams = ends.links.iter().enumerate().map(|(at, link)| {
            let window = case.window as usize;
            let buffer = || ends.fabric.buffer(case.size as usize);
            let work = match case.op {
                Op::Send => Work::Send(ends.message(case.size, 0)?),
                Op::Write => Work::Write(grants[at], ends.message(case.size, 0)?),
                Op::Read => {
                    Work::Read(grants[at], (0..window).map(|_| buffer()).collect::<Result<_, _>>()?)
                }
            };
            Ok(Self { link, work, window, flying: VecDeque::with_capacity(window) })
        });
        streams.collect()
    }

    /// Ends when everything that `pace` allowed is acknowledged.
    async fn run(&mut self, pace: &RefCell<Pace>, acknowledged: &Cell<u64>) -> anyhow::Result<()> {
        poll_fn(|cx| {
            loop {
                while self.flying.len() < self.window && pace.borrow_mut().another() {
                    let flight = self.launch(cx)?;
                    self.flying.push_back(flight);
                }
                let Some(oldest) = self.flying.front_mut() else { return Poll::Ready(Ok(())) };
                let Poll::Ready(landed) = oldest.poll(cx) else { return Poll::Pending };
                self.flying.pop_front();
                if let (Some(buf), Work::Read(_, spare)) = (landed?, &mut self.work) {
                    spare.push(buf);
                }
                acknowledged.set(acknowledged.get() + 1);
            }
        })
        .await
    }

    fn launch(&mut self, cx: &mut Context<'_>) -> anyhow::Result<Flight> {
        Ok(match &mut self.work {
            Work::Send(message) => {
                let mut sending = self.link.send(DATA, message.clone());
                // It is posted when it is first asked; on a link that is down it fails at once.
                match Pin::new(&mut sending).poll(cx) {
                    Poll::Pending => Flight::Sending(sending),
                    Poll::Ready(sent) => {
                        sent?;
                        Flight::Landed
                    }
                }
            }
            Work::Write(grant, message) => {
                Flight::Writing(self.link.rdma_write(grant, 0, message.clone())?)
            }
            Work::Read(grant, spare) => {
                let Some(buf) = spare.pop() else { anyhow::bail!("more reads than buffers") };
                Flight::Reading(self.link.rdma_read(grant, 0, buf).map_err(Error::from)?)
            }
        })
    }
}

impl Flight {
    /// Ready when it is acknowledged; a read brings its buffer back.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<anyhow::Result<Option<BufMut>>> {
        match self {
            Self::Landed => Poll::Ready(Ok(None)),
            Self::Sending(sending) => {
                Pin::new(sending).poll(cx).map(|sent| Ok(sent.map(|()| None)?))
            }
            Self::Writing(writing) => {
                Pin::new(writing).poll(cx).map(|written| Ok(written.map(|()| None)?))
            }
            Self::Reading(reading) => {
                Pin::new(reading).poll(cx).map(|read| Ok(Some(read.map_err(Error::from)?)))
            }
        }
    }
}
