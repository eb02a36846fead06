//! The part of a device that links use. The poller owns the verbs objects (`device_objects.rs`).
//!
//! All links of a device share one completion queue and one stock of receives, so an idle link has
//! none of its own. The completion queue must never overrun. Therefore each request in flight holds
//! one entry of the queue from post to completion. That includes requests that are not signaled,
//! because all requests of a queue pair complete when it fails. Links that find no free entry wait
//! in a queue of this module.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use ferrite_verbs::{Absence, Context, DeviceQuirks, GidEntry, Limits, Port};

use crate::config::Config;
use crate::error::{Error, ErrorKind};
use crate::mem::lock;

pub(crate) struct SharedDevice {
    pub(crate) name: String,
    /// The device's index, which is also the index of its protection domain in the pool.
    pub(crate) index: usize,
    device: Mutex<Device>,
    in_flight: AtomicU32,
    in_flight_max: AtomicU32,
    /// Links that wait for a free entry.
    waiting: Mutex<VecDeque<u32>>,
    has_waiting: AtomicBool,
    /// The largest payload that links send inline: the setting `inline_threshold`, or less if the
    /// device has refused a queue pair with that limit.
    inline: AtomicU32,
    gone: AtomicBool,
    /// Whether the device reports that a queue pair has taken its last receive.
    reports_last_receive: AtomicBool,
    /// The GID table as [`SharedDevice::gid_entry`] has last read it. Reading it may wait for the
    /// kernel, so `gid_entry` uses this copy. The device reports changes.
    gids: Mutex<Option<Vec<GidEntry>>>,
    /// The ports known to be down. When the device is opened, its usable ports are added only if
    /// none of them is active. Later events add and remove ports.
    ports_down: Mutex<BTreeSet<u8>>,
}

/// The device's current state.
struct Device {
    /// For diagnoses of failed links. `None` while the device is gone.
    context: Option<Context>,
    /// While the device is gone, the limits that it had before.
    limits: Limits,
    quirks: DeviceQuirks,
    /// Why the latest attempt to bring the device back failed.
    absence: Option<Error>,
}

/// The properties of a device that was just opened.
pub(crate) struct Life {
    pub(super) context: Context,
    pub(super) limits: Limits,
    pub(super) quirks: DeviceQuirks,
    pub(super) in_flight_max: u32,
    pub(super) inline: u32,
    /// The usable ports, if none of them is active: see [`inactive_ports`].
    pub(super) inactive_ports: Vec<Port>,
}

impl SharedDevice {
    pub(crate) fn new(index: usize, life: Life) -> Self {
        let Life { context, limits, quirks, in_flight_max, inline, inactive_ports } = life;
        let ports_down = Mutex::new(report_inactive(&context, &inactive_ports));
        let reports_last_receive = quirks.reports_last_receive;
        Self {
            name: context.device().name(),
            index,
            device: Mutex::new(Device { context: Some(context), limits, quirks, absence: None }),
            in_flight: AtomicU32::new(0),
            in_flight_max: AtomicU32::new(in_flight_max),
            waiting: Mutex::new(VecDeque::new()),
            has_waiting: AtomicBool::new(false),
            inline: AtomicU32::new(inline),
            gone: AtomicBool::new(false),
            reports_last_receive: AtomicBool::new(reports_last_receive),
            gids: Mutex::new(None),
            ports_down,
        }
    }

    /// Puts a device that came back into use again. No earlier link is left, so nothing is in
    /// flight and no link waits.
    pub(crate) fn begin(&self, life: Life) {
        let Life { context, limits, quirks, in_flight_max, inline, inactive_ports } = life;
        self.in_flight.store(0, Ordering::Relaxed);
        self.in_flight_max.store(in_flight_max, Ordering::Relaxed);
        self.inline.store(inline, Ordering::Relaxed);
        lock(&self.waiting).clear();
        *lock(&self.ports_down) = report_inactive(&context, &inactive_ports);
        self.forget_gids();
        *lock(&self.device) = Device { context: Some(context), limits, quirks, absence: None };
        self.gone.store(false, Ordering::Release);
    }

    /// Returns whether `ip` is one of the device's own addresses.
    pub(crate) fn has_address(&self, ip: std::net::IpAddr) -> bool {
        let gids = self.context().and_then(|context| context.gids().ok());
        gids.is_some_and(|gids| {
            gids.iter().any(|entry| entry.gid.ip().to_canonical() == ip.to_canonical())
        })
    }

    /// Returns an entry of the GID table. Reads the table if this is the first call since the table
    /// changed.
    pub(crate) fn gid_entry(&self, port: u8, index: u32) -> Option<GidEntry> {
        let mut gids = lock(&self.gids);
        if gids.is_none() {
            *gids = self.context().and_then(|context| context.gids().ok());
        }
        gids.iter().flatten().find(|entry| entry.port == port && entry.index == index).cloned()
    }

    /// Records that a port is down, and logs it if the port was up before.
    pub(crate) fn port_went_down(&self, port: u8) {
        if lock(&self.ports_down).insert(port) {
            tracing::warn!("RDMA device {}: port {port} went down", self.name);
        }
    }

    /// Records that a port is up, and logs it if it was down.
    pub(crate) fn port_came_up(&self, port: u8) {
        if lock(&self.ports_down).remove(&port) {
            tracing::info!("RDMA device {}: port {port} is up again", self.name);
        }
    }

    /// Returns the device's current fault: it is gone, or at least one of its ports is down.
    pub(crate) fn fault(&self) -> Option<String> {
        if self.is_gone() {
            return Some(self.absence().to_string());
        }
        let down: Vec<_> = lock(&self.ports_down).iter().map(u8::to_string).collect();
        (!down.is_empty()).then(|| format!("{}: port {} is down", self.name, down.join(", ")))
    }

    /// Records that the GID table has changed.
    pub(crate) fn forget_gids(&self) {
        *lock(&self.gids) = None;
    }

    /// Returns the opened device, or `None` while it is gone.
    pub(crate) fn context(&self) -> Option<Context> {
        lock(&self.device).context.clone()
    }

    /// Returns the limits of the device.
    pub(crate) fn limits(&self) -> Limits {
        lock(&self.device).limits.clone()
    }

    /// Returns how the device's provider differs from others.
    pub(crate) fn quirks(&self) -> DeviceQuirks {
        lock(&self.device).quirks
    }

    /// Returns whether memory can be opened to the peer of a single queue pair.
    pub(crate) fn has_windows(&self) -> bool {
        lock(&self.device).limits.queue_pair_windows
    }

    /// Returns the error for attempts to use the device while it is gone.
    pub(crate) fn absence(&self) -> Error {
        let what = match &lock(&self.device).absence {
            Some(reason) => {
                format!("{} was removed or failed, and is not back: {reason}", self.name)
            }
            None => format!("{} was removed or failed", self.name),
        };
        Error::new(ErrorKind::DeviceGone, what)
    }

    pub(crate) fn set_absence(&self, reason: Error) {
        lock(&self.device).absence = Some(reason);
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Marks the device as gone, so that nothing new starts on it. Returns `false` if it was
    /// already gone.
    pub(crate) fn set_gone(&self) -> bool {
        !self.gone.swap(true, Ordering::AcqRel)
    }

    /// Closes the device.
    pub(crate) fn close(&self) {
        lock(&self.device).context.take();
    }

    pub(super) fn send_queue_depth(&self, config: &Config) -> u32 {
        config.send_queue_depth.clamp(BATCH_MIN, self.limits().max_qp_wr.min(u16::MAX.into()))
    }

    /// Returns the largest payload that links may send inline.
    pub(crate) fn inline(&self) -> u32 {
        self.inline.load(Ordering::Relaxed)
    }

    /// Records that the device accepted a queue pair for inline payloads of up to `bytes`, and
    /// refused one with a larger limit.
    pub(super) fn limit_inline(&self, bytes: u32) {
        self.inline.fetch_min(bytes, Ordering::Relaxed);
    }

    /// Reserves up to `wanted` entries of the completion queue. Returns how many were reserved.
    pub(crate) fn reserve(&self, wanted: usize) -> usize {
        let wanted = wanted as u32; // at most a batch
        let before = self.in_flight.fetch_add(wanted, Ordering::Relaxed);
        let granted = self.in_flight_max().saturating_sub(before).min(wanted);
        if granted < wanted {
            self.in_flight.fetch_sub(wanted - granted, Ordering::Relaxed);
        }
        granted as usize
    }

    pub(crate) fn release(&self, entries: usize) {
        self.in_flight.fetch_sub(entries as u32, Ordering::Relaxed);
    }

    /// Returns whether requests should be signaled, so that their entries become free soon.
    pub(crate) fn is_pressed(&self) -> bool {
        self.in_flight.load(Ordering::Relaxed) > self.in_flight_max() / 4
    }

    fn in_flight_max(&self) -> u32 {
        self.in_flight_max.load(Ordering::Relaxed)
    }

    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Returns whether the device is known to report that a queue pair has taken its last receive.
    pub(crate) fn reports_last_receive(&self) -> bool {
        self.reports_last_receive.load(Ordering::Relaxed)
    }

    pub(crate) fn has_reported_last_receive(&self) {
        self.reports_last_receive.store(true, Ordering::Relaxed);
    }

    /// Takes entries of the completion queue away from requests, for up to `wanted` more receives.
    /// Returns the number of entries.
    pub(crate) fn reserve_receives(&self, wanted: usize) -> usize {
        let room = (self.in_flight_max() / 2).min(u32::try_from(wanted).unwrap_or(u32::MAX));
        self.in_flight_max.fetch_sub(room, Ordering::Relaxed);
        room as usize
    }

    /// Undoes [`SharedDevice::reserve_receives`] for this number of entries.
    pub(crate) fn release_receives(&self, entries: usize) {
        self.in_flight_max.fetch_add(entries as u32, Ordering::Relaxed);
    }

    /// Queues a link that waits for entries.
    pub(crate) fn wait(&self, link: u32) {
        lock(&self.waiting).push_back(link);
        self.has_waiting.store(true, Ordering::Release);
    }

    /// Takes all waiting links if entries are free.
    pub(crate) fn take_waiting(&self) -> VecDeque<u32> {
        if !self.has_waiting.load(Ordering::Acquire)
            || self.in_flight.load(Ordering::Relaxed) >= self.in_flight_max()
        {
            return VecDeque::new();
        }
        self.has_waiting.store(false, Ordering::Release);
        std::mem::take(&mut lock(&self.waiting))
    }
}

/// Returns the ports of a device that links may use (the chosen one, or all), if none of them is
/// active. If at least one is active, returns an empty list: the second port of a card is often not
/// connected, and that need not be reported.
pub(super) fn inactive_ports(context: &Context, chosen: Option<u8>) -> Vec<Port> {
    let mut ports = context.ports().unwrap_or_default();
    ports.retain(|port| chosen.is_none_or(|chosen| chosen == port.number));
    match ports.iter().any(Port::is_active) {
        true => Vec::new(),
        false => ports,
    }
}

/// Logs the ports that are not active when the device is opened, because the device reports only
/// later changes. Returns their numbers.
fn report_inactive(context: &Context, ports: &[Port]) -> BTreeSet<u8> {
    for port in ports {
        let (device, state) = (context.device().name(), port.state.to_string());
        let absence = Absence::PortDown { device, port: port.number, state };
        tracing::warn!("{absence}; to do: {}", absence.remedy());
    }
    ports.iter().map(|port| port.number).collect()
}

/// The minimum number of requests that a queue must hold.
pub(super) const BATCH_MIN: u32 = 16;
