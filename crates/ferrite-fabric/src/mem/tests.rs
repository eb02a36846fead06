//! Tests that use pool buffers as the two ends of a transfer. They pass the raw parts to a device
//! by hand, as the fabric's slots do.
#![expect(unsafe_code, reason = "takes the role of the fabric; each block states its obligations")]

use ferrite_verbs::fake::{DeviceSpec, World};
use ferrite_verbs::{
    Access, CompletionQueue, Path, PeerAddress, ProtectionDomain, QueuePair, QueuePairAttributes,
    QueuePairConfig, RecvRequest, SendRequest, Sge, Status, WorkCompletion,
};

use super::{Pool, Purpose, RawParts};

/// Two devices in one host, connected to each other.
fn pair(world: &World) -> [(ProtectionDomain, CompletionQueue, QueuePair); 2] {
    let ends = ["10.0.0.1", "10.0.0.2"].map(|ip| {
        world.add_device(DeviceSpec::new(ip, ip.parse().expect("an address")));
        let context = world.verbs().device(ip).and_then(|device| device.open()).expect("device");
        let domain = context.allocate_protection_domain().expect("domain");
        let cq = context.create_completion_queue(16, None, 0).expect("queue");
        let config = QueuePairConfig { max_send_sge: 2, ..QueuePairConfig::new(&cq) };
        let qp = domain.create_queue_pair(&config).expect("queue pair");
        (domain, cq, qp)
    });
    for (own, peer) in [(0, 1), (1, 0)] {
        let gid = ends[peer].0.context().gids().expect("addresses")[1].gid;
        let peer = PeerAddress { qp_num: ends[peer].2.number(), psn: 1, gid, lid: 0 };
        let (qp, path) = (&ends[own].2, Path::default());
        qp.modify(&QueuePairAttributes::init(1, Access::LOCAL)).expect("the INIT state");
        qp.modify(&QueuePairAttributes::connect_to(&peer, 1, 1, &path, 1)).expect("the RTR state");
        qp.modify(&QueuePairAttributes::ready_to_send(1, &path, 1)).expect("the RTS state");
    }
    ends
}

fn poll_status(cq: &CompletionQueue) -> Status {
    let mut out = [WorkCompletion::default()];
    assert_eq!(cq.poll(&mut out).expect("a poll without an error"), 1);
    out[0].status()
}

/// # Safety
/// The buffer must be owned until the work request has completed.
unsafe fn sge(RawParts { addr, len, lkey }: RawParts) -> Sge<'static> {
    // SAFETY: the pool keeps the memory registered and mapped while the buffer lives, and the owner
    // of the buffer has no reference into it. The caller guarantees both until the completion.
    unsafe { Sge::from_raw(addr, len, lkey) }
}

#[test]
fn transfers_between_devices_without_a_copy() {
    let world = World::new();
    let [a, b] = pair(&world);
    let pool = Pool::builder(&[a.0.clone(), b.0.clone()]).build().expect("pool");
    let mut message = pool.take_uncharged(300, Purpose::Send).expect("memory");
    message.fill(7);
    let message = message.freeze();
    let mut received = pool.take_uncharged(1000, Purpose::Receive).expect("memory");
    // SAFETY: both buffers live to the end of the test and are not accessed before the completion.
    unsafe {
        b.2.post_recv(&[RecvRequest::new(1, &[sge(received.raw_parts(1))])])
            .expect("a posted request");
        let pieces = [sge(message.raw_parts(0)), sge(message.slice(100..200).raw_parts(0))];
        a.2.post_send(&[SendRequest::send(1, &pieces).signaled()]).expect("a posted request");
    }
    assert_eq!((poll_status(&a.1), poll_status(&b.1)), (Status::SUCCESS, Status::SUCCESS));
    received.set_len(400);
    assert!(received.iter().all(|byte| *byte == 7));
}

#[test]
fn refuses_the_key_of_another_device() {
    let world = World::new();
    let [a, b] = pair(&world);
    let pool = Pool::builder(&[a.0.clone(), b.0.clone()]).build().expect("pool");
    let message = pool.take_uncharged(64, Purpose::Send).expect("memory").freeze();
    // SAFETY: as above.
    unsafe { a.2.post_send(&[SendRequest::send(1, &[sge(message.raw_parts(1))])]) }
        .expect("a posted request");
    assert_eq!(poll_status(&a.1), Status::LOCAL_PROTECTION);
}

/// A buffer that was filled before its device disappeared is sent through the one that came back.
#[test]
fn buffers_can_be_used_with_a_device_that_came_back() {
    let world = World::new();
    let [a, b] = pair(&world);
    let pool = Pool::builder(&[a.0.clone(), b.0.clone()]).build().expect("pool");
    let mut message = pool.take_uncharged(64, Purpose::Send).expect("memory");
    message.fill(7);
    let message = message.freeze();
    let before = message.raw_parts(0);
    drop((a, b));
    for device in 0..2 {
        pool.retire_domain(device);
        assert_eq!(message.raw_parts(device).lkey, 0, "there is no key for a device that is gone");
    }
    world.remove_device("10.0.0.1");
    world.remove_device("10.0.0.2");
    let [a, b] = pair(&world);
    for (device, end) in [&a, &b].into_iter().enumerate() {
        pool.restore_domain(device, &end.0).expect("the domain is restored");
    }
    assert_ne!(message.raw_parts(0).lkey, before.lkey, "the new registration has another key");
    let mut received = pool.take_uncharged(64, Purpose::Receive).expect("memory");
    // SAFETY: as above.
    unsafe {
        b.2.post_recv(&[RecvRequest::new(1, &[sge(received.raw_parts(1))])])
            .expect("a posted request");
        a.2.post_send(&[SendRequest::send(1, &[sge(message.raw_parts(0))]).signaled()])
            .expect("a posted request");
    }
    assert_eq!((poll_status(&a.1), poll_status(&b.1)), (Status::SUCCESS, Status::SUCCESS));
    assert_eq!(received[..], message[..]);
}
