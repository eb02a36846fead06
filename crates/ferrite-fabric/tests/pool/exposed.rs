//! Memory that a peer may read or write, and quarantine of memory that a device does not release.

use ferrite_fabric::mem::{Account, Pool, Purpose};
use ferrite_verbs::fake::{DeviceSpec, World};
use ferrite_verbs::{Access, RemoteSlice, Status};

use crate::wire;
use crate::{EIO, MIB, exhaust, in_use, small_pool};

const HOSTS: [(&str, &str); 2] = [("fake1", "10.0.0.1"), ("fake2", "10.0.0.2")];

/// Returns the host under test with its pool, and a peer. Each test needs a new connection, because
/// a refused access breaks the connection.
fn with_peer() -> (World, wire::End, wire::End, Pool) {
    let world = World::new();
    for (name, ip) in HOSTS {
        world.add_device(DeviceSpec::new(name, ip.parse().expect("an address")));
    }
    let [host, peer] = wire::connect(&world.verbs(), HOSTS);
    let pool = Pool::builder(std::slice::from_ref(&host.domain)).build().expect("pool");
    (world, host, peer, pool)
}

#[test]
fn peer_writes_until_revoked() {
    let (world, host, peer, pool) = with_peer();
    let mut buf = pool.take_uncharged(4096, Purpose::Receive).expect("memory");
    buf.fill(0);
    let mut exposed =
        pool.expose(buf, 0, Access::REMOTE_WRITE | Access::REMOTE_READ).expect("exposed");
    assert_eq!(
        (exposed.len(), pool.stats().exposed_bytes, world.objects().memory_regions),
        (4096, 4096, 3)
    );
    let target = exposed.remote();
    assert_eq!(peer.write(b"from the peer", target), Status::SUCCESS);
    let mut copy = [0; 13];
    exposed.read(0, &mut copy);
    assert_eq!(&copy, b"from the peer");
    exposed.write(4090, b"to you");
    let end = RemoteSlice { addr: target.addr + 4090, len: 6, ..target };
    assert_eq!(peer.read(6, end), (Status::SUCCESS, b"to you".to_vec()));

    let before = world.objects().memory_regions;
    let buf = exposed.revoke().expect("revoked");
    assert_eq!((pool.stats().exposed_regions, world.objects().memory_regions), (0, before - 1));
    assert_eq!(peer.write(b"too late", target), Status::REMOTE_ACCESS);
    assert_eq!(&buf[..13], b"from the peer");
    drop(host);
}

#[test]
fn peer_can_access_only_exposed_memory() {
    for (offset, rights) in [
        (0, Access::REMOTE_READ),    // read only
        (-1, Access::REMOTE_WRITE),  // one byte before the range
        (100, Access::REMOTE_WRITE), // one byte behind the range, still within the block
    ] {
        let (_world, _host, peer, pool) = with_peer();
        let _neighbours =
            [0; 8].map(|_: i32| pool.take_uncharged(100, Purpose::Receive).expect("memory"));
        let buf = pool.take_uncharged(100, Purpose::Receive).expect("memory");
        let exposed = pool.expose(buf, 0, rights).expect("exposed");
        let remote = exposed.remote();
        let target =
            RemoteSlice { addr: remote.addr.wrapping_add_signed(offset), len: 1, ..remote };
        assert_eq!(peer.write(b"!", target), Status::REMOTE_ACCESS, "{offset}");
    }
}

#[test]
fn dropping_exposed_memory_revokes_it() {
    let (_world, _host, peer, pool) = with_peer();
    let buf = pool.take_uncharged(100, Purpose::Receive).expect("memory");
    let exposed = pool.expose(buf, 0, Access::REMOTE_WRITE).expect("exposed");
    let target = exposed.remote();
    drop(exposed);
    assert_eq!(peer.write(b"too late", target), Status::REMOTE_ACCESS);
    assert_eq!((in_use(&pool), pool.stats().exposed_bytes), (0, 0));
}

#[test]
fn memory_that_the_device_keeps_is_not_reused() {
    let (world, pool) = small_pool();
    let peer = Account::new("peer", MIB as u64);
    let buf = pool.take(100, Purpose::Receive, &peer).expect("memory");
    let exposed = pool.expose(buf, 0, Access::REMOTE_WRITE).expect("exposed");
    world.fail_next("ibv_dereg_mr", EIO);
    let (exposed, error) = exposed.revoke().expect_err("the injected failure");
    assert!(error.to_string().contains("ibv_dereg_mr (100 bytes)"), "{error}");
    let addr = exposed.remote().addr;
    assert_eq!(pool.stats().exposed_bytes, 100, "the memory is still exposed");

    world.fail_next("ibv_dereg_mr", EIO);
    drop(exposed);
    let stats = pool.stats();
    assert_eq!(
        (stats.exposed_bytes, stats.quarantined_bytes, stats.failures.deregister),
        (0, 256, 2)
    );
    assert_eq!((in_use(&pool), peer.used_bytes()), (256, 256));
    for _ in 0..1000 {
        assert_ne!(
            pool.take_uncharged(100, Purpose::Receive).expect("memory").raw_parts(0).addr,
            addr
        );
    }
    world.fail_next("ibv_dereg_mr", EIO);
    assert_eq!((pool.retry_quarantined(), pool.stats().quarantined_bytes), (0, 256));
    assert_eq!(pool.retry_quarantined(), 1);
    assert_eq!((in_use(&pool), pool.stats().quarantined_bytes, peer.used_bytes()), (0, 0, 0));
}

#[test]
fn retries_quarantined_memory_before_failing() {
    let (world, pool) = small_pool();
    let buf = pool.take_uncharged(2 * MIB, Purpose::Receive).expect("memory");
    let exposed = pool.expose(buf, 0, Access::REMOTE_WRITE).expect("exposed");
    world.fail_next("ibv_dereg_mr", EIO);
    drop(exposed);
    let (taken, _) = exhaust(&pool, 2 * MIB, Purpose::Receive);
    assert_eq!((taken.len(), pool.stats().quarantined_bytes), (4, 0));
}

#[test]
fn drops_a_pool_with_quarantined_memory() {
    // The device releases the memory in time, and nothing is left.
    let (world, pool) = small_pool();
    let expose = |pool: &Pool| {
        let buf = pool.take_uncharged(100, Purpose::Receive).expect("memory");
        pool.expose(buf, 0, Access::REMOTE_WRITE).expect("exposed")
    };
    let exposed = expose(&pool);
    world.fail_next("ibv_dereg_mr", EIO);
    drop(exposed);
    drop(pool);
    assert_eq!(world.objects().memory_regions, 0);

    // The device does not release the memory, and no pool is left to retry. The arena stays
    // forever.
    let (world, pool) = small_pool();
    let exposed = expose(&pool);
    drop(pool);
    assert_eq!(world.objects().memory_regions, 2);
    world.fail_next("ibv_dereg_mr", EIO);
    drop(exposed);
    assert_eq!(world.objects().memory_regions, 1);
}
