//! Building a fabric.

use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, RwLock};

use ferrite_verbs::Verbs;
use rustls::{ClientConfig, ServerConfig};

use super::busy_poll::BusyPoll;
use super::commands::Commands;
use super::devices::Devices;
use super::links::Links;
use super::poller::Poller;
use super::regions::Regions;
use super::stats::Counters;
use super::{Fabric, Handle, Shared};
use crate::config::Config;
use crate::device::device_choice::DeviceChoice;
use crate::error::{Error, ErrorKind};
use crate::policy::Rdma;
use crate::random::random;
use crate::wake::mailbox::Mailbox;
use crate::wake::wait_set::Ready;
use crate::wire::Hello;

/// Builds a [`Fabric`]: see [`Fabric::builder`].
#[derive(Debug, Clone)]
#[must_use]
pub struct Builder {
    pub(super) verbs: Result<Verbs, Error>,
    pub(super) devices: Vec<String>,
    pub(super) addresses: Vec<SocketAddr>,
    pub(super) rdma: Option<Rdma>,
    pub(super) tls: Tls,
    pub(super) config: Config,
    pub(super) command_threads: bool,
    pub(super) is_quiet: bool,
}

/// The TLS settings for connects and listeners that have none of their own.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tls {
    pub(crate) client: Option<Arc<ClientConfig>>,
    pub(crate) server: Option<Arc<ServerConfig>>,
}

impl Builder {
    /// Adds a device to use. If neither this nor [`Builder::serving`] is called, all devices are
    /// used.
    pub fn device(mut self, name: impl Into<String>) -> Self {
        self.devices.push(name.into());
        self
    }

    /// Adds the device that has this address. Other devices are not used unless they are added,
    /// too. `0.0.0.0` and `::` add all devices. A link-local address needs its scope. The port does
    /// not matter. Ignored if [`Builder::device`] was called.
    pub fn serving(mut self, address: SocketAddr) -> Self {
        self.addresses.push(address);
        self
    }

    /// Sets whether links may use RDMA. Takes precedence over [`Config::rdma`].
    pub fn rdma(mut self, rdma: Rdma) -> Self {
        self.rdma = Some(rdma);
        self
    }

    /// Sets TLS for links over TCP. `client` has the trusted certificates for connects. `server`
    /// has this side's certificate for listeners.
    ///
    /// Connects and listeners with TLS settings of their own do not use these. Without `client`,
    /// other connects use plain text. Without `server`, other listeners use plain text. The
    /// caller chooses the cryptography provider (`rustls` with the feature `ring` or `aws_lc_rs`).
    /// The peer's certificate must be for its IP address, unless the connect specifies another
    /// name.
    pub fn tls(
        mut self,
        client: Option<Arc<ClientConfig>>,
        server: Option<Arc<ServerConfig>>,
    ) -> Self {
        self.tls = Tls { client, server };
        self
    }

    /// Sets the settings.
    pub fn config(mut self, config: Config) -> Self {
        self.config = config;
        self
    }

    /// Makes blocking calls to the kernel or the device (queue pairs, registrations, the connection
    /// manager) on threads of the fabric: two at first, at most eight. Otherwise the driver makes
    /// these calls.
    ///
    /// Use this for event loops that also serve other clients. Such a call can take a second if a
    /// peer stops answering at the wrong moment.
    pub fn command_threads(mut self) -> Self {
        self.command_threads = true;
        self
    }

    /// Leaves it to the caller to report that RDMA is unavailable ([`Fabric::absence`],
    /// [`Listener::absence`](crate::Listener::absence)). By default, the fabric logs that.
    pub fn caller_reports_absence(mut self) -> Self {
        self.is_quiet = true;
        self
    }

    /// Opens the devices, registers memory and posts receives.
    ///
    /// A device that cannot be used is left out ([`Fabric::unused_devices`]) if there is another
    /// device. If RDMA is preferred but unavailable, the fabric has no device, and
    /// [`Fabric::absence`] returns the reason.
    ///
    /// # Errors
    /// - [`ErrorKind::Misuse`] if a setting is out of range, or if settings contradict each other.
    /// - [`ErrorKind::System`] if the kernel refuses a descriptor, a thread or random numbers.
    /// - If RDMA is required: [`ErrorKind::Absent`] if it is unavailable, and
    ///   [`ErrorKind::Resources`] if the locked-memory limit or the device refuses. The error then
    ///   has figures and a remedy.
    pub fn build(self) -> Result<Fabric, Error> {
        let Self { verbs, devices, addresses, rdma, tls, mut config, command_threads, is_quiet } =
            self;
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
            // An error in the caller's arguments does not mean that RDMA is unavailable.
            Err(error) if config.rdma == Rdma::Require || error.kind() == ErrorKind::Misuse => {
                return Err(error);
            }
            Err(error) => (Devices::none(&config)?, Some(error)),
        };
        if let Some(error) = absence.as_ref().filter(|_| config.rdma == Rdma::Prefer && !is_quiet) {
            tracing::warn!("RDMA is unavailable, links use TCP: {}", error.with_remedy());
        }
        let Devices { pool, devices, device_objects, waits, unused } = rdma;
        let mailbox = Arc::new(Mailbox::new()?);
        waits.add(mailbox.as_fd(), Ready::Mailbox)?;
        // Without a device there are no commands that could block.
        let commands = match command_threads && !devices.is_empty() {
            true => Commands::on_threads(&mailbox)?,
            false => Commands::inline(),
        };
        let commands = Arc::new(commands);
        if command_threads {
            let commands = Arc::clone(&commands);
            pool.set_background(Box::new(move |work| commands.run(None, work)));
        }
        let clock = quanta::Clock::new();
        let has_software_device = devices.iter().any(|device| device.quirks().is_software);
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
                is_quiet,
                unused,
                tls,
                has_software_device,
                device_choice: DeviceChoice::new(&config),
                unfinished_tcp_max: AtomicUsize::new(usize::MAX),
                busy_poll: BusyPoll::new(
                    clock.clone(),
                    config.busy_poll_us,
                    config.adaptive_polling,
                ),
                config,
                commands,
                mailbox,
                waits,
                instance: random()?,
                abandoned: AtomicBool::new(false),
                drivers: AtomicUsize::new(0),
                has_foreign_loop: AtomicBool::new(false),
                clock,
                counters: Counters::default(),
                latencies: Arc::default(),
            }),
        })))
    }
}

fn check(config: &Config) -> Result<(), Error> {
    let wrong = if !Hello::SEGMENT_BYTES.contains(&config.recv_buffer_size) {
        format!("recv_buffer_size is {}, expected 256 to 2097152", config.recv_buffer_size)
    } else if !Hello::WINDOW.contains(&config.window) {
        format!("window is {}, expected 2 to 32767", config.window)
    } else if !(1..=16_384).contains(&config.channels) {
        format!("channels is {}, expected 1 to 16384", config.channels)
    } else if config.max_message_bytes < u64::from(config.recv_buffer_size) {
        let Config { max_message_bytes: max, recv_buffer_size, .. } = config;
        format!("max_message_bytes is {max}, less than recv_buffer_size {recv_buffer_size}")
    } else if config.poll_batch == 0 || config.max_half_open == 0 || config.send_queue_messages == 0
    {
        "poll_batch, max_half_open and send_queue_messages must be at least 1".into()
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::Misuse, wrong))
}
