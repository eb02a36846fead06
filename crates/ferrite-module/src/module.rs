//! What there is of the module between its load and the engine's end. Everything here runs on the
//! engine's main thread.

use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use ferrite_fabric::Rdma;
use ferrite_session::EngineAddress;

use crate::api::Context;
use crate::calls::Calls;
use crate::capacity;
use crate::descriptors;
use crate::entry;
use crate::event_loop;
use crate::listen::{self, Address};
use crate::options::{Options, SettingValue};
use crate::target::{Sockets, target};
use crate::tasks::TaskQueue;
use crate::transport::Transport;

/// Why there is no listener, or the listener.
pub(crate) enum Service {
    /// Not yet, or no longer.
    Off(String),
    On(Box<Transport>),
}

/// The module's state.
pub(crate) struct Module {
    pub(crate) options: Options,
    pub(crate) service: Service,
    /// The engine wants to end.
    is_ending: bool,
}

/// One per process, as there is one engine. Only the engine's main thread is ever at it.
static MODULE: Mutex<Option<Module>> = Mutex::new(None);

/// Does something with the module. `None` if there is none, or if a callback of ours is at it
/// already: the engine may call one from within another (a crash report in one that crashed, say),
/// and waiting there would be for ever.
pub(crate) fn with_module<R>(act: impl FnOnce(&mut Module) -> R) -> Option<R> {
    lock()?.as_mut().map(act)
}

/// There is another module now, or none.
pub(crate) fn replace_module(module: Option<Module>) {
    if let Some(mut place) = lock() {
        *place = module;
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
    pub(crate) fn new(options: Options) -> Self {
        Self { options, service: Service::Off("not begun yet".into()), is_ending: false }
    }

    /// Begins to listen. An error only where RDMA is required: otherwise the engine goes on
    /// without, and says why.
    pub(crate) fn begin(&mut self, context: Context<'_>) -> Result<(), String> {
        let begun = self.places(context).and_then(|places| {
            let protected = is_protected(context);
            let queue = if self.options.call_path() { call_path(context) } else { None };
            capacity::follow(context);
            descriptors::follow(capacity::max_clients(), self.options.max_clients());
            let (transport, (fabric, runtime)) =
                Transport::begin(&self.options, places, protected, queue.clone())?;
            event_loop::set_turn(self.options.turn());
            if let Some(queue) = queue {
                let fabric = (!self.options.poller_thread()).then_some(fabric);
                entry::listen_to(&event_loop::begin(queue, fabric, runtime))?;
            }
            Ok(transport)
        });
        match begun {
            Ok(transport) => {
                say_listening(&transport);
                self.service = Service::On(Box::new(transport));
                Ok(())
            }
            Err(why) if self.options.rdma() == Rdma::Require => Err(why),
            Err(why) => {
                tracing::warn!("no RDMA listener: {why}");
                self.service = Service::Off(why);
                Ok(())
            }
        }
    }

    /// The engine's socket that sessions use, what the engine says of its sockets, and where
    /// clients come in.
    fn places(
        &self,
        context: Context<'_>,
    ) -> Result<(EngineAddress, Sockets, Vec<Address>), String> {
        let sockets = sockets(context);
        // First whether to listen at all: what else the engine lacks matters only then.
        let addresses = listen::addresses(&self.options, &sockets)?;
        Ok((self.target(&sockets)?, sockets, addresses))
    }

    fn target(&self, sockets: &Sockets) -> Result<EngineAddress, String> {
        match self.options.engine() {
            Some(named) => Ok(named),
            None => target(sockets),
        }
    }

    /// The engine's settings have changed: those of its sockets and of protected mode are ours too.
    /// What has begun goes on.
    pub(crate) fn follow_engine(&mut self, context: Context<'_>) {
        event_loop::follow_engine(context);
        capacity::follow(context);
        descriptors::follow(capacity::max_clients(), self.options.max_clients());
        let sockets = sockets(context);
        let target = self.target(&sockets);
        let Service::On(transport) = &mut self.service else { return };
        let places = transport.begun.places(true);
        match transport.wanted.follow(&sockets, |sockets| listen::addresses(&self.options, sockets))
        {
            None => {}
            Some(Ok(_)) => tracing::warn!(
                "the engine's addresses have changed; the module keeps listening on {places} until the engine restarts"
            ),
            Some(Err(why)) => tracing::warn!(
                "the module keeps listening on {places} until the engine restarts, although {why}"
            ),
        }
        let protected_mode = is_protected(context);
        transport.gateway.reconfigure(|config| {
            config.protected_mode = protected_mode;
            match target {
                Ok(target) => config.engine = target,
                Err(why) => {
                    tracing::warn!(
                        "sessions keep using the engine's socket {}: {why}",
                        config.engine
                    );
                }
            }
        });
    }

    /// One of our own settings has changed.
    pub(crate) fn set(&mut self, index: usize, value: SettingValue) -> Result<(), String> {
        self.options.set(index, value)?;
        if let Service::On(transport) = &self.service {
            transport.reconfigure(&self.options);
            event_loop::set_turn(self.options.turn());
            descriptors::follow(capacity::max_clients(), self.options.max_clients());
        }
        Ok(())
    }

    /// The engine exits. Its final save is over, so a write made now would be lost: no more calls
    /// are made, and only the replies that were made before are delivered.
    pub(crate) fn end(&mut self) {
        event_loop::allow_calls(None);
        let was = std::mem::replace(&mut self.service, Service::Off("the engine is ending".into()));
        if let Service::On(transport) = was {
            self.is_ending = true;
            if !transport.end() {
                tracing::warn!("sessions did not stop in time");
            }
        }
    }

    /// The engine's heart beats. If it wanted to end and goes on (it could not save, say), so do
    /// we.
    pub(crate) fn beat(&mut self, context: Context<'_>) {
        if std::mem::take(&mut self.is_ending)
            && let Err(why) = self.begin(context)
        {
            tracing::error!(
                "the engine did not shut down, and the RDMA listener could not be started again: {why}"
            );
            self.service = Service::Off(why);
        }
    }
}

/// Calls can be made from now on. Where they cannot, all goes over the proxy connection, as
/// without.
fn call_path(context: Context<'_>) -> Option<Arc<TaskQueue>> {
    let begun = Calls::new(context).and_then(|calls| {
        let queue = TaskQueue::new().map_err(|error| format!("no eventfd: {error}"))?;
        event_loop::allow_calls(Some(calls));
        Ok(queue)
    });
    begun
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

/// Whether clients of other hosts must have a password. An engine that does not say is taken for
/// one that is protected.
fn is_protected(context: Context<'_>) -> bool {
    context.config(c"protected-mode").is_none_or(|value| value != "no")
}

fn say_listening(transport: &Transport) {
    let begun = &transport.begun;
    let command_paths = command_paths(&transport.gateway.config().engine);
    let places = begun.places(true);
    match &begun.absence {
        Some(why) => tracing::warn!("listening on {places}, TCP only: {why}; {command_paths}"),
        None => {
            let (rdma, devices) = (begun.places(false), begun.devices.join(", "));
            match begun.tcp_places().as_str() {
                "" => tracing::info!("listening on {rdma} over RDMA ({devices}); {command_paths}"),
                tcp => tracing::info!(
                    "listening on {rdma} over RDMA ({devices}), on {tcp} over TCP only; {command_paths}"
                ),
            }
        }
    }
}

/// Who answers, in words.
pub(crate) fn command_paths(engine: &EngineAddress) -> String {
    match event_loop::callable_commands() {
        Some(count) => {
            format!("{count} commands run in-process, the others are proxied to {engine}")
        }
        None => format!("sessions are proxied to {engine}"),
    }
}
