//! Runs one session at both engines and compares after every step.

use std::time::{Duration, Instant};

use ferrite_proto::resp::Value;

use super::compare::{Tolerance, first_difference, replies, take_equal};
use super::differences::acl_log;
use super::differences::broadcasts::Broadcasts;
use super::differences::ends::{
    ends_with_rejected_header, has_silent_quit, is_cut_off_at_the_end, is_cut_off_without_login,
};
use super::flood;
use super::session::{Action, Part, Session, Setup, Step, excerpt};
use super::side::{EngineSetup, LONG, Side};
use super::waiting::{SentInput, Wait, is_waiting, one_by_one};

/// How long the engines may differ before that counts as a difference. A timer of an engine may be
/// late on a busy machine.
const TIMEOUT: Duration = Duration::from_millis(1500);

/// The kind of a difference.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    Replies,
    /// One client is still connected, the other is not.
    ConnectionEnd,
    /// Commands of a stopped client ran, or the outcomes differ.
    Flood,
    AclLog,
    Dataset,
    EngineDied,
    /// An engine does not become idle.
    Busy,
}

#[derive(Debug)]
pub(crate) struct Finding {
    pub(crate) kind: Kind,
    /// The number of steps that were run.
    pub(crate) steps: usize,
    pub(crate) what: String,
    /// Everything that was sent and received up to there.
    pub(crate) transcript: Vec<String>,
}

/// Two engines. The clients of engine 0 use its own port, the clients of engine 1 the module's
/// port.
pub(crate) struct Pair {
    sides: [Side; 2],
    tolerance: Tolerance,
    setup: Setup,
    sent: Vec<SentInput>,
    /// One side disconnected a client that the other still serves, because it refused a command by
    /// its header or has a stricter limit. From then on, the sides' ACL logs and data may differ.
    serves_different_clients: bool,
}

impl Pair {
    /// Starts both engines without waiting for them.
    pub(crate) fn start(engine: &EngineSetup, session: &Session) -> Self {
        let sides = [false, true].map(|is_module| Side::spawn(engine, &session.setup, is_module));
        let sent = vec![SentInput::default(); session.setup.clients];
        Self {
            sides,
            tolerance: Tolerance::default(),
            setup: session.setup.clone(),
            sent,
            serves_different_clients: false,
        }
    }

    /// Returns whether the ACL logs and the data were compared at the end of the last run.
    pub(crate) fn is_fully_compared(&self) -> bool {
        !self.serves_different_clients
    }

    pub(crate) fn run(&mut self, session: &Session) -> Result<(), Finding> {
        self.sides.iter_mut().for_each(Side::await_listeners);
        self.tolerance = Tolerance::of(&self.sides[0].version());
        let mut transcript = Vec::new();
        for (at, step) in session.steps.iter().enumerate() {
            transcript.push(format!("{at:3} {step}"));
            self.step(at, step, &mut transcript)
                .map_err(|(kind, what)| finding(kind, at + 1, what, &transcript))?;
        }
        self.end().map_err(|(kind, what)| finding(kind, session.steps.len(), what, &transcript))
    }

    fn step(
        &mut self,
        at: usize,
        step: &Step,
        transcript: &mut Vec<String>,
    ) -> Result<(), (Kind, String)> {
        match &step.action {
            Action::Write { parts, settle, wait_ms, returns_id } => {
                let others_wait = self.others_wait_with_more(step.client);
                let pieces = if others_wait { one_by_one(parts) } else { vec![parts.clone()] };
                for piece in &pieces {
                    if others_wait && self.sent[step.client].wait != Wait::No {
                        transcript.push(
                            "      the rest is not sent: two clients would be blocked".into(),
                        );
                        break;
                    }
                    self.send(step.client, piece);
                    if others_wait || *settle {
                        self.settle()?;
                        self.update_waits();
                    }
                }
                if !settle {
                    return Ok(());
                }
                if *wait_ms > 0 {
                    std::thread::sleep(Duration::from_millis(*wait_ms));
                    self.settle()?;
                    self.update_waits();
                }
                if *returns_id {
                    self.learn_id(step.client);
                }
            }
            Action::EndWriting => {
                for side in &mut self.sides {
                    side.end_writing(step.client);
                    side.exchange();
                }
                self.settle()?;
            }
            Action::Reconnect => {
                self.sent[step.client] = SentInput::default();
                self.sides.iter_mut().for_each(|side| side.reconnect(step.client));
                self.settle()?;
            }
            Action::Flood { stop, by_observer } => {
                let key = format!("{}{at}", flood::KEYS);
                let outcomes =
                    self.sides.each_mut().map(|side| flood::run(side, &key, *stop, *by_observer));
                self.sides.iter_mut().for_each(|side| side.clients[step.client].close());
                transcript
                    .push(format!("      engine: {}\n      module: {}", outcomes[0], outcomes[1]));
                if outcomes[0] != outcomes[1] || outcomes.iter().any(|outcome| outcome.went_on > 0)
                {
                    let what = format!("engine: {}\n    module: {}", outcomes[0], outcomes[1]);
                    return Err((Kind::Flood, what));
                }
                // If the flood could not be stopped, this waits until its last commands are served.
                self.settle()?;
                self.sides.iter_mut().for_each(|side| drop(side.observe(&format!("DEL {key}"))));
                self.settle()?;
            }
        }
        self.compare(transcript)
    }

    fn send(&mut self, client: usize, parts: &[Part]) {
        self.sent[client].push(&self.setup, parts);
        for side in &mut self.sides {
            side.send(client, parts);
            side.exchange();
        }
    }

    /// Returns whether another client is blocked with more commands. Then the order of its commands
    /// and those of this client is not defined.
    fn others_wait_with_more(&self, client: usize) -> bool {
        let mut all = self.sent.iter().enumerate();
        all.any(|(other, sent)| other != client && sent.wait == Wait::WithMore)
    }

    /// Updates which clients are blocked. Asks the engine at its own port, which knows the clients
    /// by their addresses.
    fn update_waits(&mut self) {
        if self.sent.iter().all(|sent| !sent.may_wait) {
            return;
        }
        let list = self.sides[0].observe("CLIENT LIST");
        for (sent, client) in self.sent.iter_mut().zip(&self.sides[0].clients) {
            let is_waiting = client.address().is_some_and(|address| is_waiting(&list, &address));
            sent.update_wait(&self.setup, is_waiting);
        }
    }

    /// Waits until both engines are idle and the clients have received everything.
    fn settle(&mut self) -> Result<(), (Kind, String)> {
        let started = Instant::now();
        while started.elapsed() < LONG {
            if self.exchange() {
                continue;
            }
            let before = self.sides.each_ref().map(|side| side.process.snapshot());
            if before.iter().all(Option::is_some) && !self.exchange() {
                let after = self.sides.each_ref().map(|side| side.process.snapshot());
                if before == after && !self.exchange() {
                    return Ok(());
                }
            }
            self.check_alive()?;
            std::thread::sleep(Duration::from_micros(100));
        }
        let names = ["the engine", "the engine with the module"];
        let snapshots = self.sides.each_ref().map(|side| side.process.snapshot());
        let busy = names.iter().zip(&snapshots).filter(|(_, snapshot)| snapshot.is_none());
        Err((Kind::Busy, format!("not idle after {LONG:?}: {:?}", busy.collect::<Vec<_>>())))
    }

    fn exchange(&mut self) -> bool {
        self.sides.iter_mut().fold(false, |any, side| side.exchange() | any)
    }

    fn check_alive(&mut self) -> Result<(), (Kind, String)> {
        for side in &mut self.sides {
            if side.server.has_exited() {
                let log = side.server.log();
                let lines: Vec<_> = log.lines().collect();
                let last = lines[lines.len().saturating_sub(60)..].join("\n");
                return Err((Kind::EngineDied, last));
            }
        }
        Ok(())
    }

    /// Stores the ids that the engines have returned to this client, if both have returned one.
    fn learn_id(&mut self, client: usize) {
        let ids =
            self.sides.each_ref().map(|side| match &replies(&side.clients[client].received)[..] {
                [reply] => match Value::parse(reply) {
                    Ok(Value::Integer(id)) => Some(id),
                    _ => None,
                },
                _ => None,
            });
        if let [Some(one), Some(other)] = ids {
            for (side, id) in self.sides.iter_mut().zip([one, other]) {
                side.clients[client].id = Some(id);
                side.clients[client].received.clear();
            }
        }
    }

    fn compare(&mut self, transcript: &mut Vec<String>) -> Result<(), (Kind, String)> {
        let started = Instant::now();
        let mut is_shown = false;
        loop {
            if !std::mem::replace(&mut is_shown, true) {
                self.show(transcript);
            }
            let Err(difference) = self.take_all_equal() else {
                self.sent.iter_mut().for_each(|sent| sent.compared = sent.bytes.len());
                return Ok(());
            };
            if started.elapsed() > TIMEOUT {
                return Err(difference);
            }
            std::thread::sleep(Duration::from_millis(2));
            is_shown = !self.exchange();
            self.settle()?;
        }
    }

    fn take_all_equal(&mut self) -> Result<(), (Kind, String)> {
        while let Err((client, difference)) = self.first_unequal() {
            if !self.may_engines_disagree(client) {
                return Err(difference);
            }
            self.sides.iter_mut().for_each(|side| side.clients[client].close());
        }
        Ok(())
    }

    fn first_unequal(&mut self) -> Result<(), (usize, (Kind, String))> {
        let [engine, module] = &mut self.sides;
        for (number, (one, other)) in engine.clients.iter_mut().zip(&mut module.clients).enumerate()
        {
            let mut are_equal =
                |tolerance| take_equal(tolerance, &mut one.received, &mut other.received);
            let SentInput { bytes, compared, .. } = &self.sent[number];
            let broadcasts = || Broadcasts::of(&self.setup, bytes, *compared);
            if !are_equal(self.tolerance)
                && !are_equal(Tolerance { broadcasts: broadcasts(), ..self.tolerance })
            {
                let difference = first_difference(&one.received, &other.received);
                let both = [(one, &engine.server, "engine"), (other, &module.server, "module")];
                let ends = both.map(|(client, server, name)| {
                    if client.is_closed {
                        // The last line of the log usually says why.
                        let (log, close) = (server.log(), "\n    log: ");
                        let why = log.lines().last().map(|line| format!("{close}{line}"));
                        format!("\n    {name} closed the connection{}", why.unwrap_or_default())
                    } else {
                        String::new()
                    }
                });
                return Err((
                    number,
                    (Kind::Replies, format!("client {number} {difference}{}", ends.concat())),
                ));
            }
            if one.is_closed != other.is_closed {
                let state = |closed| if closed { "closed" } else { "open" };
                let (engine, module) = (state(one.is_closed), state(other.is_closed));
                let what = format!(
                    "client {number}: the connection to the engine is {engine}, that to the \
                     module is {module}"
                );
                return Err((number, (Kind::ConnectionEnd, what)));
            }
        }
        Ok(())
    }

    /// Returns whether it is allowed that one engine has disconnected this client, or will, and the
    /// other has not. Most of the allowed reasons depend on how the input was split into reads.
    fn may_engines_disagree(&mut self, client: usize) -> bool {
        if self.sides.iter().any(|side| ends_with_rejected_header(&side.clients[client].received)) {
            self.serves_different_clients = true;
            return true;
        }
        let [engine, module] = &mut self.sides;
        // If CONFIG is renamed, the module cannot ask for the limit and uses a strict one of its
        // own.
        if self.setup.renames.iter().any(|(name, _)| *name == "CONFIG")
            && module.clients[client].is_closed
            && module.server.log().contains("client is over client-query-buffer-limit")
        {
            self.serves_different_clients = true;
            return true;
        }
        let limit = b"client-output-buffer-limit";
        let sets_limit = |sent: &SentInput| {
            let mut windows = sent.bytes.windows(limit.len());
            windows.any(|window| window.eq_ignore_ascii_case(limit))
        };
        let has_own_limit = self.sent.iter().any(sets_limit);
        let is_cut_off = |side: &Side| {
            side.clients[client].is_closed
                && is_cut_off_without_login(&side.server.log(), has_own_limit)
        };
        if is_cut_off(engine) || is_cut_off(module) {
            return true;
        }
        let [one, other] = [&engine.clients[client], &module.clients[client]];
        if one.has_ended_writing && one.is_closed && other.is_closed {
            return is_cut_off_at_the_end(&one.received, &other.received);
        }
        match (engine.clients[client].is_closed, module.clients[client].is_closed) {
            (true, false) => has_silent_quit(&module.observe("CLIENT LIST")),
            (false, true) => has_silent_quit(&engine.observe("CLIENT LIST")),
            // If a command unblocks another client whose next command kills the sender, the engine
            // drops the reply. The module may have sent it.
            (true, true) => {
                let [one, other] = [&engine.clients[client], &module.clients[client]];
                one.received.is_empty() && replies(&other.received).len() == 1
            }
            (false, false) => false,
        }
    }

    fn show(&self, transcript: &mut Vec<String>) {
        let [engine, module] = &self.sides;
        for (number, (one, other)) in engine.clients.iter().zip(&module.clients).enumerate() {
            let [left, right] = [one, other].map(|client| excerpt(&client.received, 300));
            if one.received == other.received {
                if !left.is_empty() {
                    transcript.push(format!("      client {number} receives \"{left}\""));
                }
            } else {
                transcript
                    .push(format!("      client {number} receives from the engine \"{left}\""));
                transcript
                    .push(format!("      client {number} receives from the module \"{right}\""));
            }
        }
    }

    /// Compares the decisions of the ACL and the data after all steps.
    fn end(&mut self) -> Result<(), (Kind, String)> {
        self.sides.iter_mut().for_each(Side::relax);
        self.settle()?;
        self.compare(&mut Vec::new())?;
        self.check_alive()?;
        if !self.is_fully_compared() {
            return Ok(());
        }
        let logs: Vec<_> = self
            .sides
            .iter_mut()
            .zip([false, true])
            .map(|(side, is_module)| acl_log(&side.observe("ACL LOG 10000"), is_module))
            .collect();
        if logs[0] != logs[1] {
            let only = |one: &[String], other: &[String]| {
                let lines = one.iter().filter(|line| !other.contains(line)).cloned();
                lines.collect::<Vec<_>>().join("\n    ")
            };
            let what = format!(
                "ACL LOG\n  only at the engine:\n    {}\n  only at the module:\n    {}",
                only(&logs[0], &logs[1]),
                only(&logs[1], &logs[0])
            );
            return Err((Kind::AclLog, what));
        }
        let data = self.sides.each_mut().map(Side::dataset);
        for key in data[0].keys().chain(data[1].keys()) {
            let [engine, module] = data.each_ref().map(|all| all.get(key));
            if engine != module {
                let what = format!("{key}\n    engine: {engine:?}\n    module: {module:?}");
                return Err((Kind::Dataset, what));
            }
        }
        Ok(())
    }
}

fn finding(kind: Kind, steps: usize, what: String, transcript: &[String]) -> Finding {
    Finding { kind, steps, what, transcript: transcript.to_vec() }
}
