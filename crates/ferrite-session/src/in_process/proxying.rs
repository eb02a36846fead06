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

/// How an engine answers a client that has to log in first.
const NO_LOGIN: &[u8] = b"-NOAUTH";

/// What is done with a command that is proxied as it comes.
pub(super) enum LargeCommand {
    /// It has one reply.
    HasOneReply,
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
    pub(super) async fn proxy(
        &mut self,
        run: &[Due],
        command: Option<SessionCommand>,
    ) -> io::Result<Met> {
        let permit = self.wait_for_turn().await?;
        if let Some(command @ (SessionCommand::ChangesIdentity | SessionCommand::Resets)) = command
        {
            self.record.identity_changes(command);
            self.identity_due = true;
        }
        // In the transaction no mark can be made, and WAIT may follow in it, or on the proxy path.
        let marks = command == Some(SessionCommand::BeginsTransaction) && self.is_mark_due();
        let mut bytes = if marks { self.record.mark_writes().to_vec() } else { Vec::new() };
        bytes.extend_from_slice(&self.input.bytes()[place_of(run)]);
        self.count_proxied(run);
        let awaited = Awaited::replies(run.len()).after_own(marks);
        let met = within_turn(permit, self.exchange_and_ask(bytes, awaited, false)).await?;
        self.wrote &= !(marks && self.record.is_marked());
        Ok(met)
    }

    /// Proxies this in the place of a command.
    pub(super) async fn proxy_instead(&mut self, run: &[Due], other: &[u8]) -> io::Result<Met> {
        let permit = self.wait_for_turn().await?;
        self.count_proxied(run);
        within_turn(permit, self.exchange(other.to_vec(), Awaited::replies(1), false)).await
    }

    /// Sends this, hears what is awaited, and asks the engine what the client is then.
    async fn exchange_and_ask(
        &mut self,
        bytes: Vec<u8>,
        awaited: Awaited,
        is_streaming: bool,
    ) -> io::Result<Met> {
        let met = self.exchange(bytes, awaited, is_streaming).await?;
        if met == Met::Answered { self.ask_engine().await } else { Ok(met) }
    }

    /// Returns whether the client has not shown a login, so that the engine may refuse what would
    /// pin the session. Were such a session pinned, one line would spare a client without a
    /// password the queue in which it waits for its turn.
    pub(super) fn may_be_refused(&self) -> bool {
        !self.access.is_authenticated() && !self.in_transaction()
    }

    /// Proxies the command that pins the session, if the engine refuses it; `None` if it does not.
    pub(super) async fn proxy_if_refused(&mut self) -> io::Result<Option<Met>> {
        if !self.may_be_refused() || !self.has_refusable() {
            return Ok(None);
        }
        let permit = self.wait_for_turn().await?;
        within_turn(permit, self.proxy_refused()).await
    }

    /// The same, in its turn. One that logs in is not refused, and has one reply as well. Were the
    /// client let in between the probe and the command, the reply of one that changes the session
    /// would be misread: nobody's but its own, and by an administrator's act alone.
    async fn proxy_refused(&mut self) -> io::Result<Option<Met>> {
        match self.is_refused().await? {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(met) => return Ok(Some(met)),
        }
        let Ok(Some(found)) = self.input.peek() else { return Ok(None) };
        self.input.take(&found);
        let run = [Due { found, callable: None }];
        self.expect_login();
        let bytes = self.input.bytes()[place_of(&run)].to_vec();
        self.count_proxied(&run);
        self.exchange_and_ask(bytes, Awaited::replies(1), false).await.map(Some)
    }

    /// Returns whether the next command is whole, and one whose end the engine sees as well.
    fn has_refusable(&mut self) -> bool {
        let Ok(Some(found)) = self.input.peek() else { return false };
        let line = self.input.command(&found).and_then(|command| command.inline());
        // For the engine the line ends with its first NUL, and goes on for ever.
        line.is_none_or(|line| !line.contains(&0))
    }

    /// Asks whether the engine refuses all commands of the client but a login.
    async fn is_refused(&mut self) -> io::Result<Result<bool, Met>> {
        let probe = self.record.probe_login().to_vec();
        let met = self.exchange(probe, Awaited::own(), false).await?;
        Ok(if met == Met::Answered { Ok(self.own_reply.starts_with(NO_LOGIN)) } else { Err(met) })
    }

    /// What a line typed by hand is, `None` if it is empty. It is read by the engine's rules.
    pub(super) fn look_up_line(line: &[u8]) -> Option<CommandKind> {
        const VERTICAL_TAB: u8 = 0x0b; // a space for C, and so for the engine
        let is_empty = line.iter().all(|byte| byte.is_ascii_whitespace() || *byte == VERTICAL_TAB);
        (!is_empty).then_some(CommandKind::Session(SessionCommand::PinsToProxy))
    }

    /// Marks writes before the session is pinned, for a WAIT that the client may send there.
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

    /// Proxies WAIT. What was called is marked on the proxy connection first; if the engine refuses
    /// that, the refusal is the answer, since WAIT would speak of older writes.
    pub(super) async fn ask_for_writes(&mut self, run: &[Due]) -> io::Result<Met> {
        if self.wrote && self.in_transaction() {
            // The engine refused the mark before the transaction, and an error now would not abort
            // it.
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

    /// Returns whether calls have written what is to be marked, and it can be: in a transaction the
    /// mark would be one of its commands, with a reply in EXEC's.
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

    /// Returns how the large command that has begun is proxied. `None`: none has begun, or its name
    /// has not arrived.
    pub(super) fn large_command(&mut self) -> Option<LargeCommand> {
        if !self.access.is_authenticated() && self.input.has_many_args() {
            // the engine hangs up by its head, before the rest has come
            return Some(LargeCommand::Pins);
        }
        if !self.input.is_large(self.access.is_authenticated()) {
            return None;
        }
        let pins = match self.input.begun() {
            Begun::Unknown => return None,
            Begun::Nameless => true,
            // Commands that change a session are short.
            Begun::Named { name, first } => {
                matches!(self.engine.look_up(name, first), CommandKind::Session(_))
            }
        };
        Some(match (pins, self.may_be_refused()) {
            (false, _) => LargeCommand::HasOneReply,
            (true, true) => LargeCommand::MayBeRefused,
            (true, false) => LargeCommand::Pins,
        })
    }

    /// Proxies the command that has begun as it comes; `None` if it pins the session, since the
    /// engine does not refuse it.
    pub(super) async fn stream(&mut self, may_be_refused: bool) -> io::Result<Option<Met>> {
        drop(self.wait_for_turn().await?); // from here on it waits for the client
        if may_be_refused {
            match self.is_refused().await? {
                Ok(true) => self.expect_login(),
                Ok(false) => return Ok(None),
                Err(met) => return Ok(Some(met)),
            }
        }
        self.paths.proxied.fetch_add(1, Ordering::Relaxed);
        self.exchange_and_ask(Vec::new(), Awaited::replies(1), true).await.map(Some)
    }
}
