//! Tests that facts are gathered from directories made for the test, and from a fake device.

use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_verbs::fake::{DeviceSpec, World};
use ferrite_verbs::{Context, Status};

use super::{FLUSHED, GATEWAY, LOCAL, PEER, RETRY};
use crate::diagnose::counters::Meaning;
use crate::diagnose::facts::Facts;
use crate::diagnose::files::Roots;
use crate::diagnose::rank::rank;
use crate::diagnose::snapshot::Snapshot;
use crate::diagnose::surroundings::{Neighbour, Route, Surroundings};
use crate::diagnose::{Baseline, Failure, Likelihood, Subject, causes};

/// A procfs and a sysfs in a temporary directory.
struct Files(PathBuf);

impl Files {
    fn new(test: &str) -> Self {
        let root =
            std::env::temp_dir().join(format!("ferrite-diagnose-{}-{test}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let files = Self(root);
        let port = "sys/class/infiniband/here/ports/1";
        for (path, text) in [
            ("parent", "n1\n"),
            ("ports/1/hw_counters/sent_pkts", "10\n"),
            ("ports/1/hw_counters/rcvd_pkts", "9\n"),
            ("ports/1/counters/port_rcv_packets", "0\n"),
        ] {
            files.write(&format!("sys/class/infiniband/here/{path}"), text);
        }
        files.write(&format!("{port}/gid_attrs/ndevs/0"), "n1\n");
        for (name, ip) in [("here", "0a00:0002"), ("there", "0a00:0001")] {
            let port = format!("sys/class/infiniband/{name}/ports/1");
            files.write(&format!("{port}/gids/0"), "0000:0000:0000:0000:0000:0000:0000:0000\n");
            files
                .write(&format!("{port}/gids/1"), &format!("0000:0000:0000:0000:0000:ffff:{ip}\n"));
            files.write(
                &format!("{port}/gid_attrs/ndevs/1"),
                if name == "here" { "n1\n" } else { "n2\n" },
            );
        }
        files.netdev("n1", "0x1003", "up", "1");
        files.netdev("n2", "0x1003", "up", "1");
        files.write("proc/sys/net/ipv4/conf/n2/accept_local", "0\n");
        files.write(
            "proc/net/arp",
            "IP address       HW type     Flags       HW address            Mask     Device\n\
             10.0.0.1         0x1         0x2         36:e2:37:91:0e:b5     *        n1\n\
             10.0.0.7         0x1         0x0         00:00:00:00:00:00     *        n1\n\
             10.0.0.254       0x1         0x0         00:00:00:00:00:00     *        n1\n\
             not a line of this table\n",
        );
        let route = |netdev: &str,
                     [destination, gateway, mask]: [[u8; 4]; 3],
                     flags: &str,
                     metric: u32| {
            let [destination, gateway, mask] = [destination, gateway, mask].map(u32::from_ne_bytes);
            format!(
                "{netdev}\t{destination:08X}\t{gateway:08X}\t{flags}\t0\t0\t{metric}\t{mask:08X}\t0\t0\t0 \n"
            )
        };
        let lines = [
            "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
                .to_owned(),
            route("n0", [[0; 4], [192, 168, 0, 1], [0; 4]], "0003", 100),
            route("n1", [[10, 0, 0, 0], [0; 4], [255, 255, 255, 0]], "0001", 0),
            route("n1", [[10, 1, 0, 0], [10, 0, 0, 254], [255, 255, 0, 0]], "0003", 0),
            route("n1", [[10, 1, 2, 0], [0; 4], [255, 255, 255, 0]], "0001", 0),
            route("n1", [[172, 16, 0, 0], [0; 4], [255, 240, 0, 0]], "0201", 0),
        ];
        files.write("proc/net/route", &lines.concat());
        files
    }

    fn roots(&self) -> Roots {
        Roots { sys: self.0.join("sys"), proc: self.0.join("proc"), is_own: |_| true }
    }

    fn netdev(&self, name: &str, flags: &str, operstate: &str, carrier: &str) {
        for (file, text) in [
            ("flags", flags),
            ("operstate", operstate),
            ("carrier", carrier),
            ("mtu", "9000"),
            ("carrier_down_count", "2"),
            ("statistics/rx_packets", "77"),
        ] {
            self.write(&format!("sys/class/net/{name}/{file}"), &format!("{text}\n"));
        }
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().expect("a directory")).expect("the directory is created");
        fs::write(path, text).expect("the file is written");
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn fake(name: &str) -> (World, Context) {
    let world = World::new();
    world.add_device(DeviceSpec::new(name, LOCAL));
    let context = world.verbs().device(name).and_then(|device| device.open()).expect("device");
    (world, context)
}

#[test]
fn reads_routes_neighbours_and_local_peers() {
    let files = Files::new("surroundings");
    let seen = Surroundings::read(&files.roots());
    let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
    for (peer, netdev, route) in [
        ("10.0.0.1", "n1", Route::Own { gateway: None }),
        ("10.1.9.9", "n1", Route::Own { gateway: Some(GATEWAY) }),
        ("10.1.2.3", "n1", Route::Own { gateway: None }),
        ("8.8.8.8", "n1", Route::Other { netdev: "n0".into() }),
        ("10.0.0.1", "n0", Route::Own { gateway: Some(Ipv4Addr::new(192, 168, 0, 1)) }),
        ("172.16.0.1", "n1", Route::Other { netdev: "n0".into() }),
        ("fe80::1", "n1", Route::Unknown),
    ] {
        assert_eq!(seen.route(ip(peer), netdev), route, "{peer} by {netdev}");
    }
    for (peer, netdev, neighbour) in [
        ("10.0.0.1", "n1", Neighbour::Known),
        ("10.0.0.7", "n1", Neighbour::Silent),
        ("10.0.0.1", "n2", Neighbour::Unknown),
        ("10.0.0.9", "n1", Neighbour::Unknown),
        ("fe80::1", "n1", Neighbour::Unknown),
    ] {
        assert_eq!(seen.neighbour(ip(peer), netdev), neighbour, "{peer} on {netdev}");
    }
    let local_peer = seen.local_peer(PEER).expect("the other device");
    assert_eq!(
        (local_peer.device.as_str(), local_peer.netdev.as_ref().map(|n| n.name.as_str())),
        ("there", Some("n2"))
    );
    assert_eq!(seen.local_peer(ip("10.0.0.9")), None);
    let no_local_address = Surroundings::read(&Roots { is_own: |_| false, ..files.roots() });
    assert_eq!(no_local_address.local_peer(PEER), None);
    let nothing = Surroundings::read(&Roots {
        sys: files.0.join("no"),
        proc: files.0.join("no"),
        is_own: |_| true,
    });
    assert_eq!(nothing.route(PEER, "n1"), Route::Unknown);
    assert_eq!(nothing.neighbour(PEER, "n1"), Neighbour::Unknown);
}

/// A truncated table may lack the best route, so its routes are not used. Its neighbours are used
/// as far as they were read.
#[test]
fn limits_long_tables() {
    let files = Files::new("long");
    let route = "n1\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";
    files.write("proc/net/route", &route.repeat(6000));
    let line = |at: u32| format!("10.9.{}.{} 0x1 0x0 00:00:00:00:00:00 * n1\n", at / 256, at % 256);
    files.write("proc/net/arp", &(0..20_000).map(line).collect::<String>());
    let seen = Surroundings::read(&files.roots());
    assert_eq!(seen.route(PEER, "n1"), Route::Unknown);
    assert_eq!(seen.neighbour("10.9.0.3".parse().expect("an address"), "n1"), Neighbour::Silent);
    assert_eq!(seen.neighbour("10.9.78.0".parse().expect("an address"), "n1"), Neighbour::Unknown);
}

#[test]
fn gathers_facts_from_files_and_the_device() {
    let files = Files::new("facts");
    let roots = files.roots();
    let (_world, context) = fake("here");
    let then = Arc::new(Snapshot::take(&roots, &context, 1));
    assert!(then.soft && then.instance.is_some() && then.address(LOCAL).is_some(), "{then:?}");
    files.write("sys/class/infiniband/here/ports/1/hw_counters/sent_pkts", "15\n");
    files.netdev("n2", "0x1002", "down", "");
    std::thread::sleep(Duration::from_millis(1));
    let gather = |peer: &str| {
        let now = Arc::new(Snapshot::take(&roots, &context, 1));
        let peer = peer.parse().expect("an address");
        let seen = Surroundings::read(&roots);
        Facts::gather(now, Some(Arc::clone(&then)), &seen, (Some(LOCAL), Some(peer)))
    };
    let facts = gather("10.0.0.1");
    assert_eq!(
        facts.increase(Meaning::Sent).map(|increase| (increase.name, increase.by)),
        Some(("sent_pkts", 5))
    );
    assert_eq!(
        facts.increase(Meaning::Received).map(|increase| (increase.name, increase.by)),
        Some(("rcvd_pkts", 0))
    );
    assert_eq!(facts.increase(Meaning::Damaged), None, "no such counter");
    assert_eq!(
        facts.netdev().map(|netdev| (netdev.mtu_bytes, netdev.frames_received)),
        Some((9000, Some(77)))
    );
    assert_eq!(facts.netdev_increase(|netdev| netdev.carrier_losses), Some(0));
    assert_eq!((&facts.route, facts.neighbour), (&Route::Own { gateway: None }, Neighbour::Known));
    let local_peer = facts.local_peer.as_ref().expect("the peer is on this host");
    assert_eq!((local_peer.device.as_str(), local_peer.accepts_local), ("there", Some(false)));
    assert_eq!(rank(RETRY, &facts)[0].what, "the peer's interface n2 is down");

    let facts = gather("10.1.9.9");
    assert_eq!(
        (&facts.route, facts.neighbour),
        (&Route::Own { gateway: Some(GATEWAY) }, Neighbour::Silent)
    );
    assert_eq!(rank(RETRY, &facts)[0].what, "the gateway 10.0.0.254 does not answer");

    fs::remove_dir_all(roots.device("here")).expect("the directory is removed");
    assert_eq!(rank(FLUSHED, &gather("10.1.9.9"))[0].what, "the device here is being removed");
}

#[test]
fn queries_the_device() {
    let (world, context) = fake("diagnose-removed");
    let baseline = Baseline::take(&context, 1);
    let subject = Subject {
        context: &context,
        port: 1,
        local: Some((LOCAL, 1).into()),
        peer: Some((PEER, 2).into()),
        baseline: Some(&baseline),
        failure: FLUSHED,
    };
    assert_eq!(
        causes(&subject)[0].what,
        "this side stopped the queue pair, or the local device did after an error"
    );
    world.remove_device("diagnose-removed");
    until(|| causes(&subject)[0].likelihood == Likelihood::Certain);
    assert_eq!(causes(&subject)[0].what, "the device diagnose-removed is gone");
    let access = Subject { failure: Failure::Completion(Status::REMOTE_ACCESS), ..subject };
    assert_eq!(causes(&access)[0].what, "10.0.0.1 has revoked the grant, or it expired");
}

#[test]
fn links_of_a_port_share_snapshots() {
    let (_world, context) = fake("diagnose-shared");
    until(|| Arc::ptr_eq(&Baseline::take(&context, 1).0, &Baseline::take(&context, 1).0));
    let first = Baseline::take(&context, 1);
    assert!(!Arc::ptr_eq(&first.0, &Baseline::take(&context, 2).0));
    until(|| Baseline::take(&context, 1).taken() > first.taken());
    assert!(format!("{first:?}").starts_with("Baseline(diagnose-shared port 1, "), "{first:?}");
}

/// Waits for a condition. Measurements are cached for a while, and for longer if measuring is slow.
fn until(mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < deadline, "the condition is still false");
        std::thread::sleep(Duration::from_millis(5));
    }
}
