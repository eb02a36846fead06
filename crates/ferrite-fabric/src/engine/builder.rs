//! How an engine is made.

use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};
use std::sync::{Arc, Mutex, RwLock};

use ferrite_verbs::{Absence, Verbs};
use rustls::{ClientConfig, ServerConfig};

use super::config::Config;
use super::lane::{Lane, Life};
use super::links::Links;
use super::mailbox::Mailbox;
use super::poller::Poller;
use super::stats::Counters;
use super::waits::{Ready, Waits};
use super::{Engine, Handle, Shared, gear, random, revive};
use crate::error::{Error, ErrorKind};
use crate::mem::Pool;
use crate::one_sided::Regions;
use crate::policy::Rdma;
use crate::wire::Hello;

/// Makes an [`Engine`]: see [`Engine::builder`].
#[derive(Debug, Clone)]
#[must_use]
pub struct Builder {
    pub(super) verbs: Result<Verbs, Error>,
    pub(super) devices: Vec<String>,
    pub(super) rdma: Option<Rdma>,
    pub(super) tls: Tls,
    pub(super) config: Config,
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
