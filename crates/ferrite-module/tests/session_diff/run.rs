//! Runs one session at both engines and compares after every step.

use std::time::{Duration, Instant};

use ferrite_proto::resp::Value;

use super::compare::{Faults, first_difference, replies, take_equal};
use super::differences::{
    Broadcasts, acl_log, has_silent_quit, is_cut_off_at_the_end, is_cut_off_early, is_refused_by_its_head,
};
use super::flood;
use super::session::{Action, Part, Session, Setup, Step, excerpt};
use super::side::{Engine, LONG, Side};
use super::waiting::{Said, Wait, is_waiting, one_by_one};

/// Before what differs counts as a difference: an engine's timer may be late on a busy machine.
const PATIENCE: Duration = Duration::from_millis(1500);

/// What is not the same.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    Replies,
    /// One client is still connected, the other is not.
    ConnectionEnd,
    /// A client that was stopped went on.
    Flood,
    AclLog,
    Dataset,
    EngineDied,
    /// An engine does not come to rest.
    Busy,
}

#[derive(Debug)]
pub(crate) struct Finding {
    pub(crate) kind: Kind,
    /// The number of steps that were run.
    pub(crate) steps: usize,
    pub(crate) what: String,
    /// What was said and heard up to there.
    pub(crate) transcript: Vec<String>,
}

/// Engine 0 is asked at its own port, engine 1 through the module.
pub(crate) struct Pair {
    sides: [Side; 2],
    faults: Faults,
    setup: Setup,
    said: Vec<Said>,
    /// One engine has refused commands by their heads that the other has run: from then on their
    /// decisions and their data may differ.
    has_refused_heads: bool,
}

impl Pair {
    /// Starts both, and does not wait for them.
    pub(crate) fn begin(engine: &Engine, session: &Session) -> Self {
        let sides = [false, true].map(|is_module| Side::begin(engine, &session.setup, is_module));
        let said = vec![Said::default(); session.setup.clients];
        Self {
            sides,
            faults: Faults::default(),
            setup: session.setup.clone(),
            said,
            has_refused_heads: false,
        }
    }

    pub(crate) fn run(&mut self, session: &Session) -> Result<(), Finding> {
        self.sides.iter_mut().for_each(Side::await_listeners);
        self.faults = Faults::of(&self.sides[0].version());
        let mut transcript = Vec::new();
        for (at, step) in session.steps.iter().enumerate() {
            transcript.push(format!("{at:3} {step}"));
            self.step(at, step, &mut transcript)
                .map_err(|(kind, what)| finding(kind, at + 1, what, &transcript))?;
        }
        self.end().map_err(|(kind, what)| finding(kind, session.steps.len(), what, &transcript))
    }

    fn step(&mut self, at: usize, step: &Step, transcript: &mut Vec<String>) -> Result<(), (Kind, String)> {
        match &step.action {
            Action::Write { parts, settle, wait_ms, tells_id } => {
                let others_wait = self.others_wait_with_more(step.client);
                let pieces = if others_wait { one_by_one(parts) } else { vec![parts.clone()] };
                for piece in &pieces {
                    if others_wait && self.said[step.client].wait != Wait::No {
                        transcript.push("      the rest is not sent: two would wait with more".into());
                        break;
                    }
                    self.send(step.client, piece);
                    if others_wait || *settle {
                        self.settle()?;
                        self.look_who_waits();
                    }
                }
                if !settle {
                    return Ok(());
                }
                if *wait_ms > 0 {
                    std::thread::sleep(Duration::from_millis(*wait_ms));
                    self.settle()?;
                    self.look_who_waits();
                }
                if *tells_id {
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
                self.said[step.client] = Said::default();
                self.sides.iter_mut().for_each(|side| side.reconnect(step.client));
                self.settle()?;
            }
            Action::Flood { stop, by_observer } => {
                let key = format!("{}{at}", flood::KEYS);
                let outcomes = self.sides.each_mut().map(|side| flood::run(side, &key, *stop, *by_observer));
                self.sides.iter_mut().for_each(|side| side.clients[step.client].close());
                transcript.push(format!("      engine: {}\n      module: {}", outcomes[0], outcomes[1]));
                if outcomes[0] != outcomes[1] || outcomes.iter().any(|outcome| outcome.went_on > 0) {
                    let what = format!("engine: {}\n    module: {}", outcomes[0], outcomes[1]);
                    return Err((Kind::Flood, what));
                }
                // A client that nobody could stop has its last commands served first.
                self.settle()?;
                self.sides.iter_mut().for_each(|side| drop(side.observe(&format!("DEL {key}"))));
                self.settle()?;
            }
        }
        self.compare(transcript)
    }

    fn send(&mut self, client: usize, parts: &[Part]) {
        self.said[client].push(&self.setup, parts);
        for side in &mut self.sides {
            side.send(client, parts);
            side.exchange();
        }
    }

    /// Whether the order in which another client's commands run is open while this one sends many.
    fn others_wait_with_more(&self, client: usize) -> bool {
        let mut all = self.said.iter().enumerate();
        all.any(|(other, said)| other != client && said.wait == Wait::WithMore)
    }

    /// Asks the engine at its own port, which knows the clients by their addresses.
    fn look_who_waits(&mut self) {
        if self.said.iter().all(|said| !said.may_wait) {
            return;
        }
        let list = self.sides[0].observe("CLIENT LIST");
        for (said, client) in self.said.iter_mut().zip(&self.sides[0].clients) {
            let is_waiting = client.address().is_some_and(|address| is_waiting(&list, &address));
            said.rest(&self.setup, is_waiting);
        }
    }

    /// Until both engines have done all there is to do, and the clients have it.
    fn settle(&mut self) -> Result<(), (Kind, String)> {
        let begun = Instant::now();
        while begun.elapsed() < LONG {
            if self.exchange() {
                continue;
            }
            let before = self.sides.each_ref().map(|side| side.process.look());
            if before.iter().all(Option::is_some) && !self.exchange() {
                let after = self.sides.each_ref().map(|side| side.process.look());
                if before == after && !self.exchange() {
                    return Ok(());
                }
            }
            self.check_alive()?;
            std::thread::sleep(Duration::from_micros(100));
        }
        let names = ["the engine", "the engine with the module"];
        let looks = self.sides.each_ref().map(|side| side.process.look());
        let busy = names.iter().zip(&looks).filter(|(_, look)| look.is_none());
        Err((Kind::Busy, format!("not at rest after {LONG:?}: {:?}", busy.collect::<Vec<_>>())))
    }

    fn exchange(&mut self) -> bool {
        self.sides.iter_mut().fold(false, |any, side| side.exchange() | any)
    }

    fn check_alive(&mut self) -> Result<(), (Kind, String)> {
        for side in &mut self.sides {
            if side.server.has_ended() {
                let log = side.server.log();
                let lines: Vec<_> = log.lines().collect();
                let last = lines[lines.len().saturating_sub(60)..].join("\n");
                return Err((Kind::EngineDied, last));
            }
        }
        Ok(())
    }

    /// Takes the numbers that both engines have told this client, if both have.
    fn learn_id(&mut self, client: usize) {
        let ids = self.sides.each_ref().map(|side| match &replies(&side.clients[client].heard)[..] {
            [reply] => match Value::parse(reply) {
                Ok(Value::Integer(id)) => Some(id),
                _ => None,
            },
            _ => None,
        });
        if let [Some(one), Some(other)] = ids {
            for (side, id) in self.sides.iter_mut().zip([one, other]) {
                side.clients[client].id = Some(id);
                side.clients[client].heard.clear();
            }
        }
    }

    fn compare(&mut self, transcript: &mut Vec<String>) -> Result<(), (Kind, String)> {
        let begun = Instant::now();
        let mut is_shown = false;
        loop {
            if !std::mem::replace(&mut is_shown, true) {
                self.show(transcript);
            }
            let Err(difference) = self.take_all_equal() else {
                self.said.iter_mut().for_each(|said| said.compared = said.bytes.len());
                return Ok(());
            };
            if begun.elapsed() > PATIENCE {
                return Err(difference);
            }
            std::thread::sleep(Duration::from_millis(2));
            is_shown = !self.exchange();
            self.settle()?;
        }
    }

    fn take_all_equal(&mut self) -> Result<(), (Kind, String)> {
        while let Err((client, difference)) = self.first_unequal() {
            if !self.is_engines_mood(client) {
                return Err(difference);
            }
            self.sides.iter_mut().for_each(|side| side.clients[client].close());
        }
        Ok(())
    }

    fn first_unequal(&mut self) -> Result<(), (usize, (Kind, String))> {
        let [engine, module] = &mut self.sides;
        for (number, (one, other)) in engine.clients.iter_mut().zip(&mut module.clients).enumerate() {
            let mut are_equal = |faults| take_equal(faults, &mut one.heard, &mut other.heard);
            let Said { bytes, compared, .. } = &self.said[number];
            let broadcasts = || Broadcasts::of(&self.setup, bytes, *compared);
            if !are_equal(self.faults) && !are_equal(Faults { broadcasts: broadcasts(), ..self.faults }) {
                let difference = first_difference(&one.heard, &other.heard);
                let ends = [(one, "engine"), (other, "module")].map(|(client, name)| {
                    if client.is_closed { format!("\n    {name} has hung up") } else { String::new() }
                });
                return Err((
                    number,
                    (Kind::Replies, format!("client {number} {difference}{}", ends.concat())),
                ));
            }
            if one.is_closed != other.is_closed {
                let says = |closed| if closed { "has hung up" } else { "has not hung up" };
                let (engine, module) = (says(one.is_closed), says(other.is_closed));
                let what = format!("client {number}: the engine {engine}, the module {module}");
                return Err((number, (Kind::ConnectionEnd, what)));
            }
        }
        Ok(())
    }

    /// Whether one engine has hung up on this client, or will, and the other has not, for a reason that depends on how its input
    /// was cut into reads.
    fn is_engines_mood(&mut self, client: usize) -> bool {
        if self.sides.iter().any(|side| is_refused_by_its_head(&side.clients[client].heard)) {
            self.has_refused_heads = true;
            return true;
        }
        let [engine, module] = &mut self.sides;
        let [one, other] = [&engine.clients[client], &module.clients[client]];
        if one.has_ended_writing && one.is_closed && other.is_closed {
            return is_cut_off_at_the_end(&one.heard, &other.heard);
        }
        match (engine.clients[client].is_closed, module.clients[client].is_closed) {
            (true, false) => {
                is_cut_off_early(&engine.server.log()) || has_silent_quit(&module.observe("CLIENT LIST"))
            }
            (false, true) => has_silent_quit(&engine.observe("CLIENT LIST")),
            _ => false,
        }
    }

    fn show(&self, transcript: &mut Vec<String>) {
        let [engine, module] = &self.sides;
        for (number, (one, other)) in engine.clients.iter().zip(&module.clients).enumerate() {
            let [left, right] = [one, other].map(|client| excerpt(&client.heard, 300));
            if one.heard == other.heard {
                if !left.is_empty() {
                    transcript.push(format!("      client {number} hears \"{left}\""));
                }
            } else {
                transcript.push(format!("      client {number} hears at the engine \"{left}\""));
                transcript.push(format!("      client {number} hears at the module \"{right}\""));
            }
        }
    }

    /// When all steps are done: the decisions of the ACL, and the data.
    fn end(&mut self) -> Result<(), (Kind, String)> {
        self.sides.iter_mut().for_each(Side::relax);
        self.settle()?;
        self.compare(&mut Vec::new())?;
        self.check_alive()?;
        if self.has_refused_heads {
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
