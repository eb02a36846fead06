//! The fabric: devices, completions, links, and one descriptor to wait on. It has threads or a
//! runtime only if the caller asks for them.
//!
//! | file | what it is |
//! |---|---|
//! | `poller.rs` | one pass: poll completions, deliver them, handle events and deadlines |
//! | `poller/connect.rs` | handshakes with peers, over RDMA and TCP; migration and upgrade |
//! | `poller/revive.rs` | devices that disappear and come back |
//! | `poller/prepared.rs` | queue pairs that are created in advance |
//! | `poller/leaving.rs` | queue pairs that wait to be destroyed |
//! | `poller/shrinking.rs` | returning memory to the system |
//! | `commands.rs` | calls that may block, run on threads of their own if the program asks for it |
//! | `builder.rs` `devices.rs` | building a fabric; opening the devices that it uses |
//! | `links.rs` | the table of the fabric's links |
//! | `listener.rs` `regions.rs` | listeners and regions, shared by the poller and the handles |
//! | `strikes.rs` | peers that are excluded from RDMA for a while |
//! | `stats.rs` | the counters of a fabric |
//! | `timers.rs` | deadlines |
//! | `busy_poll.rs` `spin.rs` | how long to poll before sleeping; the pauses between passes |
//! | `drive.rs` | the ways to drive a fabric: by hand, `block_on`, a tokio task, a thread |

mod builder;
mod busy_poll;
mod commands;
mod devices;
mod drive;
mod links;
pub(crate) mod listener;
pub(crate) mod poller;
pub(crate) mod regions;
mod spin;
mod stats;
mod strikes;
pub(crate) mod timers;
#[cfg(feature = "tokio")]
mod watch;

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use ferrite_verbs::{Absence, Status, Verbs};

use crate::config::Config;
use crate::device::device_choice::DeviceChoice;
use crate::device::shared_device::SharedDevice;
use crate::diagnose::Failure;
use crate::error::{Error, ErrorKind};
use crate::latency::Latencies;
use crate::link::shared::LinkShared;
use crate::log_limit::LogLimit;
use crate::mem::{BufMut, Pool, Purpose};
use crate::policy::{Fallback, FallbackCause};
use crate::random::random;
use crate::wake::mailbox::Mailbox;
use crate::wake::wait_set::WaitSet;
use crate::wire::{Features, Hello, Version};
pub use builder::Builder;
use builder::Tls;
use busy_poll::BusyPoll;
use commands::Commands;
use links::Links;
use poller::Poller;
use regions::Regions;
use stats::Counters;
pub use stats::FabricStats;

/// Drives links over one or more devices. Clones share it.
///
/// A fabric does nothing by itself. It is driven by [`Fabric::block_on`], by a tokio task
/// ([`Fabric::drive`]), by a thread ([`Fabric::spawn_thread`]), or by any event loop. An event loop
/// waits until the fabric's descriptor ([`AsFd`]) is readable, then calls [`Fabric::progress`].
///
/// ```
/// use ferrite_fabric::{Config, Fabric};
/// # use ferrite_verbs::fake::{DeviceSpec, World};
/// # let world = World::new();
/// # world.add_device(DeviceSpec::new("fake1", "127.0.0.1".parse()?));
/// # let verbs = world.verbs(); // on a host with RDMA: Verbs::system()?
/// let config = Config { busy_poll_us: 0, ..Config::default() };
/// let fabric = Fabric::builder(&verbs).config(config).build()?;
/// assert_eq!(fabric.devices(), ["fake1"]);
/// let mut listener = fabric.listen("127.0.0.1:0".parse()?)?;
/// let (there, here) = fabric.block_on(async {
///     let connecting = fabric.connect(listener.local_addr());
///     let (there, here) = futures_util::join!(connecting, listener.accept());
///     Ok::<_, ferrite_fabric::Error>((there?, here?))
/// })?;
/// there.post_bytes(0, b"hello")?;
/// let message = fabric.block_on(here.recv())?;
/// assert_eq!(message.to_vec(), b"hello");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Fabric(Arc<Handle>);

/// The part that all clones of a [`Fabric`] share. It is dropped with the last clone. A task or
/// thread that drives the fabric holds only [`Shared`], so it outlives the `Handle` and notices
/// that the `Handle` was dropped.
struct Handle {
    shared: Arc<Shared>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.abandoned.store(true, Ordering::Release);
        self.shared.mailbox.notify();
    }
}

pub(crate) struct Shared {
    // `drop` below relies on the order in which these fields are dropped.
    poller: Mutex<Poller>,
    pub(crate) links: RwLock<Links>,
    pub(crate) regions: Regions,
    pub(crate) devices: Vec<Arc<SharedDevice>>,
    pub(crate) pool: Pool,
    /// `None` if this host has no RDMA.
    pub(crate) verbs: Option<Verbs>,
    /// Why there is no device. `None` if there is one.
    absence: Option<Error>,
    /// Whether the caller reports that RDMA is unavailable, instead of the fabric.
    pub(crate) is_quiet: bool,
    /// Devices that could not be used, each with the reason.
    unused: Vec<(String, Error)>,
    pub(crate) tls: Tls,
    pub(crate) config: Config,
    pub(crate) device_choice: DeviceChoice,
    busy_poll: BusyPoll,
    /// Maximum number of incoming TCP connections whose handshake has not finished.
    pub(crate) unfinished_tcp_max: AtomicUsize,
    /// Whether the kernel emulates a device and needs CPU time for it.
    has_software_device: bool,
    pub(crate) commands: Arc<Commands>,
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) waits: WaitSet,
    /// A random number that this fabric sends in each hello. It distinguishes the fabric from
    /// others, for example from that of an earlier process.
    instance: u64,
    /// Whether the [`Handle`] was dropped, so that only tasks and threads that drive the fabric
    /// hold it.
    abandoned: AtomicBool,
    /// Number of tasks and threads that drive the fabric, including those in `block_on`, plus one
    /// if an event loop calls `progress`.
    drivers: AtomicUsize,
    has_foreign_loop: AtomicBool,
    pub(crate) clock: quanta::Clock,
    pub(crate) counters: Counters,
    pub(crate) latencies: Arc<Latencies>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Close the commands first, because a command may own a queue pair whose requests a link
        // holds.
        self.commands.close();
        // Disconnect from the peers, then fail all links. Futures may outlive the fabric, and
        // nobody else would complete them.
        let poller = self.poller.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        poller.hang_up();
        let links = self.links.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        for link in links.iter() {
            link.with(|state, _, wakes| {
                state.core.fail(Error::new(ErrorKind::Closed, "the fabric is gone"), wakes);
                state.destroy(wakes);
                drop(state.end_upgrade()); // the upgrade's queue pair uses receives, too
            });
        }
        // Drop the device objects last, because receives must outlive the queue pairs that use
        // them.
        poller.drop_device_objects();
    }
}

impl Fabric {
    /// Returns a builder for a fabric that uses devices of `verbs`.
    pub fn builder(verbs: &Verbs) -> Builder {
        Builder {
            verbs: Ok(verbs.clone()),
            devices: Vec::new(),
            addresses: Vec::new(),
            rdma: None,
            tls: Tls::default(),
            config: Config::default(),
            command_threads: false,
            is_quiet: false,
        }
    }

    /// Returns a builder for a fabric on this host. The fabric uses the host's RDMA devices, or TCP
    /// if there are none.
    ///
    /// ```
    /// use ferrite_fabric::{Config, Fabric, Rdma};
    ///
    /// // As on a host without RDMA.
    /// let config = Config { rdma: Rdma::Forbid, ..Config::default() };
    /// let fabric = Fabric::system().config(config).build()?;
    /// let mut listener = fabric.listen("127.0.0.1:0".parse()?)?;
    /// let (there, here) = fabric.block_on(async {
    ///     let connecting = fabric.connect(listener.local_addr());
    ///     let (there, here) = futures_util::join!(connecting, listener.accept());
    ///     Ok::<_, ferrite_fabric::Error>((there?, here?))
    /// })?;
    /// there.post_bytes(0, b"hello")?;
    /// assert_eq!(fabric.block_on(here.recv())?.to_vec(), b"hello");
    /// assert_eq!(there.transport().to_string(), "TCP");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn system() -> Builder {
        let verbs = Verbs::system().map_err(|absence| ferrite_verbs::Error::from(absence).into());
        let (tls, config) = (Tls::default(), Config::default());
        let (devices, addresses) = (Vec::new(), Vec::new());
        let (rdma, command_threads, is_quiet) = (None, false, false);
        Builder { verbs, devices, addresses, rdma, tls, config, command_threads, is_quiet }
    }

    /// Logs and counts a fallback to TCP in the same way as for links. For programs that open
    /// connections of other protocols over TCP although RDMA was preferred.
    #[must_use]
    pub fn fell_back_to_tcp(&self, peer: SocketAddr, error: Error) -> Fallback {
        let fallback = Fallback::new(error);
        self.shared().count_fallback(&peer, &fallback);
        fallback
    }

    /// Returns why the fabric has no RDMA device, or `None` if it has one.
    #[must_use]
    pub fn absence(&self) -> Option<&Error> {
        self.shared().absence.as_ref()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.0.shared
    }

    /// Returns the pool that buffers are taken from.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.shared().pool
    }

    /// Takes a buffer of `len` bytes from the pool, to be filled and sent.
    ///
    /// # Errors
    /// Returns the errors of [`Pool::take`].
    pub fn buffer(&self, len: usize) -> Result<BufMut, Error> {
        Ok(self.pool().take_uncharged(len, Purpose::Send)?)
    }

    /// Returns the names of the fabric's devices, including those that are missing.
    #[must_use]
    pub fn devices(&self) -> Vec<&str> {
        self.shared().devices.iter().map(|device| device.name.as_str()).collect()
    }

    /// Returns the devices that the fabric was to use but cannot, each with the reason.
    #[must_use]
    pub fn unused_devices(&self) -> &[(String, Error)] {
        &self.shared().unused
    }

    /// Returns the devices that were removed or failed and are not back, each with the result of
    /// the latest attempt to open it, if there was one.
    ///
    /// Once nothing uses a missing device any more, the fabric searches for it. The delays between
    /// attempts double from 1 to 4 seconds. They start over when a device of the same name appears
    /// but cannot be used yet.
    #[must_use]
    pub fn missing_devices(&self) -> Vec<Error> {
        self.shared()
            .devices
            .iter()
            .filter(|device| device.is_gone())
            .map(|device| device.absence())
            .collect()
    }

    /// Returns the random number of this fabric, which peers see as [`Hello::instance`].
    #[must_use]
    pub fn instance(&self) -> u64 {
        self.shared().instance
    }

    /// Returns the settings that the fabric was built with.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.shared().config
    }
}

impl Shared {
    /// Returns the error for callers that require RDMA when the fabric has no device.
    pub(crate) fn no_rdma(&self) -> Error {
        let absence = self.absence.clone();
        absence.unwrap_or_else(|| ferrite_verbs::Error::from(Absence::NoDevice).into())
    }

    /// Records the state of a healthy link's port as the baseline for a later diagnosis. This reads
    /// kernel files, so it runs as a command.
    pub(crate) fn is_well(&self, link: &Arc<LinkShared>) {
        let link = Arc::clone(link);
        if self.commands.has_room(None) {
            self.commands.run(None, move || link.is_well());
        }
    }

    /// Logs a link that was opened over RDMA or upgraded to RDMA, if the settings ask for that.
    pub(crate) fn trace(&self, link: &LinkShared) {
        let route = link.route();
        let Some(device) = route.device.as_ref().filter(|_| self.config.trace_connections) else {
            return;
        };
        let unknown = || "unknown".to_owned();
        let address =
            |address: Option<SocketAddr>| address.map_or_else(unknown, |at| at.to_string());
        tracing::info!(
            "RDMA connection: peer {}, local {}, device {} port {}, queue pair {:#x}, MTU {}",
            address(route.peer),
            address(route.local),
            device.name,
            route.port,
            route.qp_num,
            route.mtu.map_or_else(unknown, |mtu| mtu.to_string())
        );
    }

    /// Starts the search for the likely causes of an error of `link`. The search runs as a command,
    /// because it reads kernel files and queries the device.
    ///
    /// Every holder of the returned error sees the causes once they are found. There is no search
    /// if the link is on TCP, or if too many commands of its source are waiting.
    #[cold]
    pub(crate) fn diagnose(&self, link: &LinkShared, error: Error, failure: Failure) -> Error {
        let (source, shown) = (link.source(), error.clone());
        if let Some(find) = link.diagnosis(failure).filter(|_| self.commands.has_room(source)) {
            self.commands.run(source, move || shown.set_causes(find()));
        }
        error
    }

    /// Returns the error for the first failed request of a link.
    #[cold]
    pub(crate) fn completion_error(&self, link: &LinkShared, status: Status) -> Error {
        self.diagnose(link, link.completion_error(status), Failure::Completion(status))
    }

    /// Records that a link uses TCP although RDMA was preferred. Must be called once for each
    /// fallback.
    pub(crate) fn fell_back(&self, link: &LinkShared, fallback: Fallback) {
        self.count_fallback(&link.peer_name(), &fallback);
        link.set_fallback(Some(fallback));
    }

    fn count_fallback(&self, peer: &impl fmt::Display, fallback: &Fallback) {
        self.counters.fallbacks[fallback.cause.index()].fetch_add(1, Ordering::Relaxed);
        static LINES: [LogLimit; FallbackCause::ALL.len()] =
            [const { LogLimit::new() }; FallbackCause::ALL.len()];
        if let Some(others) = LINES[fallback.cause.index()].pass() {
            tracing::warn!(%peer, cause = %fallback.cause, "link to {peer} {fallback}{others}");
        }
    }

    /// Returns the hello for this side's next link.
    ///
    /// The window is at most the new link's share of half of the memory for receives. Links that
    /// exist keep their larger windows, so all peers together may fill more than that half.
    pub(crate) fn hello(&self, links: usize, moves: bool) -> Hello {
        let config = &self.config;
        let each = config.memory.receive_reserve as u64 / 2 / (links as u64 + 1);
        let fits = each / u64::from(config.recv_buffer_size);
        // An incomplete message occupies receives. With short frames, it occupies up to twice as
        // many receives as it needs. A message that occupied all receives would stop every link.
        let largest =
            (config.memory.receive_reserve as u64 / 4).max(config.recv_buffer_size.into());
        Hello {
            version: Version::CURRENT,
            features: Features::WRITE_IMM
                | Features::ONE_SIDED
                | if moves { Features::MOVE } else { Features::NONE },
            segment_bytes: config.recv_buffer_size,
            window: u16::try_from(fits)
                .unwrap_or(u16::MAX)
                .clamp(*Hello::WINDOW.start(), config.window),
            channels: config.channels,
            max_message_bytes: config.max_message_bytes.min(largest),
            instance: self.instance,
            // A link migrates only if it has an id that nobody can guess. 0 means that it has no
            // id.
            session: if moves { random().map_or(0, |id| id.max(1)) } else { 0 },
            mtu: 0, // not known before a port is chosen
            program: config.program,
        }
    }
}

impl AsFd for Fabric {
    /// Returns the descriptor that becomes readable when there is work. The caller then calls
    /// [`Fabric::progress`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared().waits.as_fd()
    }
}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fabric").field("devices", &self.devices()).finish_non_exhaustive()
    }
}
