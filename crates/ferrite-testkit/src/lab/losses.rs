//! Losses of the RDMA path between the hosts, under numbered commands of sessions.
#![expect(clippy::print_stdout, reason = "people judge how long each loss took")]

use std::process::Command;
use std::time::{Duration, Instant};

use super::{OWN, PEER, RecreateDevices, Restore, TEST_TIMEOUT, Wire, sh, slowdown};
use crate::numbered::{Gaps, NumberedCommands};
use crate::process::exit_within;
use crate::wait::until_async;

/// The longest time without a reply, and the longest time until a session is back on RDMA after the
/// path has returned. Even a busy machine stays below both, so that a test does not depend on the
/// machine's speed.
const GAP_MAX: Duration = Duration::from_secs(10);
const BACK_MAX: Duration = Duration::from_secs(10);
/// The longest time without a reply on a quiet machine. Checked if `FERRITE_LOSSES_STRICT` is set.
const STRICT_GAP_MAX: Duration = Duration::from_secs(2);

/// The transport of sessions, as a test sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UsedTransport {
    /// All sessions use RDMA.
    Rdma,
    /// All sessions use TCP.
    Tcp,
    /// Some use RDMA and others TCP.
    Both,
}

/// Returns the address and the transport of each session, as the module in `engine` lists them.
///
/// # Panics
/// If the module's reply is not such a list.
#[cfg(feature = "redis")]
#[must_use]
pub fn module_sessions(engine: &crate::Engine) -> Vec<(String, String)> {
    let lines: String = engine.client().ask(&["FERRITE", "CLIENTS"]);
    let field = |line: &str, name: &str| {
        let mut values = line.split(' ').filter_map(|field| field.strip_prefix(name));
        values.next().expect("the field").to_owned()
    };
    let sessions = lines.lines().filter(|line| line.starts_with("id="));
    sessions.map(|line| (field(line, "addr="), field(line, "transport="))).collect()
}

impl UsedTransport {
    /// Returns the transport of sessions that the module lists with these names.
    #[must_use]
    pub fn of_module_sessions(sessions: &[(String, String)]) -> Self {
        match sessions.iter().filter(|(_, transport)| transport == "rdma-ferrite").count() {
            all if all == sessions.len() => Self::Rdma,
            0 if sessions.iter().all(|(_, transport)| transport == "tcp") => Self::Tcp,
            _ => Self::Both,
        }
    }
}

/// Loses the RDMA path again and again while the sessions run commands, and prints how long the
/// sessions had no reply. `FERRITE_LOSSES` sets the number of losses. With `FERRITE_LOSSES_STRICT`,
/// which needs a quiet machine, the sessions must have replies again within 2 s.
///
/// # Panics
/// If a command fails or has the wrong reply, or if a session takes too long to change.
pub async fn lose_paths(
    commands: NumberedCommands,
    used_transport: impl Fn() -> UsedTransport,
    server: &str,
) {
    let losses = std::env::var("FERRITE_LOSSES").ok().and_then(|losses| losses.parse().ok());
    let losses: usize = losses.unwrap_or(4);
    let _recreate = RecreateDevices;
    let wire = Wire::new(&["h1", "h2"]);
    let _devices = Restore(
        "rdma link show rxe1/1 >/dev/null 2>&1 || rdma link add rxe1 type rxe netdev h1; \
         rdma link show rxe2/1 >/dev/null 2>&1 || rdma link add rxe2 type rxe netdev h2",
    );
    let on = async |wanted: UsedTransport, what: &str| {
        until_async(&format!("{what}: all sessions on {wanted:?}"), async || {
            used_transport() == wanted
        })
        .await;
    };
    on(UsedTransport::Rdma, "at first").await;
    commands.wait_for(50, "at first").await;
    let (mut to_tcp, mut back, mut returns) = (Gaps::default(), Gaps::default(), Gaps::default());
    for loss in 0..losses {
        let (device, netdev) = [(OWN.0, "h2"), (PEER.0, "h1")][loss / 3 % 2];
        let what = ["packets lost", "interface down", "device removed"][loss % 3];
        let what = format!("loss {loss}, {what} ({device})");
        let _ = commands.take_longest_gap();
        match loss % 3 {
            0 => wire.set("loss 100%"),
            1 => sh(&format!("ip link set {netdev} down")),
            _ => {
                let removal = Command::new("rdma").args(["link", "delete", device]).spawn();
                let mut removal = removal.expect("rdma");
                on(UsedTransport::Tcp, &what).await;
                exit_within(&mut removal, TEST_TIMEOUT).expect("the removal ends");
            }
        }
        on(UsedTransport::Tcp, &what).await;
        commands.wait_for(20, &what).await;
        let gap_to_tcp = commands.take_longest_gap();
        match loss % 3 {
            0 => wire.set("delay 0"),
            1 => sh(&format!("ip link set {netdev} up")),
            _ => sh(&format!("rdma link add {device} type rxe netdev {netdev}")),
        }
        let restored = Instant::now();
        on(UsedTransport::Rdma, &what).await;
        let returned = restored.elapsed();
        commands.wait_for(20, &what).await;
        let gap_back = commands.take_longest_gap();
        println!(
            "{what}: {gap_to_tcp:.0?} without a reply; back on RDMA after {returned:.0?}, with \
             {gap_back:.0?} without a reply"
        );
        to_tcp.add(gap_to_tcp);
        back.add(gap_back);
        returns.add(returned);
    }
    let replies = commands.stop().await;
    println!(
        "{server}: {losses} losses, {replies} replies, each once and in order. Without a reply: to \
         TCP median {:.0?}, longest {:.0?}; to RDMA median {:.0?}, longest {:.0?}. Back on RDMA: \
         median {:.0?}, longest {:.0?}",
        to_tcp.median(),
        to_tcp.longest(),
        back.median(),
        back.longest(),
        returns.median(),
        returns.longest()
    );
    let limit = |limit: Duration| limit * slowdown();
    let is_strict = std::env::var_os("FERRITE_LOSSES_STRICT").is_some();
    let gap = limit(if is_strict { STRICT_GAP_MAX } else { GAP_MAX });
    assert!(to_tcp.longest() <= gap, "no reply on the way to TCP for {:?}", to_tcp.longest());
    assert!(back.longest() <= gap, "no reply on the way back to RDMA for {:?}", back.longest());
    assert!(returns.longest() <= limit(BACK_MAX), "back on RDMA after {:?}", returns.longest());
}
