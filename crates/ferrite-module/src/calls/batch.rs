//! A batch: the calls for one client within one callback from the engine.

use ferrite_proto::resp::Words;
use ferrite_session::{Callable, Replies};

use crate::api::calls::{EngineString, Outcome, UserCalls};
use crate::keys::Keys;

/// The most users in [`Batch::denied_users`].
const DENIED_MAX: usize = 64;

/// Calls on behalf of one client, within one callback from the engine.
pub(crate) struct Batch<'a> {
    pub(super) user_calls: UserCalls<'a>,
    /// The name of the client's user.
    pub(super) name: &'a [u8],
    pub(super) denied_users: &'a mut Vec<Box<[u8]>>,
    /// Whether each call checks the user's rights first, because the user has been denied a command
    /// before.
    pub(super) checks_rights_first: bool,
    pub(super) keys: &'a mut Keys,
    /// Whether the engine is a node of a cluster.
    ///
    /// Then the key path is not used, because it does not check whether this node serves the key's
    /// slot. A command that may have several keys is not called. A call with keys of different
    /// slots would make Valkey 9.1 refuse the scripts of all clients from then on.
    /// `clusterSlotByCommand` sets `READ_FLAGS_CROSSSLOT` in a client that `VM_Call` uses again,
    /// and nothing resets it.
    pub(super) is_cluster: bool,
    /// Whether the engine is a replica. Then only reads are called.
    pub(super) is_replica: bool,
    /// Whether the engine has an AOF or saves its data, and so may have failed to write to disk. A
    /// call checks that only for writes.
    pub(super) writes_to_disk: bool,
    pub(super) batch_key: Option<&'a EngineString>,
    pub(super) resp3: bool,
    /// Whether a call may have left something to propagate to AOF and replicas. Even reads may,
    /// since they delete expired keys.
    pub(super) must_propagate: bool,
    pub(super) wrote: bool,
}

impl Batch<'_> {
    /// Runs a command and appends its reply to `out`. Returns false if the command was refused.
    /// Then it has changed nothing, nothing was appended, and the command must be proxied, so that
    /// the client gets the engine's own reply.
    pub(crate) fn call(&mut self, callable: Callable, words: Words<'_>, out: &mut Replies) -> bool {
        // The arity is checked first: when Redis 7.0 checks the rights to a command with too few
        // words, it reads keys beyond them and crashes.
        if !self.may_call(callable, words.len())
            || (self.checks_rights_first && !self.user_calls.may_call(words.iter()))
        {
            return false;
        }
        let Callable { writes, reads_string, .. } = callable;
        let takes_key_path = reads_string && words.len() == 2 && !self.is_cluster;
        let key = if takes_key_path { words.get(1) } else { None };
        if let Some(key) = key
            && let Some(exists) = self.keys.read(&mut self.user_calls, key, self.resp3, out)
        {
            self.must_propagate |= !exists;
            return true;
        }
        let out = out.bytes();
        let before = out.len();
        let outcome = self.user_calls.call(words, self.resp3, out);
        let reply = &out[before..];
        self.must_propagate |= key.is_none() || !is_value(reply);
        if let Some(key) = key {
            self.keys.learn(key, reply.len());
        }
        match outcome {
            Outcome::Done => self.wrote |= writes,
            Outcome::Denied
                if !self.checks_rights_first && self.denied_users.len() < DENIED_MAX =>
            {
                self.checks_rights_first = true;
                self.denied_users.push(self.name.into());
            }
            Outcome::Denied | Outcome::Refused => {}
        }
        outcome == Outcome::Done
    }

    /// Returns whether a command with this number of words may be called at all in the engine's
    /// present state. [`Self::call`] refuses it otherwise.
    pub(crate) fn may_call(&self, callable: Callable, words: usize) -> bool {
        callable.takes(words)
            && !(self.is_replica && callable.writes)
            && !(self.writes_to_disk && callable.reports_disk_errors)
            && !(self.is_cluster && callable.has_several_keys && words > 2)
    }

    /// Returns whether a call may have written.
    pub(crate) fn wrote(&self) -> bool {
        self.wrote
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        if let Some(key) = self.batch_key.filter(|_| self.must_propagate) {
            self.user_calls.propagate(key);
        }
    }
}

/// Returns whether a reply to GET is a string, which means that the key exists.
fn is_value(reply: &[u8]) -> bool {
    reply.starts_with(b"$") && !reply.starts_with(b"$-")
}
