//! Keeps the file descriptors of sessions above the numbers that the engine needs.
//!
//! The engine's event loop has a table indexed by descriptor, with `maxclients` and a few more
//! entries. The engine accepts a client whose descriptor is beyond the table, but never reads from
//! that client. The kernel always assigns the lowest free number. So connections to the module's
//! port, even ones that never log in, could use up the numbers that the engine needs for its own
//! clients, files and replicas.

use ferrite_fabric::descriptors;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The number of entries of the engine's table beyond `maxclients` (`CONFIG_FDSET_INCR`).
const ENGINE_RESERVE: u64 = 128;
/// The engine's default `maxclients`, used if the engine does not report its own.
const DEFAULT_ENGINE_CLIENTS: u64 = 10_000;
/// The number of descriptors of a session: its client connection and its proxy connection.
const PER_SESSION: u64 = 2;
/// The number of descriptors for connections that are not sessions yet.
const PENDING_CONNECTIONS: u64 = 2048;

/// Applies the engine's `maxclients` (zero if unknown) and the module's `max-clients`. If the
/// process's limit of open files is too low for both, raises it, at most to the hard limit.
pub(crate) fn follow(engine_clients: u64, sessions: usize) {
    let clients = if engine_clients > 0 { engine_clients } else { DEFAULT_ENGINE_CLIENTS };
    let engine = ENGINE_RESERVE + clients;
    let wanted = engine + PER_SESSION * sessions as u64 + PENDING_CONNECTIONS;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let limit = match (current, maximum) {
        (Some(current), maximum) if current < wanted => {
            let raised = maximum.map_or(wanted, |maximum| maximum.min(wanted)).max(current);
            let set = setrlimit(Resource::Nofile, Rlimit { current: Some(raised), maximum });
            if set.is_ok() { raised } else { current }
        }
        (current, _) => current.unwrap_or(u64::MAX),
    };
    descriptors::set_first(i32::try_from(first(engine, limit)).unwrap_or(i32::MAX));
}

/// Returns the lowest descriptor of sessions. If the limit is too low for the engine and the
/// sessions, they get half each.
fn first(engine: u64, limit: u64) -> u64 {
    engine.min(limit / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engine_gets_what_it_needs_or_half() {
        assert_eq!(first(10_128, 65_536), 10_128);
        assert_eq!(first(10_128, 10_032), 5016);
        assert_eq!(first(10_128, u64::MAX), 10_128);
    }
}
