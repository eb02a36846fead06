//! The counters of the host's RDMA ports, as the kernel shows them under `/sys/class/infiniband`.
//!
//! To read a counter, the driver may have to ask the card. A card in trouble can block the reader
//! for seconds or for ever, so separate threads read the devices. A scrape waits for them for a
//! limited time, and always has the metrics of the program and of the other devices.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, Dir, Mode, OFlags, openat};
use rustix::path::Arg;

use crate::exposition::Exposition;

const DEVICES: &str = "/sys/class/infiniband";
/// The interval at which a driver refreshes its counters: a setting, not a counter.
const NO_COUNTER: &str = "lifespan";

/// How long a scrape waits for the devices. This is shorter than the time limit of `/ready`, which
/// may have to wait for a thread that a scrape uses.
const SCRAPE_WAIT: Duration = Duration::from_millis(500);
/// How long a scrape waits until it starts another thread for the devices that are left. One thread
/// is usually enough.
const THREAD_WAIT: Duration = Duration::from_millis(50);
/// How many devices a scrape reads in any case. It reads those with the oldest numbers. A scrape of
/// more devices each second would cost more than 1 % of a core.
const READ_ALWAYS: usize = 32;
/// The age at which a scrape reads a device again, however many devices there are. Until then a
/// scrape of more than [`READ_ALWAYS`] devices may show the previous numbers.
const FRESH: Duration = Duration::from_secs(5);
/// The age at which the numbers of a device are left out. If a device takes longer than a scrape
/// waits, a later scrape shows its numbers.
const AGE_MAX: Duration = Duration::from_secs(10);

/// Writes the counters of all ports of this host, under the kernel's names.
pub fn port_metrics(out: &mut Exposition) {
    static READER: LazyLock<Mutex<Reader>> =
        LazyLock::new(|| Mutex::new(Reader::new(DEVICES.into())));
    // Only one scrape runs at a time. A device that another scrape is reading would be missing
    // here.
    write(&lock(&READER).read(SCRAPE_WAIT), out);
}

fn write(devices: &BTreeMap<String, Device>, out: &mut Exposition) {
    let (mut active, mut counters, mut overdue) = (Vec::new(), Vec::new(), Vec::new());
    for (name, device) in devices {
        overdue.push((vec![("device", name.as_str())], u64::from(device.is_overdue())));
        for port in device.recent() {
            let labels = || vec![("device", name.as_str()), ("port", port.number.as_str())];
            active.push((labels(), u64::from(port.is_active)));
            for (counter, value) in &port.counters {
                let mut labels = labels();
                labels.push(("counter", counter));
                counters.push((labels, *value));
            }
        }
    }
    out.gauges("port_active", "Whether a port of an RDMA device is active", &active);
    let help = "1 if a device does not answer reads of its counters, which are then left out";
    out.gauges("port_counters_overdue", help, &overdue);
    let help = "Counters of the RDMA ports of this host, under the kernel's names; \
                port_xmit_data and port_rcv_data count units of 4 bytes";
    out.counters("port_counter", help, &counters);
}

/// Reads the devices below a directory.
struct Reader {
    directory: PathBuf,
    /// The age up to which numbers need not be read again: [`FRESH`].
    fresh: Duration,
    devices: Arc<Mutex<BTreeMap<String, Device>>>,
}

/// What is known about a device.
#[derive(Clone, Default)]
struct Device {
    /// Whether a thread reads the device now.
    is_being_read: bool,
    is_reported: bool,
    /// When the device was last read, and the ports that it had.
    last: Option<(Instant, Arc<Vec<Port>>)>,
}

struct Port {
    number: String,
    is_active: bool,
    counters: BTreeMap<String, u64>,
}

impl Reader {
    fn new(directory: PathBuf) -> Self {
        Self { directory, fresh: FRESH, devices: Arc::default() }
    }

    /// Reads the devices that are due, and waits for the threads that read them for at most `wait`.
    /// Returns all devices that any thread has begun to read, each with the result of its last
    /// complete reading, if there is one.
    fn read(&self, wait: Duration) -> BTreeMap<String, Device> {
        let present = names(&self.directory);
        let to_read: Vec<_> = {
            let mut devices = lock(&self.devices);
            devices.retain(|name, _| present.contains(name));
            self.due(present, &devices)
        };
        let mut left = to_read.len();
        let to_read = Arc::new(Mutex::new(to_read));
        let (done, is_done) = channel();
        let mut next_thread = Instant::now();
        let deadline = next_thread + wait;
        while left > 0 && Instant::now() < deadline {
            if Instant::now() >= next_thread {
                self.start(&to_read, &done);
                next_thread += THREAD_WAIT;
            }
            let until = next_thread.min(deadline).saturating_duration_since(Instant::now());
            if is_done.recv_timeout(until).is_ok() {
                left -= 1;
            }
        }
        let mut devices = lock(&self.devices);
        for (name, device) in devices.iter_mut() {
            device.report(name);
        }
        devices.clone()
    }

    /// Returns the devices that a scrape reads, in reverse order. These are all devices whose
    /// numbers are missing or not fresh. Devices with the oldest numbers are added, up to
    /// [`READ_ALWAYS`] in total. Devices that are being read are left out.
    fn due(&self, present: Vec<String>, devices: &BTreeMap<String, Device>) -> Vec<String> {
        let read_at = |name: &str| {
            devices.get(name).and_then(|device| device.last.as_ref()).map(|(at, _)| *at)
        };
        let is_idle = |name: &String| devices.get(name).is_none_or(|device| !device.is_being_read);
        let mut due: Vec<_> = present.into_iter().filter(is_idle).collect();
        due.sort_by_key(|name| read_at(name)); // those that were never read come first
        let is_stale = |name: &String| read_at(name).is_none_or(|at| at.elapsed() >= self.fresh);
        let count = due.iter().take_while(|name| is_stale(name)).count();
        due.truncate(count.max(READ_ALWAYS));
        due.reverse();
        due
    }

    /// Starts a thread that reads the devices of the list. If no thread can be started, logs that.
    fn start(&self, to_read: &Arc<Mutex<Vec<String>>>, done: &Sender<()>) {
        if lock(to_read).is_empty() {
            return;
        }
        let (to_read, done) = (Arc::clone(to_read), done.clone());
        let (directory, devices) = (self.directory.clone(), Arc::clone(&self.devices));
        let work = move || {
            loop {
                let Some(name) = lock(&to_read).pop() else { return };
                lock(&devices).entry(name.clone()).or_default().is_being_read = true;
                let ports = ports(&directory.join(&name).join("ports"));
                if let Some(device) = lock(&devices).get_mut(&name) {
                    device.is_being_read = false;
                    device.last = Some((Instant::now(), Arc::new(ports)));
                }
                let _ = done.send(()); // the scrape may have ended
            }
        };
        if let Err(error) = thread::Builder::new().name("ferrite-ports".into()).spawn(work) {
            tracing::debug!("cannot start a thread to read the counters of RDMA ports: {error}");
        }
    }
}

impl Device {
    /// Returns the ports of the device, unless the numbers are old.
    fn recent(&self) -> &[Port] {
        match &self.last {
            Some((at, ports)) if at.elapsed() < AGE_MAX => ports,
            _ => &[],
        }
    }

    /// Returns whether the numbers of the device are left out because it does not answer.
    fn is_overdue(&self) -> bool {
        self.is_being_read && self.recent().is_empty()
    }

    /// Logs once that the device does not answer, and once that it answers again.
    fn report(&mut self, name: &str) {
        match (self.is_overdue(), self.is_reported) {
            (true, false) => tracing::warn!(
                "RDMA device {name}: its counters could not be read in time; /metrics leaves them \
                 out until the device answers"
            ),
            (false, true) => tracing::info!("RDMA device {name}: its counters can be read again"),
            _ => return,
        }
        self.is_reported = !self.is_reported;
    }
}

fn ports(directory: &Path) -> Vec<Port> {
    let port = |number: String| {
        let port = open(CWD, directory.join(&number).as_path(), OFlags::DIRECTORY)?;
        let state = read_text(&port, c"state", |text| text.contains("ACTIVE"));
        let is_active = state.unwrap_or_default();
        Some(Port { number, is_active, counters: counters(&port) })
    };
    names(directory).into_iter().filter_map(port).collect()
}

/// Returns the counters of a port. If both directories have a counter of the same name, such as
/// `link_downed` of Soft-RoCE, the driver's own (`hw_counters`) is used, because no sample may
/// occur twice.
fn counters(port: &OwnedFd) -> BTreeMap<String, u64> {
    let mut counters = BTreeMap::new();
    for directory in [c"counters", c"hw_counters"] {
        let Some(directory) = open(port, directory, OFlags::DIRECTORY) else { continue };
        let Ok(entries) = Dir::read_from(&directory) else { continue };
        for entry in entries.flatten() {
            let Ok(name) = entry.file_name().to_str() else { continue };
            if name.starts_with('.') || name == NO_COUNTER {
                continue;
            }
            let value = read_text(&directory, entry.file_name(), |text| text.trim().parse().ok());
            // Some counters exist without a value, because the driver does not support them.
            if let Some(value) = value.flatten() {
                counters.insert(name.to_owned(), value);
            }
        }
    }
    counters
}

/// Reads a small file with few system calls and by a short path. A scrape reads hundreds of files,
/// and spends most of its time here.
fn read_text<T>(directory: &OwnedFd, name: &CStr, parse: impl FnOnce(&str) -> T) -> Option<T> {
    let file = open(directory, name, OFlags::empty())?;
    let mut text = [0; 32]; // more than the digits of any u64
    let length = rustix::io::read(&file, &mut text).ok()?;
    std::str::from_utf8(&text[..length]).ok().map(parse)
}

fn open(at: impl std::os::fd::AsFd, path: impl Arg, flags: OFlags) -> Option<OwnedFd> {
    openat(at, path, flags | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()
}

/// Returns the names in a directory, sorted.
fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<_> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write as _;

    use ferrite_testkit::{TIMEOUT, TempDir, until};
    use rustix::fs::{FileType, mknodat};

    use super::*;

    /// Writes a file of the first port of a device.
    fn file(directory: &TempDir, device: &str, name: &str, text: &str) -> PathBuf {
        let path = directory.join(device).join("ports/1").join(name);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        fs::write(&path, text).expect("a file");
        path
    }

    fn samples(devices: &BTreeMap<String, Device>) -> Vec<String> {
        let mut out = Exposition::default();
        write(devices, &mut out);
        let text = out.into_text();
        text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect()
    }

    #[test]
    fn reads_the_counters_of_every_port_and_skips_what_is_none() {
        let directory = TempDir::new("ports");
        let file = |name: &str, text: &str| file(&directory, "mlx5_0", name, text);
        file("state", "4: ACTIVE\n");
        file("counters/port_xmit_data", "12\n");
        file("counters/VL15_dropped", "N/A (no PMA)\n");
        file("counters/link_downed", "0\n");
        file("hw_counters/link_downed", "1\n");
        file("hw_counters/out_of_sequence", "3\n");
        file("hw_counters/lifespan", "10\n");
        // Port 2 has no counters, like the port of a virtual function.
        fs::create_dir_all(directory.join("mlx5_0/ports/2")).expect("a directory");
        let reader = Reader::new(directory.path().into());
        assert_eq!(
            samples(&reader.read(LONG)),
            [
                "ferrite_port_active{device=\"mlx5_0\",port=\"1\"} 1",
                "ferrite_port_active{device=\"mlx5_0\",port=\"2\"} 0",
                "ferrite_port_counters_overdue{device=\"mlx5_0\"} 0",
                "ferrite_port_counter_total{device=\"mlx5_0\",port=\"1\",\
                 counter=\"link_downed\"} 1",
                "ferrite_port_counter_total{device=\"mlx5_0\",port=\"1\",\
                 counter=\"out_of_sequence\"} 3",
                "ferrite_port_counter_total{device=\"mlx5_0\",port=\"1\",\
                 counter=\"port_xmit_data\"} 12",
            ]
        );
        fs::remove_dir_all(directory.join("mlx5_0")).expect("the device's files are removed");
        assert_eq!(samples(&reader.read(LONG)), [""; 0]);
    }

    /// The driver may ask the card for each counter, so reading costs time.
    #[test]
    fn scrape_of_many_devices_reads_a_part_of_them() {
        const DEVICES: usize = READ_ALWAYS * 2 + 8;
        let directory = TempDir::new("ports-many");
        let write_all = |value: &str| {
            for device in 0..DEVICES {
                let device = format!("mlx5_{device}");
                file(&directory, &device, "counters/port_xmit_data", value);
            }
        };
        let mut reader = Reader::new(directory.path().into());
        reader.fresh = LONG;
        // The files have a new value each time, which shows the devices that were read.
        let read = |reader: &Reader, value: &str| {
            write_all(value);
            let devices = reader.read(LONG);
            let values = devices.values().map(|device| {
                let (_, ports) = device.last.as_ref().expect("it was read");
                ports[0].counters["port_xmit_data"]
            });
            values.collect::<Vec<_>>()
        };
        let count = |values: &[u64], value| values.iter().filter(|one| **one == value).count();
        assert_eq!(count(&read(&reader, "1"), 1), DEVICES, "a scrape must read all new devices");
        assert_eq!(count(&read(&reader, "2"), 2), READ_ALWAYS);
        let third = read(&reader, "3");
        assert_eq!((count(&third, 3), count(&third, 2)), (READ_ALWAYS, READ_ALWAYS));
        let fourth = read(&reader, "4");
        assert_eq!(
            (count(&fourth, 4), count(&fourth, 1)),
            (READ_ALWAYS, 0),
            "a scrape must read the oldest first"
        );
        reader.fresh = Duration::ZERO;
        assert_eq!(
            count(&read(&reader, "5"), 5),
            DEVICES,
            "a scrape must read all devices that are not fresh"
        );
    }

    /// Longer than a scrape of files in memory takes.
    const LONG: Duration = Duration::from_secs(60);

    /// A pipe without a writer blocks its reader, like a card whose firmware hangs.
    #[test]
    fn device_that_does_not_answer_hides_no_other_and_comes_back() {
        let directory = TempDir::new("ports-hang");
        file(&directory, "mlx5_0", "counters/port_xmit_data", "1\n");
        file(&directory, "mlx5_2", "counters/port_xmit_data", "3\n");
        let counter = file(&directory, "mlx5_1", "counters/port_xmit_data", "");
        fs::remove_file(&counter).expect("removed");
        let pipe = directory.join("pipe");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).expect("a pipe");
        fs::hard_link(&pipe, &counter).expect("a link");

        let reader = Reader::new(directory.path().into());
        let of = |device: &str, value| {
            format!(
                "ferrite_port_counter_total{{device=\"{device}\",port=\"1\",\
                 counter=\"port_xmit_data\"}} {value}"
            )
        };
        let overdue = |device: &str, is: u64| {
            format!("ferrite_port_counters_overdue{{device=\"{device}\"}} {is}")
        };
        let others = [of("mlx5_0", 1), of("mlx5_2", 3), overdue("mlx5_0", 0), overdue("mlx5_1", 1)];
        let has_others = |found: &[String]| others.iter().all(|sample| found.contains(sample));
        until(TIMEOUT, "the other devices", || {
            has_others(&samples(&reader.read(Duration::from_millis(100))))
        });
        // From now on nobody waits for the device, and no other thread reads it.
        let begun = Instant::now();
        assert!(has_others(&samples(&reader.read(LONG))));
        assert!(begun.elapsed() < LONG / 2, "{:?}", begun.elapsed());

        fs::remove_file(&counter).expect("removed");
        fs::write(&counter, "9\n").expect("a file");
        let mut writer = fs::OpenOptions::new().write(true).open(&pipe).expect("the other end");
        writeln!(writer, "2").expect("written");
        drop(writer);
        until(TIMEOUT, "the device answers", || {
            samples(&reader.read(LONG)).contains(&of("mlx5_1", 9))
        });
    }
}
