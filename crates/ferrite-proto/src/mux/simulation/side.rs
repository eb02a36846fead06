//! One end of the simulated link: a multiplexer, and a driver that makes no decision.

use std::collections::BTreeMap;

use ferrite_testkit::Random;

use super::program::Programs;
use super::wire::{Clock, STEP_MICROS, Wire};
use super::{PROBE_BULK_BYTES, Violation, chance, violation};
use crate::mux::{
    CONTROL_BYTES, Cause, Class, Config, Ended, Filled, HEAD_BYTES, Mux, OpenError, Received,
    Route, Side as Role, StreamId,
};

pub(super) struct Side {
    pub(super) mux: Mux,
    role: Role,
    buffer: Vec<u8>,
    /// For each stream that waits for its turn: how many turns other streams of its class have had
    /// meanwhile.
    waiting: BTreeMap<StreamId, usize>,
    /// The most streams that ever existed at a time.
    most_streams: usize,
    has_gone_away: bool,
    /// Whether to check the order of turns, which takes time.
    checks_turns: bool,
}

impl Side {
    pub(super) fn new(role: Role, config: Config, checks_turns: bool) -> Self {
        let buffer = vec![0; config.message_bytes];
        let mux = Mux::new(role, config).expect("valid limits");
        Self {
            mux,
            role,
            buffer,
            waiting: BTreeMap::new(),
            most_streams: 0,
            has_gone_away: false,
            checks_turns,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.mux.streams() == 0 && self.mux.schedule.len() == 0
    }

    pub(super) fn describe(&self) -> String {
        let streams = self.mux.table.iter().take(3).collect::<Vec<_>>();
        let (role, count, in_flight) = (self.role, self.mux.streams(), self.mux.in_flight);
        format!("{role:?}: {count} streams, {in_flight:?} in flight, {streams:?}")
    }

    /// Handles a message, divided into random pieces.
    pub(super) fn receive(
        &mut self,
        channel: u16,
        message: &[u8],
        programs: &mut Programs,
        random: &mut Random,
        clock: &Clock,
    ) -> Result<(), Violation> {
        let mut rest = message;
        while !rest.is_empty() {
            let most = if chance(random, 50) { rest.len() } else { rest.len().min(60) };
            let (mut piece, after) = rest.split_at(1 + random.index(most));
            rest = after;
            loop {
                let received = self.mux.handle_piece(channel, &mut piece, clock.now());
                let Some(received) = self.honest(received)? else { break };
                self.on_received(received, programs, random, clock)?;
                self.poll_ended(programs)?;
            }
            self.poll_ended(programs)?;
        }
        let ended = self.mux.handle_message_end();
        self.honest(ended)
    }

    fn honest<T>(&self, result: Result<T, crate::mux::MuxError>) -> Result<T, Violation> {
        result.or_else(|error| {
            violation(format!("{:?}: reported a violation by an honest peer: {error}", self.role))
        })
    }

    fn on_received(
        &mut self,
        received: Received<'_>,
        programs: &mut Programs,
        random: &mut Random,
        clock: &Clock,
    ) -> Result<(), Violation> {
        match received {
            Received::Opened { stream, route } => {
                if route != route_of(stream.class()) || programs.has(stream, self.role) {
                    return violation(format!("{stream} was opened twice, or with another route"));
                }
                programs.open(stream, self.role, random);
                if !programs.is_probe(stream) && chance(random, 5) {
                    self.mux.reset(stream, Cause::REFUSED);
                    return programs.on_reset(stream, self.role);
                }
                self.mux.set_ready(stream);
            }
            Received::Data { stream, bytes } => {
                let read = programs.receive(stream, self.role, bytes, clock)?;
                self.mux.consume(stream, read);
            }
            Received::Fin { stream } => programs.on_fin(stream, self.role)?,
        }
        Ok(())
    }

    fn poll_ended(&mut self, programs: &mut Programs) -> Result<(), Violation> {
        while let Some(Ended { stream, end }) = self.mux.poll_ended() {
            programs.on_ended(stream, self.role, end)?;
        }
        Ok(())
    }

    /// Lets the programs of this side act. Returns the event that a shown run prints, if there is
    /// one.
    pub(super) fn act(
        &mut self,
        programs: &mut Programs,
        random: &mut Random,
        clock: &Clock,
    ) -> Result<Option<String>, Violation> {
        let mut shown = None;
        if !programs.is_calm {
            if random.below(3) == 0 {
                self.open(programs, random)?;
            }
            if random.below(20) == 0
                && let Some(stream) = programs.probe(self.role, clock)
            {
                self.mux.set_ready(stream);
            }
            if random.below(2000) == 0 {
                self.mux.go_away();
                self.has_gone_away = true;
                shown = Some("goes away".into());
            }
        }
        let are_active = random.below(4) == 0;
        for stream in if are_active { programs.live(self.role) } else { Vec::new() } {
            let is_victim = !programs.is_calm && !programs.is_probe(stream);
            if is_victim && random.below(125) == 0 {
                self.mux.reset(stream, Cause::CONNECTION_LOST);
                programs.on_reset(stream, self.role)?;
                continue;
            }
            let read = programs.read(stream, self.role, random)?;
            self.mux.consume(stream, read);
            self.mux.set_ready(stream);
        }
        self.poll_ended(programs)?;
        Ok(shown)
    }

    fn open(&mut self, programs: &mut Programs, random: &mut Random) -> Result<(), Violation> {
        let class = if programs.lacks_probe(self.role) {
            Class::Bus
        } else {
            [Class::Interactive, Class::Bulk][random.index(2)]
        };
        let opened = match random.below(30) {
            0 if class != Class::Bus => 100,
            _ => 1,
        };
        for _ in 0..opened {
            match self.mux.open(class, route_of(class)) {
                Ok(stream) => {
                    programs.open(stream, self.role, random);
                    self.mux.set_ready(stream);
                }
                Err(OpenError::TooManyStreams | OpenError::GoingAway) => {}
                Err(error) => return violation(format!("cannot open: {error}")),
            }
        }
        Ok(())
    }

    /// Packs all messages that can be sent, and posts them to the wire.
    pub(super) fn pump(
        &mut self,
        wire: &mut Wire,
        programs: &mut Programs,
        random: &mut Random,
        clock: &Clock,
    ) -> Result<(), Violation> {
        self.most_streams = self.most_streams.max(self.mux.streams());
        programs.allow_probe(self.role, self.most_probe_micros(wire));
        let role = self.role;
        for class in Class::ALL {
            loop {
                let (mut turns, mut failed) = (Vec::new(), None);
                let fill = |stream, room: &mut [u8]| {
                    turns.push(stream);
                    programs.fill(stream, role, room, random).unwrap_or_else(|error| {
                        failed = Some(error);
                        Filled::Failed(Cause::CONNECTION_LOST)
                    })
                };
                let packed = self.mux.poll_message(class, &mut self.buffer, clock.now(), fill);
                if let Some(error) = failed {
                    return Err(error);
                }
                if self.checks_turns {
                    turns.into_iter().try_for_each(|stream| self.on_turn(stream, class))?;
                }
                self.poll_ended(programs)?;
                let Some(len) = packed else { break };
                if len == 0 || len > self.mux.config().message_bytes {
                    return violation(format!("a message has {len} bytes, which is not allowed"));
                }
                wire.post(class, self.buffer[..len].to_vec(), clock);
            }
        }
        Ok(())
    }

    /// Returns how long a small message of the class *bus* may take to the peer. The messages in
    /// flight before it have at most a grant for each stream, and bytes of a probe.
    fn most_probe_micros(&self, wire: &Wire) -> u64 {
        let config = self.mux.config();
        if config.bulk_bytes_per_second < PROBE_BULK_BYTES {
            return u64::MAX;
        }
        let control = 4 * self.most_streams * (HEAD_BYTES + 4) + 4 * CONTROL_BYTES + 200;
        let in_flight = config.max_in_flight as usize + 1;
        // A probe may take several messages, each with little room, and a GRANT may come first.
        let messages = 2 * (in_flight + 200_usize.div_ceil(config.window as usize / 2));
        let one = wire.most_micros(control) + wire.round_trip_micros() + 3 * STEP_MICROS;
        messages as u64 * one
    }

    /// Checks that no stream of this class waits too long for its turn: the others may have at most
    /// twice as many turns meanwhile as there were streams.
    fn on_turn(&mut self, stream: StreamId, class: Class) -> Result<(), Violation> {
        self.waiting.remove(&stream);
        let most = 2 * self.most_streams;
        let table = &self.mux.table;
        self.waiting.retain(|id, _| table.get(*id).is_some_and(|it| it.sending.is_queued));
        let queued: Vec<_> = (self.mux.table.iter())
            .filter(|(_, it)| it.sending.is_queued && it.sending.class == class)
            .map(|(id, _)| id)
            .filter(|id| *id != stream)
            .collect();
        for other in queued {
            let turns = self.waiting.entry(other).or_default();
            *turns += 1;
            if *turns > most {
                let role = self.role;
                return violation(format!(
                    "{role:?}: {other} starves: others have had {turns} turns"
                ));
            }
        }
        Ok(())
    }

    pub(super) fn on_sent(&mut self, wire: &mut Wire, clock: &Clock) {
        while let Some(class) = wire.sent(clock) {
            self.mux.handle_sent(class);
        }
    }

    /// Checks the limits, and that whatever must be sent is queued.
    pub(super) fn check(&self) -> Result<(), Violation> {
        let (mux, role) = (&self.mux, self.role);
        let Config { max_held_bytes, max_streams, bus_streams, max_in_flight, .. } = *mux.config();
        if mux.held > max_held_bytes {
            return violation(format!(
                "{role:?}: {} bytes are held, more than the limit",
                mux.held
            ));
        }
        let held: u64 = mux.table.iter().map(|(_, it)| u64::from(it.receiving.held)).sum();
        if held != mux.held {
            return violation(format!(
                "{role:?}: {held} bytes are held, but {} are counted",
                mux.held
            ));
        }
        for opener in [Role::Caller, Role::Called] {
            let open = mux.table.opened_by(opener);
            if open.bus + open.others > max_streams || open.others > max_streams - bus_streams {
                return violation(format!(
                    "{role:?}: more than {max_streams} streams, or not {bus_streams} of them left \
                     for the class bus: {open:?}"
                ));
            }
        }
        if mux.in_flight.iter().any(|count| *count > max_in_flight) {
            return violation(format!(
                "{role:?}: too many messages in flight: {:?}",
                mux.in_flight
            ));
        }
        for (id, it) in mux.table.iter() {
            if it.sending.needs_turn() != it.sending.is_queued {
                return violation(format!(
                    "{role:?}: {id} needs a turn and is not queued, or the reverse: {it:?}"
                ));
            }
            if it.receiving.held > mux.config().window {
                return violation(format!("{role:?}: {id} holds more than its window"));
            }
        }
        Ok(())
    }

    pub(super) fn check_end(&self) -> Result<(), Violation> {
        let is_clean = self.mux.held == 0 && self.mux.ended.is_empty();
        if !is_clean || (self.has_gone_away && !self.mux.is_drained()) {
            return violation(format!(
                "{:?}: some state is left at the end: {:?}",
                self.role, self.mux
            ));
        }
        Ok(())
    }
}

fn route_of(class: Class) -> Route {
    let address = |text: &str| text.parse().expect("an address");
    match class {
        Class::Bus => {
            Route { destination: address("10.0.0.2:17001"), source: address("10.0.0.1:40000") }
        }
        _ => Route {
            destination: address("[2001:db8::2]:6379"),
            source: address("[2001:db8::1]:50000"),
        },
    }
}
