//! Descriptors of sessions have numbers above those that the engine needs.
//!
//! The engine's loop has a table by descriptor, of `maxclients` and a few more. A client whose
//! descriptor is beyond it is accepted and never heard. The kernel gives the lowest number that is
//! free: connections of the module's port, which need not even log in, would take those of the
//! engine's own clients, files and replicas.

use ferrite_fabric::descriptors;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// What the engine's loop has beyond `maxclients` (`CONFIG_FDSET_INCR`).
const ENGINE_OWN: u64 = 128;
/// The engine's default, where it does not tell.
const ENGINE_CLIENTS: u64 = 10_000;
/// A session's connection, and its connection to the engine.
const SESSION: u64 = 2;
/// Connections that are no sessions yet.
const AT_THE_DOOR: u64 = 2048;

/// Follows the engine's `maxclients` (zero: not known) and our own `max-clients`. Raises the limit
/// of the process as far as that may be.
pub(crate) fn follow(engine_clients: u64, sessions: usize) {
    let engine = ENGINE_OWN + if engine_clients > 0 { engine_clients } else { ENGINE_CLIENTS };
    let wanted = engine + SESSION * sessions as u64 + AT_THE_DOOR;
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

/// Where there are too few for both, each has a half.
fn first(engine: u64, limit: u64) -> u64 {
    engine.min(limit / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engine_has_what_it_needs_or_a_half() {
        assert_eq!(first(10_128, 65_536), 10_128);
        assert_eq!(first(10_128, 10_032), 5016);
        assert_eq!(first(10_128, u64::MAX), 10_128);
    }
}
