//! The record of an operation, from its start to its completion.

use super::{LinkCore, OwnLimits};
use crate::device::slots::Held;
use crate::error::Error;
use crate::link::kind::Kind;
use crate::link::tickets::{Outcome, Ticket};

/// Over RDMA, the latency of about one request in this many is recorded even if nobody waits for
/// the request. Reading the clock for every request would cost more than filling in the rest of its
/// [`RequestContext`].
const SAMPLED: u32 = 16;

/// The data of a request that the link needs when the request completes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RequestContext {
    pub(crate) ticket: Option<Ticket>,
    pub(crate) kind: Kind,
    pub(crate) bytes: u32,
    /// The number of frames sent so far, including this request if it is a frame.
    pub(crate) frame: u64,
    /// For one-sided operations: the grant, the offset in it, and the immediate data for the peer.
    pub(crate) grant: u64,
    pub(crate) offset: u64,
    pub(crate) imm: u32,
    /// When the operation began, if its latency is recorded; otherwise 0.
    pub(crate) begun: u64,
}

impl RequestContext {
    /// Returns whether the request is a one-sided operation on this grant. The kind is checked too,
    /// because other requests have the grant number 0. This fabric never assigns that number, but a
    /// peer may use it.
    pub(crate) fn uses(&self, grant: u64) -> bool {
        self.grant == grant && self.kind.is_one_sided()
    }

    /// Records how long the request took, if its start is known.
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

/// Chooses requests whose latency is recorded although nobody waits for them.
pub(super) struct Sampler {
    /// The number of requests since the last one that was chosen.
    since: u32,
}

impl Default for Sampler {
    /// Chooses the first signaled request, so that short-lived links are measured, too.
    fn default() -> Self {
        Self { since: SAMPLED }
    }
}

impl LinkCore {
    /// Notes the start of a request over RDMA, if the sampler chooses it. The sampler chooses only
    /// signaled requests, because only these have a completion of their own.
    pub(crate) fn sample(&mut self, signaled: bool, request: &mut RequestContext) {
        self.sampler.since = self.sampler.since.saturating_add(1);
        if signaled && self.sampler.since > SAMPLED && request.ticket.is_none() {
            self.sampler.since = 0;
            request.begun = self.limits.clock.raw();
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
