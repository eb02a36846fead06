//! The suite on the kernel's Soft-RoCE devices, in the lab's guest (`cargo xtask lab-test verbs`).
#![expect(clippy::unwrap_used, reason = "tests")]

mod churn;
mod faults;
mod process;
mod suite;

use ferrite_verbs::{Device, LinkLayer, PortState, Verbs, choose_gid};
use suite::{Fixture, Host, run_suite};

fn lab() -> Fixture {
    let verbs = Verbs::system().expect("rdma-core");
    Fixture { verbs, hosts: [Host::new("rxe1", "10.0.0.1"), Host::new("rxe2", "10.0.0.2")] }
}

run_suite!(crate::lab);

#[test]
fn devices_report_their_attributes() {
    let verbs = lab().verbs;
    let devices = verbs.devices().unwrap();
    let names: Vec<String> = devices.iter().map(Device::name).collect();
    assert!(names.contains(&"rxe1".to_owned()) && names.contains(&"rxe2".to_owned()), "{names:?}");
    for (name, netdev, ip) in [("rxe1", "h1", "10.0.0.1"), ("rxe2", "h2", "10.0.0.2")] {
        let device = verbs.device(name).unwrap();
        assert_eq!((device.driver().as_deref(), device.quirks().is_software), (Some("rxe"), true));
        assert_ne!(device.guid(), 0);
        let context = device.open().unwrap();
        let limits = context.limits().unwrap();
        assert_eq!((limits.ports, limits.max_cqe), (1, 32767));
        let port = context.active_port().unwrap();
        assert_eq!((port.state, port.link_layer), (PortState::ACTIVE, LinkLayer::ETHERNET));
        assert_eq!(port.active_mtu.bytes(), 4096);
        let gids = context.gids().unwrap();
        let chosen = choose_gid(&port, &gids).unwrap().entry;
        assert_eq!(
            (chosen.gid.ip().to_string().as_str(), chosen.netdev.as_deref()),
            (ip, Some(netdev))
        );
    }
    let error = verbs.device("mlx9").unwrap_err();
    assert!(error.to_string().contains("this host has"), "{error}");
}
