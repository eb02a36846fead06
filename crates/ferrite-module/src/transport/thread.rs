//! The code that runs on the thread `ferrite`: the gateway's listeners, and the driver of the
//! fabric.
//!
//! The thread ends when the main thread asks for it, or when it cannot serve clients any more. In
//! the second case, the thread reports why. The sessions on the main thread then end as well,
//! because their timers and sockets belong to this thread's runtime.

use std::any::Any;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use ferrite_fabric::{Fabric, FabricStats};
use ferrite_session::{Gateway, GatewayConfig};
use tokio::runtime::Handle;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{sleep, timeout};

use super::listeners::{Listeners, absence, listen, with_remedy};
use super::state::ThreadState;
use crate::engine_handle::EngineHandle;
use crate::listen::Address;
use crate::options::Options;
use crate::tasks::TaskQueue;

/// How long sessions may take to deliver their replies at shutdown. Afterwards, the thread may take
/// as long again to notify peers. The engine runs no more commands by then.
pub(super) const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// If the main thread does not drive the fabric for this time, the thread `ferrite` polls it. If
/// neither thread polled the fabric, peers would take this process for dead.
const BUSY_AFTER: Duration = Duration::from_millis(500);

/// A request from the engine's main thread.
pub(super) enum Request {
    Stats(SyncSender<FabricStats>),
    BusyPoll(u32),
    Stop,
    /// Panics, for tests.
    #[cfg(test)]
    Panic,
}

/// How far the shutdown of the thread has come.
pub(super) enum Progress {
    /// All sessions have ended.
    SessionsEnded,
    ThreadEnded,
}

/// The handles with which the main thread drives the fabric and runs sessions.
pub(super) type MainThreadHandles = (Fabric, Handle);

/// The addresses and devices of the listener, as determined at its start.
#[derive(Debug, Clone)]
pub(crate) struct ListenerInfo {
    /// The listening addresses. Each flag says whether the address accepts RDMA.
    pub(crate) addresses: Vec<(SocketAddr, bool)>,
    /// The names of the RDMA devices that the listener uses.
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

/// The channels over which the thread reports to the main thread.
pub(super) struct Reports {
    /// The result of the start.
    pub(super) started: SyncSender<Result<(Gateway, ListenerInfo, MainThreadHandles), String>>,
    pub(super) progress: SyncSender<Progress>,
    pub(super) state: ThreadState,
}

/// Runs the thread `ferrite`.
pub(super) fn run(
    (options, addresses): (&Options, &[Address]),
    config: GatewayConfig,
    queue: Option<Arc<TaskQueue>>,
    requests: UnboundedReceiver<Request>,
    reports: &Reports,
) {
    let Reports { started, progress, state } = reports;
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = started.send(Err(format!("cannot create a tokio runtime: {error}")));
            return;
        }
    };
    let entered = runtime.enter();
    let (fabric, listeners, unserved) = match listen(options, addresses) {
        Ok(listening) => listening,
        Err(why) => {
            let _ = started.send(Err(why));
            return;
        }
    };
    let (mut driver, gateway) = match &queue {
        None => (tokio::spawn(fabric.drive()), Gateway::new(config)),
        Some(queue) => {
            let driver = match options.poller_thread() {
                true => tokio::spawn(fabric.drive()),
                false => {
                    tokio::spawn(drive_while_main_thread_is_busy(fabric.clone(), Arc::clone(queue)))
                }
            };
            (driver, Gateway::inside(config, Arc::new(EngineHandle(Arc::clone(queue)))))
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
            .map(|(name, error)| format!("RDMA device {name} is not used: {}", with_remedy(error)))
            .collect(),
        absence: absence(&fabric, &listeners),
        unserved,
    };
    drop(entered);
    let handles = (fabric.clone(), runtime.handle().clone());
    if started.send(Ok((gateway.clone(), info, handles))).is_err() {
        return; // the main thread no longer waits
    }
    let (stop, stopped) = watch::channel(false);
    let mut serving = JoinSet::new();
    let served = catch_unwind(AssertUnwindSafe(|| {
        runtime.block_on(async {
            start_serving(&mut serving, listeners, &gateway, &stopped);
            tokio::select! {
                () = serve_requests(&fabric, requests) => Ok(()),
                why = all_failed(&mut serving) => Err(why),
                ended = &mut driver => Err(driver_ended(ended)),
            }
        })
    }));
    let served = served.unwrap_or_else(|panic| Err(panicked("the transport thread", &*panic)));
    state.end(served.as_ref().err().cloned().unwrap_or_else(|| "stopped by the engine".into()));
    if let Err(why) = &served {
        tracing::error!("the module accepts no clients until the engine restarts: {why}");
    }
    runtime.block_on(async {
        let _ = stop.send(true);
        while serving.join_next().await.is_some() {}
        let _ = progress.send(Progress::SessionsEnded);
        // At a shutdown, the main thread waits for the message above and then drops its sessions.
        if let Some(queue) = queue.filter(|_| served.is_err()) {
            queue.end();
        }
        // If the main thread drove the fabric, it has stopped by now. This thread drives the fabric
        // until peers have been notified.
        driver.abort();
        let driver = tokio::spawn(fabric.drive());
        drop(fabric);
        let _ = timeout(DRAIN_TIMEOUT, driver).await;
    });
}

/// Starts a task for each listener. The task ends when `stopped` becomes true. If the listener
/// fails, the task returns why.
fn start_serving(
    serving: &mut JoinSet<Result<(), String>>,
    listeners: Listeners,
    gateway: &Gateway,
    stopped: &watch::Receiver<bool>,
) {
    for (listener, _) in listeners {
        let (gateway, mut stopped) = (gateway.clone(), stopped.clone());
        serving.spawn(async move {
            let at = listener.local_addr();
            let end = async { drop(stopped.wait_for(|stop| *stop).await) };
            gateway
                .serve(listener, end)
                .await
                .map_err(|error| format!("the listener at {at} failed: {}", with_remedy(&error)))
        });
    }
}

/// Waits until the last listener has failed. Returns why it did, and logs why the others did.
async fn all_failed(serving: &mut JoinSet<Result<(), String>>) -> String {
    while let Some(ended) = serving.join_next().await {
        let why = match ended {
            Ok(Ok(())) => "the listener has ended".into(), // cannot be: nothing has stopped it
            Ok(Err(why)) => why,
            Err(error) => task_panicked("a listener", error),
        };
        if serving.is_empty() {
            return why;
        }
        tracing::error!("{why}; the other listeners still accept clients");
    }
    "there is no listener".into()
}

/// Returns why the fabric is not driven any more.
fn driver_ended(ended: Result<std::io::Result<()>, JoinError>) -> String {
    match ended {
        Ok(Ok(())) => "the task that polls the RDMA devices has ended".into(),
        Ok(Err(error)) => format!("cannot wait for the RDMA devices: {error}"),
        Err(error) => task_panicked("the task that polls the RDMA devices", error),
    }
}

fn task_panicked(what: &str, error: JoinError) -> String {
    match error.try_into_panic() {
        Ok(panic) => panicked(what, &*panic),
        Err(error) => format!("{what}: {error}"),
    }
}

/// Returns a text for a panic, with the message of the panic.
pub(super) fn panicked(what: &str, panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("a bug: {what} panicked: {}", text.unwrap_or("no message"))
}

/// Polls the fabric every [`BUSY_AFTER`] in which the main thread has not driven it. So peers still
/// get keepalives while the main thread is busy with something long.
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
            #[cfg(test)]
            Request::Panic => panic!("on purpose"),
        }
    }
}
