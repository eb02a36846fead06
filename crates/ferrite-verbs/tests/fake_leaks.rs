//! Objects that cannot be released are counted, and their memory stays mapped. This test has its
//! own process, because all objects of a process share one counter.
#![cfg(feature = "fake")]

use ferrite_verbs::fake::{DeviceSpec, World};
use ferrite_verbs::{Access, QueuePairAttributes, QueuePairConfig, RecvRequest, leaked_objects};

const EIO: i32 = 5;

fn is_mapped(addr: u64) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("proc");
    maps.lines().any(|line| {
        let mut range =
            line.split([' ', '-']).map(|number| u64::from_str_radix(number, 16).unwrap_or(0));
        let (from, to) = (range.next().unwrap_or(0), range.next().unwrap_or(0));
        (from..to).contains(&addr)
    })
}

#[test]
fn failed_destroy_is_counted_and_keeps_memory_mapped() {
    let world = World::new();
    world.add_device(DeviceSpec::new("fake1", "10.0.0.1".parse().expect("an address")));
    let context = world.verbs().device("fake1").expect("device").open().expect("open");
    let domain = context.allocate_protection_domain().expect("domain");
    let len = 1 << 20;

    // A normal release unmaps the memory.
    let region = domain.allocate(len, Access::LOCAL).expect("region");
    let addr = region.remote(0..1).addr;
    assert!(is_mapped(addr));
    drop(region);
    assert!(!is_mapped(addr));
    assert_eq!(leaked_objects(), 0);

    // If the device refuses to release the region, the memory stays mapped, because the device may
    // still write to it.
    let region = domain.allocate(len, Access::LOCAL).expect("region");
    let addr = region.remote(0..1).addr;
    world.fail_next("ibv_dereg_mr", EIO);
    drop(region);
    assert_eq!((leaked_objects(), is_mapped(addr)), (1, true));

    // If the device refuses to release a queue pair, the memory posted to it stays mapped.
    let cq = context.create_completion_queue(4, None, 0).expect("queue");
    let qp = domain.create_queue_pair(&QueuePairConfig::new(&cq)).expect("queue pair");
    qp.modify(&QueuePairAttributes::init(1, Access::LOCAL)).expect("init");
    let region = domain.allocate(len, Access::LOCAL).expect("region");
    let addr = region.remote(0..1).addr;
    qp.post_recv(&[RecvRequest::new(1, &[region.sge(0..64)])]).expect("post");
    world.fail_next("ibv_destroy_qp", EIO);
    drop((region, qp));
    assert_eq!((leaked_objects(), is_mapped(addr)), (2, true));

    // The completion queue cannot be released before the leaked queue pair, so it is leaked and
    // counted, too.
    drop(cq);
    assert_eq!(leaked_objects(), 3);
    let left = world.objects();
    assert_eq!((left.queue_pairs, left.completion_queues, left.memory_regions), (1, 1, 2));

    // A CM identifier that cannot be destroyed is counted.
    let id = world
        .verbs()
        .open_event_channel()
        .and_then(|channel| channel.create_id())
        .expect("identifier");
    world.fail_next("rdma_destroy_id", EIO);
    drop(id);
    assert_eq!((leaked_objects(), world.objects().cm_ids), (4, 1));
}
