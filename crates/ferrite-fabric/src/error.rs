//! The errors of the fabric, with causes and remedies.
//!
//! A link fails once. Its first failure is kept, and every operation in progress gets a clone of
//! it. The flush errors that follow are never shown.

mod io;

use std::fmt;
use std::sync::{Arc, OnceLock};

use ferrite_verbs::{Absence, Rejection, Status};

use crate::diagnose::Cause;
use crate::mem::PoolError;
use crate::wire::Refusal;

/// The category of a failure, which decides how to react.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// RDMA is unavailable. Use another transport. See [`Error::absence`].
    Absent,
    /// A resource of the host or the device is exhausted, or this process may not use it. Free some
    /// of the resource, raise its limit, or grant the permission.
    Resources,
    /// A queue is full, or the memory pool has no free buffer (back-pressure). Continue when there
    /// is room again.
    Full,
    /// The peer refused. See [`Error::refusal`].
    Refused,
    /// There is no route to the peer, or it does not answer. Try another address, or try later.
    /// Also: this host does not have the local address, or no RDMA device that may be used has it.
    Unreachable,
    /// The deadline passed.
    Timeout,
    /// The link failed. Reconnect, perhaps to another host.
    LinkDown,
    /// The peer has not answered a keepalive in time. Its process hangs, or the path is broken.
    /// Reconnect, perhaps to another host.
    PeerStalled,
    /// Either side closed the link.
    Closed,
    /// The peer violated the protocol. The link is down, and retrying is useless.
    Protocol,
    /// The peer has revoked the grant, or the grant does not cover this operation.
    Denied,
    /// The size exceeds what the peer or the configuration allows.
    TooLarge,
    /// The local device was removed or failed. Reconnect over another device, or over this one when
    /// it is back.
    DeviceGone,
    /// The call or a setting was invalid, or the address is in use. Correct it, because retrying is
    /// useless.
    Misuse,
    /// Any other error that the system reported.
    System,
}

/// A failure. Clones share it.
///
/// ```
/// # use ferrite_fabric::{Error, ErrorKind};
/// # fn show(error: &Error) {
/// match error.kind() {
///     ErrorKind::Absent | ErrorKind::Unreachable => println!("use TCP: {error}"),
///     ErrorKind::LinkDown | ErrorKind::PeerStalled => println!("connect again: {error}"),
///     _ => println!("{error}"),
/// }
/// for cause in error.causes() {
///     println!("  {}: {}", cause.what, cause.evidence);
/// }
/// # }
/// ```
#[derive(Clone)]
pub struct Error(Arc<Inner>);

struct Inner {
    kind: ErrorKind,
    what: String,
    status: Option<Status>,
    refusal: Option<Refusal>,
    /// Set once, possibly after the error was returned to the caller.
    causes: OnceLock<Vec<Cause>>,
    source: Option<Source>,
}

enum Source {
    Verbs(ferrite_verbs::Error),
    Pool(PoolError),
    /// RDMA was not tried because the payload would be unencrypted. The text says how to allow RDMA
    /// nevertheless.
    ClearText(&'static str),
    /// The address is a loopback address, which RDMA cannot use.
    Loopback,
    /// A device uses the host's TCP ports for RDMA, and a TCP listener already has this port.
    TcpOwnsPort,
    /// The caller has named a device that this host does not have.
    UnknownDevice,
    /// The address belongs to a device that the fabric does not use.
    OtherDevice,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, what: impl Into<String>) -> Self {
        Self(Arc::new(Inner {
            kind,
            what: what.into(),
            status: None,
            refusal: None,
            causes: OnceLock::new(),
            source: None,
        }))
    }

    /// Returns the error for a link's work request that ended with `status`.
    pub(crate) fn completion(kind: ErrorKind, what: String, status: Status) -> Self {
        let causes = OnceLock::new();
        Self(Arc::new(Inner {
            kind,
            what,
            status: Some(status),
            refusal: None,
            causes,
            source: None,
        }))
    }

    /// Returns the error for a request that a device refused to accept. The link always loses this
    /// path, because later requests would overtake the refused one.
    pub(crate) fn refused_post(error: ferrite_verbs::Error) -> Self {
        let kind = match error.kind() {
            ferrite_verbs::ErrorKind::DeviceGone => ErrorKind::DeviceGone,
            _ => ErrorKind::LinkDown,
        };
        Self(Arc::new(Inner {
            kind,
            what: format!("the device refused a request: {error}"),
            status: None,
            refusal: None,
            causes: OnceLock::new(),
            source: Some(Source::Verbs(error)),
        }))
    }

    /// Returns the error for a message for which the pool has no memory. A pool that cannot grow at
    /// the moment is also back-pressure ([`ErrorKind::Full`]), because buffers become free again.
    pub(crate) fn no_memory(error: PoolError) -> Self {
        let mut error = Self::from(error);
        if error.kind() == ErrorKind::Resources
            && let Some(inner) = Arc::get_mut(&mut error.0)
        {
            inner.kind = ErrorKind::Full;
        }
        error
    }

    /// Returns the error as the failure of a link. `Full` would tell the caller to wait, which is
    /// useless when a link is down, so it becomes `LinkDown`.
    pub(crate) fn into_failure(self) -> Self {
        match self.kind() {
            ErrorKind::Full => Self::new(ErrorKind::LinkDown, self.to_string()),
            _ => self,
        }
    }

    pub(crate) fn refused(peer: &str, refusal: Refusal) -> Self {
        let mut what = format!("{peer} refused: {}", refusal.code);
        if !refusal.text.is_empty() {
            what = format!("{what} ({})", refusal.text);
        }
        Self(Arc::new(Inner {
            kind: ErrorKind::Refused,
            what,
            status: None,
            refusal: Some(refusal),
            causes: OnceLock::new(),
            source: None,
        }))
    }

    /// Returns the error for a server that has accepted a connection over RDMA and does not serve
    /// it. `why` says what has happened. Pass the error to
    /// [`Fabric::fell_back_to_tcp`](crate::Fabric::fell_back_to_tcp).
    #[must_use]
    pub fn not_served(why: impl Into<String>) -> Self {
        Self::new(ErrorKind::LinkDown, why)
    }

    /// Returns the error for RDMA that was not tried because the payload must be encrypted.
    /// `remedy` says how the caller can allow RDMA nevertheless. Pass the error to
    /// [`Fabric::fell_back_to_tcp`](crate::Fabric::fell_back_to_tcp).
    #[must_use]
    pub fn clear_text(remedy: &'static str) -> Self {
        Self(Arc::new(Inner {
            kind: ErrorKind::Absent,
            what: "TLS is configured, and RDMA payload is clear text".into(),
            status: None,
            refusal: None,
            causes: OnceLock::new(),
            source: Some(Source::ClearText(remedy)),
        }))
    }

    /// Returns the error for listening for RDMA on a loopback address.
    pub(crate) fn loopback(local: std::net::SocketAddr) -> Self {
        Self(Arc::new(Inner {
            kind: ErrorKind::Unreachable,
            what: format!("cannot listen for RDMA on {}: it is a loopback address", local.ip()),
            status: None,
            refusal: None,
            causes: OnceLock::new(),
            source: Some(Source::Loopback),
        }))
    }

    /// Returns the error for a device, such as iWARP, that needs a TCP port of the host to listen
    /// for RDMA. Our own TCP listener already uses that port.
    pub(crate) fn tcp_owns_port(local: std::net::SocketAddr) -> Self {
        Self(Arc::new(Inner {
            kind: ErrorKind::Absent,
            what: format!(
                "an RDMA device cannot listen on {local}: it uses the host's TCP ports, and \
                 Ferrite already listens on this port over TCP"
            ),
            status: None,
            refusal: None,
            causes: OnceLock::new(),
            source: Some(Source::TcpOwnsPort),
        }))
    }

    /// Returns the error for a device that the caller has named but that this host does not have.
    pub(crate) fn unknown_device(name: &str, existing: &[String]) -> Self {
        let what = format!("no RDMA device {name}; devices: {}", existing.join(", "));
        Self::with_source(ErrorKind::Absent, what, Source::UnknownDevice)
    }

    /// Returns the error for listening on the address of a device that the fabric does not use.
    pub(crate) fn other_device(ip: std::net::IpAddr, device: &str, used: &[&str]) -> Self {
        let what = format!(
            "{ip} is an address of device {device}, but only {} may be used",
            used.join(", ")
        );
        Self::with_source(ErrorKind::Unreachable, what, Source::OtherDevice)
    }

    fn with_source(kind: ErrorKind, what: String, source: Source) -> Self {
        Self(Arc::new(Inner {
            kind,
            what,
            status: None,
            refusal: None,
            causes: OnceLock::new(),
            source: Some(source),
        }))
    }

    /// Appends to the text of the error. Has no effect if the error has clones.
    pub(crate) fn append(mut self, text: &str) -> Self {
        if let Some(inner) = Arc::get_mut(&mut self.0) {
            inner.what += text;
        }
        self
    }

    /// Returns whether the caller has named a device that this host does not have.
    #[must_use]
    pub fn is_unknown_device(&self) -> bool {
        matches!(self.0.source, Some(Source::UnknownDevice))
    }

    /// Returns whether the address belongs to a device that the fabric does not use.
    #[must_use]
    pub fn is_other_device(&self) -> bool {
        matches!(self.0.source, Some(Source::OtherDevice))
    }

    /// Returns whether this process cannot use RDMA on this host. Either RDMA is absent, or the
    /// user may not use the devices or pin the memory.
    #[must_use]
    pub fn is_unavailable(&self) -> bool {
        self.kind() == ErrorKind::Absent
            || self.verbs().is_some_and(|error| error.kind().is_unavailable())
    }

    /// Returns whether the locked-memory limit is the cause.
    pub(crate) fn is_memlock(&self) -> bool {
        self.verbs().is_some_and(|error| error.memlock().is_some())
    }

    /// Returns the error of the device or the connection manager behind this one.
    fn verbs(&self) -> Option<&ferrite_verbs::Error> {
        match &self.0.source {
            Some(Source::Verbs(error) | Source::Pool(PoolError::Register(error))) => Some(error),
            _ => None,
        }
    }

    pub(crate) fn is_clear_text(&self) -> bool {
        matches!(self.0.source, Some(Source::ClearText(_)))
    }

    /// Adds the causes that were found.
    pub(crate) fn with_causes(self, causes: Vec<Cause>) -> Self {
        self.set_causes(causes);
        self
    }

    /// Sets the causes that were found, for all clones. Only the first call has an effect.
    pub(crate) fn set_causes(&self, causes: Vec<Cause>) {
        let _ = self.0.causes.set(causes);
    }

    /// Returns the category, which decides how to react.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns the status of the work request that failed first, if that failure ended the link or
    /// its RDMA path.
    #[must_use]
    pub fn status(&self) -> Option<Status> {
        self.0.status
    }

    /// Returns the peer's refusal, if the peer speaks our protocol and refused.
    #[must_use]
    pub fn refusal(&self) -> Option<&Refusal> {
        self.0.refusal.as_ref()
    }

    /// Returns the rejection of the peer's connection manager, if there was one.
    #[must_use]
    pub fn rejection(&self) -> Option<&Rejection> {
        match &self.0.source {
            Some(Source::Verbs(error)) => error.rejection(),
            _ => None,
        }
    }

    /// Returns why RDMA is absent, if its absence is the error.
    #[must_use]
    pub fn absence(&self) -> Option<&Absence> {
        match &self.0.source {
            Some(Source::Verbs(error)) => error.absence(),
            _ => None,
        }
    }

    /// Returns likely causes, the likeliest first, from measurements at the time of the failure. A
    /// fabric with [command threads](crate::Builder::command_threads) measures on these threads, so
    /// the causes become available shortly after the error.
    #[must_use]
    pub fn causes(&self) -> &[Cause] {
        self.0.causes.get().map_or(&[], Vec::as_slice)
    }

    /// Returns the error with its remedy, for a log line.
    pub(crate) fn with_remedy(&self) -> String {
        match self.remedy() {
            Some(remedy) => format!("{self}; to do: {remedy}"),
            None => self.to_string(),
        }
    }

    /// Returns how to fix the error, if that is known.
    #[must_use]
    pub fn remedy(&self) -> Option<String> {
        match &self.0.source {
            Some(Source::Verbs(error)) => error.remedy(),
            Some(Source::Pool(error)) => error.remedy(),
            Some(Source::ClearText(remedy)) => Some((*remedy).into()),
            Some(Source::Loopback) => Some("bind to an address of an RDMA device".into()),
            Some(Source::TcpOwnsPort) => Some(
                "bind to an address of another RDMA device, or remove the iWARP device \
                 (`rdma link` lists it; siw is one)"
                    .into(),
            ),
            Some(Source::UnknownDevice) => {
                Some("name one of these devices (rdma-device), or none to use all".into())
            }
            Some(Source::OtherDevice) => {
                Some("name that device too (rdma-device), or listen on another address".into())
            }
            None => self.causes().first().and_then(|cause| cause.remedy.clone()),
        }
    }
}

impl From<ferrite_verbs::Error> for Error {
    fn from(error: ferrite_verbs::Error) -> Self {
        use ferrite_verbs::ErrorKind as Verbs;
        let kind = match error.kind() {
            Verbs::Absent => ErrorKind::Absent,
            Verbs::Memlock
            | Verbs::OutOfMemory
            | Verbs::CgroupLimit
            | Verbs::FileDescriptors
            | Verbs::DeviceLimit
            | Verbs::Permission => ErrorKind::Resources,
            Verbs::QueueFull => ErrorKind::Full,
            Verbs::DeviceGone => ErrorKind::DeviceGone,
            Verbs::NoRoute | Verbs::Unreachable => ErrorKind::Unreachable,
            Verbs::Rejected => ErrorKind::Refused,
            Verbs::Disconnected => ErrorKind::LinkDown,
            Verbs::Timeout => ErrorKind::Timeout,
            Verbs::Misuse | Verbs::AddressInUse => ErrorKind::Misuse,
            _ => ErrorKind::System,
        };
        Self::with_source(kind, error.to_string(), Source::Verbs(error))
    }
}

impl From<PoolError> for Error {
    fn from(error: PoolError) -> Self {
        use crate::mem::ErrorKind as Pool;
        let kind = match error.kind() {
            Pool::Exhausted => ErrorKind::Full,
            Pool::Refused => ErrorKind::Resources,
            Pool::DeviceGone => ErrorKind::DeviceGone,
            Pool::Misuse => ErrorKind::Misuse,
        };
        Self::with_source(kind, error.to_string(), Source::Pool(error))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.what)?;
        match self.causes().first() {
            Some(cause) => write!(f, "; {}: {} ({})", cause.likelihood, cause.what, cause.evidence),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.0.kind)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.0.source {
            Some(Source::Verbs(error)) => Some(error),
            Some(Source::Pool(error)) => Some(error),
            _ => None,
        }
    }
}
