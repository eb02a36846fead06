//! One suite for every provider: what a pair of hosts must be able to do.
//!
//! `lab_verbs` runs it on Soft-RoCE devices in the lab's guest, `fake_verbs` on the fake provider.
//! A test is a function of a [`Fixture`]; [`run_suite`] makes it a `#[test]` of the target that
//! calls it.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use ferrite_verbs::Verbs;

pub(crate) mod connection;
pub(crate) mod limits;
pub(crate) mod pair;
pub(crate) mod random;
pub(crate) mod refusal;
pub(crate) mod shared;
pub(crate) mod transfer;
pub(crate) mod windows;

/// Longer than anything here takes, on the slowest kernel.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Two hosts that can reach each other.
pub(crate) struct Fixture {
    pub(crate) verbs: Verbs,
    pub(crate) hosts: [Host; 2],
}

/// A device and the address it is reached by.
#[derive(Debug, Clone)]
pub(crate) struct Host {
    pub(crate) device: String,
    pub(crate) ip: IpAddr,
}

impl Host {
    pub(crate) fn new(device: &str, ip: &str) -> Self {
        Self { device: device.to_owned(), ip: ip.parse().expect("an address") }
    }

    /// An address on this host with a port that the system picks.
    pub(crate) fn any_port(&self) -> SocketAddr {
        SocketAddr::new(self.ip, 0)
    }
}

/// Makes every test of the suite a test of the calling target.
macro_rules! run_suite {
    ($fixture:path) => {
        run_suite!(@ $fixture, connection:
            private_data_goes_both_ways, refused_with_data, nobody_listens, dropped_request_is_refused,
            hang_up_is_heard, settings_reach_the_queue_pair, port_is_taken, not_our_address,
            private_data_too_long, by_hand_without_cm);
        run_suite!(@ $fixture, limits:
            queue_full_is_back_pressure, more_than_the_device_has, inline_too_long, posted_in_the_wrong_state,
            overrun_is_reported, empty_region);
        run_suite!(@ $fixture, refusal:
            wrong_key, out_of_bounds, deregistered, not_writable, not_readable, not_allowed_by_the_queue_pair, foreign_local_key,
            longer_than_the_receive, no_receive_posted, stopping_flushes);
        run_suite!(@ $fixture, shared:
            shared_receive_queue_serves_two, shared_receive_queue_limit, children_keep_parents_alive,
            one_channel_many_queues);
        run_suite!(@ $fixture, transfer:
            send, send_with_immediate, write, write_with_immediate, read, inline_is_copied_at_once,
            scatter_and_gather, unsignaled_complete_silently, long_chain, empty_message, solicited_only,
            fenced_after_read);
        run_suite!(@ $fixture, windows:
            bound_window_is_written, another_queue_pairs_window_is_refused, region_under_a_window_is_out_of_reach,
            outside_of_a_window_is_refused, window_for_writing_is_not_read, unbound_window_is_refused,
            invalidated_window_is_refused, deallocated_window_is_refused, a_window_is_bound_once,
            bind_needs_a_region_for_windows, queue_pair_without_rights_refuses_its_window,
            a_region_outlives_its_windows);
    };
    (@ $fixture:path, $module:ident: $($test:ident),*) => {
        mod $module {
            $(#[test] fn $test() { crate::suite::$module::$test(&$fixture()); })*
        }
    };
}
pub(crate) use run_suite;
