//! The pool on the fake provider: limits, sharing, exposure, faults, and a comparison with a model.

mod model;
mod wire;
mod pool {
    mod devices;
    mod exposed;
}

use std::collections::BTreeMap;
use std::sync::mpsc;

use bytes::Bytes;
use ferrite_fabric::mem::{
    Account, Budget, Buf, BufMut, Builder, ErrorKind, Pool, PoolError, Purpose, SizeClass,
};
use ferrite_verbs::fake::{DeviceSpec, World};
use ferrite_verbs::{Access, ProtectionDomain};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const EIO: i32 = 5;
const ENOMEM: i32 = 12;

/// Allocates a domain on a new device.
fn domain(world: &World, name: &str, ip: &str) -> ProtectionDomain {
    world.add_device(DeviceSpec::new(name, ip.parse().expect("an address")));
    let context = world.verbs().device(name).and_then(|device| device.open()).expect("device");
    context.allocate_protection_domain().expect("domain")
}

/// Returns a builder for a small pool on one device: 8 MiB for each purpose, in steps of 2 MiB.
fn small(world: &World) -> Builder {
    Pool::builder(&[domain(world, "fake1", "10.0.0.1")])
        .memory_pool_initial(4 * MIB)
        .memory_pool_increase(2 * MIB)
        .memory_pool_max(16 * MIB)
        .receive_reserve(8 * MIB)
}

fn small_pool() -> (World, Pool) {
    let world = World::new();
    let pool = small(&world).build().expect("pool");
    (world, pool)
}

/// Takes buffers until the pool refuses.
fn exhaust(pool: &Pool, len: usize, purpose: Purpose) -> (Vec<BufMut>, PoolError) {
    let mut taken = Vec::new();
    loop {
        match pool.take_uncharged(len, purpose) {
            Ok(buf) => taken.push(buf),
            Err(error) => return (taken, error),
        }
    }
}

/// Memory taken for a burst is released to the system once it was unused for a while, and can be
/// taken again.
#[test]
fn shrinks_when_the_load_is_gone() {
    let (_world, pool) = small_pool();
    let begun = pool.stats().registered_bytes;
    assert!(!pool.shrink(8), "the pool has only its initial memory");
    for _ in 0..3 {
        let (mut taken, _) = exhaust(&pool, 8 * KIB, Purpose::Receive);
        assert_eq!(pool.stats().registered_bytes, begun + 6 * MIB as u64);
        let one = taken.pop().expect("a block of the last arena");
        drop(taken);
        assert!(pool.shrink(8), "the first call releases nothing, but the next one can");
        assert_eq!(pool.stats().registered_bytes, begun + 6 * MIB as u64);
        assert!(!pool.shrink(8), "nothing more to release while a block is in use");
        assert_eq!(pool.stats().registered_bytes, begun + 4 * MIB as u64);
        assert_eq!(in_use(&pool), 8 * KIB as u64);
        drop(one);
        while pool.shrink(8) {}
        let spare = 2 * MIB as u64;
        assert_eq!((pool.stats().registered_bytes, in_use(&pool)), (begun + spare, 0));
    }
}

/// While a few blocks keep an arena from being released, blocks of other arenas are cached as
/// usual.
#[test]
fn remaining_memory_is_cached() {
    let (_world, pool) = small_pool();
    let (mut taken, _) = exhaust(&pool, 8 * KIB, Purpose::Receive);
    let last = taken.pop().expect("a block of the last arena");
    let other = taken.pop().expect("another block of the last arena");
    drop(taken);
    while pool.shrink(8) {}
    assert_eq!(pool.stats().receive.cached_bytes, 0);
    drop(pool.take_uncharged(8 * KIB, Purpose::Receive).expect("a block of the first arena"));
    assert_ne!(pool.stats().receive.cached_bytes, 0, "a block of the first arena is cached");
    drop(other);
    assert_eq!(pool.stats().receive.cached_bytes, 0, "a block of the last arena is not cached");
    drop(last);
    assert_eq!(in_use(&pool), 0);
}

fn in_use(pool: &Pool) -> u64 {
    let stats = pool.stats();
    for purpose in Purpose::ALL {
        let heap = stats.heap(purpose);
        assert_eq!(
            heap.mapped_bytes,
            heap.in_use_bytes + heap.cached_bytes + heap.free_bytes,
            "{stats:#?}"
        );
    }
    let without_locks =
        Purpose::ALL.map(|purpose| (pool.in_use_bytes(purpose), pool.max_bytes(purpose)));
    let [send, receive] =
        [&stats.send, &stats.receive].map(|heap| (heap.in_use_bytes, heap.max_bytes));
    assert_eq!(without_locks, [send, receive]);
    stats.send.in_use_bytes + stats.receive.in_use_bytes
}

#[test]
fn grows_to_the_maximum_and_then_fails() {
    let (world, pool) = small_pool();
    assert_eq!((pool.stats().mapped_bytes, pool.stats().arenas), (4 * MIB as u64, 2));
    let (taken, error) = exhaust(&pool, MIB, Purpose::Send);
    assert_eq!(taken.len(), 4);
    let PoolError::OverBudget { which, asked, limit, used } = &error else { panic!("{error}") };
    assert_eq!(*which, Budget::Heap(Purpose::Send));
    assert_eq!((*asked, *limit, *used), (2 * MIB as u64, 8 * MIB as u64, 8 * MIB as u64));
    assert_eq!(error.kind(), ErrorKind::Exhausted);
    assert!(error.remedy().is_some_and(|remedy| remedy.contains("memory_pool_max")));
    let stats = pool.stats();
    assert_eq!((stats.arenas, stats.growths, stats.send.mapped_bytes), (5, 3, 8 * MIB as u64));
    assert_eq!(world.objects().memory_regions, 5);
    drop(taken);
    assert_eq!(in_use(&pool), 0);
    pool.take_uncharged(2 * MIB, Purpose::Send).expect("memory is free again");
}

#[test]
fn rejects_lengths_beyond_the_largest_class() {
    let (_world, pool) = small_pool();
    let error = pool.take_uncharged(2 * MIB + 1, Purpose::Send).expect_err("too large");
    assert_eq!(error.to_string(), "2097153 bytes do not fit into one buffer of at most 2097152");
    assert_eq!(error.kind(), ErrorKind::Misuse);
}

#[test]
fn senders_never_starve_receives() {
    for len in SizeClass::ALL.map(SizeClass::bytes) {
        let (_world, pool) = small_pool();
        // Takes everything, then frees every other buffer: the worst fragmentation.
        let (mut taken, _) = exhaust(&pool, len, Purpose::Send);
        let mut nth = 0;
        taken.retain(|_| {
            nth += 1;
            nth % 2 == 0
        });
        let _ = exhaust(&pool, 2 * MIB, Purpose::Send);
        let (received, error) = exhaust(&pool, 2 * MIB, Purpose::Receive);
        assert_eq!(received.len(), 4, "after sends of {len}");
        assert!(matches!(
            error,
            PoolError::OverBudget { which: Budget::Heap(Purpose::Receive), .. }
        ));
    }
}

#[test]
fn memory_moves_between_size_classes() {
    let (_world, pool) = small_pool();
    for class in SizeClass::ALL.into_iter().chain(SizeClass::ALL.into_iter().rev()) {
        let (taken, _) = exhaust(&pool, class.bytes(), Purpose::Receive);
        assert_eq!(taken.len() * class.bytes(), 8 * MIB, "{class:?}");
        // The next round must find these blocks in the cache of another thread.
        std::thread::spawn(move || drop(taken)).join().expect("the thread did not panic");
        assert_eq!(in_use(&pool), 0);
    }
}

#[test]
fn takes_blocks_from_other_threads_caches() {
    let (_world, pool) = small_pool();
    let (mut taken, _) = exhaust(&pool, 256, Purpose::Send);
    let keepers = taken.split_off(4);
    std::thread::spawn(move || drop(taken)).join().expect("the thread did not panic");
    // Four blocks are free, in the cache of some thread.
    let (again, _) = exhaust(&pool, 256, Purpose::Send);
    assert_eq!(again.len(), 4);
    drop((keepers, again));
    assert_eq!(in_use(&pool), 0);
}

#[test]
fn threads_share_buffers() {
    let (_world, pool) = small_pool();
    let account = Account::new("all", 4 * MIB as u64);
    let (sender, receiver) = mpsc::channel::<(u8, Buf)>();
    std::thread::scope(|scope| {
        for number in 0..4_u8 {
            let (sender, pool, account) = (sender.clone(), pool.clone(), &account);
            scope.spawn(move || {
                for round in 0..if cfg!(miri) { 10 } else { 500_usize } {
                    let purpose = Purpose::ALL[round % 2];
                    let Ok(mut buf) = pool.take(1 + round * 37 % 9000, purpose, account) else {
                        continue;
                    };
                    buf.fill(number);
                    let buf = buf.freeze();
                    sender.send((number, buf.clone())).expect("receiver is alive");
                    assert!(buf.iter().all(|byte| *byte == number));
                }
            });
        }
        drop(sender);
        scope.spawn(move || {
            for (number, buf) in receiver {
                assert!(
                    buf.iter().all(|byte| *byte == number),
                    "a buffer was reused while it was shared"
                );
            }
        });
    });
    assert_eq!((in_use(&pool), account.used_bytes()), (0, 0));
}

#[test]
fn bytes_outlive_the_pool() {
    let (world, pool) = small_pool();
    let mut buf = pool.take_uncharged(100, Purpose::Receive).expect("memory");
    buf.fill(9);
    let bytes: Bytes = buf.freeze().slice(10..).into();
    let send = pool.take_uncharged(100, Purpose::Send).expect("memory");
    assert_eq!(world.objects().memory_regions, 2);
    drop(pool);
    drop(send);
    assert_eq!(world.objects().memory_regions, 1, "only the arena in use is left");
    let part = bytes.slice(80..);
    drop(bytes);
    assert_eq!(&part[..], &[9; 10]);
    drop(part);
    let left = world.objects();
    assert_eq!((left.memory_regions, left.protection_domains, left.contexts), (0, 0, 0));
}

#[test]
fn pool_leaves_nothing_behind() {
    let (world, pool) = small_pool();
    let clone = pool.clone();
    for purpose in Purpose::ALL {
        let taken: Vec<_> =
            (0..100).map(|n| pool.take_uncharged(n * 100, purpose).expect("memory")).collect();
        std::thread::spawn(move || drop(taken)).join().expect("the thread did not panic");
    }
    assert!(pool.stats().send.cached_bytes > 0, "the cache of the other thread must hold blocks");
    drop(pool);
    clone.take_uncharged(1, Purpose::Send).expect("the clone still works");
    drop(clone);
    assert_eq!(world.objects().memory_regions, 0);
}

/// The pool is dropped while other threads return buffers to it.
#[test]
fn pool_can_be_dropped_at_any_moment() {
    for round in 0..if cfg!(miri) { 5 } else { 300 } {
        let (world, pool) = small_pool();
        let mut taken: Vec<_> = (0..60)
            .map(|n| pool.take_uncharged(200 * (n % 3), Purpose::Send).expect("memory"))
            .collect();
        let others: Vec<Buf> = taken.split_off(30).into_iter().map(BufMut::freeze).collect();
        let shared = others.clone();
        let threads = [
            std::thread::spawn(move || drop(taken)),
            std::thread::spawn(move || drop(others)),
            std::thread::spawn(move || drop(shared)),
        ];
        if round % 2 == 0 {
            std::thread::yield_now();
        }
        drop(pool);
        for thread in threads {
            thread.join().expect("the thread did not panic");
        }
        assert_eq!(world.objects().memory_regions, 0);
    }
}

#[test]
fn buffer_has_one_owner_or_many_readers() {
    let (_world, pool) = small_pool();
    let mut buf = pool.take_uncharged(1000, Purpose::Send).expect("memory");
    assert_eq!((buf.len(), buf.capacity(), buf.purpose()), (1000, 1024, Purpose::Send));
    let addr = buf.raw_parts(0).addr;
    buf.set_len(1024);
    buf.copy_from_slice(&[3; 1024]);
    let whole = buf.freeze();
    let part = whole.slice(1000..=1009);
    assert_eq!((part.len(), part.raw_parts(0).addr), (10, addr + 1000));
    let whole = whole.try_into_mut().expect_err("the slice still reads it");
    drop(whole);
    let mut part = part.try_into_mut().expect("the last handle");
    assert_eq!((part.len(), part.capacity()), (10, 24));
    part.set_len(24);
    assert_eq!(&part[..], &[3; 24]);
    let generation = part.generation();
    drop(part);
    let mut again = pool.take_uncharged(1000, Purpose::Send).expect("memory");
    assert_eq!((again.raw_parts(0).addr, again.generation()), (addr, generation + 1));
}

#[test]
fn panics_on_ranges_outside_the_buffer() {
    let (_world, pool) = small_pool();
    let buf = pool.take_uncharged(100, Purpose::Send).expect("memory").freeze();
    for range in [0..101, 101..101, 5..usize::MAX] {
        let sliced =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| buf.slice(range.clone())));
        assert!(sliced.is_err(), "{range:?}");
    }
    let longer = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let mut buf = buf.try_into_mut().expect("one handle");
        buf.set_len(257);
    }));
    assert!(longer.is_err());
    assert_eq!(in_use(&pool), 0, "a panic must return the buffer");
}

#[test]
fn charges_accounts_by_block_and_moves_the_charge() {
    let (_world, pool) = small_pool();
    let [one, other] = ["one", "other"].map(|name| Account::new(name, 10 * KIB as u64));
    let mut posted = pool.take_uncharged(5000, Purpose::Receive).expect("memory");
    posted.charge_to(&one).expect("the account has room");
    assert_eq!(one.used_bytes(), 8 * KIB as u64);
    let error = pool.take(3 * KIB, Purpose::Receive, &one).expect_err("8 + 8 KiB are more than 10");
    let PoolError::OverBudget { which: Budget::Account(name), used, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!((&**name, *used), ("one", 8 * KIB as u64));
    let small = pool.take(1, Purpose::Send, &one).expect("256 bytes fit");
    posted.charge_to(&other).expect("the account has room");
    assert_eq!((one.used_bytes(), other.used_bytes()), (256, 8 * KIB as u64));
    let full = Account::new("full", 1);
    posted.charge_to(&full).expect_err("over the limit");
    assert_eq!((full.used_bytes(), other.used_bytes()), (0, 8 * KIB as u64));
    let bytes: Bytes = posted.freeze().into();
    std::thread::spawn(move || drop(bytes)).join().expect("the thread did not panic");
    drop(small);
    assert_eq!((one.used_bytes(), other.used_bytes()), (0, 0));
    // Memory that the heap refuses is not charged.
    let _taken = exhaust(&pool, 2 * MIB, Purpose::Send);
    pool.take(10, Purpose::Send, &one).expect_err("no memory");
    assert_eq!(one.used_bytes(), 0);
}

#[test]
fn rejects_invalid_arguments() {
    let plain = Pool::builder(&[]).build().expect("memory without a device");
    assert_eq!(plain.take_uncharged(5, Purpose::Send).expect("a buffer").len(), 5);
    let world = World::new();
    let error =
        small(&world).receive_reserve(16 * MIB).build().expect_err("nothing left for sends");
    assert!(error.to_string().contains("memory_pool_max"), "{error}");

    let (world, pool) = small_pool();
    let (_other_world, other) = small_pool();
    let buf = other.take_uncharged(10, Purpose::Receive).expect("memory");
    let (buf, error) =
        pool.expose(buf, 0, Access::REMOTE_READ).expect_err("buffer of another pool");
    assert!(error.to_string().contains("another pool"), "{error}");
    let (mut buf, error) =
        other.expose(buf, 1, Access::REMOTE_READ).expect_err("there is only one domain");
    assert!(error.to_string().contains("no domain"), "{error}");
    buf.set_len(0);
    let (_, error) = other.expose(buf, 0, Access::REMOTE_READ).expect_err("empty buffer");
    assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
    assert_eq!(world.objects().memory_regions, 2);
}

/// Every counter is incremented somewhere: a counter that never moves misleads its readers.
#[test]
fn every_counter_is_incremented() {
    let mut moved: BTreeMap<String, u64> = BTreeMap::new();
    let mut look = |pool: &Pool| {
        for (name, value) in pool.stats().counters() {
            let most = moved.entry(name).or_default();
            *most = value.max(*most);
        }
    };
    let (world, pool) = small_pool();
    let peer = Account::new("peer", 256);
    for purpose in Purpose::ALL {
        for class in SizeClass::ALL {
            let buf = pool.take_uncharged(class.bytes(), purpose).expect("memory");
            look(&pool);
            drop(buf);
        }
        look(&pool);
        let taken = exhaust(&pool, 2 * MIB, purpose);
        drop(taken);
    }
    let buf = pool.take(1, Purpose::Send, &peer).expect("memory");
    pool.take(1, Purpose::Send, &peer).expect_err("over the limit");
    pool.take(3 * MIB, Purpose::Send, &peer).expect_err("too large");
    let exposed = pool.expose(buf, 0, Access::REMOTE_READ).expect("exposed");
    look(&pool);
    world.fail_next("ibv_dereg_mr", EIO);
    drop(exposed);
    look(&pool);

    // No address space has this much memory.
    let world = World::new();
    let huge =
        small(&world).memory_pool_max(1 << 50).memory_pool_increase(1 << 49).huge_pages(true);
    let pool = huge.build().expect("pool");
    let (_taken, error) = exhaust(&pool, 2 * MIB, Purpose::Send);
    assert!(matches!(error, PoolError::Map { .. }), "{error}");
    assert_eq!(error.kind(), ErrorKind::Refused);
    let buf = pool.take_uncharged(1, Purpose::Receive).expect("memory");
    world.fail_next("ibv_reg_mr", ENOMEM);
    pool.expose(buf, 0, Access::REMOTE_READ).expect_err("the injected failure");
    look(&pool);

    // Which pages a host provides depends on its configuration: one of the three counters must
    // move.
    let pages = ["normal_pages_bytes", "transparent_pages_bytes", "huge_pages_bytes"];
    assert!(
        moved.iter().filter(|(name, value)| pages.contains(&&***name) && **value > 0).count() >= 1
    );
    let never: Vec<_> =
        moved.iter().filter(|(name, value)| **value == 0 && !pages.contains(&&***name)).collect();
    assert!(never.is_empty(), "these counters never moved: {never:?}");
}
