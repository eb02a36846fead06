//! Tickets: how a future learns the result of its operation. The future has a ticket, and the link
//! stores the result. Dropping the future only gives up the ticket; the operation continues and
//! keeps its memory.

use std::task::{Poll, Waker};

use crate::error::Error;
use crate::mem::BufMut;

/// A claim to the result of one operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticket {
    index: u32,
    generation: u32,
}

/// The result of an operation. A read returns its buffer even if it failed.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) result: Result<(), Error>,
    pub(crate) buf: Option<BufMut>,
}

enum State {
    Free,
    Waiting(Option<Waker>),
    Done(Outcome),
    /// The future was dropped.
    Abandoned,
}

struct Entry {
    generation: u32,
    state: State,
}

#[derive(Default)]
pub(crate) struct Tickets {
    entries: Vec<Entry>,
    free: Vec<u32>,
}

impl Tickets {
    pub(crate) fn issue(&mut self) -> Ticket {
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push(Entry { generation: 0, state: State::Free });
            (self.entries.len() - 1) as u32 // bounded by the outbox and the send queue
        });
        let entry = &mut self.entries[index as usize];
        entry.state = State::Waiting(None);
        Ticket { index, generation: entry.generation }
    }

    /// Stores the result of an operation. Returns the task to wake. Drops the result if the future
    /// was dropped.
    pub(crate) fn finish(&mut self, ticket: Ticket, outcome: Outcome) -> Option<Waker> {
        let entry = self.entry(ticket)?;
        match std::mem::replace(&mut entry.state, State::Done(outcome)) {
            State::Waiting(waker) => waker,
            State::Abandoned => {
                self.release(ticket);
                None
            }
            done @ (State::Done(_) | State::Free) => {
                entry.state = done; // the first result counts
                None
            }
        }
    }

    /// Returns the result if there is one. Otherwise keeps `waker`.
    pub(crate) fn poll(&mut self, ticket: Ticket, waker: &Waker) -> Poll<Outcome> {
        let Some(entry) = self.entry(ticket) else { return Poll::Pending };
        match &mut entry.state {
            State::Waiting(kept) => {
                if !kept.as_ref().is_some_and(|kept| kept.will_wake(waker)) {
                    *kept = Some(waker.clone());
                }
                Poll::Pending
            }
            state => match std::mem::replace(state, State::Free) {
                State::Done(outcome) => {
                    self.release(ticket);
                    Poll::Ready(outcome)
                }
                _ => Poll::Pending,
            },
        }
    }

    /// Notes that the future was dropped.
    pub(crate) fn abandon(&mut self, ticket: Ticket) {
        let Some(entry) = self.entry(ticket) else { return };
        match std::mem::replace(&mut entry.state, State::Abandoned) {
            State::Waiting(_) | State::Abandoned => {}
            State::Done(_) | State::Free => self.release(ticket),
        }
    }

    /// Returns whether there are no tickets.
    #[cfg(all(test, loom))]
    pub(crate) fn is_empty(&self) -> bool {
        self.free.len() == self.entries.len()
    }

    fn entry(&mut self, ticket: Ticket) -> Option<&mut Entry> {
        self.entries
            .get_mut(ticket.index as usize)
            .filter(|entry| entry.generation == ticket.generation)
    }

    fn release(&mut self, ticket: Ticket) {
        let entry = &mut self.entries[ticket.index as usize];
        entry.state = State::Free;
        entry.generation = entry.generation.wrapping_add(1);
        self.free.push(ticket.index);
    }
}
