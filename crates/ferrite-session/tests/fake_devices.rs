//! Tests, on the fake provider, what operators learn about devices that do not exist, that fail and
//! that return. The messages name the device.

mod captured_log;

use std::time::{Duration, Instant};

use captured_log::Log;
use ferrite_config::{Origin, Program, Values, find};
use ferrite_fabric::{Error, ErrorKind, Fabric, FallbackCause, ListenOptions, Rdma};
use ferrite_session::{fabric_config, open_fabric};
use ferrite_verbs::fake::{DeviceSpec, World};

const DEADLINE: Duration = Duration::from_secs(30);

fn add(world: &World, name: &str, address: &str) {
    world.add_device(DeviceSpec::new(name, address.parse().expect("an address")));
}

/// Returns a world with the devices rxe1 and rxe2, at 127.0.0.1 and 127.0.0.2.
fn world() -> World {
    let world = World::new();
    add(&world, "rxe1", "127.0.0.1");
    add(&world, "rxe2", "127.0.0.2");
    world
}

fn open(world: &World, settings: &[(&str, &str)]) -> Result<Fabric, Error> {
    let mut values = Values::new(Program::Gateway);
    for (name, text) in settings {
        let (setting, alias) = find(Program::Gateway, name).expect(name);
        values.set_text(setting, alias, text, Origin::Flag).expect(text);
    }
    open_fabric(&values, &fabric_config(&values), || Fabric::builder(&world.verbs()))
}

/// Drives a fabric until the log contains `line`.
fn until_logged(fabric: &Fabric, log: &Log, line: &str) {
    let begun = Instant::now();
    while !log.text().contains(line) {
        assert!(begun.elapsed() < DEADLINE, "no {line:?} in {}", log.text());
        fabric.poll();
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the level of the line that contains `text`. There must be only one such line.
fn level_of(log: &Log, text: &str) -> String {
    let all = log.text();
    let lines: Vec<_> = all.lines().filter(|line| line.contains(text)).collect();
    let [line] = lines[..] else { panic!("expected one line with {text:?} in {all}") };
    line.split_whitespace().nth(1).expect("a level after the time").to_owned()
}

#[test]
fn refuses_a_device_that_does_not_exist() {
    for policy in ["prefer", "require"] {
        let opened = open(&world(), &[("rdma-device", "mlx5_0"), ("rdma", policy)]);
        let error = opened.expect_err("there is no such device");
        assert_eq!(error.to_string(), "no RDMA device mlx5_0; devices: rxe1, rxe2", "{policy}");
        assert!(error.is_unavailable() && error.remedy().is_some(), "{policy}");
    }
    // A host without any device falls back to TCP, even if a device is named.
    let fabric = open(&World::new(), &[("rdma-device", "mlx5_0")]).expect("a fabric that uses TCP");
    assert!(fabric.absence().is_some());
    open(&world(), &[("rdma-device", "mlx5_0"), ("rdma", "forbid")]).expect("no device is used");
}

#[test]
fn a_device_that_was_named_does_not_hide_that_the_address_has_another() {
    let fabric = open(&world(), &[("rdma-device", "rxe2")]).expect("a fabric");
    let at = "127.0.0.1:0".parse().expect("an address");
    // The fake devices have loopback addresses. Listening there fails if no open device has the
    // address.
    let options = ListenOptions::new().rdma(Rdma::Require);
    let error = fabric.listen_with(at, &options).expect_err("only rxe1 has the address");
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
}

#[test]
fn loss_and_return_of_a_device_are_logged_with_its_name() {
    Log::of(|log| {
        let world = world();
        let fabric = open(&world, &[]).expect("a fabric");
        assert!(fabric.stats().device_faults.is_empty());
        world.remove_device("rxe2");
        until_logged(&fabric, log, "WARN");
        let text = log.text();
        assert!(text.contains("RDMA device rxe2: ") && !text.contains("rxe1"), "{text}");
        assert_eq!(level_of(log, "RDMA device rxe2: "), "WARN");
        let faults = fabric.stats().device_faults;
        assert_eq!(faults.len(), 1);
        assert!(faults[0].starts_with("rxe2 was removed or failed"), "{faults:?}");
        add(&world, "rxe2", "127.0.0.2");
        until_logged(&fabric, log, "RDMA device rxe2 is back and in use again");
        assert_eq!(level_of(log, "is back and in use again"), "INFO");
        assert_eq!(fabric.stats().device_faults, [""; 0]);
    });
}

/// A device reports only changes of its ports, so the fabric queries their state when it opens the
/// device.
#[test]
fn a_port_that_is_down_at_the_start_is_logged_with_its_device() {
    Log::of(|log| {
        let world = world();
        world.device_down("rxe1");
        let fabric = open(&world, &[]).expect("a fabric");
        let text = log.text();
        assert!(text.contains("WARN") && text.contains("rxe1 port 1 is down; to do: "), "{text}");
        assert_eq!(fabric.stats().device_faults, ["rxe1: port 1 is down"]);
        world.device_up("rxe1");
        until_logged(&fabric, log, "RDMA device rxe1: port 1 is up again");
        assert_eq!(fabric.stats().device_faults, [""; 0]);
    });
}

#[test]
fn a_port_that_goes_down_is_logged_once_with_its_device() {
    Log::of(|log| {
        let world = world();
        let fabric = open(&world, &[]).expect("a fabric");
        world.device_down("rxe1");
        until_logged(&fabric, log, "RDMA device rxe1: port 1 went down");
        assert_eq!(level_of(log, "went down"), "WARN");
        assert_eq!(fabric.stats().device_faults, ["rxe1: port 1 is down"]);
        world.device_up("rxe1");
        until_logged(&fabric, log, "RDMA device rxe1: port 1 is up again");
        assert_eq!(level_of(log, "is up again"), "INFO");
        assert_eq!(fabric.stats().device_faults, [""; 0]);
        assert_eq!(log.text().matches("went down").count(), 1, "{}", log.text());
    });
}

/// A program that opens many connections logs a fallback once for each cause, not once for each
/// connection.
#[test]
fn a_fallback_is_logged_once_for_each_cause() {
    Log::of(|log| {
        let fabric = open(&World::new(), &[]).expect("a fabric that uses TCP");
        let absence = fabric.absence().expect("there is no device").clone();
        let encryption = Error::clear_text("allow clear text");
        let before = log.text().len();
        for port in 1..=20 {
            let peer = ([10, 0, 0, 1], port).into();
            for error in [&absence, &encryption] {
                let _ = fabric.fell_back_to_tcp(peer, error.clone());
            }
        }
        let logged = log.text()[before..].to_owned();
        assert_eq!(logged.lines().count(), 2, "{logged}");
        for (line, cause) in logged.lines().zip(["no-device", "encryption"]) {
            let text = format!("link to 10.0.0.1:1 uses TCP instead of RDMA ({cause}): ");
            assert_eq!(level_of(log, &text), "WARN");
            assert!(line.contains(&text) && line.contains("; to do: "), "{line}");
        }
        for cause in [FallbackCause::NoDevice, FallbackCause::Encryption] {
            assert!(fabric.stats().fallbacks.contains(&(cause, 20)), "{cause}");
        }
    });
}
