//! The thread `ferrite`: the gateway, and the fabric's engine unless the main thread drives that,
//! under a runtime of its own.
//!
//! It never calls the engine's API (but for its log) and so never waits for the engine's lock. The
//! engine's main thread talks to it by a channel; the only answer that it ever waits for, and not
//! long, is the counters.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferrite_fabric::{Builder, Config, Fabric, FabricStats, ListenOptions, Listener, Rdma};
use ferrite_session::{EngineAddress, Gateway, GatewayConfig, ValkeyConfig, server_config};
use tokio::runtime::Handle;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::api::fork;
use crate::event_loop::{self, EngineHandle};
use crate::listen::{Address, Wanted};
use crate::options::Options;
use crate::target::Sockets;
use crate::tasks::TaskQueue;

/// Opening devices and registering memory: some hundred milliseconds on a slow host.
const BEGIN: Duration = Duration::from_secs(30);
/// The engine's thread is a database's: it waits this long for counters, and shows the last ones
/// otherwise.
const PATIENCE: Duration = Duration::from_millis(5);
/// Sessions that finish what is under way when the engine ends: it answers nothing more.
const DRAIN: Duration = Duration::from_secs(1);
/// All that the end may take. The process goes then, and the kernel tells peers.
const END: Duration = Duration::from_secs(3);
/// A main thread that has driven nothing for so long is busy with something else: peers must not
/// take it for dead.
const ABSENT: Duration = Duration::from_millis(500);
/// Links beyond this are refused by the fabric; those before, and beyond `max-clients`, are told
/// why.
const LINKS_MAX: usize = 16_384;

/// What the engine's thread asks for.
enum Ask {
    Stats(SyncSender<FabricStats>),
    BusyPoll(u32),
    End,
}

/// A listener at work.
pub(crate) struct Transport {
    pub(crate) gateway: Gateway,
    pub(crate) begun: Begun,
    asks: UnboundedSender<Ask>,
    ended: Receiver<Ended>,
    thread: Option<JoinHandle<()>>,
    last_stats: Box<FabricStats>,
    /// The answer that is still to come.
    asked: Option<Receiver<FabricStats>>,
    /// Where it was told to listen, or to be when it was last asked.
    pub(crate) wanted: Wanted,
}

/// How far the thread's end has come.
enum Ended {
    /// There are no sessions any more.
    Served,
    All,
}

/// What the main thread needs to drive the fabric and to run sessions.
type ForMain = (Fabric, Handle);

/// How it began.
#[derive(Debug, Clone)]
pub(crate) struct Begun {
    /// Where clients come in, and whether over RDMA too.
    pub(crate) addresses: Vec<(SocketAddr, bool)>,
    /// RDMA devices.
    pub(crate) devices: Vec<String>,
    /// Devices that cannot be used, and why.
    pub(crate) unused: Vec<String>,
    /// Addresses of the engine's that are not served, and why.
    pub(crate) unserved: Vec<String>,
    /// Why there is no RDMA, if there is none, and what to do.
    pub(crate) absence: Option<String>,
}

impl Begun {
    /// Where clients come in, in words: over RDMA, or at all.
    pub(crate) fn places(&self, all: bool) -> String {
        let wanted = self.addresses.iter().filter(|(_, has_rdma)| all || *has_rdma);
        wanted.map(|(address, _)| address.to_string()).collect::<Vec<_>>().join(", ")
    }

    /// Where clients come in over TCP only, in words.
    pub(crate) fn tcp_places(&self) -> String {
        let wanted = self.addresses.iter().filter(|(_, has_rdma)| !has_rdma);
        wanted.map(|(address, _)| address.to_string()).collect::<Vec<_>>().join(", ")
    }
}

impl Transport {
    /// Begins to listen, or says why not. Where RDMA is required, its absence is a reason; where it
    /// is preferred, TCP alone will do.
    pub(crate) fn begin(
        options: &Options,
        (target, sockets, addresses): (EngineAddress, Sockets, Vec<Address>),
        protected_mode: bool,
        queue: Option<Arc<TaskQueue>>,
    ) -> Result<(Self, ForMain), String> {
        let (begun, beginning) = sync_channel(1);
        let (ending, ended) = sync_channel(2);
        let (asks, asked) = unbounded_channel();
        let settings = (options.clone(), gateway_config(options, target, protected_mode));
        let wanted = Wanted::new(sockets, addresses.clone());
        let thread = std::thread::Builder::new().name("ferrite".into()).spawn(move || {
            let (options, config) = settings;
            let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                run((&options, &addresses), config, queue, (&begun, &ending), asked);
            }));
            if ran.is_err() {
                tracing::error!(
                    "the transport thread has panicked: RDMA sessions have ended, the engine goes on without"
                );
            }
            let _ = ending.send(Ended::All);
        });
        let thread = thread.map_err(|error| format!("no thread: {error}"))?;
        match beginning.recv_timeout(BEGIN) {
            Ok(Ok((gateway, begun, for_main))) => {
                let (thread, last_stats) = (Some(thread), Box::new(for_main.0.stats()));
                Ok((
                    Self { gateway, begun, asks, ended, thread, last_stats, asked: None, wanted },
                    for_main,
                ))
            }
            Ok(Err(why)) => {
                let _ = thread.join(); // it has said its last word
                Err(why)
            }
            // It ends when it finds that nobody listens to it.
            Err(_) => Err(format!("the devices were not ready after {} s", BEGIN.as_secs())),
        }
    }

    /// Whether the thread still runs.
    pub(crate) fn is_alive(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// What the fabric counts: now, or when it was last asked if the thread is busy or has ended.
    pub(crate) fn stats(&mut self) -> &FabricStats {
        if let Some(Ok(late)) = self.asked.as_ref().map(Receiver::try_recv) {
            *self.last_stats = late;
            self.asked = None;
        }
        let answered = self.asked.take().unwrap_or_else(|| {
            let (answer, answered) = sync_channel(1);
            let _ = self.asks.send(Ask::Stats(answer));
            answered
        });
        match answered.recv_timeout(PATIENCE) {
            Ok(stats) => *self.last_stats = stats,
            Err(RecvTimeoutError::Timeout) => self.asked = Some(answered), // for the next time
            Err(RecvTimeoutError::Disconnected) => {}
        }
        &self.last_stats
    }

    /// CONFIG SET: for those who come from now on.
    pub(crate) fn reconfigure(&self, options: &Options) {
        let _ = self.asks.send(Ask::BusyPoll(options.busy_poll_us()));
        self.gateway.reconfigure(|config| {
            config.max_clients = options.max_clients();
            config.valkey = valkey_config(options);
        });
    }

    /// Ends sessions and the thread; whether that was done in time. A thread that is not ready is
    /// left alone.
    pub(crate) fn end(mut self) -> bool {
        const TURN: Duration = Duration::from_millis(1);
        let _ = self.asks.send(Ask::End);
        // The engine has written and synchronised its AOF before it told us: replies that waited
        // for that may leave.
        event_loop::turned();
        let until = Instant::now() + END;
        let in_time = loop {
            event_loop::turn(-1); // sessions that are this thread's have to end as well
            match self.ended.recv_timeout(TURN) {
                Ok(Ended::Served) => event_loop::end(),
                Ok(Ended::All) => break true,
                Err(RecvTimeoutError::Disconnected) => break false,
                Err(RecvTimeoutError::Timeout) if Instant::now() > until => break false,
                Err(RecvTimeoutError::Timeout) => {}
            }
        };
        event_loop::end();
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
        drain_timeout: DRAIN,
        engine_stays: false,
        valkey: valkey_config(options),
        name: "Ferrite module",
        open_up: "run CONFIG SET protected-mode no in the engine",
        ..GatewayConfig::new(engine)
    }
}

fn valkey_config(options: &Options) -> ValkeyConfig {
    let (window_bytes, window_max_bytes) = options.windows();
    ValkeyConfig { window_bytes, window_max_bytes, ..ValkeyConfig::default() }
}

type Beginning = SyncSender<Result<(Gateway, Begun, ForMain), String>>;

/// The thread.
fn run(
    (options, addresses): (&Options, &[Address]),
    config: GatewayConfig,
    queue: Option<Arc<TaskQueue>>,
    (beginning, ending): (&Beginning, &SyncSender<Ended>),
    asked: UnboundedReceiver<Ask>,
) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = beginning.send(Err(format!("no runtime: {error}")));
            return;
        }
    };
    runtime.block_on(async {
        let (fabric, listeners, unserved) = match listen(options, addresses) {
            Ok(listening) => listening,
            Err(why) => {
                let _ = beginning.send(Err(why));
                return;
            }
        };
        let (driver, gateway) = match queue {
            None => (tokio::spawn(fabric.drive()), Gateway::new(config)),
            Some(queue) => {
                let driver = match options.poller_thread() {
                    true => tokio::spawn(fabric.drive()),
                    false => tokio::spawn(stand_in(fabric.clone(), Arc::clone(&queue))),
                };
                (driver, Gateway::inside(config, Arc::new(EngineHandle(queue))))
            }
        };
        let begun = Begun {
            addresses: listeners
                .iter()
                .map(|(listener, has_rdma)| (listener.local_addr(), *has_rdma))
                .collect(),
            devices: fabric.devices().into_iter().map(Into::into).collect(),
            unused: fabric
                .unused_devices()
                .iter()
                .map(|(name, error)| format!("RDMA device {name} is not used: {}", told(error)))
                .collect(),
            absence: absence(&fabric, &listeners),
            unserved,
        };
        if beginning
            .send(Ok((gateway.clone(), begun, (fabric.clone(), Handle::current()))))
            .is_err()
        {
            return; // it took too long
        }
        let (stop, stopped) = watch::channel(false);
        let mut serving = JoinSet::new();
        for (listener, _) in listeners {
            let (gateway, mut stopped) = (gateway.clone(), stopped.clone());
            serving.spawn(async move {
                let at = listener.local_addr();
                let end = async { drop(stopped.wait_for(|stop| *stop).await) };
                if let Err(error) = gateway.serve(listener, end).await {
                    tracing::error!("clients are no longer taken at {at}: {}", told(&error));
                }
            });
        }
        let all_ended = async { while serving.join_next().await.is_some() {} };
        tokio::select! {
            () = answer(&fabric, asked) => {}
            () = all_ended => {} // every listener has failed
        }
        let _ = stop.send(true);
        while serving.join_next().await.is_some() {}
        let _ = ending.send(Ended::Served);
        // Until peers have heard.
        driver.abort(); // a main thread that drives has stopped by now
        let driver = tokio::spawn(fabric.drive());
        drop(fabric);
        let _ = timeout(DRAIN, driver).await;
    });
}

/// Drives the fabric while the main thread does not: it may be at something long, and peers want to
/// hear that we live.
async fn stand_in(fabric: Fabric, queue: Arc<TaskQueue>) -> std::io::Result<()> {
    let mut seen = queue.looks();
    loop {
        sleep(ABSENT).await;
        if std::mem::replace(&mut seen, queue.looks()) == seen {
            fabric.poll();
        }
    }
}

/// Until the engine's thread asks for the end, or is gone.
async fn answer(fabric: &Fabric, mut asked: UnboundedReceiver<Ask>) {
    while let Some(ask) = asked.recv().await {
        match ask {
            Ask::Stats(answer) => drop(answer.try_send(fabric.stats())),
            Ask::BusyPoll(busy_poll_us) => fabric.set_busy_poll_us(busy_poll_us),
            Ask::End => return,
        }
    }
}

/// Listeners, each with whether it takes RDMA.
type Listeners = Vec<(Listener, bool)>;

/// What listens, and why addresses of the engine's do not.
fn listen(
    options: &Options,
    addresses: &[Address],
) -> Result<(Fabric, Listeners, Vec<String>), String> {
    let requires = options.rdma() == Rdma::Require;
    let is_loopback = addresses.iter().all(|address| address.at.ip().is_loopback());
    if requires && is_loopback {
        return Err("rdma require, and loopback addresses take no RDMA; to do: bind the engine, or the module by rdma-bind, to \
                    an address of an RDMA device"
            .into());
    }
    let config = Config {
        busy_poll_us: options.busy_poll_us(),
        max_connections: LINKS_MAX,
        shared_windows: options.shared_windows(),
        // Loopback takes no RDMA: then no device is opened.
        rdma: if is_loopback { Rdma::Forbid } else { options.rdma() },
        ..server_config()
    };
    // Without names: only the devices that clients of these addresses come in on.
    let served = addresses.iter().map(|address| address.at.ip()).filter(|ip| !ip.is_loopback());
    let builder =
        options.devices().fold(served.fold(Fabric::system(), Builder::serving), Builder::device);
    // The engine's main thread drives it, and is not to wait for the kernel.
    let fabric = builder.config(config).command_threads().build().map_err(|error| told(&error))?;
    let (mut listeners, mut unserved, mut why_not) = (Vec::new(), Vec::new(), None);
    for address in addresses {
        let (at, rdma) = (address.at, address.rdma(options.rdma()));
        if requires && rdma == Rdma::Forbid {
            let why =
                format!("{at} is not served: rdma require, and a loopback address takes no RDMA");
            tracing::info!("{why}");
            why_not.get_or_insert(why);
            continue;
        }
        let how = ListenOptions::new().rdma(rdma).accept_foreign_peers().one_family();
        match fabric.listen_with(at, &how) {
            Ok(listener) => {
                let has_rdma =
                    rdma != Rdma::Forbid && fabric.absence().or(listener.absence()).is_none();
                listeners.push((listener, has_rdma));
            }
            Err(_) if address.may_be_absent => {}
            Err(error) => {
                let over = if requires { " over RDMA" } else { "" };
                let why = format!("cannot listen on {at}{over}: {}", told(&error));
                // Of the engine's own addresses, one that fails is no reason to serve none.
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
        return Err(first.unwrap_or_else(|| "none of the engine's addresses is here".into()));
    }
    unserved
        .iter()
        .for_each(|why| tracing::warn!("{why}; the engine's other addresses are served"));
    Ok((fabric, listeners, unserved))
}

/// Why there is no RDMA anywhere, if there is none.
fn absence(fabric: &Fabric, listeners: &Listeners) -> Option<String> {
    if listeners.iter().any(|(_, has_rdma)| *has_rdma) {
        return None;
    }
    if listeners.iter().all(|(listener, _)| listener.local_addr().ip().is_loopback()) {
        return Some(
            "loopback addresses take no RDMA; to do: bind the engine, or the module by rdma-bind, to an address \
             of an RDMA device"
                .into(),
        );
    }
    let why =
        fabric.absence().or_else(|| listeners.iter().find_map(|(listener, _)| listener.absence()));
    why.map(told)
}

/// An error with its remedy.
fn told(error: &ferrite_fabric::Error) -> String {
    match error.remedy() {
        Some(remedy) => format!("{error}; to do: {remedy}"),
        None => error.to_string(),
    }
}
