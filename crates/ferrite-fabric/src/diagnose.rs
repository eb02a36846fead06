//! Finds the likely causes of a link's failure, ranked by measurements.
//!
//! A completion says only "transport retry exceeded". But the host knows much more: the state of
//! its own port, how the port's counters changed, whether there is a route to the peer, and whether
//! the next host answers ARP. [`causes`] evaluates all of these facts. It returns the likely
//! causes, each with evidence and a remedy.
//!
//! ```text
//! Baseline::take ── healthy link ──┐
//!                                  ▼
//! device, sysfs ── Snapshot ───► Facts ── rank ──► Vec<Cause>
//! procfs ───────── Surroundings ───▲
//! ```
//!
//! | file | what it is |
//! |---|---|
//! | `snapshot.rs` `counters.rs` | the state of a port at one moment |
//! | `surroundings.rs` | routes, neighbours, addresses of this host's RDMA devices |
//! | `baseline.rs` | [`Baseline`]: snapshots, shared by all links of a port |
//! | `facts.rs` | the measurements for one link, as plain data |
//! | `rank.rs` `own_side.rs` | from facts to causes, without I/O |
//!
//! A diagnosis reads kernel files and queries the device. It sends no packets and does not wait for
//! other hosts. Links that fail together share the measurements.

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
    /// The device that the link used.
    pub context: &'a Context,
    /// The port of the device, from 1.
    pub port: u8,
    /// The link's local address on that port (not the address of an additional TCP connection).
    pub local: Option<SocketAddr>,
    /// The peer's address.
    pub peer: Option<SocketAddr>,
    /// The state of the port when the link was last known to be healthy. Without this baseline,
    /// counters are meaningless.
    pub baseline: Option<&'a Baseline>,
    /// How the failure was noticed.
    pub failure: Failure,
}

/// How a failure was noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Failure {
    /// The first work completion of the link that was not a success.
    Completion(Status),
    /// A connect without any answer, not even a refusal.
    ConnectTimeout,
    /// The peer's device acknowledges frames, but its process does not answer.
    NoKeepalive,
    /// The peer's process has not answered a keepalive, and its device has not acknowledged it. The
    /// local device is still retrying.
    NoAcknowledgement,
}

/// How certain a [`Cause`] is, in ascending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Likelihood {
    /// Nothing contradicts the cause.
    Possible,
    /// A measurement indicates the cause, or failures of this kind usually mean it.
    Likely,
    /// The cause was measured, and explains the failure.
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

/// A possible cause of a link's failure. Displayed as one line.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cause {
    /// How certain the cause is.
    pub likelihood: Likelihood,
    /// The cause, as a clause.
    pub what: String,
    /// The measurement that indicates the cause.
    pub evidence: String,
    /// How to fix the cause, or what to check next.
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

/// Returns at most five likely causes of a failure, the best first. If one of them is certain,
/// returns only certain causes.
///
/// Reads about fifty small kernel files and queries the device a few times. This takes well under a
/// millisecond on a host, and some milliseconds in the lab. The measurements are reused for all
/// links that fail within the next 20 ms, or within ten times the duration of the measurements if
/// that is longer.
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
/// assert_eq!(causes[0].what, "the local port is not active");
/// assert_eq!(causes[0].evidence, "port 1 of fake1 is down");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use]
pub fn causes(subject: &Subject<'_>) -> Vec<Cause> {
    // An IPv4 address may be written as an IPv6 address.
    let ip = |address: Option<SocketAddr>| address.map(|address| address.ip().to_canonical());
    let addresses = (ip(subject.local), ip(subject.peer));
    let facts = if rank::needs_facts(subject.failure) {
        let now = baseline::current(subject.context, subject.port);
        let then = subject.baseline.map(|baseline| Arc::clone(&baseline.0));
        Facts::gather(now, then, &baseline::surroundings(), addresses)
    } else {
        Facts::unmeasured(addresses.0, addresses.1)
    };
    rank::rank(subject.failure, &facts)
}

/// Creates a cause.
fn cause(
    likelihood: Likelihood,
    what: impl Into<String>,
    evidence: impl Into<String>,
    remedy: Option<String>,
) -> Cause {
    Cause { likelihood, what: what.into(), evidence: evidence.into(), remedy }
}
