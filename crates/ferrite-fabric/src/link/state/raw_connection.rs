//! The state of a link whose peer speaks another protocol. It has the queued requests, and what has
//! arrived, in order.
//!
//! Ferrite adds nothing on the wire: no hello, no credits, no keepalive, no closing frames. It
//! delivers the peer's messages as they are, and only counts the bytes of the peer's writes.

use std::collections::VecDeque;
use std::task::Waker;

use ferrite_verbs::{Access, Opcode, Operation, RemoteSlice, WorkCompletion};

use super::LinkState;
use crate::device::slots::{Held, Work};
use crate::error::{Error, ErrorKind};
use crate::link::core::{RequestContext, Wakes, keep, protocol};
use crate::link::kind::Kind;
use crate::mem::{Buf, BufMut};

/// Limits on the messages that the application has not taken yet, and on their bytes. Messages are
/// copied, so that a few bytes do not hold a whole receive buffer. A peer that sends faster than
/// the application reads cannot use more memory than this.
const MESSAGES_MAX: usize = 1024;
const MESSAGE_BYTES_MAX: usize = 256 << 10;

/// An arrival on a raw connection.
#[derive(Debug)]
pub enum Arrival {
    /// A message from the peer.
    Message(Box<[u8]>),
    /// The peer has written to our memory, and reports that by immediate data. Consecutive notices
    /// are combined.
    Written {
        /// The number of notices.
        notices: u64,
        /// The sum of the immediate data of these notices.
        sum: u64,
        /// The number of bytes in these writes, as reported by the device. The peer may have
        /// written more bytes before, without a notice.
        bytes: u64,
    },
}

#[derive(Default)]
pub(crate) struct RawConnection {
    outgoing: VecDeque<Outgoing>,
    arrivals: VecDeque<Arrival>,
    messages: usize,
    message_bytes: usize,
    done: Done,
}

struct Outgoing {
    operation: Operation,
    held: Held,
    bytes: usize,
    /// Whether nobody waits for the result.
    quiet: bool,
}

/// Numbers of completed requests of a raw connection: the peer's device has acknowledged them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Done {
    /// The number of messages.
    pub messages: u64,
    /// The number of writes, which all have immediate data.
    pub writes: u64,
}

impl LinkState {
    /// Marks the peer as one of another protocol.
    pub(crate) fn make_raw(&mut self) {
        self.raw = Some(Box::default());
        self.rdma.rights = Access::REMOTE_WRITE; // the peer may write exposed memory, not read it
    }

    pub(crate) fn is_raw(&self) -> bool {
        self.raw.is_some()
    }

    fn raw(&mut self) -> Result<&mut RawConnection, Error> {
        self.core.check_open()?;
        self.raw.as_deref_mut().ok_or_else(|| Error::new(ErrorKind::Misuse, "not a raw connection"))
    }

    /// Queues a message.
    pub(crate) fn push_raw_message(&mut self, message: Buf) -> Result<(), Error> {
        let bytes = message.len();
        let held = Held::Shared(message);
        self.raw()?.outgoing.push_back(Outgoing {
            operation: Operation::Send,
            held,
            bytes,
            quiet: false,
        });
        Ok(())
    }

    /// Queues a write with immediate data.
    pub(crate) fn push_raw_write(
        &mut self,
        buf: Buf,
        remote: RemoteSlice,
        imm: u32,
        quiet: bool,
    ) -> Result<(), Error> {
        let operation = Operation::WriteImm(remote, imm);
        let bytes = buf.len();
        self.raw()?.outgoing.push_back(Outgoing {
            operation,
            held: Held::Shared(buf),
            bytes,
            quiet,
        });
        Ok(())
    }

    /// Queues a write of zero bytes. The peer's software does not notice it, but the peer's device
    /// acknowledges it. Does nothing if other requests are queued.
    pub(crate) fn push_raw_probe(&mut self) {
        let probe = !self.has_raw_work();
        if let Some(raw) = self.raw.as_deref_mut().filter(|_| probe) {
            let operation = Operation::Write(RemoteSlice { addr: 0, len: 0, rkey: 0 });
            raw.outgoing.push_back(Outgoing {
                operation,
                held: Held::Nothing,
                bytes: 0,
                quiet: false,
            });
        }
    }

    /// Queues a probe for a link that closes, if its last requests were not signaled. The
    /// completion of the probe completes those requests, too.
    pub(super) fn push_raw_closing_probe(&mut self) {
        if self.rdma.unsignaled > 0 {
            self.push_raw_probe();
        }
    }

    pub(super) fn has_raw_work(&self) -> bool {
        self.raw.as_ref().is_some_and(|raw| !raw.outgoing.is_empty())
    }

    /// Returns the next request. The last request in the queue is signaled unless it is quiet. Its
    /// completion releases the memory of all requests before it.
    pub(super) fn next_raw_work(&mut self) -> Option<Work<RequestContext>> {
        let raw = self.raw.as_deref_mut()?;
        let Outgoing { operation, held, bytes, quiet } = raw.outgoing.pop_front()?;
        let is_last = raw.outgoing.is_empty();
        let signaled = self.signal(is_last && !quiet);
        let inline = bytes <= self.rdma.inline;
        let held = match held {
            Held::Shared(buf) if inline => Held::Passing(buf),
            held => held,
        };
        let kind = match operation {
            Operation::Send => Kind::Control,
            Operation::WriteImm(..) => Kind::Notice,
            _ => Kind::Write, // a probe, which `Done` does not count
        };
        let mut request = RequestContext { kind, bytes: bytes as u32, ..RequestContext::default() };
        if kind == Kind::Notice {
            self.core.sample(signaled, &mut request);
        }
        Some(Work { operation, held, signaled, inline, request })
    }

    /// Returns whether all requests are done.
    pub(super) fn raw_is_idle(&self) -> bool {
        !self.has_raw_work() && self.rdma.binds.is_empty() && self.rdma.queue.in_flight() == 0
    }

    pub(super) fn end_raw(&mut self) {
        if let Some(raw) = self.raw.as_deref_mut() {
            raw.outgoing.clear();
        }
    }

    pub(super) fn on_raw_done(&mut self, messages: u64, writes: u64, wakes: &mut Wakes) {
        if let Some(raw) = self.raw.as_deref_mut() {
            raw.done.messages += messages;
            raw.done.writes += writes;
            wakes.append(&mut self.core.waiters.room);
        }
    }

    /// Returns the completed requests. `waker` is called when there are more.
    pub(crate) fn raw_done(&mut self, waker: Option<&Waker>) -> Done {
        if let Some(waker) = waker {
            keep(&mut self.core.waiters.room, waker);
        }
        self.raw.as_ref().map_or(Done::default(), |raw| raw.done)
    }

    pub(super) fn on_raw_received(
        &mut self,
        wc: &WorkCompletion,
        mut buf: BufMut,
        wakes: &mut Wakes,
    ) -> Result<(), Error> {
        let Some(raw) = self.raw.as_deref_mut() else { return Ok(()) };
        self.core.stats.recv_ops += 1;
        match (wc.opcode(), wc.imm()) {
            (Opcode::RECV_WRITE_IMM, Some(imm)) => {
                self.core.stats.recv_bytes += u64::from(imm);
                let (more, written) = (u64::from(imm), u64::from(wc.byte_len()));
                if let Some(Arrival::Written { notices, sum, bytes }) = raw.arrivals.back_mut() {
                    *notices += 1;
                    *sum += more;
                    *bytes += written;
                } else {
                    raw.arrivals.push_back(Arrival::Written {
                        notices: 1,
                        sum: more,
                        bytes: written,
                    });
                }
            }
            (_, None) => {
                buf.set_len((wc.byte_len() as usize).min(buf.capacity()));
                raw.messages += 1;
                raw.message_bytes += buf.len();
                if raw.messages > MESSAGES_MAX || raw.message_bytes > MESSAGE_BYTES_MAX {
                    return Err(protocol("too many messages at once"));
                }
                raw.arrivals.push_back(Arrival::Message(buf[..].into()));
            }
            (_, Some(_)) => return Err(protocol("a message with immediate data")),
        }
        wakes.append(&mut self.core.waiters.message);
        Ok(())
    }

    /// Returns the next arrival, or `None` if there is none yet.
    ///
    /// # Errors
    /// The link is down, and everything that arrived before was taken.
    pub(crate) fn pop_arrival(&mut self) -> Result<Option<Arrival>, Error> {
        let arrival = self.raw.as_deref_mut().and_then(|raw| {
            let arrival = raw.arrivals.pop_front()?;
            if let Arrival::Message(message) = &arrival {
                raw.messages -= 1;
                raw.message_bytes -= message.len();
            }
            Some(arrival)
        });
        match (arrival, self.failure()) {
            (None, Some(error)) => Err(error.clone()),
            (arrival, _) => Ok(arrival),
        }
    }
}
