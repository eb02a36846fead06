//! Sending: messages and one-sided operations of the link's users. Each is checked and queued. It
//! is posted or written at once, if nothing is queued before it and the peer's credits allow.

#[cfg(feature = "tokio")]
use std::io::IoSlice;
use std::task::{Poll, Waker};

use super::LinkShared;
use crate::device::slots::Held;
use crate::error::{Error, ErrorKind};
use crate::link::kind::Kind;
use crate::link::outbox::OneSided;
use crate::link::tickets::Ticket;
use crate::mem::{Buf, lock};
use crate::wire::{GrantToken, Rights};

impl LinkShared {
    /// Queues a message and posts what may be sent. If the queue is full, `waker` is called when
    /// there is room.
    pub(crate) fn submit(
        &self,
        channel: u16,
        parts: Vec<Buf>,
        waker: Option<&Waker>,
    ) -> Result<Ticket, (Vec<Buf>, Error)> {
        self.queue(channel, parts, waker, true)
            .map(|ticket| ticket.expect("a ticket was requested"))
    }

    pub(crate) fn queue(
        &self,
        channel: u16,
        parts: Vec<Buf>,
        waker: Option<&Waker>,
        wait: bool,
    ) -> Result<Option<Ticket>, (Vec<Buf>, Error)> {
        if !parts.iter().all(|part| self.pool.owns(part)) {
            return Err((parts, foreign()));
        }
        let bytes = parts.iter().map(|part| part.len() as u64).sum();
        self.with(|state, env, wakes| {
            let checked =
                state.core.check_open().and_then(|()| state.core.check_message(channel, bytes));
            if let Err(error) = checked.and_then(|()| state.core.check_parts(&parts)) {
                return Err((parts, error));
            }
            if !state.core.has_room(bytes) {
                if let Some(waker) = waker {
                    state.core.wake_on_room(waker);
                }
                return Err((parts, full()));
            }
            let ticket = state.core.push(channel, parts, wait);
            state.pump(env, wakes);
            Ok(ticket)
        })
    }

    /// Returns `Ready` if another message of `bytes` may be queued. Otherwise keeps `waker`.
    pub(crate) fn poll_room(&self, bytes: u64, waker: &Waker) -> Poll<Result<(), Error>> {
        let mut state = lock(&self.state);
        if let Err(error) = state.core.check_open() {
            return Poll::Ready(Err(error));
        }
        if state.core.has_room(bytes) {
            return Poll::Ready(Ok(()));
        }
        state.core.wake_on_room(waker);
        Poll::Pending
    }

    /// Returns whether queued or unfinished work of the link holds memory. If so, `waker` is called
    /// when some of it is done.
    #[cfg(feature = "tokio")]
    pub(crate) fn poll_progress(&self, waker: &Waker) -> bool {
        let mut state = lock(&self.state);
        let holds = state.holds_memory();
        if holds {
            state.core.wake_on_room(waker);
        }
        holds
    }

    /// Calls `waker` after a while, when memory may be available.
    #[cfg(feature = "tokio")]
    pub(crate) fn wait_for_memory(&self, waker: &Waker) {
        self.with(|state, _, wakes| {
            if state.failure().is_some() {
                wakes.push(waker.clone()); // the fabric does not process a link that is down
                return;
            }
            state.core.wake_on_room(waker);
            state.is_starved = true;
        });
    }

    /// Sends an empty message, which ends a stream, even if the queue is full. The message holds no
    /// memory, and the end of a stream must not wait.
    #[cfg(feature = "tokio")]
    pub(crate) fn post_end(&self, channel: u16) -> Result<(), Error> {
        self.with(|state, env, wakes| {
            state.core.check_open()?;
            state.core.push(channel, [], false);
            state.pump(env, wakes);
            Ok(())
        })
    }

    /// Returns whether the peer's `Fin` has arrived. All data of the peer has then arrived, too.
    #[cfg(feature = "tokio")]
    pub(crate) fn peer_has_closed(&self) -> bool {
        lock(&self.state).core.peer_has_closed()
    }

    /// Sends one buffer without waiting for an acknowledgement. The message needs neither a ticket
    /// nor a list of parts.
    pub(crate) fn post(&self, channel: u16, buf: Buf) -> Result<(), (Buf, Error)> {
        if !self.pool.owns(&buf) {
            return Err((buf, foreign()));
        }
        self.with(|state, env, wakes| {
            let bytes = buf.len() as u64;
            if let Err(error) =
                state.core.check_open().and_then(|()| state.core.check_message(channel, bytes))
            {
                return Err((buf, error));
            }
            if !state.core.has_room(bytes) {
                return Err((buf, full()));
            }
            state.core.push(channel, [buf], false);
            state.pump(env, wakes);
            Ok(())
        })
    }

    /// Sends a small message from the caller's memory. Returns `Ok(false)` if it cannot be sent at
    /// once.
    pub(crate) fn send_now(&self, channel: u16, bytes: &[u8]) -> Result<bool, Error> {
        self.with(|state, _, wakes| {
            state.core.check_open()?;
            state.core.check_message(channel, bytes.len() as u64)?;
            let sent = state.send_now(channel, bytes);
            sent.inspect_err(|error| state.core.fail(error.clone(), wakes))
        })
    }

    /// Sends up to `len` bytes of the slices over TCP. Copies only the rest of a frame that the
    /// kernel accepts in part. Returns the number of bytes; `None` if they must be queued instead.
    /// If the kernel or the peer accepts nothing now, returns `Pending`, and `waker` is called when
    /// more may be sent.
    #[cfg(feature = "tokio")]
    pub(crate) fn poll_send_through(
        &self,
        channel: u16,
        slices: &[IoSlice<'_>],
        len: usize,
        waker: &Waker,
    ) -> Poll<Result<Option<usize>, Error>> {
        self.with(|state, _, wakes| {
            if !state.writes_through() {
                return Poll::Ready(Ok(None));
            }
            let checked =
                state.core.check_open().and_then(|()| state.core.check_message(channel, 1));
            if let Err(error) = checked {
                return Poll::Ready(Err(error));
            }
            match state.write_slices(channel, slices, len) {
                Ok(Some(sent)) => Poll::Ready(Ok(Some(sent))),
                Ok(None) if state.is_held_up() => {
                    state.core.wake_on_room(waker);
                    Poll::Pending
                }
                Ok(None) => Poll::Ready(Ok(None)),
                Err(error) => {
                    state.core.fail(error.clone(), wakes);
                    Poll::Ready(Err(error))
                }
            }
        })
    }

    /// Queues a one-sided operation on the granted memory, from `offset` on. Its length is the
    /// length of the buffer in `held`.
    pub(crate) fn one_sided(
        &self,
        grant: &GrantToken,
        rights: Rights,
        offset: u64,
        mut held: Held,
        (kind, imm): (Kind, u32),
    ) -> Result<Ticket, (Held, Error)> {
        let (len, ours) = match &mut held {
            Held::Shared(buf) => (buf.len(), self.pool.owns(buf)),
            Held::Unique(buf) => (buf.len(), self.pool.owns_mut(buf)),
            Held::Nothing | Held::Copied(_) | Held::Passing(_) | Held::Binding(_) => (0, true),
        };
        let wrong = if !ours {
            Some(foreign())
        } else if !grant.rights.contains(rights) {
            Some(Error::new(
                ErrorKind::Denied,
                format!("the grant is for {}, not {rights}", grant.rights),
            ))
        } else if grant.range(offset, len as u64).is_none() {
            let what =
                format!("{len} bytes at offset {offset} exceed the grant of {} bytes", grant.len);
            Some(Error::new(ErrorKind::Denied, what))
        } else {
            None
        };
        if let Some(error) = wrong {
            return Err((held, error));
        }
        self.with(|state, env, wakes| {
            let checked = state.core.check_open();
            if let Err(error) = checked.and_then(|()| state.core.check_one_sided(kind)) {
                return Err((held, error));
            }
            if state.core.is_revoked(grant.grant) {
                return Err((
                    held,
                    Error::new(ErrorKind::Denied, "the peer has revoked the grant"),
                ));
            }
            if !state.core.has_room(len as u64) {
                return Err((held, full()));
            }
            let GrantToken { grant, addr: base, rkey, .. } = *grant;
            let bytes = len as u32;
            let operation =
                OneSided { kind, held, ticket: None, grant, base, rkey, offset, bytes, imm };
            let ticket = state.core.push_one_sided(operation, true);
            state.pump(env, wakes);
            Ok(ticket.expect("a ticket was requested"))
        })
    }
}

/// Returns the error for a queue that has no room.
fn full() -> Error {
    Error::new(
        ErrorKind::Full,
        "the link's queue is full: this side sends faster than the link delivers; wait for room",
    )
}

fn foreign() -> Error {
    Error::new(ErrorKind::Misuse, "the buffer belongs to another fabric's pool")
}
