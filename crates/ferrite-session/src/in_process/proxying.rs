//! Commands that go over the proxy connection, and what the session sends there for itself.

use std::io;
use std::sync::atomic::Ordering;

use ferrite_proto::SessionCommand;

#[cfg(doc)]
use super::ProxyClient;
use super::commands::{Due, place_of};
use super::engine::{Access, CommandKind};
use super::exchange::{Awaited, Met};
use super::input::Begun;
use super::limits::within_turn;
use super::{Client, InProcessSession};

/// What is done with a command that is proxied as it comes.
pub(super) enum LargeCommand {
    /// It has one reply.
    HasOneReply,
    /// It has one reply, and the client may be another user then.
    LogsIn,
    /// It has one if the engine refuses it; else the session is pinned.
    MayBeRefused,
    /// The session is pinned.
    Pins,
}

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

    /// Returns whether the client has not shown a login, so that the engine may refuse what would pin the
    /// session. Were such a session pinned, one line would spare a client without a password the queue in
    /// which it waits for its turn.
    pub(super) fn may_be_refused(&self) -> bool {
        !self.access.is_authenticated() && !self.in_transaction()
    }

    /// Proxies a command that pins the session unless the engine refuses it. A command of the session's own
    /// goes ahead of it, and the engine takes both in one go: it refuses none of them or both. One that logs
    /// in is not refused, and has one reply as well.
    pub(super) async fn proxy_if_refused(&mut self, run: &[Due]) -> io::Result<Met> {
        let permit = self.wait_for_turn().await?;
        if !self.marks_before_pin().await? {
            return Ok(Met::Over);
        }
        self.expect_login();
        let bytes = [self.record.probe_login(), &self.input.bytes()[place_of(run)]].concat();
        self.count_proxied(run);
        let met = within_turn(permit, self.exchange(bytes, Awaited::refusal(), false)).await?;
        if met == Met::Answered { self.ask_engine().await } else { Ok(met) }
    }

    /// What a line typed by hand is, `None` if it is empty. It is read by the engine's rules. But a login is known
    /// by its name: behind the answer to [`ProxyClient::probe_login`] Valkey 8.0 gives none to one that fails.
    pub(super) fn look_up_line(&self, line: &[u8]) -> Option<CommandKind> {
        let name = line.split(u8::is_ascii_whitespace).find(|word| !word.is_empty())?;
        let login = CommandKind::Session(SessionCommand::ChangesIdentity);
        let is_login = self.may_be_refused() && self.engine.look_up(name, None) == login;
        Some(if is_login { login } else { CommandKind::Session(SessionCommand::PinsToProxy) })
    }

    /// Marks writes before a command that may pin the session, for a WAIT that the client may send there.
    /// Returns false if the engine has hung up.
    pub(super) async fn marks_before_pin(&mut self) -> io::Result<bool> {
        Ok(!self.is_mark_due() || self.mark_writes().await? == Met::Answered)
    }

    /// A command that may be a login is proxied: a line that is typed by hand is not read here.
    fn expect_login(&mut self) {
        self.record.identity_changes(SessionCommand::ChangesIdentity);
        self.identity_due = true;
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

    /// Returns how the large command that has begun is proxied. `None`: none has begun, or its name has not
    /// arrived.
    pub(super) fn large_command(&mut self) -> Option<LargeCommand> {
        if !self.access.is_authenticated() && self.input.has_many_args() {
            return Some(LargeCommand::Pins); // the engine hangs up by its head, before the rest has come
        }
        if !self.input.is_large(self.access.is_authenticated()) {
            return None;
        }
        let pins = match self.input.begun() {
            Begun::Unknown => return None,
            Begun::Nameless => true,
            // Commands that change a session are short.
            Begun::Named { name, first } => match self.engine.look_up(name, first) {
                CommandKind::Session(SessionCommand::ChangesIdentity) if self.may_be_refused() => {
                    return Some(LargeCommand::LogsIn);
                }
                kind => matches!(kind, CommandKind::Session(_)),
            },
        };
        Some(match (pins, self.may_be_refused()) {
            (false, _) => LargeCommand::HasOneReply,
            (true, true) => LargeCommand::MayBeRefused,
            (true, false) => LargeCommand::Pins,
        })
    }

    /// Proxies the command that has begun as it comes.
    pub(super) async fn stream(&mut self, command: LargeCommand) -> io::Result<Met> {
        drop(self.wait_for_turn().await?); // from here on it waits for the client
        self.paths.proxied.fetch_add(1, Ordering::Relaxed);
        let (probe, awaited) = match command {
            LargeCommand::MayBeRefused => {
                if !self.marks_before_pin().await? {
                    return Ok(Met::Over);
                }
                (self.record.probe_login().to_vec(), Awaited::refusal())
            }
            _ => (Vec::new(), Awaited::replies(1)),
        };
        if matches!(command, LargeCommand::MayBeRefused | LargeCommand::LogsIn) {
            self.expect_login();
        }
        let met = self.exchange(probe, awaited, true).await?;
        if met == Met::Answered { self.ask_engine().await } else { Ok(met) }
    }
}
