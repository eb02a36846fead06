//! The choice of the transport for links, and the reason why a link uses TCP instead of RDMA.

use std::fmt;
use std::str::FromStr;

use ferrite_verbs::Absence;

use crate::error::{Error, ErrorKind};

/// Whether links use RDMA: preferred, required or forbidden. This is the setting `rdma`.
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
    /// RDMA if it works, otherwise TCP. A fallback to TCP is counted and logged: see [`Fallback`].
    /// The exception is a connect that must encrypt, which uses TCP from the start.
    #[default]
    Prefer,
    /// RDMA, or an error.
    Require,
    /// Only TCP.
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
            other => Err(format!("invalid value {other}: expected prefer, require or forbid")),
        }
    }
}

/// The transports that a connection may use: see [`Rdma::attempts`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attempts {
    /// Only RDMA.
    Rdma,
    /// RDMA, and TCP if RDMA fails.
    RdmaThenTcp,
    /// Only TCP.
    Tcp,
}

impl Rdma {
    /// Decides which transports a connection may use, for links and for sessions. With
    /// `must_encrypt`, clear text is forbidden, which excludes RDMA.
    ///
    /// ```
    /// use ferrite_fabric::{Attempts, Rdma};
    ///
    /// assert_eq!(Rdma::Prefer.attempts(false)?, Attempts::RdmaThenTcp);
    /// assert_eq!(Rdma::Prefer.attempts(true)?, Attempts::Tcp);
    /// assert!(Rdma::Require.attempts(true).is_err());
    /// # Ok::<(), ferrite_fabric::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] if RDMA and encryption are both required.
    pub fn attempts(self, must_encrypt: bool) -> Result<Attempts, Error> {
        match (self, must_encrypt) {
            (Self::Require, true) => {
                let what = "encryption and RDMA are both required, but RDMA payload is clear text";
                Err(Error::new(ErrorKind::Misuse, what))
            }
            (Self::Require, false) => Ok(Attempts::Rdma),
            (Self::Prefer, false) => Ok(Attempts::RdmaThenTcp),
            (Self::Prefer, true) | (Self::Forbid, _) => Ok(Attempts::Tcp),
        }
    }
}

/// How RDMA connections are established. This is the setting `connect`.
///
/// ```
/// use ferrite_fabric::ConnectMode;
///
/// assert_eq!("tcp-first".parse(), Ok(ConnectMode::TcpFirst));
/// assert_eq!(ConnectMode::default().to_string(), "auto");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ConnectMode {
    /// With RDMA CM. At present the same as [`ConnectMode::Auto`].
    Cm,
    /// Over a TCP connection, for networks that block RDMA CM. The TCP connection stays open. It is
    /// the fallback if RDMA is preferred, and its end reveals that the peer is gone.
    TcpFirst,
    /// With RDMA CM. If RDMA CM fails and RDMA is preferred, the link starts on TCP, and is
    /// upgraded to RDMA when possible.
    #[default]
    Auto,
}

impl fmt::Display for ConnectMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Cm => "cm",
            Self::TcpFirst => "tcp-first",
            Self::Auto => "auto",
        })
    }
}

impl FromStr for ConnectMode {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        match word {
            "cm" => Ok(Self::Cm),
            "tcp-first" => Ok(Self::TcpFirst),
            "auto" => Ok(Self::Auto),
            other => Err(format!("invalid value {other}: expected cm, tcp-first or auto")),
        }
    }
}

/// Why a link uses TCP instead of RDMA, as one word for counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum FallbackCause {
    /// libibverbs or librdmacm is missing or too old.
    NoLibrary,
    /// The kernel has no RDMA support, or no connection manager.
    NoKernelSupport,
    /// There is no device, or none that reaches the peer.
    NoDevice,
    /// The port of the device is down.
    PortDown,
    /// A limit of this host, the device or the fabric is reached, for example the locked-memory
    /// limit, or this process may not use the device.
    Resources,
    /// The peer refused.
    Refused,
    /// There is no route to the peer over RDMA, it does not answer, or the RDMA path failed.
    Unreachable,
    /// The device was removed or failed.
    DeviceGone,
    /// RDMA was not tried, because the payload must be encrypted.
    Encryption,
    /// Another reason: see the error.
    Other,
}

impl FallbackCause {
    /// All causes.
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

/// Why a link uses TCP although RDMA was preferred.
#[derive(Debug, Clone)]
pub struct Fallback {
    /// The cause as one word.
    pub cause: FallbackCause,
    /// The error of RDMA, with likely causes and the remedy if they are known.
    pub error: Error,
}

impl Fallback {
    pub(crate) fn new(error: Error) -> Self {
        Self { cause: FallbackCause::of(&error), error }
    }
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "uses TCP instead of RDMA ({}): {}", self.cause, self.error)?;
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
        let expected = "uses TCP instead of RDMA (encryption): TLS is configured, and RDMA payload \
                        is clear text; to do: say so";
        assert_eq!(fallback.to_string(), expected);
    }

    #[test]
    fn index_is_the_position_in_all() {
        for (index, cause) in FallbackCause::ALL.into_iter().enumerate() {
            assert_eq!(cause.index(), index, "{cause}");
        }
    }
}
