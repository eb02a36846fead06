//! The application of a side: the data that it sends and expects.

use std::collections::VecDeque;

use super::{Violation, violation};
use crate::link::tickets::Ticket;

/// Number of channels.
pub(super) const CHANNELS: u16 = 3;

/// A message or one-sided operation without an answer yet.
pub(super) struct Operation {
    pub(super) ticket: Ticket,
    /// For a write, the written value. For a read, the highest value whose write had an answer when
    /// the read began. For a message, 0.
    pub(super) written: u64,
    pub(super) is_read: bool,
}

#[derive(Default)]
pub(super) struct Application {
    /// Messages of the peer that have not arrived, by channel.
    expected: [VecDeque<Vec<u8>>; CHANNELS as usize],
    /// Notices of the peer's writes that have not arrived, in order.
    expected_notices: VecDeque<u32>,
    taken: usize,
    pub(super) operations: Vec<Operation>,
    /// The number of the grant of this side's memory.
    pub(super) grant: u64,
    /// The granted memory, which is a single value.
    pub(super) value: u64,
    pub(super) is_revoked: bool,
    pub(super) is_released: bool,
    /// The last value that this side wrote to the peer.
    pub(super) last_written: u64,
    /// The highest written value whose write has an answer.
    pub(super) last_answered: u64,
    /// The number of operations on the peer's grant that were refused.
    pub(super) refused: usize,
}

impl Application {
    /// Creates the application of a side that has granted its memory under this number.
    pub(super) fn new(grant: u64) -> Self {
        Self { grant, ..Self::default() }
    }

    /// Notes that the peer has sent this message.
    pub(super) fn expect(&mut self, channel: u16, message: Vec<u8>) {
        self.expected[usize::from(channel)].push_back(message);
    }

    pub(super) fn expect_notice(&mut self, imm: u32) {
        self.expected_notices.push_back(imm);
    }

    pub(super) fn on_message(&mut self, channel: u16, message: &[u8]) -> Result<(), Violation> {
        self.taken += 1;
        match self.expected[usize::from(channel)].pop_front() {
            Some(expected) if expected == message => Ok(()),
            Some(_) => {
                violation(format!("the message on channel {channel} is not the expected one"))
            }
            None => violation(format!("a message arrived on channel {channel}, but none was sent")),
        }
    }

    pub(super) fn on_notice(&mut self, imm: u32) -> Result<(), Violation> {
        self.taken += 1;
        // Refused writes have no notice.
        while let Some(expected) = self.expected_notices.pop_front() {
            if expected == imm {
                let is_there = self.is_released || self.value >= u64::from(imm);
                let (value, what) = (self.value, "a notice arrived before its write");
                return if is_there {
                    Ok(())
                } else {
                    violation(format!("{what}: the notice is {imm}, the value is {value}"))
                };
            }
            if !self.is_revoked {
                return violation(format!("notice {imm} arrived instead of {expected}"));
            }
        }
        violation(format!("notice {imm} was never sent, or arrived twice"))
    }

    /// Carries out a write of the peer.
    pub(super) fn on_write(&mut self, grant: u64, value: u64) -> Result<(), Violation> {
        if grant != self.grant || self.is_released {
            return violation("the peer wrote to memory that was released");
        }
        self.value = value;
        Ok(())
    }

    pub(super) fn on_read(&mut self, grant: u64) -> Result<u64, Violation> {
        if grant != self.grant || self.is_released {
            return violation("the peer read memory that was released");
        }
        Ok(self.value)
    }

    /// Returns whether no operation waits for its answer.
    pub(super) fn is_idle(&self) -> bool {
        self.operations.is_empty()
    }

    /// Checks the end of a run. Returns how many messages and notices were received.
    pub(super) fn finish(&self, is_in_order: bool) -> Result<usize, Violation> {
        let missing: usize = self.expected.iter().map(VecDeque::len).sum();
        if is_in_order && missing > 0 {
            return violation(format!(
                "{missing} messages were lost by a link that closed in order"
            ));
        }
        if is_in_order && !self.is_revoked && !self.expected_notices.is_empty() {
            return violation("notices were lost by a link that closed in order");
        }
        Ok(self.taken)
    }
}
