//! The counters of the host's RDMA ports, as the kernel shows them under `/sys/class/infiniband`.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read as _;
use std::path::Path;

use crate::exposition::Exposition;

const DEVICES: &str = "/sys/class/infiniband";
/// The interval at which a driver refreshes its counters: a setting, not a counter.
const NO_COUNTER: &str = "lifespan";

/// Writes the counters of all ports of this host, under the kernel's names.
pub fn port_metrics(out: &mut Exposition) {
    write(Path::new(DEVICES), out);
}

fn write(devices: &Path, out: &mut Exposition) {
    let (mut counters, mut states) = (Vec::new(), Vec::new());
    for device in names(devices) {
        let ports = devices.join(&device).join("ports");
        for port in names(&ports) {
            let of = ports.join(&port);
            let state = fs::read_to_string(of.join("state")).unwrap_or_default();
            states.push((device.clone(), port.clone(), state.contains("ACTIVE")));
            let own = |(counter, value)| (device.clone(), port.clone(), counter, value);
            counters.extend(port_counters(&of).into_iter().map(own));
        }
    }
    let states: Vec<_> = states
        .iter()
        .map(|(device, port, is_active)| {
            (vec![("device", device.as_str()), ("port", port)], u64::from(*is_active))
        })
        .collect();
    out.gauges("port_active", "Whether a port of an RDMA device is active", &states);
    let counters: Vec<_> = counters
        .iter()
        .map(|(device, port, counter, value)| {
            let labels = vec![("device", device.as_str()), ("port", port), ("counter", counter)];
            (labels, *value)
        })
        .collect();
    let help = "Counters of the RDMA ports of this host, under the kernel's names; \
                port_xmit_data and port_rcv_data count units of 4 bytes";
    out.counters("port_counter", help, &counters);
}

/// Returns the counters of a port. If both directories have one, as `link_downed` of Soft-RoCE, the
/// driver's own is taken: no sample may occur twice.
fn port_counters(port: &Path) -> BTreeMap<String, u64> {
    let mut counters = BTreeMap::new();
    for directory in ["counters", "hw_counters"].map(|name| port.join(name)) {
        for counter in names(&directory).into_iter().filter(|name| name != NO_COUNTER) {
            // Some counters exist without a value: the driver lacks them.
            if let Some(value) = read_number(&directory.join(&counter)) {
                counters.insert(counter, value);
            }
        }
    }
    counters
}

/// Reads a number from a file with as few system calls as possible: a scrape reads a hundred files,
/// and spends most of its time here.
fn read_number(path: &Path) -> Option<u64> {
    let mut text = [0; 32]; // more than the digits of any u64
    let length = fs::File::open(path).and_then(|mut file| file.read(&mut text)).ok()?;
    std::str::from_utf8(&text[..length]).ok()?.trim().parse().ok()
}

/// Returns the names in a directory, sorted.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<_> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_testkit::TempDir;

    #[test]
    fn reads_the_counters_of_every_port_and_skips_what_is_none() {
        let directory = TempDir::new("ports");
        let port = directory.join("mlx5_0/ports/1");
        let file = |name: &str, text: &str| {
            let path = port.join(name);
            fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
            fs::write(path, text).expect("a file");
        };
        file("state", "4: ACTIVE\n");
        file("counters/port_xmit_data", "12\n");
        file("counters/VL15_dropped", "N/A (no PMA)\n");
        file("counters/link_downed", "0\n");
        file("hw_counters/link_downed", "1\n");
        file("hw_counters/out_of_sequence", "3\n");
        file("hw_counters/lifespan", "10\n");
        let mut out = Exposition::default();
        write(directory.path(), &mut out);
        let text = out.into_text();
        let samples: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(
            samples,
            [
                "ferrite_port_active{device=\"mlx5_0\",port=\"1\"} 1",
                "ferrite_port_counter_total{device=\"mlx5_0\",port=\"1\",\
                 counter=\"link_downed\"} 1",
                "ferrite_port_counter_total{device=\"mlx5_0\",port=\"1\",\
                 counter=\"out_of_sequence\"} 3",
                "ferrite_port_counter_total{device=\"mlx5_0\",port=\"1\",\
                 counter=\"port_xmit_data\"} 12",
            ]
        );
    }
}
