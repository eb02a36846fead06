//! Clients that make the module store commands or replies: the engine's limits apply.

use std::time::Duration;

use ferrite_testkit::Engine;
use ferrite_testkit::process::rss_bytes;
use ferrite_testkit::resp::Client;

use crate::client::of_module;
use crate::{address, on_each};

/// Returns the resident memory of the engine's process in MiB.
fn rss_mib(server: &Engine) -> u64 {
    rss_bytes(server.pid()) >> 20
}

/// The module stores few commands of a client that has not authenticated and reads nothing. It once
/// stored all of them.
#[test]
fn a_client_that_never_authenticates_is_not_read_without_end() {
    on_each(&["--requirepass", "x"], |server| {
        let mut admin = server.client();
        admin.ok(&["AUTH", "x"]);
        let mut client = Client::to_tcp(address(&mut admin));
        let before = rss_mib(server);
        let batch = b"*1\r\n$4\r\nPING\r\n".repeat(4096);
        let mut sent = 0;
        while sent < 64 << 20 && client.write_within(&batch, Duration::from_millis(500)) {
            sent += batch.len();
        }
        assert!(sent < 32 << 20, "the module read {sent} bytes");
        let grown = rss_mib(server).saturating_sub(before);
        assert!(grown <= 8, "the engine uses {grown} MiB more memory");
    });
}

/// The module disconnects a client whose unread replies exceed client-output-buffer-limit. It once
/// stored them all.
#[test]
fn a_client_over_the_output_limit_is_disconnected() {
    on_each(&["--client-output-buffer-limit", "normal 1mb 1mb 1"], |server| {
        let mut admin = server.client();
        let values = vec!["x".repeat(1000); 4000];
        let words: Vec<_> =
            ["RPUSH", "l"].into_iter().chain(values.iter().map(String::as_str)).collect();
        admin.ask(&words);
        let before = rss_mib(server);
        let mut client = of_module(server);
        client.send(&vec![vec!["LRANGE", "l", "0", "-1"]; 60]);
        server.wait_until("the end of the session", || server.count("sessions") == 0);
        let grown = rss_mib(server).saturating_sub(before);
        assert!(grown <= 32, "the engine uses {grown} MiB more memory");
        assert_eq!(admin.ask(&["PING"]), "+PONG");
    });
}

/// Clients that are disconnected again and again for the same reason do not fill the log.
#[test]
fn clients_over_the_output_limit_do_not_fill_the_log() {
    on_each(&["--client-output-buffer-limit", "normal 1mb 1mb 1"], |server| {
        of_module(server).ok(&["SET", "k", &"x".repeat(1 << 20)]);
        for _ in 0..5 {
            let mut client = of_module(server);
            client.send(&vec![vec!["GETRANGE", "k", "0", "-1"]; 60]);
            server.wait_until("the end of the session", || server.count("sessions") == 0);
        }
        let lines = server.log().matches("over the hard client-output-buffer-limit").count();
        assert_eq!(lines, 1, "{}", server.log());
    });
}

/// A client that stays above the soft limit for too long is disconnected, and the log says so.
#[test]
fn a_client_over_the_soft_limit_is_disconnected_in_time() {
    on_each(&["--client-output-buffer-limit", "normal 0 1mb 1"], |server| {
        let mut client = of_module(server);
        client.ok(&["SET", "k", &"x".repeat(1 << 20)]);
        client.send(&vec![vec!["GETRANGE", "k", "0", "-1"]; 20]);
        server.wait_until("the end of the session", || server.count("sessions") == 0);
        let log = server.log();
        assert_eq!(log.matches("over the soft client-output-buffer-limit").count(), 1, "{log}");
        assert!(!log.contains(" with 0 unread bytes"), "{log}");
    });
}

/// `maxmemory-clients` limits the replies of all sessions together. Beyond this limit, the module
/// ends the sessions with the most unread replies, and counts each once.
#[test]
fn evicts_the_largest_sessions_beyond_maxmemory_clients() {
    on_each(&["--maxmemory-clients", "8mb"], |server| {
        let mut small = of_module(server);
        small.ok(&["SET", "k", &"x".repeat(1 << 20)]);
        // Each of these clients exceeds the limit alone, whatever its socket buffers hold.
        let mut large: Vec<_> = (0..4).map(|_| of_module(server)).collect();
        large
            .iter_mut()
            .for_each(|client| client.send(&vec![vec!["GETRANGE", "k", "0", "-1"]; 60]));
        server.wait_until("only one session is left", || server.count("sessions") == 1);
        assert_eq!(server.count("sessions_evicted"), 4);
        assert_eq!(small.ask(&["PING"]), "+PONG");
    });
}

/// A client may send a long pipeline before it reads, as at the engine's own port.
#[test]
fn a_client_may_send_all_before_it_reads() {
    on_each(&[], |server| {
        let mut client = of_module(server);
        client.ok(&["SET", "k", &"x".repeat(10_000)]);
        let count = 10_000;
        client.send(&vec![vec!["GETRANGE", "k", "0", "-1"]; count]);
        assert!(client.replies(count).iter().all(|reply| reply.len() == 10_010));
    });
}

/// A slow reader uses memory only for the replies that it has not read yet.
#[test]
fn replies_that_were_read_use_no_memory() {
    on_each(&[], |server| {
        let mut client = of_module(server);
        client.ok(&["SET", "k", &"x".repeat(1 << 20)]);
        let get = ["GETRANGE", "k", "0", "-1"];
        // From now on some replies are always unread.
        client.send(&vec![get.to_vec(); 20]);
        client.next_reply().expect("a reply");
        let before = rss_mib(server);
        for _ in 0..100 {
            client.send(&[get.to_vec()]);
            assert_eq!(client.next_reply().map(|reply| reply.len()), Some((1 << 20) + 12));
        }
        let grown = rss_mib(server).saturating_sub(before);
        assert!(grown < 60, "the engine uses {grown} MiB more memory after 100 MiB were read");
    });
}
