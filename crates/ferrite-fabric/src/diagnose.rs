//! Why a link failed: the likely causes, ranked by what was measured.
//!
//! A completion says "transport retry exceeded" and nothing more. But the host knows a lot beyond
//! that: how the own port is, what its counters did meanwhile, whether the route leads there,
//! whether the next host answers ARP. [`causes`] looks at all of it and says what it means, with
//! the evidence and a remedy.
//!
//! ```text
//! Baseline::take ── link is well ──┐
//!                                  ▼
//! device, sysfs ── Snapshot ───► Facts ── rank ──► Vec<Cause>
//! procfs ───────── Surroundings ───▲
//! ```
//!
//! | file | what |
//! |---|---|
//! | `snapshot.rs` `counters.rs` | a port at one moment |
//! | `surroundings.rs` | routes, neighbours, the addresses of this host's other devices |
//! | `baseline.rs` | [`Baseline`]: snapshots, shared by all links of a port |
//! | `facts.rs` | what was measured about one link: plain data |
//! | `rank.rs` `own_side.rs` | from facts to causes: no input or output |
//!
//! It is called on threads that must not stop. Files of the kernel are read and the device is
//! queried; nothing is sent and nothing is waited for. Links that fail together share what was
//! seen.

mod baseline;
mod counters;
mod facts;
mod files;
mod own_side;
mod rank;
mod snapshot;
mod surroundings;
#[cfg(test)]
mod tests;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use ferrite_verbs::{Context, Status};

pub use baseline::Baseline;
use facts::Facts;

/// A link that failed.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// The device it used.
    pub context: &'a Context,
    /// And the port, from 1.
    pub port: u8,
    /// Its own address on that port (not that of a TCP connection beside it).
    pub local: Option<SocketAddr>,
    /// The peer's address.
    pub peer: Option<SocketAddr>,
    /// The port when the link was last known to be well: without it, counters tell nothing.
    pub baseline: Option<&'a Baseline>,
    /// How the failure showed itself.
    pub failure: Failure,
}

/// How a failure showed itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Failure {
    /// The first work completion of the link that was not a success.
    Completion(Status),
    /// A connect that nobody answered, not even with a refusal.
    ConnectTimeout,
    /// The peer's device acknowledges frames, but its process does not answer them.
    NoKeepalive,
    /// Neither does, and the own device has not given up yet.
    NoAcknowledgement,
}

/// How sure a [`Cause`] is. The greater, the surer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Likelihood {
    /// Nothing speaks against it.
    Possible,
    /// A measurement points at it, or failures of this kind usually mean it.
    Likely,
    /// It was measured, and explains the failure.
    Certain,
}

impl fmt::Display for Likelihood {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Possible => "possible",
            Self::Likely => "likely",
            Self::Certain => "certain",
        })
    }
}

/// What may have made a link fail. Shown as one line.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cause {
    /// How sure it is.
    pub likelihood: Likelihood,
    /// The cause, in a clause.
    pub what: String,
    /// What was measured.
    pub evidence: String,
    /// What to do about it, or where to look next.
    pub remedy: Option<String>,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { likelihood, what, evidence, remedy } = self;
        write!(f, "{likelihood}: {what} ({evidence})")?;
        match remedy {
            Some(remedy) => write!(f, "; to do: {remedy}"),
            None => Ok(()),
        }
    }
}

/// The likely causes of a failure, the best first, five at most. Where one is certain, only such
/// are returned.
///
/// It reads about fifty small files of the kernel and asks the device a few times: well under a
/// millisecond on a host, some milliseconds in the lab. What was seen serves all links that fail
/// within the next 20 ms.
///
/// ```
/// use ferrite_fabric::diagnose::{Baseline, Failure, Likelihood, Subject, causes};
/// use ferrite_verbs::Status;
/// # use ferrite_verbs::fake::{DeviceSpec, World};
/// # let world = World::new();
/// # world.add_device(DeviceSpec::new("fake1", "127.0.0.1".parse()?));
/// # let context = world.verbs().device("fake1")?.open()?;
/// let baseline = Baseline::take(&context, 1); // the link is up
/// # world.device_down("fake1");
/// // … and later a work request fails:
/// let causes = causes(&Subject {
///     context: &context,
///     port: 1,
///     local: Some("127.0.0.1:0".parse()?),
///     peer: Some("10.0.0.2:7471".parse()?),
///     baseline: Some(&baseline),
///     failure: Failure::Completion(Status::RETRY_EXCEEDED),
/// });
/// assert_eq!(causes[0].likelihood, Likelihood::Certain);
/// assert_eq!(causes[0].what, "the own port is not active");
/// assert_eq!(causes[0].evidence, "port 1 of fake1 is down");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use]
pub fn causes(subject: &Subject<'_>) -> Vec<Cause> {
    // An IPv4 address may come in IPv6's clothes.
    let ip = |address: Option<SocketAddr>| address.map(|address| address.ip().to_canonical());
    let addresses = (ip(subject.local), ip(subject.peer));
    let facts = if rank::wants_facts(subject.failure) {
        let now = baseline::current(subject.context, subject.port);
        let then = subject.baseline.map(|baseline| Arc::clone(&baseline.0));
        Facts::gather(now, then, &baseline::surroundings(), addresses)
    } else {
        Facts::unmeasured(addresses.0, addresses.1)
    };
    rank::rank(subject.failure, &facts)
}
