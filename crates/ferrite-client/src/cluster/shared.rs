//! The settings of a cluster connection, and what it knows about the nodes, for the connections to
//! all nodes.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ferrite_fabric::Rdma;

use super::directory::Directory;
use crate::client::Client;

/// The shortest time for which a command is tried: redirects need some of it.
const RETRY_FOR_MIN: Duration = Duration::from_secs(1);

/// What the connections to all nodes share.
pub(super) struct Shared {
    client: Client,
    /// For how long a command that fails is sent again.
    pub(super) retry_for: Duration,
    /// Whether replicas may serve commands that only read.
    pub(super) reads_replicas: bool,
    directory: Mutex<Directory>,
}

impl Shared {
    pub(super) fn new(client: Client, retry_for: Duration, reads_replicas: bool) -> Self {
        let retry_for = retry_for.max(RETRY_FOR_MIN);
        Self { client, retry_for, reads_replicas, directory: Mutex::default() }
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    pub(super) fn policy(&self) -> Rdma {
        self.client.settings().connector.policy()
    }

    pub(super) fn directory(&self) -> MutexGuard<'_, Directory> {
        lock(&self.directory)
    }
}

/// Locks a mutex. Nothing panics while it holds one of ours.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
