//! The record of an operation, from its start to its completion.

use super::OwnLimits;
use crate::device::slots::Held;
use crate::error::Error;
use crate::link::kind::Kind;
use crate::link::tickets::{Outcome, Ticket};

/// Comes back with the completion of a request.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RequestContext {
    pub(crate) ticket: Option<Ticket>,
    pub(crate) kind: Kind,
    pub(crate) bytes: u32,
    /// The number of frames sent so far, including this one if it is a frame.
    pub(crate) frame: u64,
    /// For one-sided operations: the grant, the offset in it, and the immediate data for the peer.
    pub(crate) grant: u64,
    pub(crate) offset: u64,
    pub(crate) imm: u32,
    /// When the operation began, if someone waits for it; otherwise 0.
    pub(crate) begun: u64,
}

impl RequestContext {
    /// Returns whether it is a one-sided operation on this grant. The kind is checked too, because
    /// sends have the grant number 0, which is also a valid grant.
    pub(crate) fn uses(&self, grant: u64) -> bool {
        self.grant == grant && self.kind.is_one_sided()
    }

    /// Records how long it took, if somebody waited for it.
    pub(crate) fn record_latency(&self, limits: &OwnLimits) {
        if self.begun != 0 {
            let histogram = match self.kind {
                Kind::Read => &limits.latencies.read,
                Kind::Write | Kind::Notice => &limits.latencies.write,
                _ => &limits.latencies.send,
            };
            histogram.record(limits.clock.delta_as_nanos(self.begun, limits.clock.raw()));
        }
    }
}

/// Creates the result of an operation. A read returns its buffer.
pub(crate) fn outcome(result: Result<(), Error>, held: Held) -> Outcome {
    let buf = match held {
        Held::Unique(buf) => Some(buf),
        Held::Nothing | Held::Copied(_) | Held::Passing(_) | Held::Shared(_) | Held::Binding(_) => {
            None
        }
    };
    Outcome { result, buf }
}
