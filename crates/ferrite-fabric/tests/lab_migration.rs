//! Links that lose their RDMA path and continue, on Soft-RoCE devices in the lab's guest (`cargo
//! xtask lab-test migration`).
//!
//! The link is from 10.0.0.2 (rxe2 on h2) to 10.0.0.1 (rxe1 on h1), in one guest. TCP between the
//! two uses the guest's loopback, so that a fault of an interface or of a wire affects RDMA alone.
#![expect(clippy::print_stdout, reason = "people judge how long each fault took")]

mod migration {
    pub(crate) mod traffic;
}

use std::process::{Child, Command};
use std::time::{Duration, Instant};

use ferrite_fabric::{Config, ConnectOptions, Fabric, Link, Listener, Transport};
use ferrite_testkit::lab::{
    OWN, PEER, RecreateDevices, Restore, Wire, any_port, fault, sh, slowdown, verbs,
};
use ferrite_testkit::{Random, until, within};
use migration::traffic::Traffic;

/// Longer than any of these faults takes: the device's retries (about half a second) or the next
/// search for a device (4 s), then the upgrade back to RDMA.
const TEST_TIMEOUT: Duration = Duration::from_secs(40);

/// A link that can migrate, and its fabrics.
struct MigratingLink {
    fabrics: [Fabric; 2],
    links: [Link; 2],
    _listener: Listener,
}

fn config() -> Config {
    Config { upgrade_after: Duration::from_millis(200), ..Config::default() }
}

impl MigratingLink {
    fn new() -> Self {
        let verbs = verbs();
        let fabrics = [OWN, PEER].map(|(device, _)| {
            let fabric =
                Fabric::builder(&verbs).device(device).config(config()).build().expect("a fabric");
            fabric.spawn_thread().expect("a thread");
            fabric
        });
        // Listens on all addresses, so that the listener outlives its device.
        let mut listener =
            fabrics[1].listen("0.0.0.0:0".parse().expect("an address")).expect("listen");
        let mut to = any_port(PEER);
        to.set_port(listener.local_addr().port());
        let connecting = fabrics[0].connect_with(to, &ConnectOptions::new().local(any_port(OWN)));
        let both = async { futures_util::join!(connecting, listener.accept()) };
        let (a, b) = within(TEST_TIMEOUT, "a link", both);
        Self { fabrics, links: [a.expect("connect"), b.expect("accept")], _listener: listener }
    }

    /// Waits until both ends are on `transport`.
    #[track_caller]
    fn wait_until_on(&self, transport: Transport) {
        until(TEST_TIMEOUT * slowdown(), &format!("on {transport}"), || {
            let failures = [0, 1].map(|at| self.links[at].failure());
            assert!(failures.iter().all(Option::is_none), "{failures:?}");
            self.links.iter().all(|link| link.transport() == transport)
        });
    }
}

fn remove(device: &str) -> Child {
    Command::new("rdma").args(["link", "delete", device]).spawn().expect("rdma")
}

#[test]
fn migrates_on_request() {
    let pair = MigratingLink::new();
    pair.wait_until_on(Transport::Rdma);
    let traffic = Traffic::start(&pair.links, 1);
    for side in [0, 1, 0, 1] {
        traffic.wait_for(100, TEST_TIMEOUT, "on RDMA");
        assert!(pair.links[side].leave_rdma());
        traffic.wait_for(100, TEST_TIMEOUT, "without RDMA");
        pair.wait_until_on(Transport::Rdma);
    }
    traffic.stop();
}

#[test]
fn interface_down() {
    let _recreate = RecreateDevices;
    let pair = MigratingLink::new();
    let traffic = Traffic::start(&pair.links, 2);
    traffic.wait_for(100, TEST_TIMEOUT, "on RDMA");
    let down = fault("ip link set h1 down", "ip link set h1 up");
    pair.wait_until_on(Transport::Tcp);
    traffic.wait_for(300, TEST_TIMEOUT, "on TCP");
    let why = pair.links[0].fallback().expect("the fallback is reported");
    println!("{why}");
    drop(down);
    pair.wait_until_on(Transport::Rdma);
    traffic.wait_for(300, TEST_TIMEOUT, "on RDMA again");
    traffic.stop();
}

#[test]
fn device_removed_and_added() {
    let pair = MigratingLink::new();
    let traffic = Traffic::start(&pair.links, 3);
    for (device, netdev) in [(OWN.0, "h2"), (PEER.0, "h1")] {
        traffic.wait_for(100, TEST_TIMEOUT, "on RDMA");
        let mut removal = remove(device);
        pair.wait_until_on(Transport::Tcp);
        traffic.wait_for(100, TEST_TIMEOUT, "on TCP");
        until(TEST_TIMEOUT, "the removal ends", || removal.try_wait().expect("a status").is_some());
        sh(&format!("rdma link add {device} type rxe netdev {netdev}"));
        pair.wait_until_on(Transport::Rdma);
    }
    traffic.wait_for(100, TEST_TIMEOUT, "on RDMA again");
    traffic.stop();
}

/// Random faults under checked traffic: about 10 by default, 200 with `FERRITE_FAULTS=200`.
/// `FERRITE_SEED` replays them.
#[test]
fn random_faults() {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let seed = number("FERRITE_SEED").unwrap_or_else(|| u64::from(std::process::id()) | 1 << 20);
    let faults = number("FERRITE_FAULTS").unwrap_or(10 / u64::from(slowdown()).max(1) + 1);
    println!("FERRITE_SEED={seed} FERRITE_FAULTS={faults}");
    let mut random = Random::new(seed);
    let mut next = move |below: u64| random.below(below);
    let _recreate = RecreateDevices;
    let wire = Wire::new(&["h1"]);
    let _devices = Restore(
        "rdma link show rxe1/1 >/dev/null 2>&1 || rdma link add rxe1 type rxe netdev h1; \
         rdma link show rxe2/1 >/dev/null 2>&1 || rdma link add rxe2 type rxe netdev h2",
    );
    let pair = MigratingLink::new();
    let traffic = Traffic::start(&pair.links, seed);
    traffic.wait_for(100, TEST_TIMEOUT, "at first");
    let (begun, mut gaps) = (Instant::now(), Vec::new());
    for at in 0..faults {
        // Most faults occur while on RDMA, some during a migration.
        if next(4) > 0 {
            pair.wait_until_on(Transport::Rdma);
        }
        traffic.take_longest_gap();
        let side = next(2) as usize;
        let pause = Duration::from_millis(next(800));
        let kind = next(4);
        let what = match kind {
            0 => {
                pair.links[side].leave_rdma();
                "queue pair error"
            }
            1 => {
                wire.set("loss 100%");
                std::thread::sleep(pause);
                wire.set("delay 0");
                "black hole"
            }
            2 => {
                let down = if side == 0 {
                    fault("ip link set h1 down", "ip link set h1 up")
                } else {
                    fault("ip link set h2 down", "ip link set h2 up")
                };
                std::thread::sleep(pause);
                drop(down);
                "interface down"
            }
            _ => {
                let (device, netdev) = [(OWN.0, "h2"), (PEER.0, "h1")][side];
                let mut removal = remove(device);
                until(TEST_TIMEOUT, "the removal ends", || {
                    removal.try_wait().expect("a status").is_some()
                });
                std::thread::sleep(pause);
                sh(&format!("rdma link add {device} type rxe netdev {netdev}"));
                "device removed"
            }
        };
        traffic.wait_for(20, TEST_TIMEOUT * slowdown(), &format!("fault {at}, {what}"));
        let gap = traffic.take_longest_gap();
        println!("fault {at:3}: {what:16} for {pause:6.0?}: {gap:6.0?} without a message");
        gaps.push((gap, what));
    }
    pair.wait_until_on(Transport::Rdma);
    let counts = traffic.stop();
    gaps.sort();
    let (moves, upgrades) = (pair.links[0].stats().moves, pair.fabrics[0].stats().upgrades);
    println!(
        "{faults} faults in {:.0?}: {counts:?} messages, each once and in order; {moves} \
         migrations, {upgrades} upgrades; without a message: median {:.0?}, longest {:.0?} ({})",
        begun.elapsed(),
        gaps[gaps.len() / 2].0,
        gaps[gaps.len() - 1].0,
        gaps[gaps.len() - 1].1
    );
}
