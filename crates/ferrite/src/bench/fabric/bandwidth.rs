//! The loops that measure bandwidth.
//!
//! Each link has up to `window` operations in flight. When the oldest is acknowledged, the next one
//! is posted. The warm-up ends when its last operation is acknowledged. Then the clock runs from
//! the first measured post to the last acknowledgement.

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

use super::plan::{Amount, Budget, Case};
use super::protocol::{CONTROL, DATA, Request, send_control};
use super::side::Side;
use crate::choice::Op;

/// The measured messages and their time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Transferred {
    pub(super) messages: u64,
    pub(super) time: Duration,
}

/// Runs the client's side. Returns the measurement, and the number of operations including the
/// warm-up.
pub(super) fn client(side: &Side, case: &Case) -> anyhow::Result<(Transferred, u64)> {
    side.fabric.block_on(async {
        let mut streams = Stream::all(side, case).await?;
        run_streams(&mut streams, Budget::new(0, Amount::Operations(case.warmup))).await?;
        let started = Instant::now();
        let messages = run_streams(&mut streams, Budget::new(0, case.amount)).await?;
        let time = started.elapsed();
        // For send, the server receives on every link until `Stop`. Otherwise it waits for `Stop`
        // on the control link.
        let links = if case.op == Op::Send { &side.links[..] } else { &side.links[..1] };
        for link in links {
            send_control(link, &Request::Stop)?;
        }
        Ok((Transferred { messages, time }, messages + case.warmup))
    })
}

/// Runs the server's side. For send, receives all messages and returns their number. Does nothing
/// for other operations, and returns 0.
pub(super) fn server(side: &Side, op: Op, size: u32) -> anyhow::Result<u64> {
    if op != Op::Send {
        return Ok(0);
    }
    side.fabric.block_on(async {
        let mut total = 0;
        let mut links: FuturesUnordered<_> =
            side.links.iter().map(|link| receive_all(link, size)).collect();
        while let Some(received) = links.next().await {
            total += received?;
        }
        Ok(total)
    })
}

async fn receive_all(link: &Link, size: u32) -> anyhow::Result<u64> {
    let mut received = 0;
    loop {
        let message = link.recv().await?;
        if message.channel() == CONTROL {
            return Ok(received);
        }
        ensure!(
            message.len() == size as usize,
            "received a message of {} bytes, expected {size}",
            message.len()
        );
        received += 1;
    }
}

/// Runs as many operations as `budget` allows, over all streams. Returns their number.
async fn run_streams(streams: &mut [Stream<'_>], budget: Budget) -> anyhow::Result<u64> {
    let (budget, acknowledged) = (RefCell::new(budget), Cell::new(0));
    match streams {
        [one] => one.run(&budget, &acknowledged).await?,
        many => {
            let mut running: FuturesUnordered<_> =
                many.iter_mut().map(|stream| stream.run(&budget, &acknowledged)).collect();
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
    in_flight: VecDeque<Operation>,
}

/// The operation that a stream repeats.
enum Work {
    Send(Buf),
    Write(GrantToken, Buf),
    /// Reads. The buffers are spare: no read in flight uses them.
    Read(GrantToken, Vec<BufMut>),
}

/// An operation in flight.
enum Operation {
    Sending(Sending),
    Writing(Writing),
    Reading(Reading),
    Done,
}

impl<'a> Stream<'a> {
    async fn all(side: &'a Side, case: &Case) -> anyhow::Result<Vec<Self>> {
        let grants = if case.op == Op::Send { Vec::new() } else { side.grants().await? };
        let streams = side.links.iter().enumerate().map(|(at, link)| {
            let window = case.window as usize;
            let buffer = || side.fabric.buffer(case.size as usize);
            let work = match case.op {
                Op::Send => Work::Send(side.message(case.size, 0)?),
                Op::Write => Work::Write(grants[at], side.message(case.size, 0)?),
                Op::Read => {
                    Work::Read(grants[at], (0..window).map(|_| buffer()).collect::<Result<_, _>>()?)
                }
            };
            Ok(Self { link, work, window, in_flight: VecDeque::with_capacity(window) })
        });
        streams.collect()
    }

    /// Runs until `budget` is used up and every operation is acknowledged.
    async fn run(
        &mut self,
        budget: &RefCell<Budget>,
        acknowledged: &Cell<u64>,
    ) -> anyhow::Result<()> {
        poll_fn(|cx| {
            loop {
                while self.in_flight.len() < self.window && budget.borrow_mut().take() {
                    let operation = self.post(cx)?;
                    self.in_flight.push_back(operation);
                }
                let Some(oldest) = self.in_flight.front_mut() else { return Poll::Ready(Ok(())) };
                let Poll::Ready(done) = oldest.poll(cx) else { return Poll::Pending };
                self.in_flight.pop_front();
                if let (Some(buf), Work::Read(_, spare)) = (done?, &mut self.work) {
                    spare.push(buf);
                }
                acknowledged.set(acknowledged.get() + 1);
            }
        })
        .await
    }

    fn post(&mut self, cx: &mut Context<'_>) -> anyhow::Result<Operation> {
        Ok(match &mut self.work {
            Work::Send(message) => {
                let mut sending = self.link.send(DATA, message.clone());
                // The first poll posts the message, and fails if the link is down.
                match Pin::new(&mut sending).poll(cx) {
                    Poll::Pending => Operation::Sending(sending),
                    Poll::Ready(sent) => {
                        sent?;
                        Operation::Done
                    }
                }
            }
            Work::Write(grant, message) => {
                Operation::Writing(self.link.rdma_write(grant, 0, message.clone())?)
            }
            Work::Read(grant, spare) => {
                let Some(buf) = spare.pop() else { anyhow::bail!("more reads than buffers") };
                Operation::Reading(self.link.rdma_read(grant, 0, buf).map_err(Error::from)?)
            }
        })
    }
}

impl Operation {
    /// Returns ready when the operation is acknowledged. A read returns its buffer.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<anyhow::Result<Option<BufMut>>> {
        match self {
            Self::Done => Poll::Ready(Ok(None)),
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
