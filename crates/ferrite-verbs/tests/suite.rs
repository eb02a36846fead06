//! The tests that every provider must pass, with two hosts.
//!
//! `lab_verbs` runs this suite on Soft-RoCE devices in the lab's guest (see lab/README.md),
//! `fake_verbs` on the fake provider. Each test is a function that takes a [`Fixture`].
//! [`run_suite`] turns each function into a `#[test]` of the calling target.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use ferrite_verbs::Verbs;

pub(crate) mod connection;
pub(crate) mod limits;
pub(crate) mod pair;
pub(crate) mod refusal;
pub(crate) mod shared;
pub(crate) mod transfer;
pub(crate) mod windows;

/// A timeout that is longer than any operation here, even on the slowest kernel.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

/// Two hosts that can reach each other.
pub(crate) struct Fixture {
    pub(crate) verbs: Verbs,
    pub(crate) hosts: [Host; 2],
}

/// A device and its IP address.
#[derive(Debug, Clone)]
pub(crate) struct Host {
    pub(crate) device: String,
    pub(crate) ip: IpAddr,
}

impl Host {
    pub(crate) fn new(device: &str, ip: &str) -> Self {
        Self { device: device.to_owned(), ip: ip.parse().expect("an address") }
    }

    /// Returns an address on this host with a port that the system chooses.
    pub(crate) fn any_port(&self) -> SocketAddr {
        SocketAddr::new(self.ip, 0)
    }
}

/// Turns every test of the suite into a test of the calling target.
macro_rules! run_suite {
    ($fixture:path) => {
        run_suite!(@ $fixture, connection:
            exchanges_private_data, rejection_carries_private_data,
            connect_without_a_listener_is_rejected, dropping_a_request_rejects_it,
            disconnect_reaches_both_sides, settings_apply_to_the_queue_pair, rejects_a_port_in_use,
            rejects_an_address_of_another_host, rejects_too_long_private_data, connects_without_cm);
        run_suite!(@ $fixture, limits:
            full_queue_refuses_posts_until_it_drains, reports_exceeded_device_limits,
            rejects_too_long_requests, rejects_posts_in_the_wrong_state,
            reports_completion_queue_overrun, rejects_an_empty_region);
        run_suite!(@ $fixture, refusal:
            refuses_a_wrong_key, refuses_access_out_of_bounds, refuses_a_deregistered_region,
            refuses_writes_without_permission, refuses_reads_without_permission,
            refuses_access_without_queue_pair_rights, refuses_a_local_key_of_another_domain,
            refuses_a_message_longer_than_the_receive, fails_without_a_posted_receive,
            stopping_flushes_receives);
        run_suite!(@ $fixture, shared:
            shared_receive_queue_serves_two_queue_pairs, shared_receive_queue_limit_raises_an_event,
            children_keep_parents_alive, one_channel_serves_many_queues);
        run_suite!(@ $fixture, transfer:
            send, send_with_immediate, write, write_with_immediate, read,
            inline_data_is_copied_at_once, scatter_and_gather, unsignaled_sends_give_no_completion,
            posts_more_requests_than_one_chain, transfers_an_empty_message,
            only_solicited_messages_raise_an_event, fenced_send_waits_for_the_read);
        run_suite!(@ $fixture, windows:
            bound_window_allows_writes, window_of_another_queue_pair_is_refused,
            keys_of_the_region_under_a_window_are_refused, access_outside_a_window_is_refused,
            write_only_window_refuses_reads, unbound_window_is_refused,
            invalidated_window_is_refused, deallocated_window_is_refused,
            window_can_be_bound_only_once, bind_needs_a_region_that_allows_windows,
            queue_pair_without_rights_refuses_its_window,
            region_cannot_be_deregistered_before_its_windows);
    };
    (@ $fixture:path, $module:ident: $($test:ident),*) => {
        mod $module {
            $(#[test] fn $test() { crate::suite::$module::$test(&$fixture()); })*
        }
    };
}
pub(crate) use run_suite;
