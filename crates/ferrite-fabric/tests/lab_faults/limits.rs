//! Limits of the host are reached: locked memory, queue pairs, memory regions, completion queues.

use std::os::unix::process::CommandExt;

use ferrite_fabric::mem::PoolConfig;
use ferrite_fabric::wire::{RefusalCode, Rights};
use ferrite_fabric::{Config, ConnectOptions, ErrorKind, Fabric, Link, Rdma};

use crate::harness::{
    Clean, HOSTS, Host, OWN, PEER, TEST_TIMEOUT, any_port, quick, until, verbs, within,
};
use crate::net::sh;
use crate::pair::{Pair, Peer, connect, show};
use crate::process::{Process, again, peer, role, serve_as_peer_after};
use crate::traffic::Traffic;

const NOBODY: u32 = 65534;
const MIB: usize = 1 << 20;

/// Root has CAP_IPC_LOCK, which lifts the limit: so as nobody.
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
            .expect_err("too much");
        show("memlock too small for the pool", &error);
        assert_eq!(error.kind(), ErrorKind::Resources, "{error:?}");
        assert!(error.to_string().contains("memlock is 8 MiB, 16 MiB needed"), "{error}");
        assert!(
            error.remedy().is_some_and(|remedy| remedy.contains("LimitMEMLOCK=infinity")),
            "{error}"
        );
        // With less it works.
        let config = Config { recv_queue_depth: 64, ..Config::default() };
        let fabric = Fabric::builder(&verbs())
            .rdma(Rdma::Require)
            .device(PEER.0)
            .config(config)
            .build()
            .expect("a fabric");
        // And says the same when the limit is met later.
        let mut taken = Vec::new();
        let error = loop {
            match fabric.buffer(2 * MIB) {
                Ok(buf) => taken.push(buf),
                Err(error) => break error,
            }
            assert!(taken.len() < 10, "the limit never comes");
        };
        show("memlock too small to grow", &error);
        assert_eq!(error.kind(), ErrorKind::Resources, "{error:?}");
        return;
    }
    let wrapper = ["prlimit", "--memlock=8388608"];
    let out = again("limits::memlock_too_small", "child", &wrapper)
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .expect("prlimit");
    println!("{}", String::from_utf8_lossy(&out.stdout));
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

/// A control group for a child. Its parent makes it, and removes it when the child is gone.
struct Group;

const GROUP: &str = "/sys/fs/cgroup/ferrite-faults";

impl Group {
    fn new() -> Self {
        sh(&format!("echo +rdma >/sys/fs/cgroup/cgroup.subtree_control && mkdir -p {GROUP}"));
        Self
    }

    /// In the child.
    fn join() {
        std::fs::write(format!("{GROUP}/cgroup.procs"), std::process::id().to_string())
            .expect("joined");
    }

    /// Lets it have so many objects on a device.
    fn limit(device: &str, objects: &str) {
        let limits = format!("{device} hca_handle=max hca_object={objects}");
        std::fs::write(format!("{GROUP}/rdma.max"), limits).expect("limited");
    }

    /// Lets it have `more` objects than it has now.
    fn allow(device: &str, more: u64) {
        let current = std::fs::read_to_string(format!("{GROUP}/rdma.current")).expect("current");
        // rxe1 hca_handle=1 hca_object=12
        let line = current.lines().find(|line| line.starts_with(device)).expect("the device");
        let objects = line.split_once("hca_object=").expect("a count").1.trim();
        let limit = objects.parse::<u64>().expect("a count") + more;
        Self::limit(device, &limit.to_string());
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Linux 6.1 keeps a limit that is set in a list of the device's, also when the group is
        // gone, and stumbles over it when the device is removed.
        for (device, _) in HOSTS {
            let none = format!("{device} hca_handle=max hca_object=max");
            let _ = std::fs::write(format!("{GROUP}/rdma.max"), none);
        }
        let _ = std::fs::remove_dir(GROUP);
    }
}

/// The role of a peer that may make so many objects beyond what its fabric has: a link takes a
/// queue pair and what it grants.
fn serve_with(objects: u64) {
    Group::join();
    // So much memory that it need not grow, which takes a region.
    let memory = PoolConfig { memory_pool_initial: 32 * MIB, ..PoolConfig::default() };
    serve_as_peer_after(Config { memory, ..quick() }, || Group::allow(PEER.0, objects));
}

/// A peer that has no queue pair left says so; the links that it has do not notice.
#[test]
fn queue_pairs_of_the_peer_exhausted() {
    if role().is_some() {
        return serve_with(4);
    }
    let (clean, _group) = (Clean::begin(), Group::new());
    let (process, addr) = peer("limits::queue_pairs_of_the_peer_exhausted");
    let own = Host::new(&[OWN.0], quick());
    let links = [(); 2].map(|()| connect(&own, addr).expect("a link"));
    let traffic = links.each_ref().map(Traffic::start);
    for _ in 0..3 {
        let error = connect(&own, addr).expect_err("no queue pair is left");
        show("the peer's queue pairs are exhausted", &error);
        assert_eq!(error.kind(), ErrorKind::Refused, "{error:?}");
        let refusal = error.refusal().expect("in our words");
        assert_eq!(refusal.code, RefusalCode::MEMORY, "{refusal:?}");
        assert!(refusal.text.contains("cgroup"), "{refusal:?}");
    }
    traffic.iter().for_each(|traffic| traffic.flows("on the links that there are"));
    // One goes, and another may come.
    let [first, second] = traffic;
    first.stop();
    let [gone, kept] = links;
    within(TEST_TIMEOUT, "closing", gone.close()).expect("closed in good order");
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
    clean.end();
}

/// The own side has no queue pair left: a connect says so, and the link that there is does not
/// notice. The same for memory to grant.
#[test]
fn own_objects_exhausted() {
    if let Some(target) = role() {
        Group::join();
        let own = Host::new(&[OWN.0], quick());
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
        traffic.flows("on the link that there is");
        traffic.stop();
        drop((buf, second, link));
        own.finish();
        return;
    }
    let (clean, _group) = (Clean::begin(), Group::new());
    let peer = Peer::start(quick());
    let process = Process::start("limits::own_objects_exhausted", &peer.addr.to_string());
    process.finish();
    assert!(peer.finish().iter().all(Result::is_ok), "closed in good order");
    clean.end();
}

/// No object at all: the fabric is not made, and says why.
#[test]
fn no_room_for_a_fabric() {
    if role().is_some() {
        Group::join();
        Group::limit(PEER.0, "3"); // a domain and a pool, but neither queue
        let error = Fabric::builder(&verbs())
            .rdma(Rdma::Require)
            .device(PEER.0)
            .build()
            .expect_err("no room");
        show("no room for a fabric", &error);
        assert_eq!(error.kind(), ErrorKind::Resources, "{error:?}");
        assert!(error.remedy().is_some_and(|remedy| remedy.contains("rdma.max")), "{error}");
        assert_eq!(ferrite_verbs::leaked_objects(), 0);
        return;
    }
    let (clean, _group) = (Clean::begin(), Group::new());
    Process::start("limits::no_room_for_a_fabric", "child").finish();
    clean.end();
}

/// A completion queue smaller than what the links could have under way: they take turns, and it
/// never overruns.
#[test]
fn completion_queue_too_small() {
    let small = || Config { cq_size: 40, recv_queue_depth: 16, ..quick() };
    let pair = Pair::start(small(), small());
    let options = ConnectOptions::new().local(any_port(OWN));
    let more: Vec<Link> = (0..3)
        .map(|_| {
            within(TEST_TIMEOUT, "a link", pair.own.fabric.connect_with(pair.peer.addr, &options))
                .expect("a link")
        })
        .collect();
    let traffic: Vec<Traffic> = more.iter().map(Traffic::start).collect();
    traffic.iter().for_each(|traffic| traffic.flows("on each link"));
    traffic.into_iter().for_each(Traffic::stop);
    drop(more);
    pair.survives("four links share 24 places of a completion queue");
}
