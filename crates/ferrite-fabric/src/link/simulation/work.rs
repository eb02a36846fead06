//! The actions of a side's application on the link.

use std::task::{Poll, Waker};

use super::application::{Application, CHANNELS, Operation};
use super::side::{SEGMENT_BYTES, Side};
use super::{Random, Violation, violation};
use crate::device::slots::Held;
use crate::error::ErrorKind;
use crate::link::kind::Kind;
use crate::link::outbox::OneSided;
use crate::mem::Buf;

impl Side {
    /// Lets the application send a message, or read or write the peer's granted memory.
    pub(super) fn offer_work(
        &mut self,
        peer: &mut Application,
        random: &mut Random,
    ) -> Result<(), Violation> {
        if self.core.check_open().is_err() {
            return Ok(());
        }
        if random.chance(70) {
            self.send_message(peer, random);
        } else if !self.core.is_revoked(peer.grant) {
            self.use_grant(peer, random);
        }
        Ok(())
    }

    fn send_message(&mut self, peer: &mut Application, random: &mut Random) {
        let most = [0, 20, SEGMENT_BYTES as usize, 1800][random.below(4)];
        let len = random.below(most + 1);
        if !self.core.has_room(len as u64) {
            return;
        }
        let message: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
        let (one, other) = message.split_at(random.below(len + 1));
        let parts: Vec<Buf> = [one, other].map(|part| self.buffer(part).freeze()).into();
        let channel = random.below(CHANNELS.into()) as u16;
        let fits = self.core.check_message(channel, len as u64);
        if fits.and_then(|()| self.core.check_parts(&parts)).is_err() {
            return;
        }
        if let Some(ticket) = self.core.push(channel, parts, random.chance(50)) {
            self.application.operations.push(Operation { ticket, written: 0, is_read: false });
        }
        peer.expect(channel, message);
    }

    fn use_grant(&mut self, peer: &mut Application, random: &mut Random) {
        let own = &mut self.application;
        let kind = [Kind::Write, Kind::Notice, Kind::Read][random.below(3)];
        let is_read = kind == Kind::Read;
        let written = if is_read { own.last_answered } else { own.last_written + 1 };
        if !is_read {
            own.last_written = written;
        }
        if kind == Kind::Notice {
            peer.expect_notice(written as u32);
        }
        let buf = self.buffer(&written.to_le_bytes());
        let held = if is_read { Held::Unique(buf) } else { Held::Shared(buf.freeze()) };
        let operation = OneSided {
            kind,
            held,
            ticket: None,
            grant: peer.grant,
            base: 0,
            rkey: 0,
            offset: 0,
            bytes: 8,
            imm: written as u32,
        };
        let ticket = self.core.push_one_sided(operation, true).expect("a ticket was requested");
        self.application.operations.push(Operation { ticket, written, is_read });
    }

    /// Lets the application take a message. Returns whether there was one.
    pub(super) fn take_message(&mut self) -> Result<bool, Violation> {
        match self.core.pop() {
            Ok(Some(message)) => {
                match message.notice() {
                    Some(imm) => self.application.on_notice(imm)?,
                    None => self.application.on_message(message.channel(), &message.to_vec())?,
                }
                Ok(true)
            }
            Ok(None) | Err(_) => Ok(false),
        }
    }

    /// Collects the operations that were answered.
    pub(super) fn poll_operations(&mut self) -> Result<(), Violation> {
        let mut left = Vec::new();
        for operation in std::mem::take(&mut self.application.operations) {
            let Poll::Ready(outcome) = self.core.poll_ticket(operation.ticket, Waker::noop())
            else {
                left.push(operation);
                continue;
            };
            match (outcome.result, operation.is_read) {
                (Ok(()), true) => {
                    let bytes = outcome.buf.as_ref().and_then(|buf| buf.first_chunk().copied());
                    let Some(value) = bytes.map(u64::from_le_bytes) else {
                        return violation("a read succeeded without its bytes");
                    };
                    if !(operation.written..=self.application.last_written).contains(&value) {
                        let written = operation.written;
                        return violation(format!(
                            "a read returned {value}, which was never written, or was written \
                             before {written}"
                        ));
                    }
                }
                (Ok(()), false) => {
                    let last = &mut self.application.last_answered;
                    *last = (*last).max(operation.written);
                }
                (Err(error), _) if error.kind() == ErrorKind::Denied => {
                    self.application.refused += 1;
                }
                (Err(_), _) if self.core.failure().is_some() => {}
                (Err(error), _) => return violation(format!("an operation failed: {error}")),
            }
        }
        self.application.operations = left;
        Ok(())
    }

    /// Revokes the grant of this side's memory.
    pub(super) fn revoke(&mut self, random: &mut Random) {
        let own = &mut self.application;
        if random.chance(20) && self.core.is_up() && !std::mem::replace(&mut own.is_revoked, true) {
            self.core.revoke(own.grant);
        }
    }
}
