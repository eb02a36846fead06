//! Divides the client's commands into runs: consecutive commands that go on the same path.

use ferrite_proto::SessionCommand;

use super::InProcessSession;
use crate::in_process_engine::{Access, Client, CommandKind, FoundCommand, RunCommand};

/// The largest number of commands in a run. After that many, other sessions run first.
pub(super) const RUN_MAX: usize = 64;
/// The largest number of commands in a run before authentication. Engines disconnect a client that
/// has not logged in, and log that, when more than 1 KiB of its replies are unread. The reply to an
/// unknown command can have 300 bytes, so three replies fit.
const RUN_MAX_BEFORE_AUTH: usize = 3;

/// The path of the commands of a run.
pub(super) enum Route {
    Call,
    /// The run is proxied. Its last command may have this effect on the session.
    Proxy(Option<SessionCommand>),
    /// The run is a single command, and these bytes are proxied in its place.
    Instead(&'static [u8]),
}

impl<C: Client> InProcessSession<'_, C> {
    /// Takes consecutive commands that go on the same path. A proxied run ends with the first
    /// command that changes the session, because the path of the next one depends on it. Returns
    /// `None` if there is no complete command.
    pub(super) fn take_run(&mut self, run: &mut Vec<RunCommand>) -> Option<Route> {
        run.clear();
        self.input.forget_found();
        let mut route = None;
        let most = if self.access.is_authenticated() { RUN_MAX } else { RUN_MAX_BEFORE_AUTH };
        while run.len() < most {
            let found = match self.input.peek() {
                Ok(Some(found)) => found,
                Ok(None) => break,
                // Not a valid command: the engine replies with its own error.
                Err(_) => return route.or(Some(Route::Proxy(Some(SessionCommand::PinsToProxy)))),
            };
            let Some(kind) = self.look_up(&found, run.last()) else {
                if self.is_next_affected {
                    // The engine counts an empty command as the next one, so it must get it.
                    return Some(Route::Proxy(Some(SessionCommand::PinsToProxy)));
                }
                self.input.take(&found); // an empty command has no reply
                continue;
            };
            let (callable, command) = match kind {
                CommandKind::Callable(callable) if self.may_call(&found) => (Some(callable), None),
                CommandKind::Callable(_) | CommandKind::Plain => (None, None),
                // If a login in a transaction fails, Valkey 8.0 leaves it out of EXEC's reply, so
                // the end of that reply cannot be found.
                CommandKind::Session(SessionCommand::ChangesIdentity) if self.in_transaction() => {
                    (None, Some(SessionCommand::PinsToProxy))
                }
                CommandKind::Session(command) => (None, Some(command)),
            };
            let starts_apart = match (&route, callable) {
                (None, _) => false,
                (Some(Route::Call), None) | (Some(Route::Proxy(_)), Some(_)) => true,
                // These commands begin a run of their own. Logins are among them because Valkey 8.0
                // sends no reply to a failed login while earlier replies are still unsent.
                _ => matches!(
                    command,
                    Some(
                        SessionCommand::PinsToProxy
                            | SessionCommand::AsksForWrites
                            | SessionCommand::ChangesIdentity
                            | SessionCommand::Resets
                    )
                ),
            };
            if starts_apart {
                break;
            }
            if callable.is_none()
                && let Some(other) =
                    self.input.command(&found).and_then(|it| self.engine.instead(it.args()))
            {
                if route.is_none() {
                    self.is_next_affected = false;
                    self.input.take(&found);
                    run.push(RunCommand { found, callable });
                    route = Some(Route::Instead(other));
                }
                break;
            }
            if command == Some(SessionCommand::PinsToProxy) {
                // The command stays in the input, which is proxied unchanged.
                return Some(Route::Proxy(command));
            }
            self.is_next_affected = command == Some(SessionCommand::AffectsNext);
            self.input.take(&found);
            run.push(RunCommand { found, callable });
            route = Some(if callable.is_some() { Route::Call } else { Route::Proxy(command) });
            if command.is_some() {
                break;
            }
        }
        route
    }

    /// Looks up a command. If the command `before` is called and has the same name, its properties
    /// are reused, unless it is a subcommand. Returns `None` if the command is empty.
    fn look_up(&self, found: &FoundCommand, before: Option<&RunCommand>) -> Option<CommandKind> {
        if let Some(name) = self.input.name(found) {
            if let Some(RunCommand { found, callable: Some(callable) }) = before
                && !callable.is_subcommand
                && self.input.name(found) == Some(name)
            {
                return Some(CommandKind::Callable(*callable));
            }
            return Some(self.engine.look_up(name, self.input.words(found).get(1)));
        }
        let command = self.input.command(found)?;
        if let Some(line) = command.inline() {
            return Self::look_up_line(line);
        }
        let mut args = command.args();
        Some(self.engine.look_up(args.next()?, args.next()))
    }

    fn may_call(&self, found: &FoundCommand) -> bool {
        self.access == Access::InProcess && found.is_plain() && !self.is_next_affected
    }
}
