//! The interface through which sessions use the engine that they run in: one [`EngineHandle`] for
//! all sessions, and a [`ClientRecord`] for each session.

use std::net::SocketAddr;
use std::sync::Arc;

use ferrite_proto::SessionCommand;
use ferrite_proto::resp::{Args, encode_command};
use ferrite_session::{
    Access, Called, ClientLimits, CommandKind, Commands, InProcessEngine, ProxyClient, Replies,
    SessionFuture,
};
use tokio::sync::Notify;

use crate::api::clients::{client_flag, client_info};
use crate::call_path::{self, with_calls};
use crate::capacity;
use crate::clients::ClientRecord;
use crate::slice;
use crate::tasks::TaskQueue;

/// The engine that has loaded the module, as sessions use it.
pub(crate) struct EngineHandle(pub(crate) Arc<TaskQueue>);

impl InProcessEngine for EngineHandle {
    fn spawn(&self, session: SessionFuture) {
        self.0.spawn(session);
    }

    fn is_open_to_all(&self) -> Option<bool> {
        with_calls(|calls| calls.default_user_is_open())?
    }

    fn was_full(&self, accepted: std::time::Instant, first_bytes: std::time::Instant) -> bool {
        capacity::was_full(accepted, first_bytes)
    }

    fn new_client(&self, peer: Option<SocketAddr>, gone: Arc<Notify>) -> Arc<dyn ProxyClient> {
        ClientRecord::new(peer, gone)
    }

    fn look_up(&self, name: &[u8], first: Option<&[u8]>) -> CommandKind {
        // Without the call path nothing is known about commands, so the session is pinned to proxy.
        let unknown = CommandKind::Session(SessionCommand::PinsToProxy);
        with_calls(|calls| calls.look_up(name, first)).unwrap_or(unknown)
    }

    /// Replaces `INFO rdma` by `INFO ferrite_rdma`, which is the engine's name for that section.
    fn instead(&self, mut words: Args<'_>) -> Option<&'static [u8]> {
        let is = |word: Option<&[u8]>, name: &[u8]| {
            word.is_some_and(|word| word.eq_ignore_ascii_case(name))
        };
        let is_info_rdma =
            words.len() == 2 && is(words.next(), b"info") && is(words.next(), b"rdma");
        is_info_rdma.then_some(b"*2\r\n$4\r\nINFO\r\n$12\r\nferrite_rdma\r\n")
    }

    fn has_time(&self) -> bool {
        slice::has_time()
    }

    fn seconds(&self) -> u64 {
        slice::seconds()
    }

    fn on_proxied(&self) {
        slice::end_early();
    }

    fn settled(&self) -> SessionFuture {
        Arc::clone(&self.0).settled()
    }

    fn client_limits(&self) -> ClientLimits {
        with_calls(|calls| calls.client_limits()).unwrap_or_default()
    }
}

impl ProxyClient for ClientRecord {
    fn identify(&self) -> Vec<u8> {
        let command = if call_path::needs_attestation(self) { "ATTEST" } else { "BIND" };
        let mut bytes = Vec::new();
        encode_command(["FERRITE", command, self.token()], &mut bytes);
        bytes
    }

    fn probe_login(&self) -> &'static [u8] {
        // No session has an empty token, so this identifies no session even if the engine runs it.
        b"*3\r\n$7\r\nFERRITE\r\n$6\r\nATTEST\r\n$0\r\n\r\n"
    }

    fn identity_changes(&self, command: SessionCommand) {
        let mut state = self.state();
        state.is_identified = false;
        if command == SessionCommand::Resets {
            state.is_default_proven = false;
            (state.is_new, state.is_unnamed) = (true, true);
        }
    }

    fn refresh(&self) -> Access {
        call_path::refresh(self)
    }

    fn call(&self, commands: Commands<'_>, replies: &mut Replies) -> Called {
        let called = call_path::call(self, commands, replies);
        if called.wrote {
            self.state().is_mark_due = true;
        }
        called
    }

    fn mark_writes(&self) -> &'static [u8] {
        b"*2\r\n$7\r\nFERRITE\r\n$4\r\nMARK\r\n"
    }

    fn is_marked(&self) -> bool {
        !self.state().is_mark_due
    }

    fn refuses_wait(&self) -> bool {
        call_path::is_replica()
    }

    fn is_blocked(&self) -> bool {
        let info = self.id().filter(|_| !self.is_gone()).and_then(client_info);
        info.is_some_and(|info| info.flags & client_flag::BLOCKED != 0)
    }

    fn is_gone(&self) -> bool {
        self.is_gone()
    }

    fn id(&self) -> Option<u64> {
        self.id()
    }
}
