//! The upgrade of a link from TCP to RDMA, without losing anything.
//!
//! ```text
//!   caller                                    peer
//!     │ makes a queue pair ── Offer ──────────► │
//!     │ ◄────────────────────── Answer ──────── │ makes a queue pair
//!     │ probes over RDMA; works ── Switch ────► │
//!     │ ◄────────────────────── Switch ──────── │
//!     │ Ping(GO) over RDMA ───────────────────► │ both send over RDMA
//! ```
//!
//! After its `Switch`, a side sends only migration frames and answers to one-sided operations on
//! TCP, until RDMA is lost. The caller sends on RDMA once it has received the peer's `Switch`. The
//! peer sends on RDMA once it has received the caller's first frame there (`GO`).
//!
//! The caller numbers its offers, and every frame about an offer carries the number. So a late
//! answer or withdrawal is not mistaken for one that belongs to the next offer.

use std::time::{Duration, Instant};

use super::body::Body;
use super::migration::{ActiveTransport, path_frame};
use super::{LinkCore, protocol};
use crate::error::Error;
use crate::wire::{Address, CONTROL_BYTES, Control, Frame, TcpFrame, TcpFrameKind};

/// The numbers of `Ping` frames on a new queue pair. `PROBE` tests the queue pair, and `GO` is the
/// caller's first frame after the switch.
const PROBE: u64 = u64::MAX - 1;
const GO: u64 = u64::MAX;

/// The peer violates the protocol if it sends an offer, answer or withdrawal while more than this
/// many steps wait for the fabric's poller.
const STEPS_MAX: usize = 8;

/// A step of a migration that the fabric's poller must take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// The peer offers an upgrade to RDMA.
    Offered(Address),
    /// The peer has accepted our offer.
    Answered(Address),
    /// The peer has declined our offer, or withdrawn its own.
    Withdrawn,
    /// The new queue pair does not work.
    Failed,
    /// The new queue pair works.
    Probed,
    /// The link uses RDMA.
    Arrived,
}

/// The state of an upgrade.
#[derive(Debug, Default)]
pub(crate) struct Upgrade {
    /// The progress of the switch, once this side has a queue pair for it.
    switch: Option<Switch>,
    /// The number of offers that this side has made.
    offers: u32,
    /// The number of the peer's current offer. The peer may make another only after one side has
    /// withdrawn this one.
    peer_offer: Option<u32>,
    /// The number of the current command for the upgrade; `None` if no upgrade is under way.
    attempt: Option<u64>,
    attempts: u64,
    backoff: Option<Duration>,
    /// The time of the next attempt.
    due: Option<Instant>,
    /// Steps that the fabric's poller must still take, each with the number of its offer.
    steps: Vec<(u32, Step)>,
}

#[derive(Debug, Default)]
struct Switch {
    /// The number of the offer.
    offer: u32,
    /// Whether this side has sent, or is about to send, its `Switch`.
    is_begun: bool,
    is_said: bool,
    peer_has_said: bool,
}

impl Upgrade {
    pub(super) fn is_switching(&self) -> bool {
        self.switch.as_ref().is_some_and(|switch| switch.is_begun)
    }

    /// Forgets the peer's offer, because the path is lost.
    pub(super) fn on_path_lost(&mut self) {
        self.peer_offer = None;
    }

    /// Returns the number of the current offer.
    fn offer(&self) -> Option<u32> {
        self.peer_offer.or(self.switch.as_ref().map(|switch| switch.offer))
    }

    /// Forgets an offer that the driver has not seen yet. Returns whether there was one. Without
    /// this, a peer that makes offers and withdraws them while the driver is delayed would fill
    /// `steps`, and the link would end.
    fn forget_untaken(&mut self, offer: u32) -> bool {
        let before = self.steps.len();
        self.steps.retain(|(of, step)| *of != offer || !matches!(step, Step::Offered(_)));
        self.steps.len() < before
    }

    fn step(&mut self, step: Step) {
        self.steps.push((self.offer().unwrap_or_default(), step));
    }
}

impl LinkCore {
    /// Notes that this side has a queue pair to upgrade to.
    pub(crate) fn begin_upgrade(&mut self) {
        self.migration.may_resume = false; // the previous upgrade has ended for both sides
        let offer = self.upgrade.peer_offer.unwrap_or_else(|| {
            self.upgrade.offers = self.upgrade.offers.wrapping_add(1);
            self.upgrade.offers
        });
        self.upgrade.switch = Some(Switch { offer, ..Switch::default() });
    }

    /// Queues a frame about the current offer. Does nothing if there is no offer.
    pub(crate) fn say(&mut self, kind: TcpFrameKind, address: Option<&Address>) {
        let Some(op) = self.upgrade.offer() else {
            return; // there is no offer to answer or withdraw
        };
        if kind == TcpFrameKind::Withdraw {
            self.upgrade.peer_offer = None; // the peer may make another offer
        }
        let body = address.map_or(Body::Nothing, |it| Body::Loose(Box::new(it.encode())));
        let len = body.bytes().len() as u32;
        self.migration.say(TcpFrame { len, op, ..path_frame(kind, 0) }, body);
    }

    /// Queues a frame that tells the peer the address and the key of a grant on the next device.
    pub(crate) fn say_key(&mut self, grant: u64, addr: u64, rkey: u32) {
        let frame = TcpFrame { grant, imm: rkey, ..path_frame(TcpFrameKind::Rekey, addr) };
        self.migration.say(frame, Body::Nothing);
    }

    /// Returns the frame that probes the new queue pair. Its acknowledgement proves that the path
    /// works.
    pub(crate) fn probe(&self) -> (u32, [u8; CONTROL_BYTES]) {
        let consumed = self.credits.unannounced();
        let frame = Frame { control: true, more: false, channel: 0, consumed };
        (frame.to_imm(), Control::Ping(PROBE).encode())
    }

    /// Notes that the probe of the new queue pair has succeeded, or that the probe or a bind has
    /// failed.
    pub(crate) fn on_probed(&mut self, works: bool) {
        self.upgrade.step(if works { Step::Probed } else { Step::Failed });
    }

    /// Makes this side send its `Switch`, as soon as nothing must be sent again.
    pub(crate) fn switch(&mut self) {
        if let Some(switch) = &mut self.upgrade.switch {
            switch.is_begun = true;
        }
    }

    /// Returns this side's `Switch`, if it is due.
    pub(super) fn next_switch(&mut self) -> Option<TcpFrame> {
        let switch = self.upgrade.switch.as_mut().filter(|switch| switch.is_begun)?;
        if !self.migration.repeats_nothing() || std::mem::replace(&mut switch.is_said, true) {
            return None;
        }
        // The caller switches to RDMA when it receives this frame. It may then lose RDMA again
        // before this side learns of the switch.
        self.migration.may_resume = !self.migration.is_caller;
        Some(TcpFrame { op: switch.offer, ..path_frame(TcpFrameKind::Switch, 0) })
    }

    /// Handles the peer's `Switch`. Returns whether this side uses RDMA from now on.
    pub(super) fn on_switch(&mut self, offer: u32) -> Result<bool, Error> {
        let is_current = |switch: &&mut Switch| switch.offer == offer && !switch.peer_has_said;
        let Some(switch) = self.upgrade.switch.as_mut().filter(is_current) else {
            return Ok(false); // the frame belongs to an upgrade from which this side has withdrawn
        };
        switch.peer_has_said = true;
        if !self.migration.is_caller {
            switch.is_begun = true; // the caller begins, and the called side follows
            return Ok(false);
        }
        if !switch.is_said {
            return Err(protocol("Switch, but this side has not sent Switch"));
        }
        self.arrive();
        self.outbox.controls.push_front(Control::Ping(GO));
        Ok(true)
    }

    /// Handles a frame on the queue pair of the upgrade: a probe, or the caller's first frame
    /// there. The frame's credits are ignored, because they may be older than those that came on
    /// TCP. Returns whether the link uses RDMA from now on.
    pub(crate) fn on_upgrade_frame(&mut self, bytes: &[u8]) -> Result<bool, Error> {
        let is_ready =
            self.upgrade.switch.as_ref().is_some_and(|it| it.peer_has_said && it.is_said);
        match Control::decode(bytes) {
            Ok(Control::Ping(GO)) if is_ready && !self.migration.is_caller => {
                self.arrive();
                self.outbox.controls.push_back(Control::Pong(GO));
                Ok(true)
            }
            Ok(Control::Ping(PROBE)) => Ok(false),
            _ => Err(protocol("a frame on the new queue pair before the switch")),
        }
    }

    fn arrive(&mut self) {
        self.upgrade.switch = None;
        self.upgrade.attempt = None;
        self.upgrade.peer_offer = None;
        // The peer may have reported on TCP that it has lost this path already. Then frames that
        // came over the path still count, but this side is going back to TCP.
        if self.migration.lost.is_none() {
            self.migration.transport = ActiveTransport::Rdma;
        }
        self.migration.may_resume = false;
        self.upgrade.step(Step::Arrived);
    }

    /// Handles an offer, an answer or a withdrawal. `offer` is the number of the offer.
    pub(super) fn on_negotiation(
        &mut self,
        kind: TcpFrameKind,
        offer: u32,
        address: Option<Address>,
    ) -> Result<(), Error> {
        if self.upgrade.steps.len() > STEPS_MAX {
            return Err(protocol("too many offers and withdrawals at once"));
        }
        let is_current = self.upgrade.offer() == Some(offer);
        match (kind, address) {
            // The frame belongs to an offer that this side has withdrawn or declined.
            (TcpFrameKind::Withdraw | TcpFrameKind::Answer, _) if !is_current => {}
            (TcpFrameKind::Withdraw, _) => {
                if !self.upgrade.forget_untaken(offer) {
                    self.upgrade.step(Step::Withdrawn);
                }
                self.upgrade.peer_offer = None;
            }
            (TcpFrameKind::Answer, Some(address)) if self.migration.is_caller => {
                self.upgrade.step(Step::Answered(address));
            }
            (TcpFrameKind::Offer, Some(address)) if !self.migration.is_caller => {
                if self.migration.transport != ActiveTransport::Tcp {
                    // The offer crossed with a migration of this side. The peer will make another.
                    tracing::debug!(
                        "declining an upgrade offer: the link uses {:?}",
                        self.transport()
                    );
                    let declined = path_frame(TcpFrameKind::Withdraw, 0);
                    self.migration.say(TcpFrame { op: offer, ..declined }, Body::Nothing);
                    return Ok(());
                }
                if self.upgrade.peer_offer.replace(offer).is_some() {
                    return Err(protocol("a second offer before the first was withdrawn"));
                }
                // `take_steps` drops obsolete steps of earlier offers.
                self.upgrade.steps.push((offer, Step::Offered(address)));
            }
            _ => return Err(protocol("an Offer or Answer from the wrong side")),
        }
        Ok(())
    }

    /// Begins a command for the upgrade. Results of earlier commands no longer count.
    pub(crate) fn begin_attempt(&mut self) -> u64 {
        self.upgrade.attempts += 1;
        self.upgrade.attempt = Some(self.upgrade.attempts);
        self.upgrade.attempts
    }

    /// Returns whether the link still waits for this command.
    pub(crate) fn is_at(&self, attempt: u64) -> bool {
        self.upgrade.attempt == Some(attempt) && self.failure().is_none()
    }

    pub(crate) fn is_upgrading(&self) -> bool {
        self.upgrade.switch.is_some() || self.upgrade.attempt.is_some()
    }

    /// Returns whether it is too late to withdraw from the upgrade.
    pub(crate) fn has_switched(&self) -> bool {
        self.upgrade.is_switching()
    }

    /// Gives up the upgrade.
    pub(crate) fn end_upgrade(&mut self) {
        self.upgrade.switch = None;
        self.upgrade.attempt = None;
    }

    /// Returns how long to wait before the next attempt: `first`, then twice as long each time, up
    /// to `most`.
    pub(crate) fn next_backoff(&mut self, first: Duration, most: Duration) -> Duration {
        let wait = self.upgrade.backoff.unwrap_or(first);
        self.upgrade.backoff = Some((wait * 2).min(most));
        wait
    }

    pub(crate) fn reset_backoff(&mut self) {
        self.upgrade.backoff = None;
    }

    /// Sets the time of the next attempt, replacing any earlier one.
    pub(crate) fn set_upgrade_due(&mut self, at: Instant) {
        self.upgrade.due = Some(at);
    }

    pub(crate) fn is_upgrade_due(&self, now: Instant) -> bool {
        self.upgrade.due.is_some_and(|at| at <= now)
    }

    /// Returns whether the link is on TCP and waits for the time of its next attempt.
    pub(crate) fn awaits_upgrade(&self) -> bool {
        self.upgrade.due.is_some()
            && self.migration.transport == ActiveTransport::Tcp
            && !self.is_upgrading()
            && self.is_up()
    }

    pub(crate) fn has_steps(&self) -> bool {
        !self.upgrade.steps.is_empty()
    }

    /// Returns the steps that are still relevant, without those of offers that were withdrawn
    /// since.
    pub(crate) fn take_steps(&mut self) -> Vec<Step> {
        let current = self.upgrade.switch.as_ref().map(|switch| switch.offer);
        let is_current = |(offer, step): &(u32, Step)| match step {
            Step::Arrived => true,
            Step::Offered(_) => self.upgrade.peer_offer == Some(*offer),
            // The step belongs to an offer for which there is no queue pair yet.
            Step::Withdrawn if current.is_none() => !self.migration.is_caller,
            Step::Withdrawn | Step::Answered(_) | Step::Failed | Step::Probed => {
                current == Some(*offer)
            }
        };
        let steps = std::mem::take(&mut self.upgrade.steps);
        steps.into_iter().filter(is_current).map(|(_, step)| step).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::latency::Latencies;
    use crate::link::core::{OwnLimits, PeerTimeouts, TcpOutput, Wakes};
    use crate::link::keepalive::Keepalive;
    use crate::wire::{Features, Hello, Program, Version};

    const ADDRESS: Address =
        Address { qp_num: 3, psn: 1, lid: 0, mtu: 3, reads_in: 1, reads_out: 1, gid: [1; 16] };

    /// The called side of a link on TCP.
    fn called() -> LinkCore {
        let hello = Hello {
            version: Version::CURRENT,
            features: Features::MOVE,
            segment_bytes: 256,
            window: 8,
            channels: 1,
            max_message_bytes: 2048,
            instance: 1,
            session: 1,
            mtu: 0,
            program: Program::UNKNOWN,
        };
        let limits = OwnLimits {
            hello,
            queue_messages: 8,
            queue_bytes: 8192,
            keepalive: Keepalive::new(Duration::from_secs(10), 1),
            timeouts: PeerTimeouts {
                answer: Duration::from_secs(5),
                silence: Duration::from_secs(5),
            },
            latencies: Arc::new(Latencies::default()),
            clock: quanta::Clock::new(),
        };
        let now = Instant::now();
        let mut core = LinkCore::new(limits, ActiveTransport::Tcp, now);
        core.open(hello, now);
        core
    }

    /// Passes a migration frame of the caller's first offer to the core.
    fn hear(core: &mut LinkCore, kind: TcpFrameKind, body: Option<&[u8]>) {
        hear_of(1, core, kind, body);
    }

    /// Passes a migration frame of this offer to the core.
    fn hear_of(offer: u32, core: &mut LinkCore, kind: TcpFrameKind, body: Option<&[u8]>) {
        let frame = TcpFrame { op: offer, ..path_frame(kind, 0) };
        assert!(!core.on_path_frame(&frame, body, &mut Wakes::new()).expect("an accepted frame"));
    }

    fn said(core: &mut LinkCore) -> Vec<TcpFrameKind> {
        std::iter::from_fn(|| match core.next_tcp_output(|_| true)? {
            TcpOutput::Frame { frame, .. } | TcpOutput::Operation { frame, .. } => Some(frame.kind),
        })
        .collect()
    }

    #[test]
    fn goes_back_with_a_caller_that_has_left_the_path_before_this_side_took_it() {
        let mut core = called();
        hear(&mut core, TcpFrameKind::Offer, Some(&ADDRESS.encode()));
        assert_eq!(core.take_steps(), [Step::Offered(ADDRESS)]);
        core.begin_upgrade();
        core.say(TcpFrameKind::Answer, Some(&ADDRESS));
        hear(&mut core, TcpFrameKind::Switch, None);
        assert_eq!(said(&mut core), [TcpFrameKind::Answer, TcpFrameKind::Switch]);

        // On TCP, this side learns that the caller has left RDMA. The caller's first frame on RDMA
        // is processed only after that.
        hear(&mut core, TcpFrameKind::Resume, None);
        let is_path =
            core.on_upgrade_frame(&Control::Ping(GO).encode()).expect("an accepted frame");
        assert!(is_path, "later frames on the queue pair must count");
        assert_eq!(core.transport(), ActiveTransport::Migrating);

        // This side also detects the loss by itself. The caller does not report its received frames
        // again.
        assert!(core.lose_for_peer() && core.is_to_be_detached());
        core.on_detached(Vec::new());
        core.resume(&mut Wakes::new());
        assert_eq!(core.transport(), ActiveTransport::Tcp);
        assert_eq!(said(&mut core).first(), Some(&TcpFrameKind::Resume));
    }

    #[test]
    fn offers_that_are_withdrawn_before_the_driver_sees_them_do_not_pile_up() {
        let mut core = called();
        for offer in 1..=100 {
            hear_of(offer, &mut core, TcpFrameKind::Offer, Some(&ADDRESS.encode()));
            hear_of(offer, &mut core, TcpFrameKind::Withdraw, None);
        }
        assert_eq!(core.take_steps(), []);
        hear_of(101, &mut core, TcpFrameKind::Offer, Some(&ADDRESS.encode()));
        assert_eq!(core.take_steps(), [Step::Offered(ADDRESS)]);
        hear_of(101, &mut core, TcpFrameKind::Withdraw, None);
        assert_eq!(core.take_steps(), [Step::Withdrawn]);
    }
}
