//! What may carry links, and why something else does.

use std::fmt;
use std::str::FromStr;

use ferrite_verbs::Absence;

use crate::error::{Error, ErrorKind};

/// Whether RDMA may carry links, must, or must not. The setting `rdma`.
///
/// ```
/// use ferrite_fabric::Rdma;
///
/// assert_eq!("require".parse(), Ok(Rdma::Require));
/// assert_eq!(Rdma::default().to_string(), "prefer");
/// assert!("maybe".parse::<Rdma>().is_err());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Rdma {
    /// RDMA where it works, else TCP, and never silently: see [`Fallback`].
    #[default]
    Prefer,
    /// RDMA or an error.
    Require,
    /// TCP.
    Forbid,
}

impl fmt::Display for Rdma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Prefer => "prefer",
            Self::Require => "require",
            Self::Forbid => "forbid",
        })
    }
}

impl FromStr for Rdma {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        match word {
            "prefer" => Ok(Self::Prefer),
            "require" => Ok(Self::Require),
            "forbid" => Ok(Self::Forbid),
            other => Err(format!("{other} is none of prefer, require, forbid")),
        }
    }
}

/// How peers meet on RDMA. The setting `connect`.
///
/// ```
/// use ferrite_fabric::Meet;
///
/// assert_eq!("tcp-first".parse(), Ok(Meet::TcpFirst));
/// assert_eq!(Meet::default().to_string(), "auto");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Meet {
    /// By RDMA CM.
    Cm,
    /// Over a TCP connection, which stays open: as the way back, and because its end is how a peer
    /// is heard to go. For networks where RDMA CM does not get through.
    TcpFirst,
    /// By RDMA CM; where RDMA is preferred and that does not work, over TCP, from where the link
    /// upgrades when it can.
    #[default]
    Auto,
}

impl fmt::Display for Meet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Cm => "cm",
            Self::TcpFirst => "tcp-first",
            Self::Auto => "auto",
        })
    }
}

impl FromStr for Meet {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        match word {
            "cm" => Ok(Self::Cm),
            "tcp-first" => Ok(Self::TcpFirst),
            "auto" => Ok(Self::Auto),
            other => Err(format!("{other} is none of cm, tcp-first, auto")),
        }
    }
}

/// Why a link that should be on RDMA is on TCP, in a word: for counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum FallbackCause {
    /// libibverbs or librdmacm is not there, or too old.
    NoLibrary,
    /// The kernel has no RDMA, or no connection manager.
    NoKernelSupport,
    /// There is no device, or none that reaches the peer.
    NoDevice,
    /// The port of the device is down.
    PortDown,
    /// The locked-memory limit, or the device, has nothing left.
    Resources,
    /// The peer said no.
    Refused,
    /// No way to the peer over RDMA, or no answer.
    Unreachable,
    /// The device was removed or failed.
    DeviceGone,
    /// The payload must be encrypted, and RDMA does not do that: it was not tried.
    Encryption,
    /// Something else: the error says what.
    Other,
}

impl FallbackCause {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::NoLibrary,
        Self::NoKernelSupport,
        Self::NoDevice,
        Self::PortDown,
        Self::Resources,
        Self::Refused,
        Self::Unreachable,
        Self::DeviceGone,
        Self::Encryption,
        Self::Other,
    ];

    pub(crate) fn index(self) -> usize {
        self as usize
    }

    pub(crate) fn of(error: &Error) -> Self {
        if error.is_clear_text() {
            return Self::Encryption;
        }
        match error.absence() {
            Some(Absence::NoLibrary { .. } | Absence::OldLibrary { .. }) => return Self::NoLibrary,
            Some(Absence::NoKernel { .. } | Absence::NoCm { .. }) => {
                return Self::NoKernelSupport;
            }
            Some(Absence::PortDown { .. }) => return Self::PortDown,
            Some(_) => return Self::NoDevice,
            None => {}
        }
        match error.kind() {
            ErrorKind::Absent => Self::NoDevice,
            ErrorKind::Resources | ErrorKind::Full => Self::Resources,
            ErrorKind::Refused => Self::Refused,
            ErrorKind::Unreachable
            | ErrorKind::Timeout
            | ErrorKind::LinkDown
            | ErrorKind::PeerStalled => Self::Unreachable,
            ErrorKind::DeviceGone => Self::DeviceGone,
            _ => Self::Other,
        }
    }
}

impl fmt::Display for FallbackCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::NoLibrary => "no-library",
            Self::NoKernelSupport => "no-kernel-support",
            Self::NoDevice => "no-device",
            Self::PortDown => "port-down",
            Self::Resources => "resources",
            Self::Refused => "refused",
            Self::Unreachable => "unreachable",
            Self::DeviceGone => "device-gone",
            Self::Encryption => "encryption",
            Self::Other => "other",
        })
    }
}

/// Why a link is on TCP although RDMA was preferred.
#[derive(Debug, Clone)]
pub struct Fallback {
    /// In a word.
    pub cause: FallbackCause,
    /// How RDMA failed: with likely causes and the remedy, where they are known.
    pub error: Error,
}

impl Fallback {
    pub(crate) fn new(error: Error) -> Self {
        Self { cause: FallbackCause::of(&error), error }
    }
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "over TCP instead of RDMA ({}): {}", self.cause, self.error)?;
        match self.error.remedy() {
            Some(remedy) => write!(f, "; to do: {remedy}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encryption_is_a_cause_with_a_remedy() {
        let fallback = Fallback::new(Error::clear_text("say so"));
        assert_eq!(fallback.cause, FallbackCause::Encryption);
        let told = "over TCP instead of RDMA (encryption): TLS is set, and RDMA payload is clear text; to do: say so";
        assert_eq!(fallback.to_string(), told);
    }

    #[test]
    fn every_cause_is_counted_in_its_place() {
        for (place, cause) in FallbackCause::ALL.into_iter().enumerate() {
            assert_eq!(cause.index(), place, "{cause}");
        }
    }
}
