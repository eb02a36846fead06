//! The way up: from TCP to RDMA, without a loss.
//!
//! Each side's `Switch` is its last on TCP. The side that called sends on RDMA when it has the
//! peer's, and the peer when it hears the first of that (`GO`).

use std::sync::Arc;
use std::time::Duration;

use ferrite_verbs::{Operation, WorkCompletion};

use super::migration::{ActiveTransport, plain};
use super::{Kind, LinkState, RequestContext};
use crate::error::{Error, ErrorKind};
use crate::fabric::shared_device::SharedDevice;
use crate::fabric::slots::SendQueue;
use crate::link::tcp::{Body, TcpPath};
use crate::wire::{Address, CONTROL_BYTES, Control, Frame, TcpFrame, TcpFrameKind};

/// A way up to RDMA that is being tried.
pub(crate) struct Upgrade {
    pub(crate) queue: SendQueue<RequestContext>,
    pub(crate) device: Arc<SharedDevice>,
    pub(crate) inline: usize,
    /// The number of our first packet.
    psn: u32,
    /// This side has said, or is to say, its last on TCP.
    pub(crate) switching: bool,
    switch_sent: bool,
    peer_switched: bool,
}

/// What the fabric has to do about a link that moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// The peer offers to go on over RDMA.
    Offered(Address),
    /// It has taken our offer.
    Answered(Address),
    /// It has not, or has withdrawn its own.
    Withdrawn,
    /// The new queue pair does not work.
    Failed,
    /// The new queue pair works.
    Probed,
    /// RDMA carries the link.
    Arrived,
}

/// The questions on a new queue pair.
const PROBE: u64 = u64::MAX - 1;
const GO: u64 = u64::MAX;

impl LinkState {
    /// A queue pair to upgrade to.
    pub(crate) fn begin_upgrade(
        &mut self,
        queue: SendQueue<RequestContext>,
        device: Arc<SharedDevice>,
        inline: usize,
        psn: u32,
    ) {
        self.may_resume = false; // the last way up is over for both
        let (switching, switch_sent, peer_switched) = (false, false, false);
        self.upgrade =
            Some(Upgrade { queue, device, inline, psn, switching, switch_sent, peer_switched });
    }

    /// Says something about the way up.
    pub(crate) fn say(&mut self, kind: TcpFrameKind, address: Option<&Address>) {
        if kind == TcpFrameKind::Withdraw
            && !std::mem::replace(&mut self.peer_offers, false) // it may make another
            && self.upgrade.is_none()
        {
            return; // the peer has heard of nothing that could be withdrawn
        }
        let Some(tcp) = &mut self.tcp else { return };
        let body = address.map_or(Body::Nothing, |address| Body::Loose(Box::new(address.encode())));
        let len = body.bytes().len() as u32;
        tcp.push(&TcpFrame { len, ..plain(kind, 0) }, body, None);
    }

    /// Tells the peer where a grant is on the next device.
    pub(crate) fn say_key(&mut self, grant: u64, addr: u64, rkey: u32) {
        if let Some(tcp) = &mut self.tcp {
            tcp.push(
                &TcpFrame { grant, imm: rkey, ..plain(TcpFrameKind::Rekey, addr) },
                Body::Nothing,
                None,
            );
        }
    }

    /// Asks something on the new queue pair: its acknowledgement says that the way works.
    pub(crate) fn probe(&mut self) -> Result<(), Error> {
        let Some(upgrade) = &mut self.upgrade else { return Ok(()) };
        let frame =
            Frame { control: true, more: false, channel: 0, consumed: self.consumed as u16 };
        let request = RequestContext {
            kind: Kind::Control,
            bytes: CONTROL_BYTES as u32,
            ..RequestContext::default()
        };
        if upgrade.device.reserve(1) == 0 {
            return Err(Error::new(ErrorKind::Full, "the device has too much to do"));
        }
        let bytes = Control::Ping(PROBE).encode();
        let posted =
            upgrade.queue.post_inline(Operation::SendImm(frame.to_imm()), &bytes, true, request);
        posted
            .inspect_err(|refused| upgrade.device.release(1 - refused.posted))
            .map_err(|refused| refused.error.into())
    }

    /// A completion of the queue pair that is being upgraded to.
    pub(super) fn on_upgrade_sent(&mut self, wc: &WorkCompletion) -> bool {
        let Some(upgrade) = &mut self.upgrade else { return false };
        let (mut entries, mut is_bind) = (0, false);
        let known = upgrade.queue.complete(wc, |it, last| {
            entries += 1;
            is_bind |= last && it.request.kind == Kind::Bind;
        });
        upgrade.device.release(entries);
        if known && !(is_bind && wc.ok().is_ok()) {
            self.steps.push(if wc.ok().is_ok() { Step::Probed } else { Step::Failed });
        }
        known
    }

    /// This side says its last on TCP, as soon as nothing is to be sent again.
    pub(crate) fn switch(&mut self) {
        if let Some(upgrade) = &mut self.upgrade {
            upgrade.switching = true;
        }
    }

    /// Whether nothing new may go on TCP any more; says so when it is time.
    pub(super) fn is_switching(&mut self, tcp: &mut TcpPath) -> bool {
        let Some(upgrade) = self.upgrade.as_mut().filter(|upgrade| upgrade.switching) else {
            return false;
        };
        if self.again.is_empty() && !std::mem::replace(&mut upgrade.switch_sent, true) {
            tcp.push(&plain(TcpFrameKind::Switch, 0), Body::Nothing, None);
            // The caller goes up when it has this, and may come back before this side has heard of
            // it.
            self.may_resume = !self.is_caller;
        }
        true
    }

    /// The peer has said its last on TCP.
    pub(super) fn on_switch(&mut self) -> Result<(), Error> {
        let Some(upgrade) = self.upgrade.as_mut().filter(|upgrade| !upgrade.peer_switched) else {
            return Ok(()); // to where this side has withdrawn from
        };
        upgrade.peer_switched = true;
        if self.is_caller {
            if !upgrade.switch_sent {
                return Err(super::receiving::protocol("a switch that nobody asked for"));
            }
            self.arrive();
            self.controls.push_front(Control::Ping(GO));
        } else {
            upgrade.switching = true; // then the caller begins
        }
        Ok(())
    }

    /// Something came on the queue pair that is being upgraded to: a probe, or that the side that
    /// called sends there now. What it says of credits may be older than what came on TCP.
    pub(super) fn on_upgrade_frame(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let ready = self
            .upgrade
            .as_ref()
            .is_some_and(|upgrade| upgrade.peer_switched && upgrade.switch_sent);
        match Control::decode(bytes) {
            Ok(Control::Ping(GO)) if ready && !self.is_caller => {
                self.arrive();
                self.controls.push_back(Control::Pong(GO));
                Ok(())
            }
            Ok(Control::Ping(PROBE)) => Ok(()),
            _ => Err(super::receiving::protocol("a frame on a path that is not there yet")),
        }
    }

    fn arrive(&mut self) {
        let Some(Upgrade { queue, device, inline, .. }) = self.upgrade.take() else { return };
        self.attempt = None;
        (self.queue, self.device, self.inline) = (queue, Some(device), inline);
        self.transport = ActiveTransport::Rdma;
        self.peer_offers = false;
        self.may_resume = false;
        self.steps.push(Step::Arrived);
    }

    /// A command for the way up begins; what the ones before it come to concerns nobody any more.
    pub(crate) fn begin_attempt(&mut self) -> u64 {
        self.attempts += 1;
        self.attempt = Some(self.attempts);
        self.attempts
    }

    /// Whether that is what the link does now, and it does it still.
    pub(crate) fn is_at(&self, attempt: u64) -> bool {
        self.attempt == Some(attempt) && self.failure().is_none()
    }

    pub(crate) fn is_upgrading(&self) -> bool {
        self.upgrade.is_some() || self.attempt.is_some()
    }

    /// Gives up the way up. The queue pair is the caller's to destroy.
    pub(crate) fn end_upgrade(&mut self) -> Option<(Arc<SharedDevice>, SendQueue<RequestContext>)> {
        self.attempt = None;
        let upgrade = self.upgrade.take()?;
        if let Some(qp) = upgrade.queue.qp() {
            let _ = qp.stop(); // a device that is gone has stopped it
        }
        self.generation = upgrade.queue.next_generation();
        Some((upgrade.device, upgrade.queue))
    }

    /// When to try to go up next: twice as long each time.
    pub(crate) fn next_upgrade(&mut self, first: Duration, most: Duration) -> Duration {
        let wait = self.upgrade_wait.unwrap_or(first);
        self.upgrade_wait = Some((wait * 2).min(most));
        wait
    }

    pub(crate) fn reset_upgrade(&mut self) {
        self.upgrade_wait = None;
    }

    /// Whether the way up goes over this device.
    pub(crate) fn upgrades_on(&self, device: &SharedDevice) -> bool {
        self.upgrade.as_ref().is_some_and(|upgrade| upgrade.device.index == device.index)
    }

    /// Whether it is too late to withdraw from the way up.
    pub(crate) fn has_switched(&self) -> bool {
        self.upgrade.as_ref().is_some_and(|upgrade| upgrade.switching)
    }

    /// The queue of the next path, if that is its queue pair.
    pub(crate) fn upgrade_queue(&self, qp: u32) -> Option<&SendQueue<RequestContext>> {
        self.upgrade.as_ref().map(|upgrade| &upgrade.queue).filter(|queue| queue.is_of(qp))
    }

    /// The number of the first packet on that queue pair.
    pub(crate) fn upgrade_psn(&self) -> u32 {
        self.upgrade.as_ref().map_or(0, |upgrade| upgrade.psn)
    }
}
