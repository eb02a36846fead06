//! The background thread that drives the fabric, and the fabrics: one set per process.
//!
//! Callers wait in their own threads. The background thread moves the frames of all streams, and
//! keeps the streams alive while Python does other work. It never takes Python's lock (the GIL).
//!
//! A forked child does not have the parent's thread. It starts its own when it first connects. It
//! does not touch the parent's runtime and fabrics, because their memory and queues belong to the
//! parent.

use std::sync::{Arc, Mutex, PoisonError};

use ferrite_fabric::{Config, Fabric, Rdma};
use ferrite_session::client_config;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use tokio::runtime::{Builder, Handle, Runtime};

static BACKGROUND: Mutex<Option<Arc<Background>>> = Mutex::new(None);

/// The runtime of this process, and its fabrics.
pub(crate) struct Background {
    process: u32,
    runtime: Runtime,
    /// Opened when first needed: programs that forbid RDMA open no device.
    with_rdma: Mutex<Option<Fabric>>,
    tcp_only: Mutex<Option<Fabric>>,
}

impl Background {
    /// Returns the background of this process. Creates it if there is none yet.
    pub(crate) fn of_this_process() -> PyResult<Arc<Self>> {
        let mut background = BACKGROUND.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(background) = background.as_ref().filter(|known| known.is_of_this_process()) {
            return Ok(background.clone());
        }
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("ferrite")
            .enable_all()
            .build()
            .map_err(|error| PyOSError::new_err(format!("cannot start a thread: {error}")))?;
        let new = Arc::new(Self {
            process: std::process::id(),
            runtime,
            with_rdma: Mutex::default(),
            tcp_only: Mutex::default(),
        });
        // The parent's threads do not exist in this process: dropping the parent's runtime would
        // wait for them.
        std::mem::forget(background.replace(new.clone()));
        Ok(new)
    }

    pub(crate) fn is_of_this_process(&self) -> bool {
        self.process == std::process::id()
    }

    pub(crate) fn handle(&self) -> &Handle {
        self.runtime.handle()
    }

    /// Returns the fabric for streams with this policy.
    pub(crate) fn fabric(&self, rdma: Rdma) -> PyResult<Fabric> {
        let (fabric, rdma) = match rdma {
            Rdma::Forbid => (&self.tcp_only, Rdma::Forbid),
            Rdma::Prefer | Rdma::Require => (&self.with_rdma, Rdma::Prefer),
        };
        let mut fabric = fabric.lock().unwrap_or_else(PoisonError::into_inner);
        // A fabric without a device is built again, because devices may appear later.
        if let Some(fabric) = fabric.as_ref()
            && (rdma == Rdma::Forbid || fabric.absence().is_none())
        {
            return Ok(fabric.clone());
        }
        let built = Fabric::system().config(Config { rdma, ..client_config() }).build();
        let built = built.map_err(|error| PyOSError::new_err(error.to_string()))?;
        self.runtime.spawn(built.drive());
        Ok(fabric.insert(built).clone())
    }
}
