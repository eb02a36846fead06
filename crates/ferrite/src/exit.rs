//! Reports the failure of a command: one paragraph for people, one JSON object for scripts and an
//! exit code.

use std::fmt::Write as _;
use std::process::ExitCode;

use ferrite_config::exit_code;
use ferrite_verbs::{Absence, CompletionError, ErrorKind};
use serde::Serialize;

use crate::output::{self, StdoutError, escape_controls};
use crate::pingpong::ConnectionLost;
use crate::server;
use crate::settings::WrongSettings;

/// Prints the failure as a paragraph on stderr and, if `json` is set, as an object on stdout. The
/// object is one line, like the events of long-running programs. If the log is JSON, the paragraph
/// is a line of the log instead. Prints nothing if `error` says that the reader of stdout has gone.
pub(crate) fn report(error: &anyhow::Error, json: bool) -> ExitCode {
    if error.downcast_ref::<StdoutError>().is_some_and(StdoutError::is_broken_pipe) {
        return ExitCode::from(exit_code::FAILURE);
    }
    let failure = Failure::from_error(error);
    match crate::log::is_json() {
        true => tracing::error!("{}", failure.paragraph()),
        false => eprintln!("ferrite: {}", escape_controls(&failure.paragraph())),
    }
    if json {
        match serde_json::to_string(&serde_json::json!({ "error": failure })) {
            Ok(text) => output::write_line(&text),
            Err(error) => eprintln!("ferrite: {error}"),
        }
    }
    ExitCode::from(code(error))
}

/// Returns the exit code for an error, and the paragraph for people.
pub(crate) fn describe(error: &anyhow::Error) -> (u8, String) {
    (code(error), Failure::from_error(error).paragraph())
}

/// Returns the exit code for an error.
fn code(error: &anyhow::Error) -> u8 {
    let is_unavailable = error.chain().any(|cause| {
        let verbs = cause.downcast_ref::<ferrite_verbs::Error>();
        let fabric = cause.downcast_ref::<ferrite_fabric::Error>();
        cause.downcast_ref::<Absence>().is_some()
            || verbs.is_some_and(|error| error.kind().is_unavailable())
            || fabric.is_some_and(ferrite_fabric::Error::is_unavailable)
    });
    if let Some(error) = error.downcast_ref::<server::ServerError>() {
        error.code()
    } else if error.downcast_ref::<WrongSettings>().is_some() {
        exit_code::USAGE
    } else if is_unavailable {
        exit_code::UNAVAILABLE
    } else {
        exit_code::FAILURE
    }
}

/// A failure as JSON.
#[derive(Debug, Serialize)]
pub(crate) struct Failure {
    /// The class of the failure: `absent`, `timeout`, `rejected` and so on.
    kind: &'static str,
    /// The missing part: `library`, `kernel`, `device`, `connection_manager` or `port`.
    #[serde(skip_serializing_if = "Option::is_none")]
    missing: Option<&'static str>,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

impl Failure {
    pub(crate) fn from_error(error: &anyhow::Error) -> Self {
        let verbs = error.chain().find_map(|cause| cause.downcast_ref::<ferrite_verbs::Error>());
        let absence = error.chain().find_map(|cause| cause.downcast_ref::<Absence>());
        let absence = absence.or_else(|| verbs.and_then(ferrite_verbs::Error::absence));
        let fabric = error.chain().find_map(|cause| cause.downcast_ref::<ferrite_fabric::Error>());
        let server = error.downcast_ref::<server::ServerError>();
        let lost = error.chain().find_map(|cause| cause.downcast_ref::<ConnectionLost>());
        Self {
            kind: match (absence, verbs, fabric, lost) {
                (Some(_), ..) => "absent",
                (_, Some(verbs), ..) => kind_name(verbs.kind()),
                (_, _, Some(fabric), _) => fabric_kind_name(fabric.kind()),
                (.., Some(lost)) => lost.kind_name(),
                _ if let Some(server) = server => server.kind_name(),
                _ if error.downcast_ref::<CompletionError>().is_some() => "completion_error",
                _ if error.downcast_ref::<WrongSettings>().is_some() => "config",
                _ => "failure",
            },
            missing: absence.map(missing),
            message: message(error),
            remedy: absence
                .map(Absence::remedy)
                .or_else(|| verbs.and_then(ferrite_verbs::Error::remedy))
                .or_else(|| fabric.and_then(ferrite_fabric::Error::remedy)),
        }
    }

    fn paragraph(&self) -> String {
        let mut text = String::new();
        if let Some(missing) = self.missing {
            let what = match missing {
                "port" => "an active port is",
                "library" => "the library is",
                "kernel" => "the kernel support is",
                "device" => "a device is",
                _ => "the connection manager is",
            };
            let _ = write!(
                text,
                "RDMA is unavailable on this host. RDMA needs a library, kernel support, a device \
                 with an active port, and the connection manager; {what} missing: "
            );
        }
        text += &self.message;
        if let Some(remedy) = &self.remedy {
            let _ = write!(text, ". What to do: {remedy}.");
        }
        text
    }
}

/// Joins the causes from the outermost to the innermost. Leaves out a cause that the text already
/// contains.
fn message(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            let _ = write!(text, ": {cause}");
        }
    }
    text
}

/// Returns the part that is missing.
fn missing(absence: &Absence) -> &'static str {
    match absence {
        Absence::NoLibrary { .. } | Absence::OldLibrary { .. } => "library",
        Absence::NoKernel { .. } => "kernel",
        Absence::NoCm { .. } => "connection_manager",
        Absence::PortDown { .. } => "port",
        // NoDevice, and variants that a later version may add.
        _ => "device",
    }
}

fn kind_name(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Absent => "absent",
        ErrorKind::Memlock => "memlock",
        ErrorKind::OutOfMemory => "out_of_memory",
        ErrorKind::CgroupLimit => "cgroup_limit",
        ErrorKind::FileDescriptors => "file_descriptors",
        ErrorKind::DeviceLimit => "device_limit",
        ErrorKind::QueueFull => "queue_full",
        ErrorKind::Permission => "permission",
        ErrorKind::DeviceGone => "device_gone",
        ErrorKind::NoRoute => "no_route",
        ErrorKind::AddressInUse => "address_in_use",
        ErrorKind::Unreachable => "unreachable",
        ErrorKind::Rejected => "rejected",
        ErrorKind::Disconnected => "disconnected",
        ErrorKind::Timeout => "timeout",
        ErrorKind::Misuse => "misuse",
        _ => "failure",
    }
}

/// Returns the name of a fabric error in JSON.
pub(crate) fn fabric_kind_name(kind: ferrite_fabric::ErrorKind) -> &'static str {
    use ferrite_fabric::ErrorKind as Kind;
    match kind {
        Kind::Absent => "absent",
        Kind::Resources => "resources",
        Kind::Full => "full",
        Kind::Refused => "refused",
        Kind::Unreachable => "unreachable",
        Kind::Timeout => "timeout",
        Kind::LinkDown => "link_down",
        Kind::PeerStalled => "peer_stalled",
        Kind::Closed => "closed",
        Kind::Protocol => "protocol",
        Kind::Denied => "denied",
        Kind::TooLarge => "too_large",
        Kind::DeviceGone => "device_gone",
        Kind::Misuse => "misuse",
        _ => "failure",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absence_names_the_missing_part_and_the_remedy() {
        let error = anyhow::Error::from(ferrite_verbs::Error::from(Absence::NoDevice))
            .context("while trying");
        let failure = Failure::from_error(&error);
        assert_eq!((failure.kind, failure.missing), ("absent", Some("device")));
        let text = failure.paragraph();
        assert!(text.contains("a device is missing: while trying: no RDMA device"), "{text}");
        assert!(text.contains("What to do: load the driver") && !text.contains('\n'), "{text}");
    }

    #[test]
    fn finds_the_absence_inside_a_fabric_error() {
        let error = ferrite_fabric::Error::from(ferrite_verbs::Error::from(Absence::NoDevice));
        let text = error.to_string();
        let failure = Failure::from_error(&anyhow::Error::from(error).context("while trying"));
        assert_eq!((failure.kind, failure.missing), ("absent", Some("device")));
        assert_eq!(failure.message, format!("while trying: {text}"), "no repeated cause");
        assert!(failure.remedy.is_some());
    }

    #[test]
    fn exit_codes_are_those_of_the_table() {
        let absent = || ferrite_verbs::Error::from(Absence::NoDevice);
        let wrong = || WrongSettings("wrong".into());
        assert_eq!(code(&anyhow::Error::from(absent()).context("while trying")), 69);
        assert_eq!(code(&anyhow::Error::from(ferrite_fabric::Error::from(absent()))), 69);
        assert_eq!(code(&anyhow::Error::from(wrong()).context("in a file")), 2);
        assert_eq!(code(&anyhow::anyhow!("it broke")), 1);
        // A missing permission and the locked-memory limit have code 69, too. Tests in the lab
        // cause them.
        assert!(
            [ErrorKind::Permission, ErrorKind::Memlock].into_iter().all(ErrorKind::is_unavailable)
        );
        assert!(!ErrorKind::OutOfMemory.is_unavailable());
    }

    #[test]
    fn other_failures_are_not_absences() {
        let failure = Failure::from_error(&anyhow::anyhow!("it broke"));
        assert_eq!(
            (failure.kind, failure.missing, failure.paragraph().as_str()),
            ("failure", None, "it broke")
        );
    }
}
