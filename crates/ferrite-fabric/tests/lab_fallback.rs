//! The fallback matrix on Soft-RoCE: {fault} × {prefer, require, forbid} × {cm, tcp-first}
//! (`cargo xtask lab-test fallback`).
//!
//! Each cell opens a link from 10.0.0.2 to 10.0.0.1 during a fault. Within the deadline, each
//! setting must have this result:
//!
//! - `prefer`: a link on TCP that reports its cause and is counted. If the test can end the fault,
//!   the link then upgrades to RDMA.
//! - `require`: an error of the right kind.
//! - `forbid`: a link on TCP without a fallback report.
//!
//! The last test, `queue_pair_error`, is different: its fault occurs on an open link.
#![expect(clippy::print_stdout, reason = "prints the matrix")]

use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use ferrite_fabric::mem::PoolConfig;
use ferrite_fabric::{
    Config, ConnectMode, ConnectOptions, ErrorKind, Fabric, FallbackCause, Link, ListenOptions,
    Rdma, Transport,
};
use ferrite_testkit::lab::{
    OWN, PEER, RecreateDevices, Restore, Wire, any_port, fault, sh, slowdown,
};
use ferrite_testkit::{until, within};

/// A failed attempt takes at most `connection_timeout` (2 s here) over RDMA, and as long over TCP.
const DEADLINE: Duration = Duration::from_secs(5);
/// The limit for the upgrade to RDMA, which waits for the next attempt or the next search for a
/// device.
const BACK_WITHIN: Duration = Duration::from_secs(20);
/// The environment variable that tells a child the address of the parent's listener.
const TARGET: &str = "FERRITE_TARGET";

fn config() -> Config {
    Config {
        connection_timeout: Duration::from_secs(2),
        upgrade_after: Duration::from_millis(300),
        ..Config::default()
    }
}

/// Starts a peer that echoes every message.
fn peer(rdma: Rdma) -> (Fabric, SocketAddr) {
    let fabric = Fabric::system().device(PEER.0).config(config()).build().expect("a fabric");
    fabric.spawn_thread().expect("a thread");
    let options = ListenOptions::new().rdma(rdma);
    let mut listener =
        fabric.listen_with("0.0.0.0:0".parse().expect("an address"), &options).expect("listen");
    let mut target = any_port(PEER);
    target.set_port(listener.local_addr().port());
    std::thread::spawn(move || {
        while let Ok(link) = within(Duration::from_secs(600), "a link", listener.accept()) {
            std::thread::spawn(move || echo(&link));
        }
    });
    (fabric, target)
}

fn echo(link: &Link) {
    while let Ok(message) = within(Duration::from_secs(600), "a message", link.recv()) {
        if within(Duration::from_secs(60), "an answer", link.send_bytes(0, &message.to_vec()))
            .is_err()
        {
            return;
        }
    }
}

fn check_echo(link: &Link, what: &str) {
    within(DEADLINE * slowdown(), what, async {
        link.send_bytes(0, what.as_bytes()).await.expect("sent");
        assert_eq!(link.recv().await.expect("an answer").to_vec(), what.as_bytes());
    });
}

/// Checks all cells of one fault. In the cells of `prefer`, `lift(true)` ends the fault and
/// `lift(false)` causes it again. `lift` returns false if the fault cannot be ended.
fn check_cells(
    name: &str,
    target: SocketAddr,
    config: &Config,
    causes: &[FallbackCause],
    kinds: &[ErrorKind],
    mut lift: impl FnMut(bool) -> bool,
) {
    for mode in [ConnectMode::Cm, ConnectMode::TcpFirst] {
        for rdma in [Rdma::Prefer, Rdma::Require, Rdma::Forbid] {
            let begun = Instant::now();
            let built = Fabric::system().device(OWN.0).rdma(rdma).config(config.clone()).build();
            let fabric = match built {
                Ok(fabric) => fabric,
                Err(error) => {
                    assert!(
                        rdma == Rdma::Require && kinds.contains(&error.kind()),
                        "{name} {rdma}: {error:?}"
                    );
                    println!(
                        "{name:18} {rdma:8} {mode:10} {:5.2?}  refused: {error}",
                        begun.elapsed()
                    );
                    continue;
                }
            };
            fabric.spawn_thread().expect("a thread");
            let options = ConnectOptions::new().local(any_port(OWN)).mode(mode);
            let opened = within(DEADLINE * slowdown(), name, fabric.connect_with(target, &options));
            let took = begun.elapsed();
            match (rdma, opened) {
                (Rdma::Prefer, Ok(link)) => {
                    check_echo(&link, "over TCP");
                    assert_eq!(link.transport(), Transport::Tcp, "{name} {mode}");
                    let fallback = link.fallback().expect("the fallback is reported");
                    assert!(
                        causes.contains(&fallback.cause),
                        "{name} {mode}: {:?} {fallback}",
                        fallback.cause
                    );
                    let counted: u64 =
                        fabric.stats().fallbacks.iter().map(|(_, count)| count).sum();
                    assert_eq!(counted, 1, "{name} {mode}");
                    let lifted = Instant::now();
                    let back = if lift(true) {
                        until(
                            BACK_WITHIN * slowdown(),
                            &format!("{name} {mode}: back on RDMA"),
                            || link.transport() == Transport::Rdma,
                        );
                        check_echo(&link, "over RDMA");
                        assert!(link.fallback().is_none(), "{name} {mode}");
                        let took = lifted.elapsed();
                        drop(link);
                        lift(false);
                        format!("back on RDMA after {took:.1?}")
                    } else {
                        "cannot be lifted under a running process".into()
                    };
                    println!(
                        "{name:18} {rdma:8} {mode:10} {took:5.2?}  TCP ({}); {back}: {fallback}",
                        fallback.cause
                    );
                }
                (Rdma::Require, Err(error)) => {
                    assert!(kinds.contains(&error.kind()), "{name} {mode}: {error:?}");
                    println!("{name:18} {rdma:8} {mode:10} {took:5.2?}  refused: {error}");
                }
                (Rdma::Forbid, Ok(link)) => {
                    check_echo(&link, "over TCP");
                    assert_eq!(link.transport(), Transport::Tcp, "{name} {mode}");
                    assert!(link.fallback().is_none(), "{name} {mode}");
                    println!("{name:18} {rdma:8} {mode:10} {took:5.2?}  TCP");
                }
                (rdma, opened) => panic!("{name} {rdma} {mode}: {opened:?}"),
            }
        }
    }
}

/// Returns the address of the parent's listener if this process is a child.
fn target() -> Option<SocketAddr> {
    std::env::var(TARGET).ok().map(|target| target.parse().expect("an address"))
}

/// Runs the test again in a child started by `wrapper`, with a peer in this process.
fn run_in_child(test: &str, wrapper: &[&str], as_nobody: bool) {
    let (_peer, addr) = peer(Rdma::Prefer);
    let mut child = Command::new(wrapper[0]);
    child.args(&wrapper[1..]).args(std::env::args().take(1)).args(["--exact", test, "--nocapture"]);
    if as_nobody {
        child.uid(65534).gid(65534);
    }
    let out = child.env(TARGET, addr.to_string()).output().expect("a child");
    println!("{}", String::from_utf8_lossy(&out.stdout));
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn no_library() {
    if let Some(target) = target() {
        return check_cells(
            "no library",
            target,
            &config(),
            &[FallbackCause::NoLibrary],
            &[ErrorKind::Absent],
            |_| false,
        );
    }
    let hide = "mount --bind /dev/null /usr/lib/x86_64-linux-gnu/libibverbs.so.1 && exec \"$@\"";
    run_in_child("no_library", &["unshare", "--mount", "sh", "-c", hide, "sh"], false);
}

#[test]
fn memlock() {
    if let Some(target) = target() {
        let memory = PoolConfig { memory_pool_initial: 32 << 20, ..PoolConfig::default() };
        let config = Config { memory, ..config() };
        return check_cells(
            "memlock",
            target,
            &config,
            &[FallbackCause::Resources],
            &[ErrorKind::Resources],
            |_| false,
        );
    }
    run_in_child("memlock", &["prlimit", "--memlock=8388608"], true);
}

#[test]
fn no_device() {
    let _restore =
        Restore("rdma link show rxe2/1 >/dev/null 2>&1 || rdma link add rxe2 type rxe netdev h2");
    sh("rdma link delete rxe2"); // before this process opens the device
    let (_peer, addr) = peer(Rdma::Prefer);
    let kinds = [ErrorKind::Absent, ErrorKind::DeviceGone];
    let causes = [FallbackCause::NoDevice, FallbackCause::DeviceGone];
    check_cells("no device", addr, &config(), &causes, &kinds, |_| false);
}

#[test]
fn port_down() {
    let _recreate = RecreateDevices;
    let (_peer, addr) = peer(Rdma::Prefer);
    let mut down = Some(fault(
        "ip link set h2 down",
        "ip link set h2 up; ip addr add 10.0.0.2/24 dev h2 2>/dev/null; true",
    ));
    let causes = [FallbackCause::PortDown, FallbackCause::Unreachable, FallbackCause::NoDevice];
    let kinds = [ErrorKind::Unreachable, ErrorKind::Timeout, ErrorKind::Absent];
    check_cells("port down", addr, &config(), &causes, &kinds, |lift| {
        down = (!lift).then(|| fault("ip link set h2 down", "ip link set h2 up"));
        true
    });
    drop(down);
}

#[test]
fn cm_refused() {
    let (_peer, addr) = peer(Rdma::Forbid);
    let kinds = [ErrorKind::Refused, ErrorKind::Unreachable];
    check_cells(
        "CM refused",
        addr,
        &config(),
        &[FallbackCause::Refused, FallbackCause::Unreachable],
        &kinds,
        |_| false,
    );
}

#[test]
fn packets_dropped() {
    let wire = Wire::new(&["h1"]);
    let (_peer, addr) = peer(Rdma::Prefer);
    wire.set("loss 100%");
    let kinds = [ErrorKind::Unreachable, ErrorKind::Timeout];
    check_cells(
        "UDP 4791 dropped",
        addr,
        &config(),
        &[FallbackCause::Unreachable],
        &kinds,
        |lift| {
            wire.set(if lift { "delay 0" } else { "loss 100%" });
            true
        },
    );
}

#[test]
fn peer_without_rdma() {
    let _restore =
        Restore("rdma link show rxe1/1 >/dev/null 2>&1 || rdma link add rxe1 type rxe netdev h1");
    let (peer, addr) = peer(Rdma::Prefer);
    let remove = || {
        let mut removal =
            Command::new("rdma").args(["link", "delete", PEER.0]).spawn().expect("rdma");
        until(BACK_WITHIN * slowdown(), "the removal ends", || {
            removal.try_wait().expect("a status").is_some()
        });
        until(BACK_WITHIN * slowdown(), "the peer has lost its device", || {
            !peer.missing_devices().is_empty()
        });
    };
    remove();
    let causes = [FallbackCause::Refused, FallbackCause::Unreachable, FallbackCause::NoDevice];
    let kinds = [ErrorKind::Refused, ErrorKind::Unreachable, ErrorKind::Timeout];
    check_cells("peer without RDMA", addr, &config(), &causes, &kinds, |lift| {
        if lift {
            sh("rdma link add rxe1 type rxe netdev h1");
        } else {
            remove();
        }
        true
    });
}

/// The link leaves RDMA while it is in use, as after an error of its queue pair. With `prefer`, it
/// continues over TCP and returns to RDMA. With `require`, it cannot leave RDMA. With `forbid`,
/// there is no queue pair to test.
#[test]
fn queue_pair_error() {
    let (_peer, addr) = peer(Rdma::Prefer);
    for mode in [ConnectMode::Cm, ConnectMode::TcpFirst] {
        for rdma in [Rdma::Prefer, Rdma::Require] {
            let fabric = Fabric::system()
                .device(OWN.0)
                .rdma(rdma)
                .config(config())
                .build()
                .expect("a fabric");
            fabric.spawn_thread().expect("a thread");
            let options = ConnectOptions::new().local(any_port(OWN)).mode(mode);
            let link = within(DEADLINE * slowdown(), "a link", fabric.connect_with(addr, &options))
                .expect("a link");
            assert_eq!(link.transport(), Transport::Rdma, "{rdma} {mode}");
            check_echo(&link, "at first");
            let begun = Instant::now();
            if rdma == Rdma::Require {
                assert!(!link.leave_rdma(), "{mode}: the link must not leave RDMA");
                println!("{:18} {rdma:8} {mode:10} stays on RDMA, or ends", "queue pair error");
                continue;
            }
            assert!(link.leave_rdma(), "{mode}");
            check_echo(&link, "without a queue pair");
            until(BACK_WITHIN * slowdown(), "back on RDMA", || link.transport() == Transport::Rdma);
            check_echo(&link, "on RDMA again");
            let counted: u64 = fabric.stats().fallbacks.iter().map(|(_, count)| count).sum();
            assert_eq!(counted, 1);
            println!(
                "{:18} {rdma:8} {mode:10} TCP, and back after {:.1?}",
                "queue pair error",
                begun.elapsed()
            );
        }
    }
}
