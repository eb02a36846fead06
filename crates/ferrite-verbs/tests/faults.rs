//! Faults on Soft-RoCE (`cargo xtask lab-test faults`). A fault must be reported in time and with a
//! typed error. A fault that the device can repair, such as a lost packet, must only delay the
//! requests.
//!
//! The table of faults in lab/README.md lists them. Most tests break the guest's network with an
//! operator's tools (ip, tc, rdma). They repair the network at the end, even if they fail.
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::lab;
use crate::process::{connect_and_wait, rerun_test};
use crate::suite::pair::{End, Mode, Pair, PairConfig, Parts, params, pattern};
use crate::suite::{Host, TIMEOUT};
use ferrite_testkit::lab::{Restore, fault, sh};
use ferrite_testkit::process::{KillOnDrop, role};
use ferrite_verbs::cm::{self, Listener};
use ferrite_verbs::{
    Access, AsyncEventKind, CmEventKind, ConnectionRequest, Error, ErrorKind, QueuePairConfig,
    SendRequest, State, Status, Subject,
};

/// Writes until a write fails, and returns the status and the time since the fault.
fn write_until_failure(from: &End, to: &End, since: Instant) -> (Status, Duration) {
    let local = [from.region.sge(0..64)];
    loop {
        from.post(SendRequest::write(1, &local, to.region.remote(0..64)).signaled());
        let done = from.reap(Mode::Event);
        if done.status() != Status::SUCCESS {
            return (done.status(), since.elapsed());
        }
        assert!(since.elapsed() < TIMEOUT, "writes still succeed");
    }
}

/// Connects a pair, checks that the pair works, and causes a fault. Returns the pair, the first
/// failed status that the connecting side (10.0.0.2) gets, the time since the fault, and a guard
/// that repairs the fault when it is dropped.
fn status_under(cause: &str, repair: &'static str) -> (Pair, Status, Duration, Restore) {
    let pair = Pair::new(&lab());
    let [to, from] = &pair.ends;
    from.post(SendRequest::write(1, &[from.region.sge(0..64)], to.region.remote(0..64)).signaled());
    assert_eq!(from.reap(Mode::Event).status(), Status::SUCCESS);
    let repair = fault(cause, repair);
    let (status, after) = write_until_failure(from, to, Instant::now());
    assert_eq!(from.qp.state().unwrap(), State::ERROR);
    (pair, status, after, repair)
}

fn expect_async(end: &End, kind: AsyncEventKind) -> Subject {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let event = end
            .context
            .wait_async_event(deadline.saturating_duration_since(Instant::now()))
            .unwrap();
        let event = event.unwrap_or_else(|| panic!("no event: {kind}"));
        if event.kind == kind {
            return event.subject;
        }
    }
}

#[test]
fn peer_netdev_down() {
    let (pair, status, after, repair) = status_under("ip link set h1 down", "ip link set h1 up");
    assert_eq!(status, Status::RETRY_EXCEEDED, "after {after:?}");
    assert_eq!(expect_async(&pair.ends[0], AsyncEventKind::PORT_ERROR), Subject::Port(1));
    let absence = pair.ends[0].context.active_port().unwrap_err();
    assert!(
        matches!(absence.absence(), Some(ferrite_verbs::Absence::PortDown { .. })),
        "{absence}"
    );
    assert!(absence.remedy().unwrap().contains("ip link set"), "{absence}");
    drop(repair);
    assert_eq!(expect_async(&pair.ends[0], AsyncEventKind::PORT_ACTIVE), Subject::Port(1));
}

#[test]
fn own_netdev_down() {
    let (pair, status, after, _fault) = status_under("ip link set h2 down", "ip link set h2 up");
    let local = [Status::LOCAL_QP_OPERATION, Status::FLUSHED, Status::RETRY_EXCEEDED];
    assert!(local.contains(&status), "{status} after {after:?}");
    assert_eq!(expect_async(&pair.ends[1], AsyncEventKind::PORT_ERROR), Subject::Port(1));
}

#[test]
fn carrier_lost() {
    let (_pair, status, after, _fault) = status_under("ip link set p1 down", "ip link set p1 up");
    assert_eq!(status, Status::RETRY_EXCEEDED, "after {after:?}");
}

/// Drops packets from 10.0.0.1 on the bridge's port `p2`, not at the sender (`h1`). A queueing
/// discipline on `h1` could make a send fail, even just while it is being installed. Then the queue
/// pair of the connection manager could fail, and would stay in error.
const BLACK_HOLE: &str = "tc qdisc add dev p2 root netem loss 100%";
const NO_BLACK_HOLE: &str = "tc qdisc del dev p2 root";

#[test]
fn black_hole() {
    let (_pair, status, after, _fault) = status_under(BLACK_HOLE, NO_BLACK_HOLE);
    assert_eq!(status, Status::RETRY_EXCEEDED, "after {after:?}");
}

#[test]
fn peer_address_removed() {
    let (_pair, status, after, _fault) =
        status_under("ip addr del 10.0.0.1/24 dev h1", "ip addr add 10.0.0.1/24 dev h1");
    assert_eq!(status, Status::RETRY_EXCEEDED, "after {after:?}");
}

/// Lost, late, reordered, duplicated or corrupted packets only increase the latency.
#[test]
fn bad_wire_only_slows_writes() {
    // The ack timeout of 268 ms is longer than the delays here. With 7 retries, Soft-RoCE resends
    // for ever.
    let mut pair =
        Pair::with(&lab(), &PairConfig { retries: 7, ack_timeout: 16, ..Default::default() });
    for netem in
        ["loss 5%", "delay 20ms", "delay 20ms reorder 25% 50%", "duplicate 20%", "corrupt 5%"]
    {
        let _fault = fault(&format!("tc qdisc add dev p2 root netem {netem}"), NO_BLACK_HOLE);
        write_and_compare(&mut pair, 20, netem);
    }
}

/// A short outage only delays the writes, because the device resends them.
#[test]
fn short_outage_only_delays_writes() {
    let mut pair =
        Pair::with(&lab(), &PairConfig { retries: 7, ack_timeout: 16, ..Default::default() });
    let _up = Restore("ip link set h1 up");
    let outage = std::thread::spawn(|| sh("ip link set h1 down; sleep 0.1; ip link set h1 up"));
    while !outage.is_finished() {
        write_and_compare(&mut pair, 1, "during the outage");
    }
    outage.join().unwrap();
    write_and_compare(&mut pair, 20, "after the outage");
}

/// Writes `count` times from 10.0.0.2 to 10.0.0.1, and checks the received bytes.
fn write_and_compare(pair: &mut Pair, count: u8, during: &str) {
    let [to, from] = &mut pair.ends;
    for at in 0..count {
        // The bytes differ each time, so the compared bytes must come from this write.
        let bytes = pattern(at.wrapping_add(to.region.load(0)).wrapping_add(1), 64);
        from.region.write(0, &bytes);
        from.post(
            SendRequest::write(1, &[from.region.sge(0..64)], to.region.remote(0..64)).signaled(),
        );
        assert_eq!(from.reap(Mode::Event).status(), Status::SUCCESS, "write {at}, {during}");
        assert_eq!(to.region.to_vec(0, 64), bytes, "write {at}, {during}");
    }
}

/// The kernel would wait for more than a minute. The caller's deadline ends the attempt earlier.
#[test]
fn connect_times_out_in_a_black_hole() {
    let fixture = lab();
    let [host, peer] = &fixture.hosts;
    let listener = Listener::bind(&fixture.verbs, host.any_port(), 4).unwrap();
    let target = listener.id().local_addr().unwrap();
    let id = cm::resolve(&fixture.verbs, Some(peer.any_port()), target, TIMEOUT).unwrap();
    let parts = Parts::new(&fixture, peer, &PairConfig::default());
    let _fault = fault(BLACK_HOLE, NO_BLACK_HOLE);
    let start = Instant::now();
    let deadline = Duration::from_secs(2);
    let error =
        cm::connect(&id, &parts.qp, Access::LOCAL, &params(&PairConfig::default()), deadline)
            .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(error.to_string().contains("did not answer in time"), "{error}");
    assert!(start.elapsed() < deadline + Duration::from_secs(5), "took {:?}", start.elapsed());
}

#[test]
fn resolving_an_unused_address_fails() {
    let fixture = lab();
    let target = Host::new("none", "10.0.0.77").any_port();
    let local = Some(fixture.hosts[1].any_port());
    let error = cm::resolve(&fixture.verbs, local, target, Duration::from_secs(8)).unwrap_err();
    assert!([ErrorKind::NoRoute, ErrorKind::Timeout].contains(&error.kind()), "{error:?}");
    assert!(error.to_string().contains("10.0.0.77"), "{error}");
}

/// The kernel notifies the owners of CM identifiers on the device. It removes a Soft-RoCE device
/// only when the last user has released it. So the removal finishes when the program has dropped
/// all objects on the device. (If a driver can remove its device at once, the kernel also raises
/// the async event DEVICE_FATAL.)
#[test]
fn device_removed() {
    let pair = Pair::new(&lab());
    let [to, from] = pair.ends;
    from.receive_into(1, 0..64);
    let mut removal =
        KillOnDrop(Command::new("rdma").args(["link", "delete", "rxe2"]).spawn().unwrap());
    let _repair =
        Restore("rdma link show rxe2/1 >/dev/null 2>&1 || rdma link add rxe2 type rxe netdev h2");
    let event = from.id.channel().wait_event(TIMEOUT).unwrap().expect("an event");
    assert_eq!((event.kind, event.id), (CmEventKind::DEVICE_REMOVAL, from.id.key()));
    let target = from.region.remote(0..64);
    drop(from);
    assert!(removal.0.wait().unwrap().success());
    assert_eq!(ferrite_verbs::leaked_objects(), 0, "everything could be released");
    let error = lab().verbs.device("rxe2").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeviceGone, "{error:?}");
    // The peer detects the removal with its next write at the latest.
    to.post(SendRequest::write(1, &[to.region.sge(0..64)], target).signaled());
    let status = to.reap(Mode::Event).status();
    assert!([Status::RETRY_EXCEEDED, Status::FLUSHED].contains(&status), "{status}");
}

/// Starts a child that connects to this process and then waits to be killed.
fn child_that_connects(test: &str) -> (KillOnDrop, Listener, ConnectionRequest, Parts) {
    let fixture = lab();
    let listener = Listener::bind(&fixture.verbs, fixture.hosts[0].any_port(), 4).unwrap();
    let target = listener.id().local_addr().unwrap();
    let child = KillOnDrop(rerun_test(test, &target.to_string(), &[]).spawn().unwrap());
    let request = listener.next_request(TIMEOUT).unwrap().expect("the child's request");
    let config = PairConfig::default();
    let parts = Parts::new(&fixture, &fixture.hosts[0], &config);
    cm::accept(&request, &parts.qp, config.access, &params(&config), TIMEOUT).unwrap();
    (child, listener, request, parts)
}

#[test]
fn peer_killed() {
    if let Some(target) = role() {
        return connect_and_wait(&target);
    }
    let (mut child, listener, request, parts) = child_that_connects("faults::peer_killed");
    parts.qp.post_recv(&[ferrite_verbs::RecvRequest::new(1, &[])]).unwrap();
    child.0.kill().unwrap();
    let start = Instant::now();
    let event = listener.id().channel().wait_event(TIMEOUT).unwrap().expect("an event");
    assert_eq!((event.kind, event.id), (CmEventKind::DISCONNECTED, request.id.key()));
    assert!(start.elapsed() < Duration::from_secs(10), "reported after {:?}", start.elapsed());
    parts.qp.stop().unwrap();
}

const NOBODY: u32 = 65534;

#[test]
fn memlock_error_names_the_limit() {
    if role().is_some() {
        let context = lab().verbs.device("rxe1").unwrap().open().unwrap();
        let domain = context.allocate_protection_domain().unwrap();
        domain.allocate(1 << 20, Access::LOCAL).expect("1 MiB fits under the limit");
        let error = domain.allocate(64 << 20, Access::LOCAL).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Memlock, "{error:?}");
        let memlock = *error.memlock().unwrap();
        assert_eq!((memlock.limit_bytes, memlock.needed_bytes), (8 << 20, 64 << 20));
        assert!(
            error.to_string().contains("limit is 8 MiB, but 64 MiB more are needed"),
            "{error}"
        );
        assert!(error.remedy().unwrap().contains("LimitMEMLOCK=infinity"));
        return;
    }
    // The child runs as `nobody`, because root has CAP_IPC_LOCK, which lifts the limit.
    let mut child = rerun_test(
        "faults::memlock_error_names_the_limit",
        "child",
        &["prlimit", "--memlock=8388608"],
    );
    let out = child.uid(NOBODY).gid(NOBODY).output().unwrap();
    assert!(
        out.status.success(),
        "{}{}",
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
}

#[test]
fn no_file_descriptors_left() {
    let context = lab().verbs.device("rxe1").unwrap().open().unwrap();
    if role().is_some() {
        let (_channels, error) = until_refused(|| context.create_completion_channel());
        assert_eq!(error.kind(), ErrorKind::FileDescriptors, "{error:?}");
        assert!(error.remedy().unwrap().contains("LimitNOFILE"));
        return;
    }
    let out = rerun_test("faults::no_file_descriptors_left", "child", &["prlimit", "--nofile=40"])
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

/// Runs `test` again in a child process, in a cgroup with these rdma limits. In the child, joins
/// the cgroup and returns `true`. In the parent, waits for the child and returns `false`.
fn in_cgroup(test: &str, limits: &str) -> bool {
    let group = format!("/sys/fs/cgroup/{}", test.replace("::", "-"));
    if role().is_some() {
        std::fs::write(format!("{group}/cgroup.procs"), std::process::id().to_string()).unwrap();
        return true;
    }
    sh(&format!("echo +rdma >/sys/fs/cgroup/cgroup.subtree_control && mkdir -p {group}"));
    sh(&format!("echo '{limits}' >{group}/rdma.max"));
    let out = rerun_test(test, "child", &[]).output().unwrap();
    let _ = std::fs::remove_dir(group);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    false
}

/// Creates objects until one is refused.
fn until_refused<T>(make: impl Fn() -> Result<T, Error>) -> (Vec<T>, Error) {
    let mut made = Vec::new();
    loop {
        match make() {
            Ok(one) => made.push(one),
            Err(error) => return (made, error),
        }
        assert!(made.len() < 1000, "the limit is never reached");
    }
}

#[test]
fn cgroup_limit_reached() {
    if in_cgroup("faults::cgroup_limit_reached", "rxe1 hca_handle=1 hca_object=20") {
        let context = lab().verbs.device("rxe1").unwrap().open().unwrap();
        let domain = context.allocate_protection_domain().unwrap();
        let (_regions, error) = until_refused(|| domain.allocate(4096, Access::LOCAL));
        assert_eq!(error.kind(), ErrorKind::CgroupLimit, "{error:?}");
        assert!(error.remedy().unwrap().contains("rdma.max"));
        let error = lab().verbs.device("rxe1").unwrap().open().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::CgroupLimit, "{error:?}");
    }
}

/// Creating more queue pairs than allowed gives a typed error. After the queue pairs are released,
/// new ones can be created.
#[test]
fn objects_exhausted() {
    if in_cgroup("faults::objects_exhausted", "rxe1 hca_handle=max hca_object=100") {
        let context = lab().verbs.device("rxe1").unwrap().open().unwrap();
        let domain = context.allocate_protection_domain().unwrap();
        let cq = context.create_completion_queue(16, None, 0).unwrap();
        let make = || domain.create_queue_pair(&QueuePairConfig::new(&cq));
        let (qps, error) = until_refused(make);
        assert_eq!(error.kind(), ErrorKind::CgroupLimit, "{error:?}");
        drop(qps);
        make().expect("released queue pairs make room");
    }
}
