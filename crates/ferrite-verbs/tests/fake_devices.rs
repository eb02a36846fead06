//! Tests with devices, kernels and failures that the lab does not have. The fake provider imitates
//! what the sources of the kernel and of rdma-core do in these cases.

use std::time::{Duration, Instant};

use ferrite_verbs::fake::{DeviceSpec, Objects, World};
use ferrite_verbs::{Access, CmEventKind, QueuePairAttributes, QueuePairConfig, SendRequest};

const EIO: i32 = 5;
const EINVAL: i32 = 22;
const TIMEOUT: Duration = Duration::from_secs(30);

fn world() -> World {
    let world = World::new();
    world.add_device(DeviceSpec::new("fake1", "10.0.0.1".parse().expect("an address")));
    world
}

/// If the doorbell of Soft-RoCE fails, Soft-RoCE has already queued all requests, and does not name
/// a refused one.
#[test]
fn counts_all_requests_as_posted_when_the_provider_names_none() {
    let world = world();
    let context = world.verbs().device("fake1").and_then(|device| device.open()).expect("device");
    let domain = context.allocate_protection_domain().expect("domain");
    let cq = context.create_completion_queue(64, None, 0).expect("queue");
    let qp = domain.create_queue_pair(&QueuePairConfig::new(&cq)).expect("queue pair");
    qp.modify(&QueuePairAttributes::init(1, Access::LOCAL)).expect("init");
    qp.stop().expect("stop");
    let requests = [1, 2, 3].map(|id| SendRequest::send(id, &[]).signaled());
    world.fail_next_doorbell(EIO);
    let refused = qp.post_send(&requests).expect_err("injected failure");
    assert_eq!(refused.posted, 3, "{refused}");
    // If the provider names the first request of the first chain, no request counts as posted.
    let requests = [SendRequest::send(1, &[]); 11];
    qp.post_send(&requests[..8]).expect("room");
    world.fail_next("ibv_post_send", EIO);
    let refused = qp.post_send(&requests).expect_err("injected failure");
    assert_eq!(refused.posted, 0, "the provider named the first request: {refused}");
}

/// After the kernel has destroyed all objects, every destroy call fails with EIO. This counts as
/// success.
#[test]
fn releases_objects_of_a_device_that_the_kernel_took_away() {
    let world = world();
    let context = world.verbs().device("fake1").and_then(|device| device.open()).expect("device");
    let domain = context.allocate_protection_domain().expect("domain");
    let channel = context.create_completion_channel().expect("channel");
    let cq = context.create_completion_queue(64, Some(&channel), 0).expect("queue");
    let srq = domain.create_shared_receive_queue(16, 1).expect("shared queue");
    let config = QueuePairConfig { srq: Some(srq.clone()), ..QueuePairConfig::new(&cq) };
    let qp = domain.create_queue_pair(&config).expect("queue pair");
    let region = domain.allocate(4096, Access::LOCAL).expect("region");
    assert!(!context.is_disassociated());
    world.disassociate_device("fake1");
    assert!(context.is_disassociated());
    let before = ferrite_verbs::leaked_objects();
    qp.destroy().map_err(|(_, error)| error).expect("the kernel has destroyed it");
    drop(config);
    srq.destroy().map_err(|(_, error)| error).expect("the kernel has destroyed it");
    region.deregister().map_err(|(_, error)| error).expect("the kernel has unpinned it");
    drop((cq, channel, domain, context));
    assert_eq!(ferrite_verbs::leaked_objects(), before);
    assert_eq!(world.objects(), Objects::default());
}

/// EIO alone does not prove that an object was destroyed. If the firmware fails a command, the call
/// also returns EIO, and the object still exists.
#[test]
fn keeps_objects_of_a_device_that_only_fails_to_destroy_them() {
    let world = world();
    let context = world.verbs().device("fake1").and_then(|device| device.open()).expect("device");
    let domain = context.allocate_protection_domain().expect("domain");
    let region = domain.allocate(4096, Access::LOCAL).expect("region");
    world.fail_next("ibv_dereg_mr", EIO);
    let (region, _) = region.deregister().expect_err("injected failure");
    assert_eq!(world.objects().memory_regions, 1);
    region.deregister().map_err(|(_, error)| error).expect("second attempt");
}

/// On kernels before 5.12, libibverbs must be prepared for forks before the first registration.
#[test]
fn prepares_for_forks_where_the_kernel_does_not() {
    let world = world();
    world.run_on_old_kernel();
    let device = world.verbs().device("fake1").expect("device");
    world.fail_next("ibv_fork_init", EINVAL);
    let error = device.open().expect_err("memory is not safe for forks");
    assert!(error.to_string().contains("5.12"), "{error}");
    assert!(!world.is_fork_safe());
    device.open().expect("open");
    assert!(world.is_fork_safe());
}

/// Real drivers also pin the memory of queues, so creating a queue can reach the limit.
#[test]
#[cfg(not(miri))] // Miri has no processes
fn names_the_locked_memory_limit_when_a_queue_is_refused() {
    const ENOMEM: i32 = 12;
    const ME: &str = "names_the_locked_memory_limit_when_a_queue_is_refused";
    if std::env::var_os("FERRITE_TEST_LIMITED").is_none() {
        // Root has CAP_IPC_LOCK, which lifts the limit, so the child runs without it.
        let is_root = rustix::process::geteuid().is_root();
        let without = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"];
        let words = without.into_iter().filter(|_| is_root).chain(["prlimit", "--memlock=65536"]);
        let me = std::env::current_exe().expect("a test");
        let mut words = words.map(std::ffi::OsString::from).chain([me.into_os_string()]);
        let mut child = std::process::Command::new(words.next().expect("a program"));
        let child =
            child.args(words).args(["--exact", ME, "--nocapture"]).env("FERRITE_TEST_LIMITED", "1");
        let out = child.output().expect("setpriv and prlimit of util-linux");
        let said = [out.stdout, out.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        assert!(out.status.success() && said[0].contains("1 passed"), "{said:?}");
        return;
    }
    let world = world();
    let context = world.verbs().device("fake1").and_then(|device| device.open()).expect("device");
    let domain = context.allocate_protection_domain().expect("domain");
    let expect_memlock_error =
        |call: &str, asked: &dyn Fn() -> Result<(), ferrite_verbs::Error>| {
            world.fail_next(call, ENOMEM);
            let error = asked().expect_err("injected failure");
            assert_eq!(
                error.memlock().map(|memlock| memlock.limit_bytes),
                Some(65536),
                "{call}: {error}"
            );
            assert!(error.remedy().is_some_and(|remedy| remedy.contains("LimitMEMLOCK")), "{call}");
        };
    expect_memlock_error("ibv_reg_mr", &|| domain.allocate(1 << 20, Access::LOCAL).map(drop));
    expect_memlock_error("ibv_create_cq", &|| {
        context.create_completion_queue(16_384, None, 0).map(drop)
    });
    expect_memlock_error("ibv_create_srq", &|| {
        domain.create_shared_receive_queue(4096, 1).map(drop)
    });
    let cq = context.create_completion_queue(16, None, 0).expect("a queue");
    let config = QueuePairConfig { max_send_wr: 1024, ..QueuePairConfig::new(&cq) };
    expect_memlock_error("ibv_create_qp", &|| domain.create_queue_pair(&config).map(drop));
    // If the limit allows the request, the error means that the host itself is out of memory.
    world.fail_next("ibv_create_cq", ENOMEM);
    let error = context.create_completion_queue(16, None, 0).expect_err("injected failure");
    assert_eq!(error.kind(), ferrite_verbs::ErrorKind::OutOfMemory, "{error}");
}

/// A call on an identifier can wait in the kernel. Fetching events does not wait for that call.
#[test]
fn takes_events_while_a_call_on_another_identifier_waits() {
    let world = world();
    let channel = world.verbs().open_event_channel().expect("a channel");
    let (slow, quick) =
        (channel.create_id().expect("identifier"), channel.create_id().expect("identifier"));
    let to = "10.0.0.1:7".parse().expect("an address");
    quick.resolve_address(None, to, TIMEOUT).expect("resolution starts");
    world.hold("rdma_resolve_addr");
    let caller = std::thread::spawn(move || slow.resolve_address(None, to, TIMEOUT).map(|()| slow));
    let begun = Instant::now();
    while world.waiting_in("rdma_resolve_addr") == 0 {
        assert!(begun.elapsed() < TIMEOUT, "the held call must start");
        std::thread::yield_now();
    }
    let (sender, receiver) = std::sync::mpsc::channel();
    let events = channel.clone();
    std::thread::spawn(move || sender.send(events.next_event()));
    let event = receiver.recv_timeout(TIMEOUT);
    world.let_go("rdma_resolve_addr");
    let event =
        event.expect("fetched without waiting for the call").expect("a channel").expect("an event");
    assert_eq!((event.id, event.kind), (quick.key(), CmEventKind::ADDRESS_RESOLVED));
    assert_eq!((quick.peer_addr(), quick.device()), (Some(to), Some(("fake1".to_owned(), 1))));
    let slow = caller.join().expect("the caller").expect("resolution starts");
    let event = channel.wait_event(TIMEOUT).expect("a channel").expect("an event");
    assert_eq!((event.id, event.kind), (slow.key(), CmEventKind::ADDRESS_RESOLVED));
}
