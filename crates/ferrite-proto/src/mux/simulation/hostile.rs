//! Hostile peers: a multiplexer against changed, repeated and lost messages, against floods, and
//! against each violation of the protocol.

use std::time::{Duration, Instant};

use ferrite_testkit::Random;

use super::{Summary, Violation, chance, violation};
use crate::mux::{
    Cause, Class, Config, Control, DataHead, Filled, Mux, MuxError, Received, RecordError, Route,
    Side, StreamId,
};

/// The window of all streams.
const WINDOW: u32 = 1000;

fn config() -> Config {
    Config {
        window: WINDOW,
        turn_bytes: 300,
        message_bytes: 2000,
        max_streams: 20,
        bus_streams: 4,
        opens_per_second: 1000,
        max_refused: 50,
        max_held_bytes: 5000,
        bulk_bytes_per_second: 2000,
        ..Config::default()
    }
}

fn route() -> Route {
    let address = "10.0.0.1:1".parse().expect("an address");
    Route { destination: address, source: address }
}

/// The multiplexer under test, and what its driver does.
struct Victim {
    mux: Mux,
    now: Instant,
    /// The probability, in percent, that a piece of received bytes is consumed.
    read_percent: u64,
    accepted: usize,
}

impl Victim {
    fn new(side: Side, config: Config) -> Self {
        let mux = Mux::new(side, config).expect("valid limits");
        Self { mux, now: Instant::now(), read_percent: 50, accepted: 0 }
    }

    fn peer(&self) -> Side {
        self.mux.side().other()
    }

    /// Passes a message to the multiplexer.
    fn receive(
        &mut self,
        channel: u16,
        message: &[u8],
        random: &mut Random,
    ) -> Result<Result<(), MuxError>, Violation> {
        let mut piece = message;
        loop {
            match self.mux.handle_piece(channel, &mut piece, self.now) {
                Ok(Some(Received::Data { stream, bytes })) => {
                    if chance(random, self.read_percent) {
                        self.mux.consume(stream, bytes.len() as u32);
                    }
                }
                Ok(Some(Received::Opened { stream, .. })) => {
                    self.accepted += 1;
                    self.mux.set_ready(stream);
                }
                Ok(Some(Received::Fin { .. })) => {}
                Ok(None) => break,
                Err(error) => return self.ended(error).map(Err),
            }
            self.check()?;
        }
        self.check()?;
        match self.mux.handle_message_end() {
            Ok(()) => Ok(Ok(())),
            Err(error) => self.ended(error).map(Err),
        }
    }

    /// Checks that an error is final.
    fn ended(&mut self, error: MuxError) -> Result<MuxError, Violation> {
        let is_final = self.mux.handle_piece(0, &mut &[][..], self.now) == Err(error)
            && self.mux.handle_message_end() == Err(error)
            && self.send(Class::Bus).is_none()
            && self.mux.open(Class::Bus, route()).is_err();
        if !is_final || error.to_string().is_empty() {
            return violation(format!("{error} does not end the link"));
        }
        Ok(error)
    }

    /// Packs a message with a few bytes of each stream that may send.
    fn send(&mut self, class: Class) -> Option<Vec<u8>> {
        let mut out = vec![0; self.mux.config().message_bytes];
        let len = self.mux.poll_message(class, &mut out, self.now, |_, room| {
            room.fill(7);
            Filled::Bytes { len: room.len().min(100), is_more: false }
        })?;
        self.mux.handle_sent(class);
        out.truncate(len);
        Some(out)
    }

    fn check(&mut self) -> Result<(), Violation> {
        while self.mux.poll_ended().is_some() {}
        let Config { max_streams, max_refused, max_held_bytes, .. } = *self.mux.config();
        let (streams, held) = (self.mux.streams(), self.mux.held_bytes());
        let queued = self.mux.schedule.len();
        if streams > 2 * max_streams || held > max_held_bytes {
            return violation(format!(
                "{streams} streams hold {held} bytes, more than the limits allow"
            ));
        }
        // Each stream may wait for a turn and for a grant, and the refusals wait, too.
        if queued > 4 * max_streams + max_refused + 1 {
            return violation(format!(
                "{queued} records wait to be sent, more than the limits allow"
            ));
        }
        Ok(())
    }
}

/// Runs one of the attacks.
pub(super) fn run(random: &mut Random, is_shown: bool) -> Result<Summary, Violation> {
    let side = [Side::Caller, Side::Called][random.index(2)];
    let mut victim = Victim::new(side, config());
    victim.read_percent = random.below(101);
    let violations = match random.below(10) {
        0..3 => changed_messages(&mut victim, random)?,
        3 => flood_of_opens(&mut victim, random)?,
        4 => flood_of_bytes(&mut victim, random)?,
        5 => flood_of_resets(&mut victim, random)?,
        _ => violations(side, random, is_shown)?,
    };
    Ok(Summary { violations, ..Summary::default() })
}

/// Feeds the messages of an honest peer. Some of them are changed, repeated, lost, or sent on
/// another channel.
fn changed_messages(victim: &mut Victim, random: &mut Random) -> Result<u64, Violation> {
    let mut peer = Victim::new(victim.peer(), config());
    for _ in 0..100 {
        for it in [&mut peer, victim] {
            let class = Class::ALL[random.index(3)];
            let opened = it.mux.open(class, route());
            opened.into_iter().for_each(|stream| it.mux.set_ready(stream));
            it.now += Duration::from_millis(random.below(100));
        }
        let streams: Vec<_> = peer.mux.table.iter().map(|(id, _)| id).collect();
        for stream in streams {
            match random.below(20) {
                0 => peer.mux.reset(stream, Cause::REFUSED),
                _ => peer.mux.set_ready(stream),
            }
        }
        let class = Class::ALL[random.index(3)];
        if let Some(message) = victim.send(class) {
            // The victim may have received a changed record and answer it. If the peer reports that
            // answer as a violation, this is no failure.
            let _ = peer.receive(class.channel(), &message, random)?;
        }
        let class = Class::ALL[random.index(3)];
        let Some(mut message) = peer.send(class) else { continue };
        let mut channel = class.channel();
        let mut copies = 1;
        match random.below(40) {
            0 => copies = 0,
            1 => copies = 2,
            2 => channel = random.below(4) as u16,
            3..6 => {
                let at = random.index(message.len());
                message[at] ^= 1 << random.below(8);
            }
            6 => message.truncate(random.index(message.len())),
            7 => message.extend(random.bytes(20)),
            _ => {}
        }
        for _ in 0..copies {
            if victim.receive(channel, &message, random)?.is_err() {
                return Ok(1);
            }
        }
    }
    Ok(0)
}

fn id(side: Side, class: Class, number: u32) -> StreamId {
    StreamId::new(side, class, number).expect("a valid name")
}

fn open(stream: StreamId) -> Vec<u8> {
    Control::Open { stream, route: route() }.encode().to_vec()
}

fn data(stream: StreamId, length: u32, next_class: Option<Class>) -> Vec<u8> {
    let mut record = DataHead { stream, length, next_class }.encode().to_vec();
    record.resize(record.len() + length as usize, 7);
    record
}

/// Opens far more streams than allowed. Reads the refusals, or leaves them unread.
fn flood_of_opens(victim: &mut Victim, random: &mut Random) -> Result<u64, Violation> {
    let (peer, reads) = (victim.peer(), chance(random, 50));
    let most = victim.mux.config().max_streams - victim.mux.config().bus_streams;
    for number in 1..500 {
        let stream = id(peer, Class::Interactive, number);
        match victim.receive(1, &open(stream), random)? {
            Ok(()) => {}
            Err(MuxError::TooManyRefused { .. }) if !reads => return Ok(1),
            Err(error) => {
                return violation(format!(
                    "excess streams must be refused, but the link failed: {error}"
                ));
            }
        }
        if victim.accepted > most {
            return violation("more streams were accepted than allowed");
        }
        if reads {
            while victim.send(Class::Interactive).is_some() {}
        }
    }
    if !reads {
        return violation("the link survived a flood of streams");
    }
    let accepted = victim.accepted;
    let bus = id(peer, Class::Bus, 1);
    match victim.receive(0, &open(bus), random)? {
        Ok(()) if victim.accepted == accepted + 1 => Ok(0),
        result => violation(format!("the flood has taken the streams of the bus: {result:?}")),
    }
}

/// Sends all that the credit allows on many streams, which nobody reads.
fn flood_of_bytes(victim: &mut Victim, random: &mut Random) -> Result<u64, Violation> {
    victim.read_percent = 0;
    let peer = victim.peer();
    for number in 1..20 {
        let stream = id(peer, Class::Bulk, number);
        let mut message = open(stream);
        let mut left = WINDOW;
        while left > 0 {
            let length = left.min(1 + random.below(400) as u32);
            message.extend(data(stream, length, None));
            left -= length;
        }
        if let Err(error) = victim.receive(2, &message, random)? {
            return violation(format!("bytes within the credit were rejected: {error}"));
        }
    }
    if victim.mux.stats().out_of_memory == 0 {
        return violation("bytes beyond the limit were kept");
    }
    Ok(0)
}

/// Opens streams and resets them at once, and sends records for streams that have ended.
fn flood_of_resets(victim: &mut Victim, random: &mut Random) -> Result<u64, Violation> {
    let peer = victim.peer();
    for number in 1..1000 {
        let stream = id(peer, Class::Interactive, number);
        let reset = Control::Reset { stream, cause: Cause::from_wire(99) }.encode();
        let late = [
            data(stream, 5, None),
            Control::Fin { stream }.encode().to_vec(),
            Control::Grant { stream, bytes: 5, answers_move: false }.encode().to_vec(),
            reset.to_vec(),
        ];
        let late = &late[random.index(4)];
        let message = [&open(stream)[..], &reset, late].concat();
        victim.now += Duration::from_millis(1);
        if let Err(error) = victim.receive(1, &message, random)? {
            return violation(format!("the link failed after streams were reset at once: {error}"));
        }
    }
    if victim.mux.streams() > 0 {
        return violation("streams that were reset still exist");
    }
    Ok(0)
}

/// Violates each rule once, each time with a new multiplexer. Returns the number of rules.
fn violations(side: Side, random: &mut Random, is_shown: bool) -> Result<u64, Violation> {
    for at in 0.. {
        let mut victim = Victim::new(side, config());
        if !violate(&mut victim, at, random, is_shown)? {
            return Ok(at as u64);
        }
    }
    Ok(0)
}

/// Prepares streams in several states, and then violates the rule with this number. Returns false
/// if there is none.
fn violate(
    victim: &mut Victim,
    at: usize,
    random: &mut Random,
    is_shown: bool,
) -> Result<bool, Violation> {
    let (peer, own) = (victim.peer(), victim.mux.side());
    let interactive = |number| id(peer, Class::Interactive, number);
    let (live, ended, with_fin, moving) =
        (interactive(1), interactive(2), interactive(5), interactive(6));
    let prepared = [
        open(live),
        open(ended),
        Control::Reset { stream: ended, cause: Cause::REFUSED }.encode().to_vec(),
        open(with_fin),
        Control::Fin { stream: with_fin }.encode().to_vec(),
        open(moving),
        data(moving, 10, Some(Class::Bulk)),
    ];
    let ours = victim.mux.open(Class::Bulk, route()).expect("room for a stream");
    let unsent = if chance(random, 50) {
        while victim.send(Class::Bulk).is_some() {}
        victim.mux.open(Class::Bulk, route()).expect("room for a stream")
    } else {
        ours
    };
    if let Err(error) = victim.receive(1, &prepared.concat(), random)? {
        return violation(format!("valid records were rejected: {error}"));
    }
    let never = id(peer, Class::Bus, 1);
    let fin = |stream| Control::Fin { stream }.encode().to_vec();
    let reset = |stream| Control::Reset { stream, cause: Cause::REFUSED }.encode().to_vec();
    let grant = |stream, bytes, answers_move| {
        Control::Grant { stream, bytes, answers_move }.encode().to_vec()
    };
    let go_away = |last| Control::GoAway { last }.encode().to_vec();
    let unopened = |stream| MuxError::NeverOpened { stream };
    let reused = |stream| MuxError::ReusedName { stream };
    let wrong = |stream, class| MuxError::WrongClass { stream, class };
    let early = MuxError::EarlyMove { stream: moving };
    let after = MuxError::AfterFin { stream: with_fin };
    let beyond = MuxError::BeyondCredit { stream: live, length: 501, credit: 500 };
    let ours_next = id(own, Class::Bus, 99);
    let all = [
        (0, data(never, 1, None), unopened(never)),
        (0, fin(never), unopened(never)),
        (0, reset(never), unopened(never)),
        (0, grant(never, 1, false), unopened(never)),
        (0, grant(ours_next, 1, false), unopened(ours_next)),
        (2, reset(unsent), unopened(unsent)),
        (2, data(unsent, 1, None), unopened(unsent)),
        (0, open(ours_next), MuxError::ForeignName { stream: ours_next }),
        (1, open(live), reused(live)),
        (1, open(ended), reused(ended)),
        (1, open(interactive(4)), reused(interactive(4))),
        (1, open(never), wrong(never, Class::Interactive)),
        (0, data(live, 1, None), wrong(live, Class::Bus)),
        (2, fin(live), wrong(live, Class::Bulk)),
        (1, [data(live, 500, None), data(live, 501, None)].concat(), beyond),
        (0, grant(live, u32::MAX, false), MuxError::TooMuchCredit { stream: live }),
        (1, data(with_fin, 1, None), after),
        (1, fin(with_fin), after),
        (1, data(live, 1, Some(Class::Interactive)), MuxError::SameClass { stream: live }),
        (1, data(moving, 1, None), early),
        (2, data(moving, 1, None), early),
        (2, fin(moving), early),
        (0, grant(live, 0, true), MuxError::UnexpectedAnswer { stream: live }),
        (0, [go_away(None), go_away(None)].concat(), MuxError::SecondGoAway),
        (0, go_away(Some(ours_next)), MuxError::GoAwayStream { stream: ours_next }),
        (0, go_away(Some(live)), MuxError::GoAwayStream { stream: live }),
        (3, fin(live), MuxError::Channel { channel: 3 }),
        (1, fin(live)[..11].to_vec(), RecordError::Truncated.into()),
        (1, data(live, 9, None)[..20].to_vec(), RecordError::Truncated.into()),
        (1, vec![9; 12], RecordError::Type { kind: 9 }.into()),
    ];
    let Some((channel, message, expected)) = all.get(at) else { return Ok(false) };
    if is_shown {
        eprintln!("{own:?} under test; expected: {expected}");
    }
    match victim.receive(*channel, message, random)? {
        Err(error) if error == *expected => Ok(true),
        result => violation(format!("the result is {result:?}, expected the error: {expected}")),
    }
}
