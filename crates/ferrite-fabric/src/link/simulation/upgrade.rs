//! The upgrade of a side to RDMA, as `fabric/poller/connect/upgrading.rs` drives it.

use super::side::{Path, Side};
use super::wire::{Packet, Wires};
use crate::device::slots::Held;
use crate::link::core::{ActiveTransport, RequestContext, Step};
use crate::wire::{Address, TcpFrameKind};

impl Side {
    /// Runs the steps that the core requests. Returns whether the link now uses RDMA.
    pub(super) fn take_steps(&mut self, wires: &mut Wires, accepts: bool) -> bool {
        let mut is_upgraded = false;
        for step in self.core.take_steps() {
            if self.is_shown {
                eprintln!("{} takes {step:?}", self.describe());
            }
            match step {
                Step::Offered(_) if !accepts => self.withdraw(),
                Step::Offered(address) => {
                    self.next = Some(Path::new(address.qp_num.into()));
                    self.core.begin_attempt();
                    self.core.begin_upgrade();
                    self.core.say(TcpFrameKind::Answer, Some(&address));
                }
                Step::Answered(_) => {
                    let to = usize::from(self.core.is_caller());
                    if let Some(next) = &mut self.next {
                        let (imm, bytes) = self.core.probe();
                        let packet = Packet::Frame { imm, bytes: bytes.to_vec() };
                        next.post(wires, to, packet, Held::Nothing, RequestContext::default());
                    }
                }
                Step::Probed => self.core.switch(),
                Step::Failed => self.withdraw(),
                Step::Withdrawn => {
                    self.next = None;
                    self.core.end_upgrade();
                }
                Step::Arrived => {
                    self.core.reset_backoff();
                    is_upgraded = true;
                }
            }
        }
        is_upgraded
    }

    /// Gives up the upgrade.
    pub(super) fn withdraw(&mut self) {
        if self.is_shown {
            eprintln!("{} withdraws", self.describe());
        }
        self.core.say(TcpFrameKind::Withdraw, None);
        self.core.end_upgrade();
        self.next = None;
    }

    /// Offers an upgrade to RDMA.
    pub(super) fn offer(&mut self, wires: &mut Wires) {
        let may_offer = self.core.is_up()
            && self.core.transport() == ActiveTransport::Tcp
            && !self.core.is_upgrading();
        if may_offer {
            let wire = wires.lay();
            self.core.begin_attempt();
            self.next = Some(Path::new(wire));
            self.core.begin_upgrade();
            let address = Address {
                qp_num: wire as u32,
                psn: 1,
                lid: 0,
                mtu: 3,
                reads_in: 1,
                reads_out: 1,
                gid: [1; 16],
            };
            self.core.say(TcpFrameKind::Offer, Some(&address));
        }
    }
}
