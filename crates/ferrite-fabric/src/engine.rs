//! The engine: devices, completions, links, and one descriptor to wait on. It has no thread and no runtime of its own.
//!
//! | file | what it is |
//! |---|---|
//! | `slots.rs` | requests in flight own their memory: the only `unsafe` of the engine |
//! | `lane.rs` | what the engine has on one device, shared by all links there |
//! | `poller.rs` | one pass: reap, deliver, look at events and the clock |
//! | `revive.rs` | devices that go and come back |
//! | `waits.rs` `mailbox.rs` `wakeup.rs` `timers.rs` | the descriptor, calls from other threads, deadlines |
//! | `drive.rs` | ways to drive it: by hand, to the end of a future, under tokio, on a thread |
//! | `config.rs` | settings |

mod bell;
pub(crate) mod config;
mod drive;
pub(crate) mod gear;
pub(crate) mod lane;
mod links;
pub(crate) mod mailbox;
pub(crate) mod poller;
#[cfg(all(test, loom))]
mod protocol;
mod queue_pairs;
mod revive;
pub(crate) mod slots;
pub(crate) mod timers;
pub(crate) mod waits;
mod wakeup;
#[cfg(feature = "tokio")]
mod watch;

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use ferrite_verbs::{Absence, Status, Verbs};
use rustls::{ClientConfig, ServerConfig};

use crate::error::{Error, ErrorKind};
use crate::latency::{Latencies, LatencyStats};
use crate::link::LinkStats;
use crate::link::shared::LinkShared;
use crate::mem::{BufMut, Pool, PoolStats, Purpose, lock};
use crate::one_sided::{Region, Regions};
use crate::policy::{Fallback, FallbackCause, Rdma};
use crate::wire::{Features, Hello, Rights, Version};
pub use config::Config;
use lane::{Lane, Life};
use links::Links;
use mailbox::Mailbox;
use poller::Poller;
use waits::{Ready, Waits};

/// Drives links over one or more devices. Clones share it.
///
/// It does nothing by itself: it is driven by [`Engine::block_on`], by a tokio task ([`Engine::drive`]), by a thread
/// ([`Engine::spawn_thread`]), or by hand from any event loop: wait until its descriptor ([`AsFd`]) is readable, then call
/// [`Engine::progress`].
///
/// ```
/// use ferrite_fabric::{Config, Engine};
/// # use ferrite_verbs::fake::{DeviceSpec, World};
/// # let world = World::new();
/// # world.add_device(DeviceSpec::new("fake1", "127.0.0.1".parse()?));
/// # let verbs = world.verbs(); // on a host with RDMA: Verbs::system()?
/// let engine = Engine::builder(&verbs).config(Config { busy_poll_us: 0, ..Config::default() }).build()?;
/// assert_eq!(engine.devices(), ["fake1"]);
/// let mut listener = engine.listen("127.0.0.1:0".parse()?)?;
/// let (there, here) = engine.block_on(async {
///     let (there, here) = futures_util::join!(engine.connect(listener.local_addr()), listener.accept());
///     Ok::<_, ferrite_fabric::Error>((there?, here?))
/// })?;
/// there.post_bytes(0, b"hello")?;
/// let message = engine.block_on(here.recv())?;
/// assert_eq!(message.to_vec(), b"hello");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Engine(Arc<Handle>);

/// What all users of an engine have; the driver has [`Shared`] alone, and sees when the last of these is gone.
struct Handle {
    shared: Arc<Shared>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.abandoned.store(true, Ordering::Release);
        self.shared.mailbox.ring();
    }
}

pub(crate) struct Shared {
    // See `drop` for the order in which things go.
    poller: Mutex<Poller>,
    pub(crate) links: RwLock<Links>,
    pub(crate) regions: Regions,
    pub(crate) lanes: Vec<Arc<Lane>>,
    pub(crate) pool: Pool,
    /// `None` where there is no RDMA.
    pub(crate) verbs: Option<Verbs>,
    /// Why there is no device, if there is none.
    absence: Option<Error>,
    pub(crate) tls: Tls,
    pub(crate) config: Config,
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) waits: Waits,
    /// Tells this process's hellos from those of one before it.
    instance: u64,
    /// Nobody but the driver has the engine any more.
    abandoned: AtomicBool,
    /// Tasks and threads that drive it, those in `block_on` included, and one for a loop that calls `progress`.
    drivers: AtomicUsize,
    has_foreign_loop: AtomicBool,
    busy_poll_us: AtomicU32,
    pub(crate) clock: quanta::Clock,
    pub(crate) counters: Counters,
    pub(crate) latencies: Arc<Latencies>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Futures may outlive the engine: nobody would answer them any more. Peers hear of it first.
        let poller = self.poller.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        poller.hang_up();
        let links = self.links.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        for link in links.iter() {
            link.with(|state, around, wakes| {
                state.fail(Error::new(ErrorKind::Closed, "the engine is gone"), wakes);
                state.destroy(around, true, wakes);
            });
        }
        // Only now: receives outlive the queue pairs that take them.
        poller.drop_gears();
    }
}

/// More than verbs have.
const STATUSES: usize = 32;

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) passes: AtomicU64,
    pub(crate) completions: AtomicU64,
    pub(crate) sleeps: AtomicU64,
    pub(crate) accepted: AtomicU64,
    pub(crate) connected: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) strangers: AtomicU64,
    pub(crate) failed_links: AtomicU64,
    pub(crate) unknown_receives: AtomicU64,
    /// By [`FallbackCause::index`].
    pub(crate) fallbacks: [AtomicU64; FallbackCause::ALL.len()],
    pub(crate) climbs: AtomicU64,
    /// Takes of completions that found some.
    pub(crate) batches: AtomicU64,
    pub(crate) connect_retries: AtomicU64,
    /// By status, first failures and flushes alike.
    pub(crate) errors: [AtomicU64; STATUSES],
    pub(crate) devices_lost: AtomicU64,
    pub(crate) devices_back: AtomicU64,
}

/// Makes an [`Engine`]: see [`Engine::builder`].
#[derive(Debug, Clone)]
#[must_use]
pub struct Builder {
    verbs: Result<Verbs, Error>,
    devices: Vec<String>,
    rdma: Option<Rdma>,
    tls: Tls,
    config: Config,
}

/// TLS where nothing else is said.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tls {
    pub(crate) client: Option<Arc<ClientConfig>>,
    pub(crate) server: Option<Arc<ServerConfig>>,
}

impl Builder {
    /// Uses this device. May be said several times; without it all devices are used.
    pub fn device(mut self, name: impl Into<String>) -> Self {
        self.devices.push(name.into());
        self
    }

    /// Whether RDMA may carry links, whatever the settings say.
    pub fn rdma(mut self, rdma: Rdma) -> Self {
        self.rdma = Some(rdma);
        self
    }

    /// TLS for links that TCP carries: what to trust, and who this side is. Without the first, connects are in clear text,
    /// without the second listeners are. Which cryptography they use is the caller's choice (`rustls` with the feature `ring` or
    /// `aws_lc_rs`). The peer's certificate must be for its IP address, unless the connect says otherwise.
    pub fn tls(mut self, client: Option<Arc<ClientConfig>>, server: Option<Arc<ServerConfig>>) -> Self {
        self.tls = Tls { client, server };
        self
    }

    /// The settings.
    pub fn config(mut self, config: Config) -> Self {
        self.config = config;
        self
    }

    /// Opens the devices, registers memory and posts receives. Where RDMA is preferred and not to be had, the engine has no
    /// device, and says why: [`Engine::absence`].
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] for settings that contradict each other. Where RDMA is required: [`ErrorKind::Absent`] if there is
    /// none here, [`ErrorKind::Resources`] if the locked-memory limit or the device refuses, with figures and remedy.
    pub fn build(self) -> Result<Engine, Error> {
        let Self { verbs, devices, rdma, tls, mut config } = self;
        config.rdma = rdma.unwrap_or(config.rdma);
        check(&config)?;
        let rdma = match (config.rdma, &verbs) {
            (Rdma::Forbid, _) => Err(Error::new(ErrorKind::Absent, "RDMA is forbidden by the settings")),
            (_, Err(absent)) => Err(absent.clone()),
            (_, Ok(verbs)) => Devices::open(verbs, &devices, &config),
        };
        let (rdma, absence) = match rdma {
            Ok(rdma) => (rdma, None),
            // What the caller named wrongly is no absence.
            Err(error) if config.rdma == Rdma::Require || error.kind() == ErrorKind::Misuse => {
                return Err(error);
            }
            Err(error) => (Devices::none(&config)?, Some(error)),
        };
        if let Some(error) = absence.as_ref().filter(|_| config.rdma == Rdma::Prefer) {
            let to_do = error.remedy().unwrap_or_default();
            tracing::warn!("no RDMA on this host, links go over TCP: {error}; to do: {to_do}");
        }
        let Devices { pool, lanes, gears, waits } = rdma;
        let mailbox = Arc::new(Mailbox::new()?);
        waits.add(mailbox.as_fd(), Ready::Mailbox)?;
        Ok(Engine(Arc::new(Handle {
            shared: Arc::new(Shared {
                poller: Mutex::new(Poller::new(config.poll_batch, gears)),
                links: RwLock::new(Links::default()),
                regions: Regions::default(),
                lanes,
                pool,
                verbs: verbs.ok(),
                absence,
                tls,
                busy_poll_us: AtomicU32::new(config.busy_poll_us),
                config,
                mailbox,
                waits,
                instance: random(),
                abandoned: AtomicBool::new(false),
                drivers: AtomicUsize::new(0),
                has_foreign_loop: AtomicBool::new(false),
                clock: quanta::Clock::new(),
                counters: Counters::default(),
                latencies: Arc::default(),
            }),
        })))
    }
}

/// What an engine has of its devices.
struct Devices {
    pool: Pool,
    lanes: Vec<Arc<Lane>>,
    gears: Vec<Option<gear::Gear>>,
    waits: Waits,
}

impl Devices {
    fn open(verbs: &Verbs, names: &[String], config: &Config) -> Result<Self, Error> {
        let opened = if names.is_empty() {
            verbs.devices()?
        } else {
            names.iter().map(|name| verbs.device(name)).collect::<Result<_, _>>()?
        };
        if opened.is_empty() {
            return Err(ferrite_verbs::Error::from(Absence::NoDevice).into());
        }
        let domains = opened
            .iter()
            .map(|device| device.open()?.allocate_protection_domain())
            .collect::<Result<Vec<_>, _>>()?;
        let pool = Pool::builder(&domains).config(config.memory.clone()).build()?;
        let waits = Waits::new()?;
        let (mut lanes, mut gears) = (Vec::new(), Vec::new());
        for (index, domain) in domains.iter().enumerate() {
            let (life, mut gear) = Life::begin(index, domain, config)?;
            gear.refill(&pool)?;
            revive::attach(&gear, &waits, index)?;
            lanes.push(Arc::new(Lane::new(index, life)));
            gears.push(Some(gear));
        }
        Ok(Self { pool, lanes, gears, waits })
    }

    fn none(config: &Config) -> Result<Self, Error> {
        let pool = Pool::builder(&[]).config(config.memory.clone()).build()?;
        Ok(Self { pool, lanes: Vec::new(), gears: Vec::new(), waits: Waits::new()? })
    }
}

fn check(config: &Config) -> Result<(), Error> {
    let wrong = if !Hello::SEGMENT_BYTES.contains(&config.recv_buffer_size) {
        format!("recv_buffer_size is {}: 256 to 2097152", config.recv_buffer_size)
    } else if !Hello::WINDOW.contains(&config.window) {
        format!("window is {}: 2 to 32767", config.window)
    } else if !(1..=16_384).contains(&config.channels) {
        format!("channels is {}: 1 to 16384", config.channels)
    } else if config.max_message_bytes < u64::from(config.recv_buffer_size) {
        "max_message_bytes is less than recv_buffer_size".into()
    } else if config.poll_batch == 0 || config.max_half_open == 0 || config.send_queue_messages == 0 {
        "poll_batch, max_half_open and send_queue_messages must be at least 1".into()
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::Misuse, wrong))
}

/// Unpredictable enough to tell two processes apart.
fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

impl Engine {
    /// An engine on devices of `verbs`.
    pub fn builder(verbs: &Verbs) -> Builder {
        Builder {
            verbs: Ok(verbs.clone()),
            devices: Vec::new(),
            rdma: None,
            tls: Tls::default(),
            config: Config::default(),
        }
    }

    /// An engine on this host, whatever it has: its RDMA devices, or only TCP.
    ///
    /// ```
    /// use ferrite_fabric::{Config, Engine, Rdma};
    ///
    /// let config = Config { rdma: Rdma::Forbid, ..Config::default() }; // as on a host without RDMA
    /// let engine = Engine::system().config(config).build()?;
    /// let mut listener = engine.listen("127.0.0.1:0".parse()?)?;
    /// let (there, here) = engine.block_on(async {
    ///     let (there, here) = futures_util::join!(engine.connect(listener.local_addr()), listener.accept());
    ///     Ok::<_, ferrite_fabric::Error>((there?, here?))
    /// })?;
    /// there.post_bytes(0, b"hello")?;
    /// assert_eq!(engine.block_on(here.recv())?.to_vec(), b"hello");
    /// assert_eq!(there.transport().to_string(), "TCP");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn system() -> Builder {
        let verbs = Verbs::system().map_err(|absence| ferrite_verbs::Error::from(absence).into());
        Builder { verbs, devices: Vec::new(), rdma: None, tls: Tls::default(), config: Config::default() }
    }

    /// For who opens connections of other protocols and had to do so over TCP, though RDMA was preferred: warns and counts, as
    /// for links.
    #[must_use]
    pub fn fell_back_to_tcp(&self, peer: SocketAddr, error: Error) -> Fallback {
        let fallback = Fallback::new(error);
        self.shared().count_fallback(&peer, &fallback);
        fallback
    }

    /// Why it has no RDMA device, if it has none.
    #[must_use]
    pub fn absence(&self) -> Option<&Error> {
        self.shared().absence.as_ref()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.0.shared
    }

    /// Where buffers come from.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.shared().pool
    }

    /// A buffer to be filled and sent.
    ///
    /// # Errors
    /// Those of [`Pool::take`].
    pub fn buffer(&self, len: usize) -> Result<BufMut, Error> {
        Ok(self.pool().take_uncharged(len, Purpose::Send)?)
    }

    /// The names of its devices, those that are missing included.
    #[must_use]
    pub fn devices(&self) -> Vec<&str> {
        self.shared().lanes.iter().map(|lane| lane.name.as_str()).collect()
    }

    /// Its devices that were removed or failed and are not back, each with what was found when it was last looked for. An
    /// engine looks for them by itself, after a second at first and every 8 seconds later, and goes on with a device of the
    /// same name.
    #[must_use]
    pub fn missing_devices(&self) -> Vec<Error> {
        self.shared().lanes.iter().filter(|lane| lane.is_gone()).map(|lane| lane.absence()).collect()
    }

    /// The settings it was made with.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.shared().config
    }

    /// Registers `buf` on a device so that peers may reach it there with a grant ([`Region::grant`]), within `rights`.
    ///
    /// **Peers see what is in the buffer**: overwrite what its last user left there.
    ///
    /// # Errors
    /// The buffer comes back, with what the device or the locked-memory limit said.
    pub fn register_memory(
        &self,
        device: &str,
        buf: BufMut,
        rights: Rights,
    ) -> Result<Region, (BufMut, Error)> {
        match self.shared().lanes.iter().find(|lane| lane.name == device) {
            Some(lane) => self.register_on(Some(lane), buf, rights),
            None => Err((buf, Error::new(ErrorKind::Misuse, format!("the engine has no device {device}")))),
        }
    }

    pub(crate) fn register_on(
        &self,
        lane: Option<&Arc<Lane>>,
        buf: BufMut,
        rights: Rights,
    ) -> Result<Region, (BufMut, Error)> {
        if let Some(lane) = lane.filter(|lane| lane.is_gone()) {
            return Err((buf, lane.absence()));
        }
        Region::new(self.clone(), lane, buf, rights)
    }

    /// What it has done and what it holds.
    #[must_use]
    pub fn stats(&self) -> EngineStats {
        let shared = self.shared();
        let (receives_posted, receives_overdue) = lock(&shared.poller).receives();
        let links = shared.links.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut totals = links.retired;
        for link in links.iter() {
            totals.add(&link.with(|state, _, _| state.stats));
        }
        let counters = &shared.counters;
        EngineStats {
            links: links.iter().count() as u64,
            totals,
            in_flight: shared.lanes.iter().map(|lane| u64::from(lane.in_flight())).sum(),
            receives_posted,
            receives_overdue,
            passes: counters.passes.load(Ordering::Relaxed),
            completions: counters.completions.load(Ordering::Relaxed),
            sleeps: counters.sleeps.load(Ordering::Relaxed),
            accepted: counters.accepted.load(Ordering::Relaxed),
            connected: counters.connected.load(Ordering::Relaxed),
            refused: counters.refused.load(Ordering::Relaxed),
            strangers: counters.strangers.load(Ordering::Relaxed),
            failed_links: counters.failed_links.load(Ordering::Relaxed),
            unknown_receives: counters.unknown_receives.load(Ordering::Relaxed),
            fallbacks: FallbackCause::ALL
                .map(|cause| (cause, counters.fallbacks[cause.index()].load(Ordering::Relaxed))),
            climbs: counters.climbs.load(Ordering::Relaxed),
            batches: counters.batches.load(Ordering::Relaxed),
            connect_retries: counters.connect_retries.load(Ordering::Relaxed),
            errors: counters
                .errors
                .iter()
                .enumerate()
                .map(|(code, count)| (Status::from_code(code as u32), count.load(Ordering::Relaxed)))
                .filter(|(_, count)| *count > 0)
                .collect(),
            send_latency: shared.latencies.send.snapshot(),
            write_latency: shared.latencies.write.snapshot(),
            read_latency: shared.latencies.read.snapshot(),
            devices_lost: counters.devices_lost.load(Ordering::Relaxed),
            devices_back: counters.devices_back.load(Ordering::Relaxed),
            memory: shared.pool.stats(),
        }
    }
}

impl Shared {
    /// For those who want RDMA and cannot have it.
    pub(crate) fn no_rdma(&self) -> Error {
        let absence = self.absence.clone();
        absence.unwrap_or_else(|| ferrite_verbs::Error::from(Absence::NoDevice).into())
    }

    /// A link is on TCP although RDMA was preferred: said once for each.
    pub(crate) fn fell_back(&self, link: &LinkShared, fallback: Fallback) {
        self.count_fallback(&link.peer_name(), &fallback);
        link.set_fallback(Some(fallback));
    }

    fn count_fallback(&self, peer: &impl fmt::Display, fallback: &Fallback) {
        self.counters.fallbacks[fallback.cause.index()].fetch_add(1, Ordering::Relaxed);
        tracing::warn!(%peer, cause = %fallback.cause, "link to {peer} {fallback}");
    }

    /// What this side says of itself on its next link. The window shrinks when so many links could ask for more memory
    /// than there is for receives.
    pub(crate) fn hello(&self, links: usize, moves: bool) -> Hello {
        let config = &self.config;
        let each = config.memory.receive_reserve as u64 / 2 / (links as u64 + 1);
        let fits = each / u64::from(config.recv_buffer_size);
        // A message lies in receives until it is whole, twice as many as it needs if its frames are short: one that takes
        // them all would stop every link.
        let largest = (config.memory.receive_reserve as u64 / 4).max(config.recv_buffer_size.into());
        Hello {
            version: Version::CURRENT,
            features: Features::WRITE_IMM
                | Features::ONE_SIDED
                | if moves { Features::MOVE } else { Features::NONE },
            segment_bytes: config.recv_buffer_size,
            window: u16::try_from(fits).unwrap_or(u16::MAX).clamp(*Hello::WINDOW.start(), config.window),
            channels: config.channels,
            max_message_bytes: config.max_message_bytes.min(largest),
            instance: self.instance,
            session: if moves { random().max(1) } else { 0 },
        }
    }
}

impl AsFd for Engine {
    /// Readable when there is something to do: then call [`Engine::progress`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared().waits.as_fd()
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("devices", &self.devices()).finish_non_exhaustive()
    }
}

/// What an engine has done, and what it holds now.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct EngineStats {
    /// Links that are not gone yet.
    pub links: u64,
    /// All links together, those that are gone included.
    pub totals: LinkStats,
    /// Requests that the devices have.
    pub in_flight: u64,
    /// Receives that wait for messages.
    pub receives_posted: u64,
    /// Receives that failed links took along; their memory comes back with the engine's end.
    pub receives_overdue: u64,
    /// Looks at the completion queues.
    pub passes: u64,
    /// Completions found by them.
    pub completions: u64,
    /// Times that there was nothing left to do.
    pub sleeps: u64,
    /// Links that peers opened.
    pub accepted: u64,
    /// Links that this side opened.
    pub connected: u64,
    /// Peers that were refused.
    pub refused: u64,
    /// Peers that do not speak our protocol.
    pub strangers: u64,
    /// Links that did not end in good order.
    pub failed_links: u64,
    /// Receives for queue pairs that nobody knows.
    pub unknown_receives: u64,
    /// Links that went over TCP although RDMA was preferred, by cause.
    pub fallbacks: [(FallbackCause, u64); FallbackCause::ALL.len()],
    /// Takes that found completions: `completions` divided by this is how many come at a time.
    pub batches: u64,
    /// Handshakes that were tried again.
    pub connect_retries: u64,
    /// Requests that failed, by status; flushed ones too.
    pub errors: Vec<(Status, u64)>,
    /// How long sends took that somebody waited for, writes, and reads.
    pub send_latency: LatencyStats,
    /// The same of one-sided writes.
    pub write_latency: LatencyStats,
    /// The same of one-sided reads.
    pub read_latency: LatencyStats,
    /// Times that a link went from TCP to RDMA.
    pub climbs: u64,
    /// Times that a device was removed, or failed.
    pub devices_lost: u64,
    /// Times that one came back.
    pub devices_back: u64,
    /// The pool.
    pub memory: PoolStats,
}
