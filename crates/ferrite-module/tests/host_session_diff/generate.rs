//! Generates a session from a seed.
//!
//! ```text
//!   seed ─► setup: renamed commands, users, number of clients
//!        ─► theme: the kinds of commands that this session prefers or omits
//!        ─► bursts of one to six commands for one client ─► pieces ─► order among the clients
//! ```

mod pieces;
mod setup;

use std::collections::VecDeque;

use ferrite_testkit::Random;
use setup::setup;

use super::commands::{Command, CommandGenerator, KINDS, Kind, chance, pick};
use super::session::{Action, Part, Session, Setup, Step, Stop, Word, encode, push};

/// The kinds of commands that follow a command with many words.
const AFTER_MANY: &[Kind] = &[
    Kind::Hello,
    Kind::Hello,
    Kind::Hello,
    Kind::Auth,
    Kind::Select,
    Kind::Multi,
    Kind::Reply,
    Kind::Watch,
    Kind::Strings,
    Kind::Strings,
];

struct Generator {
    random: Random,
    setup: Setup,
    weights: Vec<(Kind, u64)>,
    bursts: usize,
    /// The pieces that each client still has to send.
    queues: Vec<VecDeque<Step>>,
    /// Clients that may be blocked in the engine: it is not known when their next commands run.
    may_be_blocked: Vec<bool>,
    /// Whether clients are killed while they send. That takes time, so not every session has it.
    has_floods: bool,
}

/// Returns the session of this seed.
pub(crate) fn session(seed: u64) -> Session {
    let mut random = Random::new(seed);
    for _ in 0..4 {
        random.below(2); // skipped; using these numbers would change the session of each seed
    }
    let setup = setup(&mut random);
    let weights = theme(&mut random);
    let has_floods = chance(&mut random, 20);
    let clients = setup.clients;
    let mut generator = Generator {
        random,
        setup,
        weights,
        bursts: 0,
        queues: vec![VecDeque::new(); clients],
        may_be_blocked: vec![false; clients],
        has_floods,
    };
    let steps = generator.steps();
    Session { seed, setup: generator.setup, steps: Vec::new() }.with_steps(steps)
}

/// Omits some kinds and prefers others. If every session had all kinds, two given kinds would
/// rarely occur together.
fn theme(random: &mut Random) -> Vec<(Kind, u64)> {
    let factor = |random: &mut Random| pick(random, &[0, 1, 1, 1, 5]);
    KINDS.iter().map(|(kind, weight)| (*kind, weight * factor(random))).collect()
}

impl Generator {
    fn steps(&mut self) -> Vec<Step> {
        let mut steps = Vec::new();
        let clients = self.queues.len();
        for client in 0..clients {
            self.log_in(client);
            steps.extend(self.queues[client].drain(..));
        }
        let bursts = self.bursts + 10 + self.random.below(25) as usize;
        let mut client = 0;
        while self.bursts < bursts || self.queues.iter().any(|queue| !queue.is_empty()) {
            // Usually the client of the last burst also sends the next one, so that other clients
            // rarely send in between.
            if self.queues[client].is_empty() || chance(&mut self.random, 25) {
                client = self.random.below(clients as u64) as usize;
            }
            if self.queues[client].is_empty() {
                if self.bursts >= bursts {
                    client = self.queues.iter().position(|queue| !queue.is_empty()).unwrap_or(0);
                } else {
                    self.burst(client);
                }
            }
            steps.extend(self.queues[client].pop_front());
        }
        steps
    }

    fn queue(&mut self, client: usize, action: Action) {
        self.queues[client].push_back(Step { client, action, burst: self.bursts });
    }

    /// Logs a client in: client 0 mostly as an administrator, a quarter of the others as `low` or
    /// `reader`. The rest do not log in. Most clients then ask for their id.
    fn log_in(&mut self, client: usize) {
        let login = match client {
            0 if chance(&mut self.random, 80) => Some(("admin", "right")),
            0 => None,
            _ if chance(&mut self.random, 25) => {
                Some(pick(&mut self.random, &[("low", "p"), ("reader", "r")]))
            }
            _ => None,
        };
        if let Some((user, password)) = login {
            let words = [self.setup.typed("AUTH"), user, password].map(word).to_vec();
            self.write(client, &[words], false);
        }
        if chance(&mut self.random, 70) {
            let words = [self.setup.typed("CLIENT"), "ID"].map(word).to_vec();
            self.write(client, &[words], true);
        }
    }

    fn write(&mut self, client: usize, commands: &[Vec<Word>], returns_id: bool) {
        self.bursts += 1;
        let mut parts = Vec::new();
        commands.iter().for_each(|words| encode(words, &mut parts));
        self.queue(client, Action::Write { parts, settle: true, wait_ms: 0, returns_id });
    }

    fn burst(&mut self, client: usize) {
        self.bursts += 1;
        match self.random.below(100) {
            0..4 => {
                self.queue(client, Action::Reconnect);
                self.may_be_blocked[client] = false;
                self.log_in(client);
            }
            4..8 if client > 0 && self.has_floods => {
                let stops = [Stop::KillId, Stop::KillUser, Stop::DeleteUser, Stop::RecreateUser];
                let stop = pick(&mut self.random, &stops);
                let by_observer = chance(&mut self.random, 50);
                self.queue(client, Action::Flood { stop, by_observer });
                self.queue(client, Action::Reconnect);
                self.may_be_blocked[client] = false;
            }
            8..10 => self.garbage(client),
            10..13 => self.inline(client),
            13..20 => self.transaction(client),
            20..24 => self.half_close(client),
            _ => self.commands(client),
        }
    }

    fn kind(&mut self) -> Kind {
        let total: u64 = self.weights.iter().map(|(_, weight)| weight).sum();
        let mut at = self.random.below(total.max(1));
        for (kind, weight) in &self.weights {
            match at.checked_sub(*weight) {
                Some(rest) => at = rest,
                None => return *kind,
            }
        }
        Kind::Strings
    }

    fn commands(&mut self, client: usize) {
        let count = pick(&mut self.random, &[1, 1, 1, 2, 3, 4, 6]);
        let mut kinds: Vec<_> = (0..count).map(|_| self.kind()).collect();
        if let Some(at) = kinds.iter().position(|kind| *kind == Kind::Many) {
            // One command with many words is enough. If the module miscounts its replies, the
            // module misreads the replies to the commands after it.
            kinds.truncate(at + 1);
            kinds.drain(..if chance(&mut self.random, 70) { at } else { 0 });
            for _ in 0..=self.random.below(3) {
                kinds.push(pick(&mut self.random, AFTER_MANY));
            }
            kinds.push(Kind::Strings);
        }
        let mut parts = Vec::new();
        let mut wait_ms = 0;
        let mut focus = 0;
        for kind in kinds {
            if kind == Kind::Many || chance(&mut self.random, 20) {
                focus = raw_len(&parts).unwrap_or(focus);
            }
            let command = self.generate(client, kind);
            encode(&command.words, &mut parts);
            wait_ms = command.wait_ms;
            if wait_ms > 0 {
                if kind == Kind::Pause {
                    // The next command waits for the end of the pause. Both commands are sent in
                    // one piece, so that no other client can send in between. Otherwise it would
                    // not be defined whether the other client's commands are paused. If that client
                    // then shut down its side, the engine would drop its paused commands.
                    encode(&self.generate(client, Kind::Strings).words, &mut parts);
                    self.queue(
                        client,
                        Action::Write { parts, settle: true, wait_ms, returns_id: false },
                    );
                    return;
                }
                break; // until that time is over, later replies would depend on the clock
            }
        }
        self.send_in_pieces(client, parts, wait_ms, focus);
    }

    /// Generates a command that the client can send now.
    fn generate(&mut self, client: usize, kind: Kind) -> Command {
        let command =
            CommandGenerator { random: &mut self.random, setup: &self.setup }.generate(kind);
        // If the client is blocked, it is not known when this command runs.
        if command.wait_ms > 0 && self.may_be_blocked[client] {
            return CommandGenerator { random: &mut self.random, setup: &self.setup }
                .generate(Kind::Strings);
        }
        self.may_be_blocked[client] |= command.may_block;
        command
    }

    /// Generates a whole transaction, so that some transactions succeed.
    fn transaction(&mut self, client: usize) {
        let mut commands = vec![vec![word(self.setup.typed("MULTI"))]];
        let mut wait_ms = 0;
        for _ in 0..self.random.below(4) {
            let kind = match self.kind() {
                Kind::Many | Kind::Blocking | Kind::Pause | Kind::Quit => Kind::Strings,
                kind => kind,
            };
            let command = self.generate(client, kind);
            wait_ms = command.wait_ms;
            commands.push(command.words);
            if wait_ms > 0 {
                break;
            }
        }
        let end = pick(&mut self.random, &["EXEC", "EXEC", "EXEC", "DISCARD"]);
        commands.push(vec![word(self.setup.typed(end))]);
        let mut parts = Vec::new();
        commands.iter().for_each(|words| encode(words, &mut parts));
        self.send_in_pieces(client, parts, wait_ms, 0);
    }

    /// Generates commands after which the client shuts down its side of the connection, mostly at
    /// once. All commands get replies, except one that is cut off.
    fn half_close(&mut self, client: usize) {
        match self.random.below(5) {
            0 => self.inline(client),
            1 => self.transaction(client),
            _ => self.commands(client),
        }
        let rests = chance(&mut self.random, 20);
        let cut_off =
            if chance(&mut self.random, 20) { 1 + self.random.below(20) as usize } else { 0 };
        let last = self.queues[client].back_mut().map(|step| &mut step.action);
        let Some(Action::Write { parts, settle, wait_ms: 0, .. }) = last else {
            // When an engine sees the end, it drops commands that wait for the clock. The outcome
            // would be a race.
            return;
        };
        *settle = rests;
        if let Some(Part::Raw(raw)) = parts.last_mut() {
            raw.truncate(raw.len().saturating_sub(cut_off));
        }
        self.queue(client, Action::EndWriting);
        self.queue(client, Action::Reconnect);
        self.may_be_blocked[client] = false;
        self.log_in(client);
    }

    /// Generates inline commands.
    fn inline(&mut self, client: usize) {
        let mut parts = Vec::new();
        for _ in 0..=self.random.below(2) {
            let kind = self.kind();
            let command =
                CommandGenerator { random: &mut self.random, setup: &self.setup }.generate(kind);
            let plain = |word: &Word| match word {
                Word::Bytes(bytes) => {
                    bytes.iter().all(u8::is_ascii_alphanumeric) && bytes.len() < 100
                }
                Word::Id(_) => false,
            };
            if command.words.len() > 50
                || command.wait_ms > 0
                || command.may_block
                || !command.words.iter().all(plain)
            {
                push(
                    &mut parts,
                    pick(
                        &mut self.random,
                        &[&b"PING\r\n"[..], b"\r\n", b"SET k1 \"a b\"\n", b"GET 'k1\r\n"],
                    ),
                );
                continue;
            }
            for word in &command.words {
                if let Word::Bytes(bytes) = word {
                    push(&mut parts, bytes);
                    push(&mut parts, b" ");
                }
            }
            push(&mut parts, pick(&mut self.random, &[&b"\r\n"[..], b"\n"]));
        }
        self.send_in_pieces(client, parts, 0, 0);
    }

    /// Generates input that is not a command, is almost one, or is empty.
    fn garbage(&mut self, client: usize) {
        let bytes = pick(
            &mut self.random,
            &[
                &b"*0\r\n"[..],
                b"*-1\r\n",
                b"*3\r\n$3\r\nSET\r\n$2\r\nk1\r\n:5\r\n",
                b"*1\r\n$-1\r\n",
                b"*1\r\n$99999999\r\n",
                b"*2147483648\r\n",
                b"*abc\r\n",
                b"$5\r\nhello\r\n",
                b"*2\r\n$3\r\nGETxx$2\r\nk1\r\n",
                b"*60001\r\n",
                b"*2\r\n$3000000\r\n",
                b"*1\r\n$4\r\nPINGxx",
                b"\r\n\r\n",
                b"GET \"k1\r\n",
            ],
        );
        let mut parts = Vec::new();
        push(&mut parts, bytes);
        if chance(&mut self.random, 50) {
            let kind = self.kind();
            let command =
                CommandGenerator { random: &mut self.random, setup: &self.setup }.generate(kind);
            if command.wait_ms == 0 && !command.may_block {
                encode(&command.words, &mut parts);
            }
        }
        self.send_in_pieces(client, parts, 0, 0);
        if chance(&mut self.random, 60) {
            self.queue(client, Action::Reconnect);
        }
    }
}

/// Returns the length of the bytes; `None` if they contain the id of a client.
fn raw_len(parts: &[Part]) -> Option<usize> {
    match parts {
        [] => Some(0),
        [Part::Raw(bytes)] => Some(bytes.len()),
        _ => None,
    }
}

fn word(text: &str) -> Word {
    Word::Bytes(text.as_bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_always_gives_the_same_session() {
        for seed in 0..10 {
            let (one, other) = (session(seed), session(seed));
            assert_eq!(one.steps, other.steps);
            assert!((2..=5).contains(&one.setup.clients));
        }
        assert_ne!(session(1).steps, session(2).steps);
    }

    #[test]
    fn clients_alternate_only_after_the_engines_are_idle() {
        for seed in 0..10 {
            let steps = session(seed).steps;
            for pair in steps.windows(2) {
                if let Action::Write { settle: false, .. } = pair[0].action {
                    assert_eq!(pair[0].client, pair[1].client, "seed {seed}");
                }
            }
        }
    }

    #[test]
    fn half_closed_clients_reconnect_next() {
        let all: Vec<_> = (0..20).map(|seed| session(seed).steps).collect();
        let mut ends = 0;
        for steps in &all {
            for (at, step) in
                steps.iter().enumerate().filter(|(_, step)| step.action == Action::EndWriting)
            {
                let mut next = steps[at + 1..].iter().filter(|next| next.client == step.client);
                assert_eq!(next.next().map(|next| &next.action), Some(&Action::Reconnect));
                ends += 1;
            }
        }
        assert!(ends > 10, "{ends}");
    }

    #[test]
    fn a_pause_is_over_before_another_client_sends() {
        let mut pauses = 0;
        for seed in 0..100 {
            for step in session(seed).steps {
                let Action::Write { parts, wait_ms, .. } = step.action else { continue };
                let pauses_here = |part: &Part| {
                    let pause = b"PAUSE\r\n$2\r\n30";
                    let Part::Raw(bytes) = part else { return false };
                    bytes.windows(pause.len()).any(|window| window == pause)
                };
                if parts.iter().any(pauses_here) {
                    assert!(wait_ms > 30, "seed {seed}: {parts:?}");
                    pauses += 1;
                }
            }
        }
        assert!(pauses > 10, "{pauses}");
    }
}
