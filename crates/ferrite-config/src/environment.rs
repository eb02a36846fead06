//! Environment variables: which ones mean a setting, which ones are misspelt, and which ones
//! somebody else has set.
//!
//! Kubernetes sets variables for each Service: one called `ferrite` gives `FERRITE_PORT` the value
//! `tcp://10.0.0.1:6380`. Such variables are not settings.

use crate::nearest::nearest_within;
use crate::table;

const PREFIX: &str = "FERRITE_";

/// Returns whether a variable has a name or a value that Kubernetes gives to the variables of a
/// Service.
#[must_use]
pub fn is_of_kubernetes(name: &str, value: &str) -> bool {
    let scheme = value.split_once("://").map(|(scheme, _)| scheme);
    let is_address = matches!(scheme, Some("tcp" | "udp" | "sctp"));
    // FERRITE_PORT_6380_TCP, FERRITE_PORT_6380_TCP_ADDR, …_PORT and …_PROTO.
    let is_of_port = name.split_once("_PORT_").is_some_and(|(_, rest)| {
        rest.split('_').next().is_some_and(|port| port.parse::<u16>().is_ok())
    });
    is_address || is_of_port || name.contains("_SERVICE_HOST") || name.contains("_SERVICE_PORT")
}

/// Returns a warning for each variable whose name nearly is the name of a setting. Other variables
/// that start with `FERRITE_` belong to other programs.
pub fn warnings(variables: impl IntoIterator<Item = (String, String)>) -> Vec<String> {
    let known: Vec<_> = table::all().map(crate::Setting::variable).collect();
    let warn = |(name, value): (String, String)| {
        let rest = name.strip_prefix(PREFIX)?;
        if known.contains(&name) || is_of_kubernetes(&name, &value) {
            return None;
        }
        let short = known.iter().filter_map(|known| known.strip_prefix(PREFIX));
        let near = nearest_within(rest, short, (rest.len() / 4).min(2))?;
        Some(format!(
            "unknown environment variable {name} is ignored; the nearest known one is \
             {PREFIX}{near}"
        ))
    };
    variables.into_iter().filter_map(warn).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn warnings_of(name: &str, value: &str) -> Vec<String> {
        warnings([(name.to_owned(), value.to_owned())])
    }

    #[test]
    fn misspelt_variables_are_named_with_the_nearest() {
        let found = warnings_of("FERRITE_BUSY_POL_US", "50");
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("nearest known one is FERRITE_BUSY_POLL_US"), "{}", found[0]);
        for known in ["FERRITE_BUSY_POLL_US", "FERRITE_SEED", "FERRITE_LAB_CACHE", "PATH"] {
            assert_eq!(warnings_of(known, "1"), [""; 0], "{known}");
        }
    }

    #[test]
    fn variables_of_a_kubernetes_service_are_not_settings() {
        for (name, value) in [
            ("FERRITE_PORT", "tcp://10.0.0.1:6380"),
            ("FERRITE_RDMA_PORT", "udp://10.0.0.1:6380"),
            ("FERRITE_SERVICE_HOST", "10.0.0.1"),
            ("FERRITE_SERVICE_PORT_REDIS", "6380"),
            ("FERRITE_PORT_6380_TCP", "tcp://10.0.0.1:6380"),
            ("FERRITE_PORT_6380_TCP_ADDR", "10.0.0.1"),
        ] {
            assert!(is_of_kubernetes(name, value), "{name}");
            assert_eq!(warnings_of(name, value), [""; 0], "{name}");
        }
        assert!(!is_of_kubernetes("FERRITE_PORT", "6380"));
    }
}
