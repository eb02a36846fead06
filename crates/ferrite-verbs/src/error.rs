//! Errors of this crate, with causes and remedies that an operator can act on.
//!
//! There are two types. [`Absence`] says why RDMA is unavailable on this host, so that a caller can
//! fall back to TCP. [`Error`] says that a call failed. Its [`ErrorKind`] tells the caller whether
//! to retry, reconnect, fall back or stop. Its message names the call, its arguments and the cause.
//! For an absence or a denied file, the message names only the cause. [`Error::remedy`] returns the
//! remedy, where one is known.

use std::fmt;
use std::io;
use std::path::PathBuf;

use rustix::io::Errno;

mod memlock;
mod rejection;

pub use memlock::Memlock;
pub(crate) use memlock::{ENTRY_BYTES, SEND_ENTRY_BYTES};
pub use rejection::{RejectReason, Rejection};

/// Why this host has no usable RDMA.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Absence {
    /// The library could not be loaded.
    #[error("no RDMA library: {library} could not be loaded ({detail})")]
    NoLibrary {
        /// The soname.
        library: &'static str,
        /// The message of the dynamic loader.
        detail: String,
    },
    /// The library is installed, but too old for this crate.
    #[error("RDMA library too old: {library} has no {symbol}")]
    OldLibrary {
        /// The soname.
        library: &'static str,
        /// The function that is missing.
        symbol: &'static str,
    },
    /// There are no user-space verbs. Either ib_uverbs is not loaded, or the process cannot see the
    /// device files, for example in a container.
    #[error(
        "no RDMA in the kernel: ib_uverbs is not loaded, or this process cannot see \
         /dev/infiniband ({detail})"
    )]
    NoKernel {
        /// The error that libibverbs reported.
        detail: String,
    },
    /// Libraries and kernel support are present, but there is no device.
    #[error("no RDMA device on this host")]
    NoDevice,
    /// Verbs work, but RDMA CM cannot make connections. Either rdma_ucm is not loaded, or the
    /// process cannot see its device file, for example in a container.
    #[error(
        "no RDMA connection manager: rdma_ucm is not loaded, or this process cannot see \
         /dev/infiniband/rdma_cm ({detail})"
    )]
    NoCm {
        /// The error that librdmacm reported.
        detail: String,
    },
    /// The device exists, but the requested port, or every port, is inactive.
    #[error("RDMA port down: {device} port {port} is {state}")]
    PortDown {
        /// The device name.
        device: String,
        /// The port number, from 1.
        port: u8,
        /// The port's state, in words.
        state: String,
    },
}

impl Absence {
    /// Returns the remedy: what an operator can do to make RDMA available.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            Self::NoLibrary { .. } => {
                "install rdma-core's libraries: apt-get install libibverbs1 librdmacm1 \
                 ibverbs-providers (Debian, Ubuntu) or dnf install libibverbs librdmacm (Fedora, \
                 RHEL)"
                    .into()
            }
            Self::OldLibrary { .. } => "update rdma-core to version 44 or later".into(),
            Self::NoKernel { .. } => {
                "load the kernel module with `modprobe ib_uverbs`; for a container, load it on the \
                 host and pass /dev/infiniband into the container; in a systemd unit, set \
                 PrivateDevices=no"
                    .into()
            }
            Self::NoDevice => {
                "load the driver of the network card (for example modprobe mlx5_ib), or make a \
                 software device over Ethernet: modprobe rdma_rxe && rdma link add rxe0 type rxe \
                 netdev eth0; if `rdma link` shows a device, the process cannot see \
                 /dev/infiniband: pass it into the container, or set PrivateDevices=no in the \
                 systemd unit"
                    .into()
            }
            Self::NoCm { .. } => {
                "load the kernel module with `modprobe rdma_ucm`; for a container, load it on the \
                 host and pass /dev/infiniband/rdma_cm into the container; in a systemd unit, set \
                 PrivateDevices=no"
                    .into()
            }
            Self::PortDown { device, .. } => format!(
                "bring the network interface of {device} up with `ip link set NETDEV up` (`rdma \
                 link` shows NETDEV), or check the cable and, on InfiniBand, the subnet manager"
            ),
        }
    }
}

/// The class of a failure, which decides what the caller does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// RDMA is unavailable on this host: fall back to another transport. See [`Error::absence`].
    Absent,
    /// The locked-memory limit does not allow a registration or a queue: fall back, or raise the
    /// limit. See [`Error::memlock`].
    Memlock,
    /// The kernel or the device has no memory or objects left: free some, then retry.
    OutOfMemory,
    /// A cgroup (the rdma controller) allows no more objects, or the device is busy: stop creating
    /// objects, or raise the limit.
    CgroupLimit,
    /// The process or the host has no file descriptors left.
    FileDescriptors,
    /// The request exceeds a limit of the device: ask for less.
    DeviceLimit,
    /// A queue has no free entry: reap completions, then post again.
    QueueFull,
    /// The process lacks the permission.
    Permission,
    /// The device was removed or has failed: close everything on it.
    DeviceGone,
    /// The peer's address cannot be resolved or routed to from here.
    NoRoute,
    /// The local address is in use.
    AddressInUse,
    /// The peer does not answer.
    Unreachable,
    /// The peer rejected the connection. See [`Error::rejection`].
    Rejected,
    /// The peer closed the connection.
    Disconnected,
    /// The deadline passed.
    Timeout,
    /// The call was invalid: a bug in the caller.
    Misuse,
    /// Any other error that the system reported.
    System,
}

impl ErrorKind {
    /// Returns whether this process cannot use RDMA on this host: RDMA is absent, or the user may
    /// not use the devices or pin the memory.
    #[must_use]
    pub fn is_unavailable(self) -> bool {
        matches!(self, Self::Absent | Self::Permission | Self::Memlock)
    }
}

/// A call that failed.
///
/// ```
/// # use ferrite_verbs::{ErrorKind, Verbs};
/// # fn show() -> Result<(), ferrite_verbs::Error> {
/// match Verbs::system()?.devices() {
///     Ok(devices) => println!("{} devices", devices.len()),
///     Err(error) if error.kind() == ErrorKind::Absent => println!("use TCP: {error}"),
///     Err(error) => return Err(error),
/// }
/// # Ok(()) }
/// ```
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    call: &'static str,
    context: String,
    errno: Option<Errno>,
    cause: Option<Cause>,
}

/// A known cause, with its details.
enum Cause {
    Absence(Absence),
    /// The process may not open this file.
    Denied(PathBuf),
    Memlock(Memlock),
    Rejection(Rejection),
    Text(String),
}

impl Error {
    /// Returns the class of the failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns the name of the C function that failed, or that was not called because its arguments
    /// are invalid. The name is empty for an [`Absence`]. It is `RDMA device` if no device has the
    /// requested name.
    #[must_use]
    pub fn call(&self) -> &'static str {
        self.0.call
    }

    /// Returns the system's error number, if there is one.
    #[must_use]
    pub fn raw_os_error(&self) -> Option<i32> {
        self.0.errno.map(Errno::raw_os_error)
    }

    /// Returns why RDMA is unavailable, if that is the cause.
    #[must_use]
    pub fn absence(&self) -> Option<&Absence> {
        match &self.0.cause {
            Some(Cause::Absence(absence)) => Some(absence),
            _ => None,
        }
    }

    /// Returns the numbers of the locked-memory limit, if that is the cause.
    #[must_use]
    pub fn memlock(&self) -> Option<&Memlock> {
        match &self.0.cause {
            Some(Cause::Memlock(memlock)) => Some(memlock),
            _ => None,
        }
    }

    /// Returns how the peer rejected the connection, if that is the cause.
    #[must_use]
    pub fn rejection(&self) -> Option<&Rejection> {
        match &self.0.cause {
            Some(Cause::Rejection(rejection)) => Some(rejection),
            _ => None,
        }
    }

    /// Returns what to do about the failure, where that is known.
    #[must_use]
    pub fn remedy(&self) -> Option<String> {
        match (&self.0.cause, self.0.kind) {
            (Some(Cause::Absence(absence)), _) => Some(absence.remedy()),
            (Some(Cause::Memlock(memlock)), _) => Some(memlock.remedy()),
            (_, ErrorKind::Permission) => Some(
                "add the user to the group of the files in /dev/infiniband (usually rdma), or \
                 write a udev rule (KERNEL==\"uverbs*|rdma_cm\", MODE=\"0666\"); then log in \
                 again, or restart the service"
                    .into(),
            ),
            (_, ErrorKind::CgroupLimit) => Some(
                "compare rdma.current with rdma.max of the process's cgroup, and raise rdma.max \
                 by writing the file, because systemd has no setting for it; if rdma.max does not \
                 limit the device, the device was busy, so try again"
                    .into(),
            ),
            (_, ErrorKind::FileDescriptors) => Some(
                "raise the limit of open files: ulimit -n, or LimitNOFILE= in the systemd unit"
                    .into(),
            ),
            (_, ErrorKind::AddressInUse) => Some(
                "choose another port, or stop the program that has it (`ss -ltnp` names it; for \
                 RDMA, `rdma resource show cm_id`)"
                    .into(),
            ),
            _ => None,
        }
    }

    /// Creates an error of kind `kind` without an error number.
    pub(crate) fn new(kind: ErrorKind, call: &'static str, context: impl Into<String>) -> Self {
        Self(Box::new(Inner { kind, call, context: context.into(), errno: None, cause: None }))
    }

    /// Creates an error for `call`, which failed with `errno`; `context` describes its arguments.
    pub(crate) fn os(call: &'static str, errno: Errno, context: impl Into<String>) -> Self {
        let kind = match errno {
            Errno::NOMEM => ErrorKind::OutOfMemory,
            Errno::AGAIN if creates_object(call) => ErrorKind::CgroupLimit,
            Errno::MFILE | Errno::NFILE => ErrorKind::FileDescriptors,
            Errno::PERM | Errno::ACCESS => ErrorKind::Permission,
            Errno::NODEV | Errno::NXIO | Errno::IO => ErrorKind::DeviceGone,
            Errno::ADDRINUSE => ErrorKind::AddressInUse,
            Errno::ADDRNOTAVAIL | Errno::NETUNREACH | Errno::HOSTUNREACH | Errno::NETDOWN => {
                ErrorKind::NoRoute
            }
            Errno::TIMEDOUT => ErrorKind::Timeout,
            Errno::INVAL => ErrorKind::Misuse,
            _ => ErrorKind::System,
        };
        Self(Box::new(Inner {
            kind,
            call,
            context: context.into(),
            errno: Some(errno),
            cause: None,
        }))
    }

    /// Creates an error for `call` from the C library's errno. If errno is 0, the error says that
    /// no error number was set.
    pub(crate) fn last(call: &'static str, context: impl Into<String>) -> Self {
        if io::Error::last_os_error().raw_os_error() == Some(0) {
            return Self::new(ErrorKind::System, call, context)
                .because("failed without an error number");
        }
        Self::os(call, last_errno(), context)
    }

    /// Creates an error for a device file that the process may not open.
    pub(crate) fn denied(call: &'static str, file: PathBuf) -> Self {
        let mut error = Self::new(ErrorKind::Permission, call, "");
        error.0.cause = Some(Cause::Denied(file));
        error
    }

    pub(crate) fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    pub(crate) fn because(mut self, text: impl Into<String>) -> Self {
        self.0.cause = Some(Cause::Text(text.into()));
        self
    }

    pub(crate) fn because_of_rejection(mut self, rejection: Rejection) -> Self {
        self.0.kind = ErrorKind::Rejected;
        self.0.cause = Some(Cause::Rejection(rejection));
        self
    }

    /// Sets the cause to the locked-memory limit, if that limit does not allow `needed_bytes` more.
    pub(crate) fn or_memlock(mut self, needed_bytes: u64) -> Self {
        if self.0.kind == ErrorKind::OutOfMemory
            && let Some(memlock) = Memlock::exceeded_by(needed_bytes)
        {
            self.0.kind = ErrorKind::Memlock;
            self.0.cause = Some(Cause::Memlock(memlock));
        }
        self
    }
}

/// Returns whether a call creates an object that counts towards the cgroup's limit. If the limit is
/// reached, the kernel fails these calls, and no others, with EAGAIN (`ib_rdmacg_try_charge` in its
/// `drivers/infiniband/core/cgroup.c`).
fn creates_object(call: &str) -> bool {
    ["ibv_open_", "ibv_alloc_", "ibv_create_", "ibv_reg_"]
        .iter()
        .any(|start| call.starts_with(start))
}

impl From<Absence> for Error {
    fn from(absence: Absence) -> Self {
        Self(Box::new(Inner {
            kind: ErrorKind::Absent,
            call: "",
            context: String::new(),
            errno: None,
            cause: Some(Cause::Absence(absence)),
        }))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { kind, call, context, errno, cause } = &*self.0;
        if let Some(Cause::Absence(absence)) = cause {
            return absence.fmt(f);
        }
        if let Some(Cause::Denied(file)) = cause {
            return write!(f, "permission denied on {}", file.display());
        }
        f.write_str(call)?;
        if !context.is_empty() {
            write!(f, " ({context})")?;
        }
        match errno {
            // The system's text for EAGAIN ("temporarily unavailable") would mislead the reader.
            Some(Errno::AGAIN) if *kind == ErrorKind::CgroupLimit => {
                f.write_str(": the cgroup's limit is reached (rdma.max), or the device is busy")?;
            }
            Some(errno) => write!(f, ": {}", io::Error::from(*errno))?,
            None => {}
        }
        match cause {
            Some(Cause::Memlock(memlock)) => write!(f, ": {memlock}"),
            Some(Cause::Rejection(rejection)) => {
                write!(f, ": the peer refused: {}", rejection.reason)
            }
            Some(Cause::Text(text)) => write!(f, ": {text}"),
            Some(Cause::Absence(_) | Cause::Denied(_)) | None => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.0.kind)
    }
}

impl std::error::Error for Error {}

/// Returns the C library's error number of this thread, or EIO if that is no valid error number.
pub(crate) fn last_errno() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Sets the C library's error number of this thread.
///
/// Some providers fail without setting errno (bnxt_re: a queue pair with too many inline bytes). So
/// callers set errno to 0 before they create a queue or a queue pair. Otherwise a number from an
/// earlier call would look like the cause.
pub(crate) fn set_errno(raw: i32) {
    unsafe extern "C" {
        fn __errno_location() -> *mut std::ffi::c_int;
    }
    // SAFETY: the C library returns the address of this thread's own errno.
    unsafe { *__errno_location() = raw };
}

/// Converts the return value of most verbs, which is 0 or an error number. Some providers return −1
/// instead and set errno.
pub(crate) fn check(
    call: &'static str,
    rc: i32,
    context: impl FnOnce() -> String,
) -> Result<(), Error> {
    match rc {
        0 => Ok(()),
        rc if rc > 0 => Err(Error::os(call, Errno::from_raw_os_error(rc), context())),
        _ => Err(Error::last(call, context())),
    }
}
