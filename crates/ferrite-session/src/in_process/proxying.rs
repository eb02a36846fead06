//! Commands that go over the proxy connection, and what the session sends there for itself.

use std::io;
use std::sync::atomic::Ordering;

use ferrite_proto::SessionCommand;

use super::commands::{Due, place_of};
use super::engine::{Access, CommandKind};
use super::exchange::{Awaited, Met};
use super::input::Begun;
use super::limits::within_turn;
use super::{Client, InProcessSession};

impl<C: Client> InProcessSession<'_, C> {
    pub(super) fn count_proxied(&self, run: &[Due]) {
        self.paths.proxied.fetch_add(run.len() as u64, Ordering::Relaxed);
        self.count_input(run);
    }

    /// Proxies commands that lie one behind the other, and asks the engine what the client is then.
    pub(super) async fn proxy(&mut self, run: &[Due], command: Option<SessionCommand>) -> io::Result<Met> {
        let permit = self.wait_for_turn().await?;
        if let Some(command @ (SessionCommand::ChangesIdentity | SessionCommand::Resets)) = command {
            self.record.identity_changes(command);
            self.identity_due = true;
        }
        // In the transaction no mark can be made, and WAIT may follow in it, or on the proxy path.
        let marks = command == Some(SessionCommand::BeginsTransaction) && self.is_mark_due();
        let mut bytes = if marks { self.record.mark_writes().to_vec() } else { Vec::new() };
        bytes.extend_from_slice(&self.input.bytes()[place_of(run)]);
        self.count_proxied(run);
        let awaited = Awaited::replies(run.len()).after_own(marks);
        let met = within_turn(permit, self.exchange(bytes, awaited, false)).await?;
        self.wrote &= !(marks && self.record.is_marked());
        if met == Met::Answered { self.ask_engine().await } else { Ok(met) }
    }

    /// Asks the engine what the client is, after commands were proxied.
    async fn ask_engine(&mut self) -> io::Result<Met> {
        self.access = self.record.refresh();
        // In a transaction the command would be queued as one of the client's own.
        let can_ask = matches!(self.access, Access::Proxy { in_transaction: false, .. });
        if can_ask && std::mem::take(&mut self.identity_due) {
            let met = self.exchange(self.record.identify(), Awaited::own(), false).await?;
            if met != Met::Answered {
                return Ok(met);
            }
            self.access = self.record.refresh();
        }
        Ok(Met::Answered)
    }

    /// Proxies WAIT. What was called is marked on the proxy connection first; if the engine refuses that,
    /// the refusal is the answer, since WAIT would speak of older writes.
    pub(super) async fn ask_for_writes(&mut self, run: &[Due]) -> io::Result<Met> {
        if self.wrote && self.in_transaction() {
            // The engine refused the mark before the transaction, and an error now would not abort it.
            self.write_replies().await?;
            self.warn_of_unmarked_writes();
            return Ok(Met::Over);
        }
        if self.is_mark_due() {
            match self.mark_writes().await? {
                Met::Answered if self.record.is_marked() => {}
                Met::Answered => {
                    self.count_proxied(run);
                    let refusal = std::mem::take(&mut self.own_reply);
                    self.replies.bytes().extend_from_slice(&refusal);
                    return Ok(Met::Answered);
                }
                met => return Ok(met),
            }
        }
        self.proxy(run, Some(SessionCommand::AsksForWrites)).await
    }

    /// Returns whether calls have written what is to be marked, and it can be: in a transaction the mark
    /// would be one of its commands, with a reply in EXEC's.
    pub(super) fn is_mark_due(&self) -> bool {
        self.wrote && !self.in_transaction()
    }

    pub(super) fn in_transaction(&self) -> bool {
        matches!(self.access, Access::Proxy { in_transaction: true, .. })
    }

    pub(super) async fn mark_writes(&mut self) -> io::Result<Met> {
        let met = self.exchange(self.record.mark_writes().to_vec(), Awaited::own(), false).await?;
        self.wrote &= !self.record.is_marked();
        Ok(met)
    }

    pub(super) fn warn_of_unmarked_writes(&self) {
        tracing::warn!(
            client = self.record.id(),
            "client disconnected: its writes cannot be marked for WAIT"
        );
    }

    /// Returns whether the large command that has begun can be proxied as it comes; if not, the session
    /// is pinned. `None`: none has begun, or its name has not arrived.
    pub(super) fn large_command(&mut self) -> Option<bool> {
        if !self.access.is_authenticated() && self.input.has_many_args() {
            return Some(false); // the engine refuses it by its head, before the rest has come
        }
        if !self.input.is_large(self.access.is_authenticated()) {
            return None;
        }
        match self.input.begun() {
            Begun::Unknown => None,
            Begun::Nameless => Some(false),
            Begun::Named { name, first } => {
                // Commands that change a session are short.
                Some(!matches!(self.engine.look_up(name, first), CommandKind::Session(_)))
            }
        }
    }

    /// Proxies the command that has begun as it comes.
    pub(super) async fn stream(&mut self) -> io::Result<Met> {
        drop(self.wait_for_turn().await?); // from here on it waits for the client
        self.paths.proxied.fetch_add(1, Ordering::Relaxed);
        let met = self.exchange(Vec::new(), Awaited::replies(1), true).await?;
        if met == Met::Answered { self.ask_engine().await } else { Ok(met) }
    }
}
