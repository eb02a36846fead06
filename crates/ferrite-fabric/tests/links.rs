//! One test suite for links over every transport: how two fabrics must behave towards each other.
//!
//! `lab_links` runs it on Soft-RoCE devices in the lab's guest, `fake_links` on the fake provider,
//! `tcp_links` and `tls_links` without RDMA. A test is a function that takes a [`Fixture`];
//! [`run_suite`] turns it into a `#[test]` of the target that invokes the macro.

pub(crate) mod drivers;
pub(crate) mod fabrics;
pub(crate) mod handshake;
pub(crate) mod isolation;
pub(crate) mod life;
pub(crate) mod messages;
pub(crate) mod one_sided;
pub(crate) mod pair;
pub(crate) mod pressure;
pub(crate) mod raw_connections;
pub(crate) mod revocation;
pub(crate) mod storm;
pub(crate) mod verbs_peer;
pub(crate) mod violations;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use ferrite_fabric::rustls::{ClientConfig, ServerConfig};
use ferrite_fabric::{Builder, Config, Fabric, Rdma};
use ferrite_verbs::Verbs;

/// The limit for every wait in a test. Nothing takes this long, even on the slowest kernel.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) const KIB: usize = 1 << 10;
pub(crate) const MIB: usize = 1 << 20;

/// Two hosts that can reach each other.
pub(crate) struct Fixture {
    /// The RDMA provider, or `None` to run over TCP.
    pub(crate) verbs: Option<Verbs>,
    /// The TLS configurations, to encrypt TCP.
    pub(crate) tls: Option<(Arc<ClientConfig>, Arc<ServerConfig>)>,
    pub(crate) hosts: [Host; 2],
    /// Divides the amount of work in tests, for targets where everything is slower.
    pub(crate) work_divisor: usize,
    /// Divides the number of operations in the storm tests.
    pub(crate) storm_divisor: u64,
}

/// A device and the address at which it is reachable.
#[derive(Debug, Clone)]
pub(crate) struct Host {
    pub(crate) device: String,
    pub(crate) ip: IpAddr,
}

impl Host {
    pub(crate) fn new(device: &str, ip: &str) -> Self {
        Self { device: device.to_owned(), ip: ip.parse().expect("valid IP address") }
    }

    /// Returns an address on this host with a port that the system picks.
    pub(crate) fn any_port(&self) -> SocketAddr {
        SocketAddr::new(self.ip, 0)
    }
}

impl Fixture {
    /// Builds a fabric on one host.
    pub(crate) fn fabric(&self, host: &Host, config: &Config) -> Fabric {
        let builder = self.builder().config(config.clone());
        let builder = if self.is_rdma() { builder.device(&host.device) } else { builder };
        builder.build().expect("a fabric")
    }

    /// Returns the size of the largest frame on this transport.
    pub(crate) fn segment_bytes(&self, config: &Config) -> u64 {
        let least = if self.is_rdma() { 0 } else { 64 << 10 };
        u64::from(config.recv_buffer_size).max(least)
    }

    pub(crate) fn is_rdma(&self) -> bool {
        self.verbs.is_some()
    }

    pub(crate) fn verbs(&self) -> &Verbs {
        self.verbs.as_ref().expect("only RDMA tests ask for verbs")
    }

    /// Returns a builder for fabrics that use this transport alone.
    pub(crate) fn builder(&self) -> Builder {
        match &self.verbs {
            Some(verbs) => Fabric::builder(verbs).rdma(Rdma::Require),
            None => {
                let (client, server) = self.tls.clone().unzip();
                Fabric::system().rdma(Rdma::Forbid).tls(client, server)
            }
        }
    }
}

/// Turns every test of the suite into a test of the calling target. With `over any transport`,
/// leaves out the tests of RDMA itself.
macro_rules! run_suite {
    ($run:path) => {
        run_suite!(over any transport: $run);
        mod rdma {
            use super::links::run_suite;
            run_suite!(@ $run, raw_connections:
                messages_and_writes_arrive_in_order, closing_delivers_pending_writes,
                writing_outside_the_window_ends_the_connection, idle_connections_stay_open,
                refused_without_a_handler);
            run_suite!(@ $run, isolation:
                cannot_write_another_peers_window, refuses_peers_after_repeated_access_errors,
                grants_work_only_on_their_link, dropping_memory_before_its_window_is_bound);
            run_suite!(@ $run, drivers: reposts_released_memory);
            run_suite!(@ $run, fabrics:
                rejects_invalid_settings, send_memory_runs_out, statistics_add_up);
            run_suite!(@ $run, life: dropping_the_fabric_fails_pending_futures);
            run_suite!(@ $run, pressure:
                few_receives_lose_nothing, pinned_memory_stays_within_its_limit);
            run_suite!(@ $run, violations:
                frame_without_immediate_data, exceeds_the_window, may_fill_the_window,
                credits_for_unsent_frames, credits_that_decrease, invalid_control_messages,
                unknown_channel, endless_message, endless_message_of_one_byte_frames,
                fin_ack_without_fin, frame_after_fin, ping_flood, pings_are_answered,
                frame_larger_than_a_receive, peer_disappears, never_returns_credit,
                ignores_a_revocation, may_revoke_many_grants, random_frames);
            run_suite!(@ $run, handshake:
                hands_over_foreign_peers, rejects_foreign_peers, other_versions_are_refused,
                malformed_hellos_are_refused, rejects_invalid_answers, displaces_stalled_handshakes,
                connects_to_itself, keeps_handshakes_when_the_listener_was_delayed);
            run_suite!(@ $run, one_sided:
                failed_registration_returns_the_buffer, forged_grants_end_the_link,
                owner_reports_the_first_cause, features_that_the_peer_lacks_are_not_used);
            run_suite!(@ $run, revocation: use_after_revocation_ends_the_link);
        }
    };
    (over any transport: $run:path) => {
        run_suite!(@ $run, drivers:
            tokio_on_several_threads, tokio_on_one_thread, dedicated_threads, one_link_many_threads,
            epoll_loop_level_triggered, epoll_loop_edge_triggered, progress_continues_after_a_break,
            idle_fabrics_sleep, threads_use_links_at_random);
        run_suite!(@ $run, fabrics:
            small_queues, works_without_inline_sends, caps_the_inline_threshold,
            idle_links_cost_nothing, receive_memory_runs_out,
            rejects_messages_larger_than_the_receive_memory, drops_fabrics_in_every_state);
        run_suite!(@ $run, messages:
            every_size_arrives, messages_larger_than_a_buffer, many_in_order,
            channels_keep_their_order, large_messages_do_not_delay_small_ones,
            small_messages_overtake_a_full_queue, rejects_invalid_calls,
            polling_after_completion_is_an_error, messages_outlive_their_fabric);
        run_suite!(@ $run, pressure:
            sender_stops_when_nobody_receives, queued_bytes_are_limited, window_of_two,
            smallest_segments, senders_wait_for_room, limits_the_number_of_parts);
        run_suite!(@ $run, storm: cancel_storm, storms_with_extreme_settings);
        run_suite!(@ $run, life:
            closing_delivers_what_was_sent, closing_waits_for_a_slow_receiver, dropping_closes,
            closed_links_are_released, new_links_do_not_inherit_timeouts,
            revocation_does_not_end_the_link, closing_after_a_pause, closing_has_a_deadline,
            abort_fails_pending_operations, partial_messages_are_not_delivered,
            dropping_the_peers_fabric_ends_the_link, detects_a_stalled_peer, idle_links_stay_up);
        run_suite!(@ $run, handshake:
            refused_when_nobody_listens, fails_when_no_host_has_the_address,
            refuses_peers_that_the_program_does_not_admit,
            times_out_without_an_answer, dropping_the_future_cancels,
            closes_links_that_are_never_taken, dropping_the_listener_closes_pending_links,
            refuses_links_beyond_max_connections, fifty_concurrent_connects);
        run_suite!(@ $run, one_sided:
            read_returns_granted_bytes, write_changes_only_its_range, notices_keep_their_order,
            denies_what_the_grant_does_not_cover, dropped_operations_complete);
        run_suite!(@ $run, revocation:
            revokes_an_unused_grant, revokes_many_grants_at_once, revokes_during_reads_and_writes,
            revocation_has_a_deadline, grants_expire, dropping_a_region_revokes_it,
            revokes_after_the_link_ended);
    };
    (@ $run:path, $module:ident: $($test:ident),*) => {
        mod $module {
            $(#[test] fn $test() { $run(crate::links::$module::$test); })*
        }
    };
}
pub(crate) use run_suite;
