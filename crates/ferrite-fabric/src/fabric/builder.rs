//! How a fabric is made.

use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};
use std::sync::{Arc, Mutex, RwLock};

use ferrite_verbs::Verbs;
use rustls::{ClientConfig, ServerConfig};

use super::commands::Commands;
use super::config::Config;
use super::devices::Devices;
use super::links::Links;
use super::mailbox::Mailbox;
use super::poller::Poller;
use super::stats::Counters;
use super::wait_set::Ready;
use super::{Fabric, Handle, Shared};
use crate::error::{Error, ErrorKind};
use crate::one_sided::Regions;
use crate::policy::Rdma;
use crate::random::random;
use crate::wire::Hello;

/// Makes an [`Fabric`]: see [`Fabric::builder`].
#[derive(Debug, Clone)]
#[must_use]
pub struct Builder {
    pub(super) verbs: Result<Verbs, Error>,
    pub(super) devices: Vec<String>,
    pub(super) addresses: Vec<IpAddr>,
    pub(super) rdma: Option<Rdma>,
    pub(super) tls: Tls,
    pub(super) config: Config,
    pub(super) command_threads: bool,
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

    /// Uses only the device that has this address; may be said several times. `0.0.0.0` and `::`
    /// stand for all devices. [`Builder::device`] goes before it.
    pub fn serving(mut self, address: IpAddr) -> Self {
        self.addresses.push(address);
        self
    }

    /// Whether RDMA may carry links, whatever the settings say.
    pub fn rdma(mut self, rdma: Rdma) -> Self {
        self.rdma = Some(rdma);
        self
    }

    /// TLS for links that TCP carries: what to trust, and who this side is. Without the first,
    /// connects are in clear text, without the second listeners are. Which cryptography they use is
    /// the caller's choice (`rustls` with the feature `ring` or `aws_lc_rs`). The peer's
    /// certificate must be for its IP address, unless the connect says otherwise.
    pub fn tls(
        mut self,
        client: Option<Arc<ClientConfig>>,
        server: Option<Arc<ServerConfig>>,
    ) -> Self {
        self.tls = Tls { client, server };
        self
    }

    /// The settings.
    pub fn config(mut self, config: Config) -> Self {
        self.config = config;
        self
    }

    /// Makes calls that may wait for the kernel or the device (queue pairs, registrations, the
    /// connection manager) on threads of the fabric's own, two at first and at most eight. Without
    /// this whoever drives the fabric makes them. For event loops that have others to serve: a peer
    /// that is silent at the wrong moment makes such a call take a second.
    pub fn command_threads(mut self) -> Self {
        self.command_threads = true;
        self
    }

    /// Opens the devices, registers memory and posts receives. A device that cannot be used is left
    /// out ([`Fabric::unused_devices`]) if there is another. Where RDMA is preferred and not to be
    /// had, the fabric has no device, and says why: [`Fabric::absence`].
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] for settings that contradict each other. Where RDMA is required:
    /// [`ErrorKind::Absent`] if there is none here, [`ErrorKind::Resources`] if the locked-memory
    /// limit or the device refuses, with figures and remedy.
    pub fn build(self) -> Result<Fabric, Error> {
        let Self { verbs, devices, addresses, rdma, tls, mut config, command_threads } = self;
        config.rdma = rdma.unwrap_or(config.rdma);
        check(&config)?;
        let rdma = match (config.rdma, &verbs) {
            (Rdma::Forbid, _) => {
                Err(Error::new(ErrorKind::Absent, "RDMA is forbidden by the settings"))
            }
            (_, Err(absent)) => Err(absent.clone()),
            (_, Ok(verbs)) => Devices::open(verbs, &devices, &addresses, &mut config),
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
            tracing::warn!("RDMA is unavailable, links go over TCP: {}", error.with_remedy());
        }
        let Devices { pool, devices, device_objects, waits, unused } = rdma;
        let mailbox = Arc::new(Mailbox::new()?);
        waits.add(mailbox.as_fd(), Ready::Mailbox)?;
        // Without a device there is nothing to wait for.
        let commands = match command_threads && !devices.is_empty() {
            true => Commands::on_threads(&mailbox)?,
            false => Commands::inline(),
        };
        let commands = Arc::new(commands);
        if command_threads {
            let commands = Arc::clone(&commands);
            pool.set_elsewhere(Box::new(move |errand| commands.run(None, errand)));
        }
        Ok(Fabric(Arc::new(Handle {
            shared: Arc::new(Shared {
                poller: Mutex::new(Poller::new(
                    config.poll_batch,
                    device_objects,
                    config.access_back_off,
                )),
                links: RwLock::new(Links::default()),
                regions: Regions::default(),
                devices,
                pool,
                verbs: verbs.ok(),
                absence,
                unused,
                tls,
                busy_poll_us: AtomicU32::new(config.busy_poll_us),
                config,
                commands,
                mailbox,
                waits,
                instance: random()?,
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

fn check(config: &Config) -> Result<(), Error> {
    let wrong = if !Hello::SEGMENT_BYTES.contains(&config.recv_buffer_size) {
        format!("recv_buffer_size is {}: 256 to 2097152", config.recv_buffer_size)
    } else if !Hello::WINDOW.contains(&config.window) {
        format!("window is {}: 2 to 32767", config.window)
    } else if !(1..=16_384).contains(&config.channels) {
        format!("channels is {}: 1 to 16384", config.channels)
    } else if config.max_message_bytes < u64::from(config.recv_buffer_size) {
        "max_message_bytes is less than recv_buffer_size".into()
    } else if config.poll_batch == 0 || config.max_half_open == 0 || config.send_queue_messages == 0
    {
        "poll_batch, max_half_open and send_queue_messages must be at least 1".into()
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::Misuse, wrong))
}
