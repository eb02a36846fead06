//! The pool and its devices: registrations that fail, and devices that go and return.

use ferrite_fabric::mem::{ErrorKind, Pool, PoolError, Purpose};
use ferrite_verbs::fake::{DeviceSpec, World};
use ferrite_verbs::{Access, ProtectionDomain};

use crate::{ENOMEM, MIB, domain, small, small_pool};

#[test]
fn reports_a_refused_registration() {
    let world = World::new();
    world.fail_next("ibv_reg_mr", ENOMEM);
    let error = small(&world).build().expect_err("the injected failure");
    let PoolError::Register(cause) = &error else { panic!("{error}") };
    assert_eq!(error.to_string(), cause.to_string());
    assert!(error.to_string().starts_with("ibv_reg_mr (2097152 bytes on fake1): "), "{error}");
    assert_eq!((error.kind(), error.remedy()), (ErrorKind::Refused, cause.remedy()));
    assert_eq!(world.objects().memory_regions, 0);
}

#[test]
fn works_when_it_cannot_grow() {
    let (world, pool) = small_pool();
    let first = pool.take_uncharged(2 * MIB, Purpose::Send).expect("memory");
    world.fail_next("ibv_reg_mr", ENOMEM);
    let error = pool.take_uncharged(1, Purpose::Send).expect_err("the injected failure");
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert_eq!(pool.stats().failures.register, 1);
    drop(first);
    // The cache holds a block of another class in the only chunk. The pool empties the cache
    // instead of failing.
    drop(pool.take_uncharged(1, Purpose::Send).expect("no growth needed"));
    world.fail_next("ibv_reg_mr", ENOMEM);
    drop(pool.take_uncharged(2 * MIB, Purpose::Send).expect("the caches are emptied"));
    assert_eq!(pool.stats().failures.register, 2);
    pool.take_uncharged(1, Purpose::Send).expect("no growth needed");
    let _first = pool.take_uncharged(2 * MIB, Purpose::Send).expect("it may grow again");
}

#[test]
fn registers_with_every_device_or_none() {
    let world = World::new();
    let one = domain(&world, "fake1", "10.0.0.1");
    let mut spec = DeviceSpec::new("fake2", "10.0.0.2".parse().expect("an address"));
    spec.max_mr = 5; // for all devices together: two arenas on both devices, and a third on one
    world.add_device(spec);
    let context = world.verbs().device("fake2").and_then(|device| device.open()).expect("device");
    let other = context.allocate_protection_domain().expect("domain");
    let pool = Pool::builder(&[one, other]).memory_pool_increase(2 * MIB).build().expect("pool");
    assert_eq!((pool.domains().len(), world.objects().memory_regions), (2, 4));
    assert_eq!(pool.stats().registered_bytes, 8 * MIB as u64);
    let _first = pool.take_uncharged(2 * MIB, Purpose::Send).expect("memory");
    let error = pool.take_uncharged(2 * MIB, Purpose::Send).expect_err("the second device refuses");
    assert!(error.to_string().contains("fake2"), "{error}");
    assert_eq!(world.objects().memory_regions, 4);
}

/// Removes a device and opens it again under the same name.
fn add_device_again(world: &World, name: &str, ip: &str) -> ProtectionDomain {
    world.remove_device(name);
    domain(world, name, ip)
}

#[test]
fn restores_a_device() {
    let (world, pool) = small_pool();
    let early = pool.take_uncharged(2 * MIB, Purpose::Send).expect("memory");
    pool.retire_domain(0);
    assert_eq!((world.objects().memory_regions, pool.domains().len()), (0, 0));
    // The pool grows while there is no device.
    let meanwhile = pool.take_uncharged(2 * MIB, Purpose::Send).expect("memory");
    let (meanwhile, error) =
        pool.expose(meanwhile, 0, Access::REMOTE_READ).expect_err("the device is gone");
    assert_eq!(error.kind(), ErrorKind::DeviceGone, "{error}");
    let domain = add_device_again(&world, "fake1", "10.0.0.1");
    pool.restore_domain(0, &domain).expect("restored");
    assert_eq!((world.objects().memory_regions, pool.domains().len()), (3, 1));
    // The pool grows afterwards, with the new domain.
    let late = pool.take_uncharged(2 * MIB, Purpose::Send).expect("memory");
    assert_eq!(world.objects().memory_regions, 4);
    let exposed = pool.expose(meanwhile, 0, Access::REMOTE_READ).expect("device is back");
    drop((early, exposed, late, pool, domain));
    assert_eq!(world.objects().memory_regions, 0);
}

/// A device can be removed while the pool grows, before anybody has noticed.
#[test]
fn grows_beside_a_device_that_was_just_removed() {
    let (world, pool) = small_pool();
    let early = pool.take_uncharged(2 * MIB, Purpose::Send).expect("memory");
    world.remove_device("fake1");
    let meanwhile = pool.take_uncharged(2 * MIB, Purpose::Send).expect("memory for TCP");
    pool.retire_domain(0);
    let domain = domain(&world, "fake1", "10.0.0.1");
    pool.restore_domain(0, &domain).expect("restored");
    assert_eq!((world.objects().memory_regions, pool.domains().len()), (3, 1));
    drop((early, meanwhile, pool, domain));
    assert_eq!(world.objects().memory_regions, 0);
}

#[test]
fn restores_a_device_completely_or_not_at_all() {
    let world = World::new();
    let domains = [domain(&world, "fake1", "10.0.0.1"), domain(&world, "fake2", "10.0.0.2")];
    let pool = Pool::builder(&domains).memory_pool_initial(4 * MIB).build().expect("pool");
    let error = pool.restore_domain(0, &domains[0]).expect_err("the domain was not retired");
    assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
    let error = pool.restore_domain(2, &domains[0]).expect_err("there is no such domain");
    assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
    pool.retire_domain(1);
    // A device with room for only one of the two arenas.
    world.remove_device("fake2");
    let small = DeviceSpec {
        max_mr: 1,
        ..DeviceSpec::new("fake2", "10.0.0.2".parse().expect("an address"))
    };
    world.add_device(small);
    let context = world.verbs().device("fake2").and_then(|device| device.open()).expect("device");
    let too_small = context.allocate_protection_domain().expect("domain");
    let error = pool.restore_domain(1, &too_small).expect_err("the device has no room");
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert!(error.to_string().contains("fake2"), "{error}");
    assert_eq!(
        (world.objects().memory_regions, pool.domains().len()),
        (2, 1),
        "the attempt must leave nothing behind"
    );
    drop((too_small, context));
    let again = add_device_again(&world, "fake2", "10.0.0.2");
    assert_eq!((world.objects().memory_regions, pool.domains().len()), (2, 1));
    pool.restore_domain(1, &again).expect("restored");
    assert_eq!((world.objects().memory_regions, pool.domains().len()), (4, 2));
    drop((pool, domains, again));
    assert_eq!(world.objects().memory_regions, 0);
}
