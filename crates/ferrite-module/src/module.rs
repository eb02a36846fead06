//! The module's state between its load and the engine's shutdown. Everything here runs on the
//! engine's main thread.

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Instant;

use ferrite_fabric::Rdma;
use ferrite_metrics::{AdminPort, AdminServer};
use ferrite_session::EngineAddress;

use crate::admin::{self, ShownListener};
use crate::api::cluster::NodeId;
use crate::api::{Context, Reply};
use crate::call_path;
use crate::calls::Calls;
use crate::capacity;
use crate::descriptors;
use crate::endpoints::{self, Endpoints};
use crate::event_loop;
use crate::listen::{self, Host};
use crate::options::{Options, SettingValue};
use crate::slice;
use crate::target::{Sockets, target};
use crate::tasks::TaskQueue;
use crate::transport::{SHUTDOWN_TIMEOUT, Transport};

/// The listener, or why there is none.
pub(crate) enum Service {
    /// There is no listener, for this reason.
    Off(String),
    On(Box<Transport>),
}

/// Functions that make the engine call the module. They are in `entry.rs`, beside the C functions
/// that the engine then calls.
#[derive(Clone, Copy)]
pub(crate) struct Callbacks {
    /// Makes the engine's event loop watch these descriptors, and run a slice when one is readable.
    pub(crate) watch: fn(&[RawFd]) -> Result<(), String>,
    /// Makes the engine report the iterations of its event loop.
    pub(crate) subscribe_to_loop: fn(Context<'_>),
}

/// The module's state.
pub(crate) struct Module {
    pub(crate) options: Options,
    pub(crate) service: Service,
    admin: Option<AdminServer>,
    pub(crate) endpoints: Endpoints,
    callbacks: Callbacks,
}

/// The module. There is one per process, because there is one engine. Only the engine's main thread
/// uses it. The exception is a crash report, which the engine writes on the thread that crashed.
static MODULE: Mutex<Option<Module>> = Mutex::new(None);

/// Runs `act` with the module.
///
/// Returns `None` if there is no module, or if another callback of the module is using it. The
/// engine may call one callback from within another, for example for a crash report, and waiting
/// for the lock would then deadlock.
pub(crate) fn with_module<R>(act: impl FnOnce(&mut Module) -> R) -> Option<R> {
    lock()?.as_mut().map(act)
}

/// Sets the module, or removes it.
pub(crate) fn replace_module(module: Option<Module>) {
    if let Some(mut current) = lock() {
        *current = module;
    }
}

fn lock() -> Option<MutexGuard<'static, Option<Module>>> {
    match MODULE.try_lock() {
        Ok(module) => Some(module),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

impl Module {
    pub(crate) fn new(options: Options, callbacks: Callbacks) -> Self {
        let service = Service::Off("not started yet".into());
        Self { options, service, admin: None, endpoints: Endpoints::default(), callbacks }
    }

    /// Checks that the settings fit together, after the engine has set them one by one.
    ///
    /// # Errors
    /// Returns an error that names each wrong setting and says why it is wrong.
    pub(crate) fn check_options(&self) -> Result<(), String> {
        self.options.check()
    }

    /// Starts the listener and the admin port.
    ///
    /// # Errors
    /// Returns an error if the listener cannot start, or if the address of the admin port cannot be
    /// bound. There is one exception: the settings give no address to listen on, or no socket of
    /// the engine to connect to, and RDMA is not required. Then the reason is logged, and the
    /// engine runs without a listener.
    pub(crate) fn start(&mut self, context: Context<'_>) -> Result<(), String> {
        let admin_port = self.options.admin().map(AdminPort::bind).transpose()?;
        let listener = match self.endpoints(context) {
            Ok(endpoints) => Ok(self.listen(context, endpoints)?),
            Err(why) if self.options.rdma() == Rdma::Require => return Err(why),
            Err(why) => {
                tracing::warn!("no RDMA listener: {why}");
                self.service = Service::Off(why.clone());
                Err(why)
            }
        };
        self.admin = admin_port.and_then(|port| admin::serve(port, listener));
        Ok(())
    }

    /// Starts the listener. Returns the objects whose state the admin port shows.
    fn listen(
        &mut self,
        context: Context<'_>,
        endpoints: (EngineAddress, Vec<Host>),
    ) -> Result<ShownListener, String> {
        let (target, hosts) = endpoints;
        let resolved = listen::resolve(&hosts, self.options.port());
        let started = resolved.and_then(|addresses| {
            let protected = is_protected(context);
            let queue = match self.options.call_path() {
                true => enable_call_path(context, self.callbacks),
                false => None,
            };
            capacity::follow(context);
            descriptors::follow(capacity::max_clients(), self.options.max_clients());
            // Retries may take long, and the engine waits for them. So they are made only while the
            // engine starts and has no clients.
            let options = match context.has_clients() {
                true => self.options.without_retries(),
                false => self.options.clone(),
            };
            let (transport, (fabric, runtime)) =
                Transport::start(&options, (target, hosts, addresses), protected, queue.clone())?;
            slice::set_length(self.options.slice());
            let shown = ShownListener {
                fabric: fabric.clone(),
                gateway: transport.gateway.clone(),
                state: transport.state.clone(),
            };
            if let Some(queue) = queue {
                let fabric = (!self.options.poller_thread()).then_some(fabric);
                (self.callbacks.watch)(&event_loop::start(queue, fabric, runtime))?;
            }
            Ok((transport, shown))
        });
        let (transport, shown) = started.inspect_err(|_| call_path::set(None))?;
        log_listening(&transport);
        self.service = Service::On(Box::new(transport));
        Ok(shown)
    }

    /// Returns the engine's socket that sessions connect to, and the hosts to listen on.
    fn endpoints(&self, context: Context<'_>) -> Result<(EngineAddress, Vec<Host>), String> {
        let sockets = sockets(context);
        // The hosts come first, because an unusable engine socket matters only if the module
        // listens.
        let hosts = listen::hosts(&self.options, &sockets)?;
        Ok((self.target(&sockets)?, hosts))
    }

    fn target(&self, sockets: &Sockets) -> Result<EngineAddress, String> {
        match self.options.engine() {
            Some(named) => Ok(named),
            None => target(sockets),
        }
    }

    /// Adapts to changed settings of the engine: its sockets, `maxclients`, protected mode,
    /// `timeout`, `appendfsync` and the limits for the memory of clients. Listeners keep their
    /// addresses until the engine restarts.
    pub(crate) fn follow_engine(&mut self, context: Context<'_>) {
        call_path::follow_engine(context);
        capacity::follow(context);
        descriptors::follow(capacity::max_clients(), self.options.max_clients());
        let sockets = sockets(context);
        let target = self.target(&sockets);
        let Service::On(transport) = &mut self.service else { return };
        if transport.state.why_ended().is_some() {
            return; // nothing listens any more
        }
        let current = transport.listener.all_addresses();
        match transport.wanted.follow(listen::hosts(&self.options, &sockets)) {
            None => {}
            Some(Ok(_)) => tracing::warn!(
                "the engine's addresses have changed, but the module keeps listening on {current}; \
                 restart the engine to apply the change"
            ),
            Some(Err(why)) => tracing::warn!(
                "the engine's addresses have changed, but the module keeps listening on {current}: \
                 {why}"
            ),
        }
        let protected_mode = is_protected(context);
        transport.gateway.reconfigure(|config| {
            config.protected_mode = protected_mode;
            match target {
                Ok(target) => config.engine = target,
                Err(why) => {
                    tracing::warn!(
                        "the engine's sockets have changed, but sessions keep connecting to {}: \
                         {why}",
                        config.engine
                    );
                }
            }
        });
    }

    /// Changes one of the module's own settings.
    pub(crate) fn set(&mut self, index: usize, value: SettingValue) -> Result<(), String> {
        self.options.set(index, value)?;
        if let Service::On(transport) = &self.service {
            transport.reconfigure(&self.options);
            slice::set_length(self.options.slice());
            descriptors::follow(capacity::max_clients(), self.options.max_clients());
        }
        Ok(())
    }

    /// Announces this node's endpoints to nodes of the cluster whose turn it is. Does nothing
    /// without a cluster.
    pub(crate) fn announce(&mut self, context: Context<'_>) {
        let Some(cluster) = context.cluster() else { return };
        self.update_own_endpoints();
        let now = Instant::now();
        for (to, message) in self.endpoints.tick(&cluster.nodes(), now) {
            let was_sent = cluster.send(to, endpoints::MESSAGE_TYPE, &message);
            self.endpoints.note_sent(to, was_sent, now);
        }
    }

    /// Takes a message of another node's module. Sends nothing.
    pub(crate) fn receive(&mut self, from: NodeId, message: &[u8]) {
        self.endpoints.receive(from, message, Instant::now());
    }

    /// Returns the reply to FERRITE ENDPOINTS.
    pub(crate) fn list_endpoints(&mut self) -> Reply {
        self.update_own_endpoints();
        self.endpoints.list(Instant::now())
    }

    fn update_own_endpoints(&mut self) {
        let listening = match &self.service {
            Service::On(transport) if transport.state.why_ended().is_none() => {
                transport.listener.addresses.as_slice()
            }
            _ => &[],
        };
        self.endpoints.set_own(listening.iter());
    }

    /// Stops the listener because the engine exits. The engine's final save is over, so a write
    /// made now would be lost. Therefore no more calls are made, and only existing replies are
    /// delivered. An engine that cannot save aborts its shutdown before this.
    pub(crate) fn shut_down(&mut self) {
        call_path::set(None);
        self.admin = None; // the admin port holds the fabric, which would not end otherwise
        let off = Service::Off("the engine is shutting down".into());
        if let Service::On(transport) = std::mem::replace(&mut self.service, off)
            && !transport.stop()
        {
            tracing::warn!("sessions did not stop within {} s", SHUTDOWN_TIMEOUT.as_secs());
        }
    }
}

/// Enables the call path. If that fails, the reason is logged and all commands are proxied.
fn enable_call_path(context: Context<'_>, callbacks: Callbacks) -> Option<Arc<TaskQueue>> {
    let enabled = Calls::new(context, callbacks.subscribe_to_loop).and_then(|calls| {
        let queue =
            TaskQueue::new().map_err(|error| format!("cannot create an eventfd: {error}"))?;
        call_path::set(Some(calls));
        Ok(queue)
    });
    enabled
        .inspect_err(|why| tracing::warn!("call path disabled, all commands are proxied: {why}"))
        .ok()
}

fn sockets(context: Context<'_>) -> Sockets {
    Sockets {
        unixsocket: context.config(c"unixsocket"),
        port: context.config(c"port"),
        tls_port: context.config(c"tls-port"),
        bind: context.config(c"bind"),
    }
}

/// Returns whether the engine is in protected mode, in which it rejects clients of other hosts
/// unless a password is set. Returns true if the engine does not say.
fn is_protected(context: Context<'_>) -> bool {
    context.config(c"protected-mode").is_none_or(|value| value != "no")
}

fn log_listening(transport: &Transport) {
    let listener = &transport.listener;
    let command_paths = command_paths(&transport.gateway.config().engine);
    match &listener.absence {
        Some(why) => {
            let all = listener.all_addresses();
            tracing::warn!("listening on {all}, TCP only: {why}; {command_paths}");
        }
        None => {
            let (rdma, devices) = (listener.rdma_addresses(), listener.devices.join(", "));
            match listener.tcp_only_addresses().as_str() {
                "" => tracing::info!("listening on {rdma} over RDMA ({devices}); {command_paths}"),
                tcp => tracing::info!(
                    "listening on {rdma} over RDMA ({devices}), on {tcp} over TCP only; \
                     {command_paths}"
                ),
            }
        }
    }
}

/// Describes how many commands run in-process, and where the others are proxied to.
pub(crate) fn command_paths(engine: &EngineAddress) -> String {
    match call_path::callable_commands() {
        Some(count) => {
            format!("{count} commands run in-process, the others are proxied to {engine}")
        }
        None => format!("sessions are proxied to {engine}"),
    }
}
