//! The thread `ferrite`, which runs the gateway in its own tokio runtime. It also drives the fabric
//! unless the engine's main thread does.
//!
//! The thread calls only one function of the module API, the log, and so never waits for the
//! engine's lock. The engine's main thread sends it requests over a channel. While the listener
//! runs, the main thread waits only for the counters, and at most 5 ms.

mod listeners;
mod state;
mod thread;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferrite_fabric::FabricStats;
use ferrite_session::{EngineAddress, Gateway, GatewayConfig, valkey_config};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

pub(crate) use self::state::ThreadState;
use self::thread::{
    DRAIN_TIMEOUT, ListenerInfo, MainThreadHandles, Progress, Reports, Request, panicked, run,
};
use crate::event_loop;
use crate::listen::{Address, Host, WantedHosts};
use crate::options::Options;
use crate::tasks::TaskQueue;

/// How long the thread may take to open devices and register memory, in addition to the delays
/// before retries. A slow host needs some hundred milliseconds.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the engine's main thread waits for counters. The time is short because the database
/// serves nobody meanwhile. After that the main thread uses the previous counters.
const STATS_TIMEOUT: Duration = Duration::from_millis(5);
/// How long the whole shutdown may take. After that the process exits, and the kernel closes the
/// connections.
pub(crate) const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);

/// A running listener.
pub(crate) struct Transport {
    pub(crate) gateway: Gateway,
    pub(crate) listener: ListenerInfo,
    requests: UnboundedSender<Request>,
    progress: Receiver<Progress>,
    thread: Option<JoinHandle<()>>,
    pub(crate) state: ThreadState,
    last_stats: Box<FabricStats>,
    /// Receives the counters that the thread did not send in time.
    pending_stats: Option<Receiver<FabricStats>>,
    /// The hosts that the engine's configuration asks for. They may have changed since the listener
    /// started.
    pub(crate) wanted: WantedHosts,
}

impl Transport {
    /// Starts the thread and listens.
    ///
    /// # Errors
    /// Returns an error if the module can listen on no address, or not on every address of
    /// `rdma-bind`. If RDMA is required, missing RDMA is an error. If RDMA is preferred and
    /// missing, the listener accepts TCP only, unless `rdma-device` names a device and the address
    /// belongs to another one: this is an error. The text of an error says why.
    pub(crate) fn start(
        options: &Options,
        (target, hosts, addresses): (EngineAddress, Vec<Host>, Vec<Address>),
        protected_mode: bool,
        queue: Option<Arc<TaskQueue>>,
    ) -> Result<(Self, MainThreadHandles), String> {
        let (started, starting) = sync_channel(1);
        let (report, progress) = sync_channel(2);
        let state = ThreadState::default();
        let reports = Reports { started, progress: report, state: state.clone() };
        let (requests, received) = unbounded_channel();
        let settings = (options.clone(), gateway_config(options, target, protected_mode));
        let wanted = WantedHosts::new(hosts);
        let retries_last = options.retries_last();
        let thread = std::thread::Builder::new().name("ferrite".into()).spawn(move || {
            let (options, config) = settings;
            let ran = catch_unwind(AssertUnwindSafe(|| {
                run((&options, &addresses), config, queue, received, &reports);
            }));
            // This is a panic at the start or at the end of the thread. `run` handles other panics.
            if let Err(panic) = ran {
                let why = panicked("the transport thread", &*panic);
                tracing::error!("{why}");
                reports.state.end(why);
            }
            let _ = reports.progress.send(Progress::ThreadEnded);
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
                        state,
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
            Err(RecvTimeoutError::Disconnected) => {
                let _ = thread.join(); // it has ended without a result
                Err(state.why_ended().unwrap_or("the transport thread has ended").to_owned())
            }
            // The thread ends by itself when it cannot send its result.
            Err(RecvTimeoutError::Timeout) => {
                Err(format!("the RDMA devices were not ready within {} s", timeout.as_secs()))
            }
        }
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

    /// Makes the thread panic.
    #[cfg(test)]
    pub(crate) fn panic(&self) {
        let _ = self.requests.send(Request::Panic);
    }

    /// Ends the sessions and the thread. Returns whether both ended in time; if not, the thread is
    /// left running.
    pub(crate) fn stop(mut self) -> bool {
        const POLL_INTERVAL: Duration = Duration::from_millis(1);
        let _ = self.requests.send(Request::Stop);
        // Lets replies be sent that wait for the AOF. The engine wrote and synchronised its AOF
        // before it reported its shutdown.
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
