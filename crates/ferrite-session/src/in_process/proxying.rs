//! Sends the client's commands, and those of the session itself, over the proxy connection.

use std::io;
use std::sync::atomic::Ordering;

use ferrite_fabric::LogLimit;
use ferrite_proto::SessionCommand;

use super::InProcessSession;
use super::exchange::{ExchangeOutcome, ExpectedReplies};
use super::limits::run_with_permit;
use crate::disconnect_log::log_disconnect;
use crate::in_process_engine::{Access, Client, CommandKind, PartialCommand, RunCommand, range_of};

/// The beginning of an engine's reply to a client that must log in first.
const NOAUTH: &[u8] = b"-NOAUTH";

/// How to handle a large command, which is proxied while it arrives.
pub(super) enum LargeCommand {
    /// The command is proxied and has one reply.
    HasOneReply,
    /// The session first asks the engine whether the client must log in. If so, the command is
    /// proxied and has one reply. Otherwise it pins the session.
    MayBeRefused,
    /// The command pins the session.
    Pins,
}

impl<C: Client> InProcessSession<'_, C> {
    pub(super) fn count_proxied(&self, run: &[RunCommand]) {
        self.paths.proxied.fetch_add(run.len() as u64, Ordering::Relaxed);
        self.count_input(run);
    }

    /// Proxies consecutive commands, then asks the engine for the client's state.
    pub(super) async fn proxy(
        &mut self,
        run: &[RunCommand],
        command: Option<SessionCommand>,
    ) -> io::Result<ExchangeOutcome> {
        let permit = self.acquire_permit().await?;
        if let Some(command @ (SessionCommand::ChangesIdentity | SessionCommand::Resets)) = command
        {
            self.record.identity_changes(command);
            self.must_identify = true;
        }
        // Writes are marked before MULTI, because they cannot be marked inside the transaction. A
        // WAIT may follow inside the transaction, or after the session was pinned. They are also
        // marked before ASKING, because a mark after it would be the command that ASKING affects.
        let marks = matches!(
            command,
            Some(SessionCommand::BeginsTransaction | SessionCommand::AffectsNext)
        ) && self.is_mark_due();
        let mut bytes = if marks { self.record.mark_writes().to_vec() } else { Vec::new() };
        bytes.extend_from_slice(&self.input.bytes()[range_of(run)]);
        self.count_proxied(run);
        let expected = ExpectedReplies::of_client(run.len()).after_own(marks);
        let outcome =
            run_with_permit(permit, self.exchange_and_refresh(bytes, expected, false)).await?;
        self.has_unmarked_writes &= !(marks && self.record.is_marked());
        Ok(outcome)
    }

    /// Proxies the bytes in `other` in place of a command.
    pub(super) async fn proxy_instead(
        &mut self,
        run: &[RunCommand],
        other: &[u8],
    ) -> io::Result<ExchangeOutcome> {
        let permit = self.acquire_permit().await?;
        self.count_proxied(run);
        run_with_permit(permit, self.exchange(other.to_vec(), ExpectedReplies::of_client(1), false))
            .await
    }

    /// Sends bytes, receives the expected replies, then asks the engine for the client's state.
    async fn exchange_and_refresh(
        &mut self,
        bytes: Vec<u8>,
        expected: ExpectedReplies,
        is_streaming: bool,
    ) -> io::Result<ExchangeOutcome> {
        let outcome = self.exchange(bytes, expected, is_streaming).await?;
        if outcome == ExchangeOutcome::Answered { self.refresh_access().await } else { Ok(outcome) }
    }

    /// Returns whether the engine may reject commands because the client has not logged in.
    ///
    /// A command that the engine rejects must not pin the session. Otherwise, a client without a
    /// password could leave the queue of unauthenticated clients ([`BeforeAuthQueue`]) with a
    /// single command.
    ///
    /// [`BeforeAuthQueue`]: super::limits::BeforeAuthQueue
    pub(super) fn may_be_refused(&self) -> bool {
        !self.access.is_authenticated() && !self.in_transaction()
    }

    /// Handles a command that would pin the session, if the client has not logged in.
    ///
    /// Asks the engine first, by another command, whether it rejects the client's commands. If so,
    /// proxies the next command and does not pin the session. Otherwise returns `None` and sends
    /// nothing more.
    pub(super) async fn proxy_if_refused(&mut self) -> io::Result<Option<ExchangeOutcome>> {
        if !self.may_be_refused() || !self.has_refusable() {
            return Ok(None);
        }
        let permit = self.acquire_permit().await?;
        run_with_permit(permit, self.proxy_refused()).await
    }

    /// Does the work of [`Self::proxy_if_refused`] while the permit is held.
    ///
    /// A login is not rejected, but it has one reply as well. If an administrator gives the client
    /// access between the probe and the command, the reply of a command that changes the session
    /// can be misread. Only this client is affected.
    async fn proxy_refused(&mut self) -> io::Result<Option<ExchangeOutcome>> {
        match self.is_refused().await? {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(outcome) => return Ok(Some(outcome)),
        }
        let Ok(Some(found)) = self.input.peek() else { return Ok(None) };
        self.input.take(&found);
        let run = [RunCommand { found, callable: None }];
        self.expect_login();
        let bytes = self.input.bytes()[range_of(&run)].to_vec();
        self.count_proxied(&run);
        self.exchange_and_refresh(bytes, ExpectedReplies::of_client(1), false).await.map(Some)
    }

    /// Returns whether the next command is complete, and the engine finds its end at the same byte.
    fn has_refusable(&mut self) -> bool {
        let Ok(Some(found)) = self.input.peek() else { return false };
        let line = self.input.command(&found).and_then(|command| command.inline());
        // The engine does not look beyond the first NUL of a line, so it never sees the line's end.
        line.is_none_or(|line| !line.contains(&0))
    }

    /// Asks whether the engine rejects all commands of the client except a login. The inner error
    /// is the outcome of an exchange that got no reply.
    async fn is_refused(&mut self) -> io::Result<Result<bool, ExchangeOutcome>> {
        let probe = self.record.probe_login().to_vec();
        let outcome = self.exchange(probe, ExpectedReplies::own(), false).await?;
        Ok(if outcome == ExchangeOutcome::Answered {
            Ok(self.own_reply.starts_with(NOAUTH))
        } else {
            Err(outcome)
        })
    }

    /// Returns the kind of an inline command, or `None` if the line is empty. An inline command
    /// pins the session, because only the engine parses it.
    pub(super) fn look_up_line(line: &[u8]) -> Option<CommandKind> {
        const VERTICAL_TAB: u8 = 0x0b; // white space for C's isspace, which the engine uses
        let is_empty = line.iter().all(|byte| byte.is_ascii_whitespace() || *byte == VERTICAL_TAB);
        (!is_empty).then_some(CommandKind::Session(SessionCommand::PinsToProxy))
    }

    /// Marks writes before the session is pinned, for a WAIT that the client may send later.
    /// Returns false if the engine did not reply.
    pub(super) async fn mark_before_pin(&mut self) -> io::Result<bool> {
        Ok(!self.is_mark_due() || self.mark_writes().await? == ExchangeOutcome::Answered)
    }

    /// Notes that the proxied command may be a login. Inline commands are not parsed here, so any
    /// of them may be a login.
    fn expect_login(&mut self) {
        self.record.identity_changes(SessionCommand::ChangesIdentity);
        self.must_identify = true;
    }

    /// Asks the engine for the client's state after commands were proxied.
    async fn refresh_access(&mut self) -> io::Result<ExchangeOutcome> {
        self.access = self.record.refresh();
        // In a transaction the engine would queue the session's command as one of the client's.
        let can_ask = matches!(self.access, Access::Proxy { in_transaction: false, .. });
        if can_ask && std::mem::take(&mut self.must_identify) {
            let outcome =
                self.exchange(self.record.identify(), ExpectedReplies::own(), false).await?;
            if outcome != ExchangeOutcome::Answered {
                return Ok(outcome);
            }
            self.access = self.record.refresh();
        }
        Ok(ExchangeOutcome::Answered)
    }

    /// Proxies WAIT, after it has marked the writes of called commands on the proxy connection. If
    /// the engine rejects the mark, WAIT is not sent, because it would cover only older writes. The
    /// client gets the engine's error as the reply to WAIT.
    pub(super) async fn proxy_wait(&mut self, run: &[RunCommand]) -> io::Result<ExchangeOutcome> {
        // A replica refuses WAIT with its own error. The writes stay unmarked, because the engine
        // may become a primary again.
        let is_refused = self.has_unmarked_writes && self.record.refuses_wait();
        if self.has_unmarked_writes && self.in_transaction() && !is_refused {
            // The engine rejected the mark before the transaction, and an error in place of this
            // command would not abort the transaction. So the client is disconnected.
            self.write_replies().await?;
            self.warn_of_unmarked_writes();
            return Ok(ExchangeOutcome::Disconnected);
        }
        if self.is_mark_due() && !is_refused {
            match self.mark_writes().await? {
                ExchangeOutcome::Answered if self.record.is_marked() => {}
                ExchangeOutcome::Answered => {
                    self.count_proxied(run);
                    let refusal = std::mem::take(&mut self.own_reply);
                    self.replies.bytes().extend_from_slice(&refusal);
                    return Ok(ExchangeOutcome::Answered);
                }
                outcome => return Ok(outcome),
            }
        }
        self.proxy(run, Some(SessionCommand::AsksForWrites)).await
    }

    /// Returns whether there are writes to mark and they can be marked. Inside a transaction they
    /// cannot be marked: the mark would become a command of the transaction, and its reply a part
    /// of EXEC's reply.
    pub(super) fn is_mark_due(&self) -> bool {
        self.has_unmarked_writes && !self.in_transaction()
    }

    pub(super) fn in_transaction(&self) -> bool {
        matches!(self.access, Access::Proxy { in_transaction: true, .. })
    }

    pub(super) async fn mark_writes(&mut self) -> io::Result<ExchangeOutcome> {
        let outcome = self
            .exchange(self.record.mark_writes().to_vec(), ExpectedReplies::own(), false)
            .await?;
        self.has_unmarked_writes &= !self.record.is_marked();
        Ok(outcome)
    }

    pub(super) fn warn_of_unmarked_writes(&self) {
        static LINES: LogLimit = LogLimit::new();
        let why = "FERRITE MARK was refused or could not be sent, so WAIT would not cover all \
                   writes of this client";
        log_disconnect(&LINES, self.record.id(), why);
    }

    /// Returns how to handle a large command that has arrived in part. Returns `None` if there is
    /// no large command, or if its name has not arrived.
    pub(super) fn large_command(&mut self) -> Option<LargeCommand> {
        if !self.access.is_authenticated() && self.input.has_many_args() {
            // The arguments are not gathered here, because the engine disconnects the client as
            // soon as it sees their number.
            return Some(LargeCommand::Pins);
        }
        if !self.input.is_large(self.access.is_authenticated()) {
            return None;
        }
        let pins = match self.input.partial_command() {
            PartialCommand::Unknown => return None,
            PartialCommand::Nameless => true,
            // Commands that change the session are short in practice. A long one pins the session.
            PartialCommand::Named { name, first } => {
                matches!(self.engine.look_up(name, first), CommandKind::Session(_))
            }
        };
        Some(match (pins, self.may_be_refused()) {
            (false, _) => LargeCommand::HasOneReply,
            (true, true) => LargeCommand::MayBeRefused,
            (true, false) => LargeCommand::Pins,
        })
    }

    /// Proxies the large command while it arrives. Returns `None` if it must pin the session
    /// because the engine does not reject it.
    pub(super) async fn stream(
        &mut self,
        may_be_refused: bool,
    ) -> io::Result<Option<ExchangeOutcome>> {
        // The session waits in the queue, but does not keep the permit, because from here on it
        // waits for its client.
        drop(self.acquire_permit().await?);
        if may_be_refused {
            match self.is_refused().await? {
                Ok(true) => self.expect_login(),
                Ok(false) => return Ok(None),
                Err(outcome) => return Ok(Some(outcome)),
            }
        }
        self.paths.proxied.fetch_add(1, Ordering::Relaxed);
        self.exchange_and_refresh(Vec::new(), ExpectedReplies::of_client(1), true).await.map(Some)
    }
}
