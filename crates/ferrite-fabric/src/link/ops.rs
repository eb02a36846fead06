//! The futures of a link. They do not hold the memory of their operations, so dropping a future
//! forgets only the result. The exception is a [`Sending`] whose message is not in the queue yet:
//! it holds the message.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::message::Message;
use super::shared::LinkShared;
use super::tickets::Ticket;
use crate::error::{Error, ErrorKind};
use crate::mem::{Buf, BufMut};

/// The future of a message to send. A poll queues the message once there is room. It is ready when
/// the peer's device has the whole message, or, on TCP, when the kernel has it. Dropping the future
/// drops a message that is not in the queue yet. A message in the queue is sent all the same.
///
/// ```no_run
/// # use ferrite_fabric::{Error, Link, mem::Buf};
/// # async fn show(link: Link, buf: Buf) -> Result<(), Error> {
/// link.send(0, buf).await?; // waits for room, then for the acknowledgement
/// # Ok(()) }
/// ```
#[must_use = "the message is sent only when this is awaited; `post` sends without a future"]
pub struct Sending {
    link: Arc<LinkShared>,
    state: SendState,
}

enum SendState {
    /// The wait for room in the queue.
    Outside {
        channel: u16,
        parts: Vec<Buf>,
    },
    /// The wait for the acknowledgement.
    Inside(Ticket),
    Over,
}

impl Sending {
    pub(crate) fn new(link: Arc<LinkShared>, channel: u16, parts: Vec<Buf>) -> Self {
        Self { link, state: SendState::Outside { channel, parts } }
    }
}

impl Future for Sending {
    type Output = Result<(), Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let polled = match &mut this.state {
            SendState::Outside { channel, parts } => {
                let (channel, parts) = (*channel, std::mem::take(parts));
                match this.link.submit(channel, parts, Some(cx.waker())) {
                    Ok(ticket) => {
                        this.state = SendState::Inside(ticket);
                        this.link.poll_ticket(ticket, cx.waker())
                    }
                    Err((parts, error)) if error.kind() == ErrorKind::Full => {
                        this.state = SendState::Outside { channel, parts };
                        return Poll::Pending;
                    }
                    Err((_, error)) => {
                        this.state = SendState::Over;
                        return Poll::Ready(Err(error));
                    }
                }
            }
            SendState::Inside(ticket) => this.link.poll_ticket(*ticket, cx.waker()),
            SendState::Over => return Poll::Ready(Err(over())),
        };
        polled.map(|outcome| {
            this.state = SendState::Over;
            outcome.result
        })
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        if let SendState::Inside(ticket) = self.state {
            self.link.abandon(ticket);
        }
    }
}

impl fmt::Debug for Sending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sending").finish_non_exhaustive()
    }
}

/// A read of a peer's memory. Returns the filled buffer, or the failure together with the buffer.
/// Dropping this does not stop the read; the buffer returns to its pool when the device has
/// finished with it.
#[must_use = "only this future returns the buffer"]
pub struct Reading {
    link: Arc<LinkShared>,
    ticket: Option<Ticket>,
}

/// A write to a peer's memory. Ready when the peer's device has acknowledged all the bytes, or, on
/// TCP, when the peer has stored them. Dropping this does not cancel the write.
#[must_use = "only this future tells whether the write arrived; the write goes on without it"]
pub struct Writing {
    link: Arc<LinkShared>,
    ticket: Option<Ticket>,
}

impl Reading {
    pub(crate) fn new(link: Arc<LinkShared>, ticket: Ticket) -> Self {
        Self { link, ticket: Some(ticket) }
    }
}

impl Writing {
    pub(crate) fn new(link: Arc<LinkShared>, ticket: Ticket) -> Self {
        Self { link, ticket: Some(ticket) }
    }
}

/// A failed read, with the buffer that it should have filled.
#[derive(Debug)]
pub struct ReadError {
    /// The cause of the failure.
    pub error: Error,
    /// The buffer that was given to the read, with any contents; `None` if the future was polled
    /// again after it was ready.
    pub buf: Option<BufMut>,
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for ReadError {}

impl From<ReadError> for Error {
    fn from(failed: ReadError) -> Self {
        failed.error
    }
}

impl Future for Reading {
    type Output = Result<BufMut, ReadError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(ticket) = self.ticket else {
            return Poll::Ready(Err(ReadError { error: over(), buf: None }));
        };
        self.link.poll_ticket(ticket, cx.waker()).map(|outcome| {
            self.ticket = None;
            match (outcome.result, outcome.buf) {
                (Ok(()), Some(buf)) => Ok(buf),
                (Ok(()), None) => Err(ReadError { error: over(), buf: None }),
                (Err(error), buf) => Err(ReadError { error, buf }),
            }
        })
    }
}

impl Future for Writing {
    type Output = Result<(), Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(ticket) = self.ticket else { return Poll::Ready(Err(over())) };
        self.link.poll_ticket(ticket, cx.waker()).map(|outcome| {
            self.ticket = None;
            outcome.result
        })
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.link.abandon(ticket);
        }
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.link.abandon(ticket);
        }
    }
}

impl fmt::Debug for Reading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reading").finish_non_exhaustive()
    }
}

impl fmt::Debug for Writing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writing").finish_non_exhaustive()
    }
}

/// The future of the next message. Dropping it loses no message: the message stays in the link.
#[derive(Debug)]
#[must_use = "futures do nothing unless awaited"]
pub struct Receiving<'a>(pub(crate) &'a Arc<LinkShared>);

impl Future for Receiving<'_> {
    type Output = Result<Message, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.0.receive(Some(cx.waker())) {
            Ok(Some(message)) => Poll::Ready(Ok(message)),
            Ok(None) => Poll::Pending,
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

/// The future of the end of a link. Its result is `Ok` after an orderly close.
#[derive(Debug)]
#[must_use = "futures do nothing unless awaited"]
pub struct Ending(pub(crate) Arc<LinkShared>);

impl Future for Ending {
    type Output = Result<(), Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.0.ended(cx.waker()) {
            None => Poll::Pending,
            Some(error) if error.kind() == ErrorKind::Closed => Poll::Ready(Ok(())),
            Some(error) => Poll::Ready(Err(error)),
        }
    }
}

fn over() -> Error {
    Error::new(ErrorKind::Misuse, "a future was polled again after it was ready")
}
