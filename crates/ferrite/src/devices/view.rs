//! Formats the inventory as text: a block per device, a line per port, a table of addresses.

use std::fmt::Write as _;

use super::{DeviceEntry, Inventory, LimitsEntry, Opened, PortEntry};

/// Writes a line to a string, which cannot fail.
macro_rules! line {
    ($out:expr, $($arg:tt)*) => { let _ = writeln!($out, $($arg)*); };
}

/// Returns the text, with a newline at its end.
pub(super) fn render(inventory: &Inventory, verbose: bool) -> String {
    let mut out = String::new();
    for device in &inventory.devices {
        render_device(&mut out, device, verbose);
        out.push('\n');
    }
    let manager = &inventory.connection_manager;
    if manager.available {
        line!(out, "connection manager (RDMA CM): available");
    } else {
        let error = manager.error.as_deref().unwrap_or("unknown");
        line!(out, "connection manager (RDMA CM): NOT available: {error}");
        if let Some(remedy) = &manager.remedy {
            line!(out, "  what to do: {remedy}");
        }
    }
    out
}

fn render_device(out: &mut String, device: &DeviceEntry, verbose: bool) {
    line!(out, "{}: {}", device.name, driver_text(device));
    let numa =
        device.numa_node.map_or("no NUMA node".to_owned(), |node| format!("NUMA node {node}"));
    let firmware = match device.opened.as_ref().map(|opened| opened.firmware.as_str()) {
        None | Some("") => String::new(),
        Some(version) => format!("firmware {version}, "),
    };
    line!(out, "  {firmware}GUID {}, {numa}", device.guid);
    if let Some(error) = &device.error {
        line!(out, "  CANNOT BE USED: {error}");
    }
    let Some(opened) = &device.opened else { return };
    for port in &opened.ports {
        render_port(out, port);
    }
    render_limits(out, opened, verbose);
}

fn driver_text(device: &DeviceEntry) -> String {
    const CAVEAT: &str = "(in software: tests functions, not speed)";
    match device.driver.as_deref() {
        Some("rxe") => format!("Soft-RoCE {CAVEAT}"),
        Some("siw") => format!("software iWARP {CAVEAT}"),
        Some(driver) => format!("driver {driver}"),
        None => "driver unknown".to_owned(),
    }
}

fn render_port(out: &mut String, port: &PortEntry) {
    let speed = port.mbit_per_s.map_or("unknown speed".to_owned(), speed_text);
    let state = if port.active { port.state.clone() } else { port.state.to_uppercase() };
    let netdevs = if port.netdevs.is_empty() {
        String::new()
    } else {
        format!(", {}", port.netdevs.join(" "))
    };
    line!(
        out,
        "  port {}: {state}, {}, MTU {} (of {}), {speed}{netdevs}",
        port.port,
        port.link_layer,
        port.mtu_bytes,
        port.max_mtu_bytes
    );
    if let Some(remedy) = &port.remedy {
        line!(out, "    no traffic can pass; what to do: {remedy}");
    }
    if port.gids.is_empty() {
        line!(out, "    no GIDs: give the network interface an IP address");
        return;
    }
    let width =
        port.gids.iter().map(|gid| gid.address.len()).max().unwrap_or(0).max("address".len());
    line!(out, "    {:>5}  {:width$}  {:10}  netdev", "GID", "address", "type");
    for gid in &port.gids {
        let chosen = port.chosen_gid.as_ref().filter(|chosen| chosen.index == gid.index);
        let mark = if chosen.is_some() { '*' } else { ' ' };
        let netdev = gid.netdev.as_deref().unwrap_or("-");
        line!(out, "    {mark}{:>4}  {:width$}  {:10}  {netdev}", gid.index, gid.address, gid.kind);
    }
    if let Some(chosen) = &port.chosen_gid {
        line!(out, "    * {} would be used: {}", chosen.index, chosen.why);
    }
}

fn speed_text(mbit_per_s: u32) -> String {
    format!("{} Gbit/s", f64::from(mbit_per_s) / 1000.0)
}

fn render_limits(out: &mut String, opened: &Opened, verbose: bool) {
    let limits = &opened.limits;
    line!(
        out,
        "  limits: {} queue pairs of {} requests, {} completion queues of {}, {} regions of {}, \
         {} reads in flight",
        limits.max_qp,
        limits.max_qp_wr,
        limits.max_cq,
        limits.max_cqe,
        limits.max_mr,
        size_text(limits.max_mr_size),
        limits.max_qp_init_rd_atom
    );
    if verbose {
        line!(out, "  {:22} {}", "completion_vectors", opened.completion_vectors);
        for (name, value) in rows(limits) {
            line!(out, "  {name:22} {value}");
        }
    }
}

/// Returns the name and the value of every limit. The names are those in JSON.
fn rows(limits: &LimitsEntry) -> Vec<(String, String)> {
    match serde_json::to_value(limits) {
        Ok(serde_json::Value::Object(fields)) => {
            fields.into_iter().map(|(name, value)| (name, value.to_string())).collect()
        }
        _ => Vec::new(),
    }
}

fn size_text(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes == u64::MAX {
        return "any size".to_owned();
    }
    let unit = UNITS.iter().enumerate().rev().find(|(at, _)| bytes >> (10 * (at + 1)) > 0);
    unit.map_or(format!("{bytes} B"), |(at, name)| format!("{} {name}", bytes >> (10 * (at + 1))))
}

#[cfg(test)]
mod tests {
    use super::super::*;
    use super::*;

    fn inventory() -> Inventory {
        let gid = |index, address: &str| GidRow {
            index,
            gid: address.to_owned(),
            address: address.to_owned(),
            kind: "RoCE v2".to_owned(),
            netdev: Some("eth0".to_owned()),
        };
        let port = PortEntry {
            port: 1,
            state: "active".to_owned(),
            active: true,
            link_layer: "Ethernet".to_owned(),
            mtu_bytes: 1024,
            max_mtu_bytes: 4096,
            mbit_per_s: Some(2_500),
            netdevs: vec!["eth0".to_owned()],
            remedy: None,
            gids: vec![gid(0, "fe80::1"), gid(1, "10.0.0.1")],
            chosen_gid: Some(ChosenGid { index: 1, why: "it is the best" }),
        };
        let limits = LimitsEntry { max_qp: 9, max_mr_size: 1 << 31, ..LimitsEntry::default() };
        let device = DeviceEntry {
            name: "rxe0".to_owned(),
            driver: Some("rxe".to_owned()),
            software: true,
            guid: guid_text(0x4c69_61ff_fe34_3859),
            numa_node: None,
            opened: Some(Opened {
                firmware: String::new(),
                completion_vectors: 2,
                ports: vec![port],
                limits,
            }),
            error: None,
        };
        let connection_manager = ConnectionManager { available: true, error: None, remedy: None };
        Inventory { format: 1, devices: vec![device], connection_manager }
    }

    #[test]
    fn shows_all_of_a_device() {
        let text = render(&inventory(), false);
        let expected = "\
rxe0: Soft-RoCE (in software: tests functions, not speed)
  GUID 4c69:61ff:fe34:3859, no NUMA node
  port 1: active, Ethernet, MTU 1024 (of 4096), 2.5 Gbit/s, eth0
      GID  address   type        netdev
        0  fe80::1   RoCE v2     eth0
    *   1  10.0.0.1  RoCE v2     eth0
    * 1 would be used: it is the best
  limits: 9 queue pairs of 0 requests, 0 completion queues of 0, 0 regions of 2 GiB, 0 reads in flight

connection manager (RDMA CM): available
";
        assert_eq!(text, expected);
        assert!(render(&inventory(), true).contains("\n  max_qp_init_rd_atom    0\n"));
    }

    #[test]
    fn shows_problems_in_capitals_with_their_remedy() {
        let mut inventory = inventory();
        let port = &mut inventory.devices[0].opened.as_mut().expect("opened").ports[0];
        port.state = "down".to_owned();
        port.active = false;
        port.remedy = Some("turn it on".to_owned());
        port.gids.clear();
        inventory.connection_manager = ConnectionManager {
            available: false,
            error: Some("none".into()),
            remedy: Some("load it".into()),
        };
        let text = render(&inventory, false);
        assert!(
            text.contains("port 1: DOWN,") && text.contains("what to do: turn it on"),
            "{text}"
        );
        assert!(
            text.contains("no GIDs") && text.contains("NOT available: none\n  what to do: load it"),
            "{text}"
        );
    }

    #[test]
    fn shows_a_device_that_cannot_be_opened() {
        let mut inventory = inventory();
        inventory.devices[0].opened = None;
        inventory.devices[0].error = Some("ibv_open_device (rxe0): no".to_owned());
        assert!(render(&inventory, true).contains("CANNOT BE USED: ibv_open_device (rxe0): no"));
        let json = serde_json::to_value(&inventory).expect("a model");
        assert_eq!(json["devices"][0]["error"], "ibv_open_device (rxe0): no");
        assert!(json["devices"][0].get("ports").is_none());
    }

    #[test]
    fn json_names_are_stable() {
        let json = serde_json::to_value(inventory()).expect("a model");
        assert_eq!(json["format"], 1);
        let device = &json["devices"][0];
        let port = &device["ports"][0];
        assert_eq!((&device["software"], &device["limits"]["max_qp"]), (&true.into(), &9.into()));
        assert_eq!(
            (&port["chosen_gid"]["index"], &port["gids"][1]["type"]),
            (&1.into(), &"RoCE v2".into())
        );
        assert_eq!(port["mtu_bytes"], 1024);
    }

    #[test]
    fn formats_sizes() {
        assert_eq!(size_text(17), "17 B");
        assert_eq!(size_text(4096), "4 KiB");
        assert_eq!(size_text(u64::MAX - 1), "16383 PiB");
        assert_eq!(size_text(u64::MAX), "any size");
    }
}
