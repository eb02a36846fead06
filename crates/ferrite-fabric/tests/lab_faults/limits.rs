//! The host's limits are reached: locked memory, queue pairs, memory regions, completion queues.

use std::os::unix::process::CommandExt;

use ferrite_fabric::mem::PoolConfig;
use ferrite_fabric::wire::{RefusalCode, Rights};
use ferrite_fabric::{Config, ConnectOptions, ErrorKind, Fabric, Link, Rdma};
use ferrite_testkit::lab::{
    HOSTS, Host, LeakCheck, OWN, PEER, TEST_TIMEOUT, any_port, sh, short_timeouts, verbs,
};
use ferrite_testkit::process::{PeerProcess, rerun_as, role};
use ferrite_testkit::{until, within};

use crate::pair::{Pair, Peer, connect, show};
use crate::process::{peer, serve_as_peer_after};
use crate::traffic::Traffic;

const NOBODY: u32 = 65534;
const MIB: usize = 1 << 20;

/// The child runs as nobody, because root has CAP_IPC_LOCK, which lifts the limit.
#[test]
fn memlock_too_small() {
    if role().is_some() {
        let memory = PoolConfig { memory_pool_initial: 32 * MIB, ..PoolConfig::default() };
        let config = Config { memory, ..Config::default() };
        let error = Fabric::builder(&verbs())
            .rdma(Rdma::Require)
            .device(PEER.0)
            .config(config)
            .build()
            .expect_err("the pool exceeds memlock");
        show("memlock too small for the pool", &error);
        assert_eq!(error.kind(), ErrorKind::Resources, "{error:?}");
        assert!(
            error.to_string().contains("limit is 8 MiB, but 16 MiB more are needed"),
            "{error}"
        );
        assert!(
            error.remedy().is_some_and(|remedy| remedy.contains("LimitMEMLOCK=infinity")),
            "{error}"
        );
        // A fabric with fewer receives needs less memory.
        let config = Config { recv_queue_depth: 64, ..Config::default() };
        let fabric = Fabric::builder(&verbs())
            .rdma(Rdma::Require)
            .device(PEER.0)
            .config(config)
            .build()
            .expect("a fabric");
        // The error has the same kind when the limit is reached later.
        let mut taken = Vec::new();
        let error = loop {
            match fabric.buffer(2 * MIB) {
                Ok(buf) => taken.push(buf),
                Err(error) => break error,
            }
            assert!(taken.len() < 10, "the limit is never reached");
        };
        show("memlock too small to grow", &error);
        assert_eq!(error.kind(), ErrorKind::Resources, "{error:?}");
        return;
    }
    let wrapper = ["prlimit", "--memlock=8388608"];
    let out = rerun_as("limits::memlock_too_small", "child", &wrapper)
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .expect("prlimit");
    println!("{}", String::from_utf8_lossy(&out.stdout));
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

/// A control group for a child. The parent creates it, and removes it when the child is gone.
struct Group;

const GROUP: &str = "/sys/fs/cgroup/ferrite-faults";

impl Group {
    fn new() -> Self {
        sh(&format!("echo +rdma >/sys/fs/cgroup/cgroup.subtree_control && mkdir -p {GROUP}"));
        Self
    }

    /// Moves this process, the child, into the group.
    fn join() {
        std::fs::write(format!("{GROUP}/cgroup.procs"), std::process::id().to_string())
            .expect("join the group");
    }

    /// Limits the number of objects on a device.
    fn limit(device: &str, objects: &str) {
        let limits = format!("{device} hca_handle=max hca_object={objects}");
        std::fs::write(format!("{GROUP}/rdma.max"), limits).expect("set the limit");
    }

    /// Allows `more` objects than there are now.
    fn allow(device: &str, more: u64) {
        let current =
            std::fs::read_to_string(format!("{GROUP}/rdma.current")).expect("rdma.current");
        // An example of a line: rxe1 hca_handle=1 hca_object=12
        let line = current.lines().find(|line| line.starts_with(device)).expect("the device");
        let objects = line.split_once("hca_object=").expect("a count").1.trim();
        let limit = objects.parse::<u64>().expect("a count") + more;
        Self::limit(device, &limit.to_string());
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Linux 6.1 keeps the limit in a list of the device after the group is gone, and fails when
        // the device is removed. So this lifts the limit first.
        for (device, _) in HOSTS {
            let none = format!("{device} hca_handle=max hca_object=max");
            let _ = std::fs::write(format!("{GROUP}/rdma.max"), none);
        }
        let _ = std::fs::remove_dir(GROUP);
    }
}

/// Plays a peer that may create `objects` more objects than its fabric has. Each link takes two of
/// them: a queue pair, and a memory region for its grant.
fn serve_with_objects(objects: u64) {
    Group::join();
    // Enough memory that the pool need not grow, which would take a region.
    let memory = PoolConfig { memory_pool_initial: 32 * MIB, ..PoolConfig::default() };
    serve_as_peer_after(Config { memory, ..short_timeouts() }, || Group::allow(PEER.0, objects));
}

/// A peer without free queue pairs says so in its refusal. Its existing links are not affected.
#[test]
fn peer_queue_pairs_exhausted() {
    if role().is_some() {
        return serve_with_objects(4);
    }
    let (leak_check, _group) = (LeakCheck::begin(), Group::new());
    let (process, addr) = peer("limits::peer_queue_pairs_exhausted");
    let own = Host::new(&[OWN.0], short_timeouts());
    let links = [(); 2].map(|()| connect(&own, addr).expect("a link"));
    let traffic = links.each_ref().map(Traffic::start);
    for _ in 0..3 {
        let error = connect(&own, addr).expect_err("no queue pair is left");
        show("the peer's queue pairs are exhausted", &error);
        assert_eq!(error.kind(), ErrorKind::Refused, "{error:?}");
        let refusal = error.refusal().expect("a Ferrite refusal");
        assert_eq!(refusal.code, RefusalCode::MEMORY, "{refusal:?}");
        assert!(refusal.text.contains("cgroup"), "{refusal:?}");
    }
    traffic.iter().for_each(|traffic| traffic.check_progress("on the existing links"));
    // When one link is gone, another can be made.
    let [first, second] = traffic;
    first.stop();
    let [gone, kept] = links;
    within(TEST_TIMEOUT, "closing", gone.close()).expect("closed cleanly");
    drop(gone);
    let mut link = None;
    until(TEST_TIMEOUT, "another link", || {
        link = connect(&own, addr).ok();
        link.is_some()
    });
    second.stop();
    drop((link, kept));
    own.finish();
    process.finish();
    leak_check.end();
}

/// The local side has no queue pairs left. A connect reports that, and the existing link is not
/// affected. The same holds for memory regions.
#[test]
fn own_objects_exhausted() {
    if let Some(target) = role() {
        Group::join();
        let own = Host::new(&[OWN.0], short_timeouts());
        let target = target.parse().expect("an address");
        let link = connect(&own, target).expect("a link");
        let traffic = Traffic::start(&link);
        Group::allow(OWN.0, 1);
        let second = connect(&own, target).expect("the last queue pair");
        let error = connect(&own, target).expect_err("no queue pair is left");
        show("no queue pair is left", &error);
        assert_eq!(error.kind(), ErrorKind::Resources, "{error:?}");
        assert!(error.remedy().is_some_and(|remedy| remedy.contains("rdma.max")), "{error}");
        let buf = own.fabric.buffer(4096).expect("a buffer");
        let (buf, error) = link.register_memory(buf, Rights::READ).expect_err("no region is left");
        show("no memory region is left", &error);
        assert_eq!((error.kind(), buf.len()), (ErrorKind::Resources, 4096), "{error:?}");
        traffic.check_progress("on the existing link");
        traffic.stop();
        drop((buf, second, link));
        own.finish();
        return;
    }
    let (leak_check, _group) = (LeakCheck::begin(), Group::new());
    let peer = Peer::start(short_timeouts());
    let process = PeerProcess::start("limits::own_objects_exhausted", &peer.addr.to_string());
    process.finish();
    assert!(peer.finish().iter().all(Result::is_ok), "a link did not close cleanly");
    leak_check.end();
}

/// Without enough objects the fabric cannot be built, and reports why.
#[test]
fn no_room_for_a_fabric() {
    if role().is_some() {
        Group::join();
        Group::limit(PEER.0, "3"); // enough for a domain and a pool, but not for a queue
        let error = Fabric::builder(&verbs())
            .rdma(Rdma::Require)
            .device(PEER.0)
            .build()
            .expect_err("the fabric cannot be built");
        show("no objects for a fabric", &error);
        assert_eq!(error.kind(), ErrorKind::Resources, "{error:?}");
        assert!(error.remedy().is_some_and(|remedy| remedy.contains("rdma.max")), "{error}");
        assert_eq!(ferrite_verbs::leaked_objects(), 0);
        return;
    }
    let (leak_check, _group) = (LeakCheck::begin(), Group::new());
    PeerProcess::start("limits::no_room_for_a_fabric", "child").finish();
    leak_check.end();
}

/// The completion queue is smaller than the number of requests that the links could have in flight.
/// The links take turns, and the queue never overruns.
#[test]
fn completion_queue_too_small() {
    let small = || Config { cq_size: 40, recv_queue_depth: 16, ..short_timeouts() };
    let pair = Pair::start(small(), small());
    let options = ConnectOptions::new().local(any_port(OWN));
    let more: Vec<Link> = (0..3)
        .map(|_| {
            within(TEST_TIMEOUT, "a link", pair.own.fabric.connect_with(pair.peer.addr, &options))
                .expect("a link")
        })
        .collect();
    let traffic: Vec<Traffic> = more.iter().map(Traffic::start).collect();
    traffic.iter().for_each(|traffic| traffic.check_progress("on each link"));
    traffic.into_iter().for_each(Traffic::stop);
    drop(more);
    pair.survives("four links share 24 entries of a completion queue");
}
