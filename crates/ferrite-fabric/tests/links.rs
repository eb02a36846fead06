//! One suite for links on every provider: what two engines must be able to do to each other.
//!
//! `lab_links` runs it on Soft-RoCE devices in the lab's guest, `fake_links` on the fake provider. A test is a function of
//! a [`Fixture`]; [`run_suite`] makes it a `#[test]` of the target that calls it.

pub(crate) mod bare;
pub(crate) mod drivers;
pub(crate) mod engines;
pub(crate) mod hello;
pub(crate) mod isolation;
pub(crate) mod life;
pub(crate) mod manners;
pub(crate) mod meeting;
pub(crate) mod messages;
pub(crate) mod one_sided;
pub(crate) mod pair;
pub(crate) mod pressure;
pub(crate) mod random;
pub(crate) mod raw;
pub(crate) mod storm;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use ferrite_fabric::rustls::{ClientConfig, ServerConfig};
use ferrite_fabric::{Builder, Config, Engine, Rdma};
use ferrite_verbs::Verbs;

/// Longer than anything here takes, on the slowest kernel.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) const KIB: usize = 1 << 10;
pub(crate) const MIB: usize = 1 << 20;

/// Two hosts that can reach each other.
pub(crate) struct Fixture {
    /// `None`: over TCP.
    pub(crate) verbs: Option<Verbs>,
    /// On TCP: encrypted.
    pub(crate) tls: Option<(Arc<ClientConfig>, Arc<ServerConfig>)>,
    pub(crate) hosts: [Host; 2],
    /// How much less is to be done where everything takes longer, and in a storm.
    pub(crate) slower: usize,
    pub(crate) storm_part: u64,
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

impl Fixture {
    /// An engine on one host.
    pub(crate) fn engine(&self, host: &Host, config: &Config) -> Engine {
        let builder = self.builder().config(config.clone());
        let builder = if self.is_rdma() { builder.device(&host.device) } else { builder };
        builder.build().expect("an engine")
    }

    /// The largest frame on this transport.
    pub(crate) fn segment_bytes(&self, config: &Config) -> u64 {
        let least = if self.is_rdma() { 0 } else { 64 << 10 };
        u64::from(config.recv_buffer_size).max(least)
    }

    pub(crate) fn is_rdma(&self) -> bool {
        self.verbs.is_some()
    }

    pub(crate) fn verbs(&self) -> &Verbs {
        self.verbs.as_ref().expect("a test of RDMA")
    }

    /// An engine of this transport alone.
    pub(crate) fn builder(&self) -> Builder {
        match &self.verbs {
            Some(verbs) => Engine::builder(verbs).rdma(Rdma::Require),
            None => {
                let (client, server) = self.tls.clone().unzip();
                Engine::system().rdma(Rdma::Forbid).tls(client, server)
            }
        }
    }
}

/// Makes every test of the suite a test of the calling target; or only those that are not about RDMA itself.
macro_rules! run_suite {
    ($run:path) => {
        run_suite!(over any transport: $run);
        mod rdma {
            use super::links::run_suite;
            run_suite!(@ $run, bare:
                messages_and_writes, closing_delivers_what_was_written, writes_beside, silence_is_golden,
                nobody_takes_them);
            run_suite!(@ $run, isolation:
                another_peers_window_is_out_of_reach, who_reaches_for_others_memory_is_turned_away,
                a_grant_is_good_on_its_link_only, given_up_before_it_is_bound);
            run_suite!(@ $run, drivers: memory_given_back_is_used);
            run_suite!(@ $run, engines: impossible_settings, send_memory_runs_out, statistics);
            run_suite!(@ $run, life: futures_outlive_their_engine);
            run_suite!(@ $run, pressure: receives_run_dry, pinned_memory_stays_within_its_limit);
            run_suite!(@ $run, manners:
                without_immediate_data, more_than_the_window, exactly_the_window, credits_for_nothing,
                credits_taken_back, unknown_control, no_such_channel, endless_message, endless_message_of_crumbs,
                answers_to_no_farewell, words_after_the_last, endless_questions, questions_are_answered,
                longer_than_a_segment, vanishes, never_gives_credit, ignores_a_revocation, revocations_without_end,
                babble);
            run_suite!(@ $run, meeting:
                strangers_are_handed_over, strangers_are_refused, other_versions_are_refused,
                malformed_hellos_are_refused, strange_answers, half_open, with_itself,
                listener_was_away);
            run_suite!(@ $run, one_sided: cannot_be_registered, forged_grants, ignored_revocation, owner_with_requests_under_way);
        }
    };
    (over any transport: $run:path) => {
        run_suite!(@ $run, drivers:
            tokio_on_several_threads, tokio_on_one_thread, on_threads, one_link_many_threads, foreign_loop,
            foreign_loop_by_edges, broken_off, idle_engines_sleep, threads_in_a_hurry);
        run_suite!(@ $run, engines:
            small_queues, nothing_inline, too_much_inline, idle_links_cost_nothing, receive_memory_runs_out,
            message_larger_than_the_memory, many_lives);
        run_suite!(@ $run, messages:
            of_every_size, larger_than_a_buffer, many_in_order, channels_keep_their_order, small_beside_large,
            small_while_large_fills_the_queue, wrong_calls, asked_again, outlive_their_engine);
        run_suite!(@ $run, pressure:
            nobody_takes, bytes_that_wait_are_counted, window_of_two, smallest_segments, senders_wait_for_room,
            many_small_parts);
        run_suite!(@ $run, storm: cancel_storm, storms_at_the_edge);
        run_suite!(@ $run, life:
            closing_delivers_what_was_sent, closing_waits_for_a_slow_receiver, dropping_closes, closed_links_are_gone,
            successors_live_their_own_time, revocation_is_no_farewell, closing_after_a_pause, closing_has_a_deadline,
            abort_ends_everything, half_a_message_is_none, dropped_engine, stalled_peer,
            idle_links_stay);
        run_suite!(@ $run, meeting:
            nobody_listens, nobody_there, nobody_answers, given_up, made_and_never_taken, dropped_listener,
            limit_of_links, fifty_at_once);
        run_suite!(@ $run, one_sided:
            reads, writes, notices, bounds_and_rights, revoke_idle, revoke_many, revoke_under_fire,
            revoke_has_a_deadline, expires, dropped_region, revoke_without_a_link, forgotten_operations);
    };
    (@ $run:path, $module:ident: $($test:ident),*) => {
        mod $module {
            $(#[test] fn $test() { $run(crate::links::$module::$test); })*
        }
    };
}
pub(crate) use run_suite;
