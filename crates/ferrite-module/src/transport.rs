//! The thread `ferrite`, which runs the gateway in its own tokio runtime. It also drives the fabric
//! unless the engine's main thread does.
//!
//! The thread calls only one function of the module API, the log, and so never waits for the
//! engine's lock. The engine's main thread sends it requests over a channel. While the listener
//! runs, the main thread waits only for the counters, and at most 5 ms.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferrite_fabric::wire::Program;
use ferrite_fabric::{Builder, Fabric, FabricStats, ListenOptions, Listener, Rdma};
use ferrite_session::{
    EngineAddress, Gateway, GatewayConfig, fabric_config, open_fabric, valkey_config,
};
use tokio::runtime::Handle;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::api::fork;
use crate::engine_handle::EngineHandle;
use crate::event_loop;
use crate::listen::{Address, Host, WantedHosts};
use crate::options::Options;
use crate::tasks::TaskQueue;

/// How long the thread may take to open devices and register memory. A slow host needs some hundred
/// milliseconds.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the engine's main thread waits for counters, since the database serves nobody
/// meanwhile. After that it uses the previous counters.
const STATS_TIMEOUT: Duration = Duration::from_millis(5);
/// How long sessions may take to deliver their replies at shutdown, and peers to be notified after
/// that. The engine runs no more commands by then.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// How long the whole shutdown may take. After that the process exits, and the kernel closes the
/// connections.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);
/// If the main thread has not driven the fabric for this long, it is busy, and the thread `ferrite`
/// takes over. Otherwise peers would take this process for dead.
const BUSY_AFTER: Duration = Duration::from_millis(500);

const NO_RDMA_ON_LOOPBACK: &str = "loopback addresses take no RDMA; to do: bind the engine, or \
    the module (rdma-bind), to an address of an RDMA device";

/// A request from the engine's main thread.
enum Request {
    Stats(SyncSender<FabricStats>),
    BusyPoll(u32),
    Stop,
}

/// A running listener.
pub(crate) struct Transport {
    pub(crate) gateway: Gateway,
    pub(crate) listener: ListenerInfo,
    requests: UnboundedSender<Request>,
    progress: Receiver<Progress>,
    thread: Option<JoinHandle<()>>,
    last_stats: Box<FabricStats>,
    /// Receives the counters that the thread did not send in time.
    pending_stats: Option<Receiver<FabricStats>>,
    /// The hosts that the engine's configuration asks for. They may have changed since the listener
    /// started.
    pub(crate) wanted: WantedHosts,
}

/// How far the shutdown of the thread has come.
enum Progress {
    /// All sessions have ended.
    SessionsEnded,
    ThreadEnded,
}

/// The handles with which the main thread drives the fabric and runs sessions.
type MainThreadHandles = (Fabric, Handle);

/// What the listener serves, as determined at its start.
#[derive(Debug, Clone)]
pub(crate) struct ListenerInfo {
    /// The listening addresses, each with whether it accepts RDMA.
    pub(crate) addresses: Vec<(SocketAddr, bool)>,
    /// RDMA devices.
    pub(crate) devices: Vec<String>,
    /// Devices that cannot be used, and why.
    pub(crate) unused: Vec<String>,
    /// The engine's addresses that are not served, and why.
    pub(crate) unserved: Vec<String>,
    /// Why there is no RDMA and what to do about it; `None` if there is RDMA.
    pub(crate) absence: Option<String>,
}

impl ListenerInfo {
    /// Returns all addresses, separated by commas.
    pub(crate) fn all_addresses(&self) -> String {
        self.list(|_| true)
    }

    /// Returns the addresses that accept RDMA, separated by commas.
    pub(crate) fn rdma_addresses(&self) -> String {
        self.list(|has_rdma| has_rdma)
    }

    /// Returns the addresses that accept TCP only, separated by commas.
    pub(crate) fn tcp_only_addresses(&self) -> String {
        self.list(|has_rdma| !has_rdma)
    }

    fn list(&self, is_wanted: impl Fn(bool) -> bool) -> String {
        let wanted = self.addresses.iter().filter(|(_, has_rdma)| is_wanted(*has_rdma));
        wanted.map(|(address, _)| address.to_string()).collect::<Vec<_>>().join(", ")
    }
}

impl Transport {
    /// Starts the thread and listens.
    ///
    /// # Errors
    /// Nothing listens; the text says why. If RDMA is required, missing RDMA is an error. If it is
    /// preferred, the listener then accepts TCP only.
    pub(crate) fn start(
        options: &Options,
        (target, hosts, addresses): (EngineAddress, Vec<Host>, Vec<Address>),
        protected_mode: bool,
        queue: Option<Arc<TaskQueue>>,
    ) -> Result<(Self, MainThreadHandles), String> {
        let (started, starting) = sync_channel(1);
        let (report, progress) = sync_channel(2);
        let (requests, received) = unbounded_channel();
        let settings = (options.clone(), gateway_config(options, target, protected_mode));
        let wanted = WantedHosts::new(hosts);
        let retries_last = options.retries_last();
        let thread = std::thread::Builder::new().name("ferrite".into()).spawn(move || {
            let (options, config) = settings;
            let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                run((&options, &addresses), config, queue, (&started, &report), received);
            }));
            if ran.is_err() {
                tracing::error!(
                    "a bug: the transport thread panicked; its sessions have ended, and the \
                     module accepts no clients until the engine restarts"
                );
            }
            let _ = report.send(Progress::ThreadEnded);
        });
        let thread = thread.map_err(|error| format!("cannot start a thread: {error}"))?;
        let timeout = START_TIMEOUT + retries_last;
        match starting.recv_timeout(timeout) {
            Ok(Ok((gateway, listener, for_main_thread))) => {
                let (thread, last_stats) = (Some(thread), Box::new(for_main_thread.0.stats()));
                Ok((
                    Self {
                        gateway,
                        listener,
                        requests,
                        progress,
                        thread,
                        last_stats,
                        pending_stats: None,
                        wanted,
                    },
                    for_main_thread,
                ))
            }
            Ok(Err(why)) => {
                let _ = thread.join(); // it returns after an error
                Err(why)
            }
            // The thread ends by itself when it cannot send its result.
            Err(_) => {
                Err(format!("the RDMA devices were not ready within {} s", timeout.as_secs()))
            }
        }
    }

    /// Returns whether the thread still runs.
    pub(crate) fn is_alive(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Returns the fabric's counters. If the thread is busy or has ended, these are the last ones
    /// that it sent.
    pub(crate) fn stats(&mut self) -> &FabricStats {
        if let Some(Ok(late)) = self.pending_stats.as_ref().map(Receiver::try_recv) {
            *self.last_stats = late;
            self.pending_stats = None;
        }
        let reply = self.pending_stats.take().unwrap_or_else(|| {
            let (answer, reply) = sync_channel(1);
            let _ = self.requests.send(Request::Stats(answer));
            reply
        });
        match reply.recv_timeout(STATS_TIMEOUT) {
            Ok(stats) => *self.last_stats = stats,
            Err(RecvTimeoutError::Timeout) => self.pending_stats = Some(reply), // read next time
            Err(RecvTimeoutError::Disconnected) => {}
        }
        &self.last_stats
    }

    /// Applies settings that CONFIG SET has changed. Windows and the limit of clients apply to
    /// clients that connect from now on.
    pub(crate) fn reconfigure(&self, options: &Options) {
        let _ = self.requests.send(Request::BusyPoll(options.busy_poll_us()));
        self.gateway.reconfigure(|config| {
            config.max_clients = options.max_clients();
            config.valkey = valkey_config(options.values());
        });
    }

    /// Ends the sessions and the thread. Returns whether both ended in time; if not, the thread is
    /// left running.
    pub(crate) fn stop(mut self) -> bool {
        const POLL_INTERVAL: Duration = Duration::from_millis(1);
        let _ = self.requests.send(Request::Stop);
        // The engine wrote and synchronised its AOF before this event, so replies that waited for
        // that can be sent.
        event_loop::on_loop_iteration();
        let until = Instant::now() + SHUTDOWN_TIMEOUT;
        let in_time = loop {
            event_loop::run_slice(-1); // sessions on this thread must end as well
            match self.progress.recv_timeout(POLL_INTERVAL) {
                Ok(Progress::SessionsEnded) => event_loop::stop(),
                Ok(Progress::ThreadEnded) => break true,
                Err(RecvTimeoutError::Disconnected) => break false,
                Err(RecvTimeoutError::Timeout) if Instant::now() > until => break false,
                Err(RecvTimeoutError::Timeout) => {}
            }
        };
        event_loop::stop();
        if let Some(thread) = self.thread.take().filter(|_| in_time) {
            let _ = thread.join();
        }
        in_time
    }
}

fn gateway_config(options: &Options, engine: EngineAddress, protected_mode: bool) -> GatewayConfig {
    GatewayConfig {
        max_clients: options.max_clients(),
        protected_mode,
        drain_timeout: DRAIN_TIMEOUT,
        engine_keeps_running: false,
        valkey: valkey_config(options.values()),
        name: "Ferrite module",
        unprotect_hint: "run CONFIG SET protected-mode no in the engine",
        ..GatewayConfig::new(engine)
    }
}

/// Where the thread sends the result of its start.
type StartResult = SyncSender<Result<(Gateway, ListenerInfo, MainThreadHandles), String>>;

/// Runs the thread `ferrite`.
fn run(
    (options, addresses): (&Options, &[Address]),
    config: GatewayConfig,
    queue: Option<Arc<TaskQueue>>,
    (started, report): (&StartResult, &SyncSender<Progress>),
    requests: UnboundedReceiver<Request>,
) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = started.send(Err(format!("cannot create a tokio runtime: {error}")));
            return;
        }
    };
    runtime.block_on(async {
        let (fabric, listeners, unserved) = match listen(options, addresses) {
            Ok(listening) => listening,
            Err(why) => {
                let _ = started.send(Err(why));
                return;
            }
        };
        let (driver, gateway) = match queue {
            None => (tokio::spawn(fabric.drive()), Gateway::new(config)),
            Some(queue) => {
                let driver = match options.poller_thread() {
                    true => tokio::spawn(fabric.drive()),
                    false => tokio::spawn(drive_while_main_thread_is_busy(
                        fabric.clone(),
                        Arc::clone(&queue),
                    )),
                };
                (driver, Gateway::inside(config, Arc::new(EngineHandle(queue))))
            }
        };
        let info = ListenerInfo {
            addresses: listeners
                .iter()
                .map(|(listener, has_rdma)| (listener.local_addr(), *has_rdma))
                .collect(),
            devices: fabric.devices().into_iter().map(Into::into).collect(),
            unused: fabric
                .unused_devices()
                .iter()
                .map(|(name, error)| {
                    format!("RDMA device {name} is not used: {}", with_remedy(error))
                })
                .collect(),
            absence: absence(&fabric, &listeners),
            unserved,
        };
        if started.send(Ok((gateway.clone(), info, (fabric.clone(), Handle::current())))).is_err() {
            return; // the main thread no longer waits
        }
        let (stop, stopped) = watch::channel(false);
        let mut serving = JoinSet::new();
        for (listener, _) in listeners {
            let (gateway, mut stopped) = (gateway.clone(), stopped.clone());
            serving.spawn(async move {
                let at = listener.local_addr();
                let end = async { drop(stopped.wait_for(|stop| *stop).await) };
                if let Err(error) = gateway.serve(listener, end).await {
                    tracing::error!(
                        "the listener at {at} failed and accepts no more clients: {}",
                        with_remedy(&error)
                    );
                }
            });
        }
        let all_ended = async { while serving.join_next().await.is_some() {} };
        tokio::select! {
            () = serve_requests(&fabric, requests) => {}
            () = all_ended => {} // every listener has failed
        }
        let _ = stop.send(true);
        while serving.join_next().await.is_some() {}
        let _ = report.send(Progress::SessionsEnded);
        // If the main thread drove the fabric, it has stopped by now. This thread drives the fabric
        // until peers have been notified.
        driver.abort();
        let driver = tokio::spawn(fabric.drive());
        drop(fabric);
        let _ = timeout(DRAIN_TIMEOUT, driver).await;
    });
}

/// Drives the fabric while the main thread is busy with something long, so that peers still get
/// keepalives.
async fn drive_while_main_thread_is_busy(
    fabric: Fabric,
    queue: Arc<TaskQueue>,
) -> std::io::Result<()> {
    let mut seen = queue.pass_count();
    loop {
        sleep(BUSY_AFTER).await;
        if std::mem::replace(&mut seen, queue.pass_count()) == seen {
            fabric.poll();
        }
    }
}

/// Serves requests of the engine's main thread until it asks to stop, or is gone.
async fn serve_requests(fabric: &Fabric, mut requests: UnboundedReceiver<Request>) {
    while let Some(request) = requests.recv().await {
        match request {
            Request::Stats(answer) => drop(answer.try_send(fabric.stats())),
            Request::BusyPoll(busy_poll_us) => fabric.set_busy_poll_us(busy_poll_us),
            Request::Stop => return,
        }
    }
}

/// Listeners, each with whether it accepts RDMA.
type Listeners = Vec<(Listener, bool)>;

/// Listens on the addresses. Also returns, for each of the engine's addresses that cannot be
/// served, why not.
fn listen(
    options: &Options,
    addresses: &[Address],
) -> Result<(Fabric, Listeners, Vec<String>), String> {
    let requires = options.rdma() == Rdma::Require;
    let is_loopback = addresses.iter().all(|address| address.at.ip().is_loopback());
    if requires && is_loopback {
        return Err(format!("rdma is set to require, but {NO_RDMA_ON_LOOPBACK}"));
    }
    let mut config = fabric_config(options.values());
    config.program = Program::MODULE;
    if is_loopback {
        config.rdma = Rdma::Forbid; // no device needs to be opened
    }
    // If no devices are named, only those that have one of these addresses are opened.
    let served: Vec<_> =
        addresses.iter().map(|address| address.at).filter(|at| !at.ip().is_loopback()).collect();
    // The engine's main thread drives the fabric and must not wait for the kernel.
    let begin = || {
        let builder = served.iter().copied().fold(Fabric::system(), Builder::serving);
        builder.command_threads().caller_reports_absence()
    };
    let fabric =
        open_fabric(options.values(), &config, begin).map_err(|error| with_remedy(&error))?;
    let (mut listeners, mut unserved, mut why_not) = (Vec::new(), Vec::new(), None);
    for address in addresses {
        let (at, rdma) = (address.at, address.rdma(options.rdma()));
        if requires && rdma == Rdma::Forbid {
            let why =
                format!("{at} is not served: rdma is set to require, and loopback has no RDMA");
            tracing::info!("{why}");
            why_not.get_or_insert(why);
            continue;
        }
        let how = ListenOptions::new().rdma(rdma).accept_foreign_peers().one_family();
        match fabric.listen_with(at, &how) {
            Ok(listener) => {
                // `rdma-device` names devices, but the address belongs to another device.
                let other = listener.absence().filter(|error| error.is_other_device());
                if let Some(error) = other.filter(|_| address.is_named && options.names_devices()) {
                    return Err(format!("cannot listen on {at}: {}", with_remedy(error)));
                }
                let has_rdma =
                    rdma != Rdma::Forbid && fabric.absence().or(listener.absence()).is_none();
                listeners.push((listener, has_rdma));
            }
            Err(_) if address.may_be_absent => {}
            Err(error) => {
                let over = if requires { " over RDMA" } else { "" };
                let why = format!("cannot listen on {at}{over}: {}", with_remedy(&error));
                // If one of the engine's own addresses fails, the others are still served.
                if address.is_named {
                    return Err(why);
                }
                unserved.push(why);
            }
        }
    }
    fork::close_in_children(listeners.iter().flat_map(|(listener, _)| listener.descriptors()));
    if listeners.is_empty() {
        let first = unserved.into_iter().next().or(why_not);
        return Err(first.unwrap_or_else(|| {
            "this host has none of the engine's bind addresses; load the module with rdma-bind \
             ADDRESS"
                .into()
        }));
    }
    let is_other = |(listener, _): &(Listener, bool)| {
        listener.absence().is_some_and(ferrite_fabric::Error::is_other_device)
    };
    if options.names_devices()
        && !listeners.iter().any(|(_, has_rdma)| *has_rdma)
        && let Some((listener, _)) = listeners.iter().find(|listener| is_other(listener))
        && let Some(error) = listener.absence()
    {
        let at = listener.local_addr();
        return Err(format!("cannot listen on {at} over RDMA: {}", with_remedy(error)));
    }
    unserved
        .iter()
        .for_each(|why| tracing::warn!("{why}; the engine's other addresses are served"));
    // If no address has RDMA, the module reports the reason once for all addresses.
    if listeners.iter().any(|(_, has_rdma)| *has_rdma) {
        for listener in listeners.iter().map(|(listener, _)| listener) {
            if let Some(error) = listener.absence() {
                let at = listener.local_addr();
                tracing::warn!("{at} takes TCP only, not RDMA: {}", with_remedy(error));
            }
        }
    }
    Ok((fabric, listeners, unserved))
}

/// Returns why no listener accepts RDMA; `None` if one does.
fn absence(fabric: &Fabric, listeners: &Listeners) -> Option<String> {
    if listeners.iter().any(|(_, has_rdma)| *has_rdma) {
        return None;
    }
    if listeners.iter().all(|(listener, _)| listener.local_addr().ip().is_loopback()) {
        return Some(NO_RDMA_ON_LOOPBACK.into());
    }
    let why =
        fabric.absence().or_else(|| listeners.iter().find_map(|(listener, _)| listener.absence()));
    why.map(with_remedy)
}

/// Returns the text of an error together with its remedy.
fn with_remedy(error: &ferrite_fabric::Error) -> String {
    match error.remedy() {
        Some(remedy) => format!("{error}; to do: {remedy}"),
        None => error.to_string(),
    }
}
