//! A client that works on its own keys and holds every reply against its model of them. Connections
//! end in the middle of it: what was not answered may have happened or not, up to some command, and
//! reading back tells up to which.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ferrite_fabric::ConnectOptions;
use ferrite_proto::Role;
use ferrite_proto::resp::Value as Reply;
use ferrite_session::{ValkeyConfig, ValkeyStream};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use crate::connection::{Both, Connection};
use crate::model::{self, Model, Value, Words, is_refusal, keys_of};
use crate::random::Random;
use crate::world::World;

/// That any of them may take, whatever goes on: a failover's pause and a link's end included.
const PATIENCE: Duration = Duration::from_secs(90);
/// A client of Valkey Over RDMA is not told that the other side is gone if the wire was cut at that
/// time.
const SILENCE: Duration = Duration::from_secs(4);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Way {
    /// Between Ferrite peers, over RDMA or not at all.
    Ferrite,
    /// The same, over TCP where RDMA does not work at the moment.
    FerriteOrTcp,
    Valkey,
    /// The engine's own port.
    Tcp,
}

/// A transaction that was begun: what is queued, and whether something was refused.
#[derive(Clone, Default)]
struct Begun {
    queued: Vec<Words>,
    is_refused: bool,
}

pub(crate) struct Client {
    pub(crate) number: usize,
    way: Way,
    random: Random,
    model: Model,
    connection: Option<Connection>,
    /// Which of the engines it is connected to.
    engine: usize,
    connections: u64,
    flushed: u64,
}

impl Client {
    pub(crate) fn new(number: usize, way: Way, seed: u64) -> Self {
        let random = Random::new(seed ^ (number as u64 + 1) << 32);
        let (model, connection) = (Model::default(), None);
        Self { number, way, random, model, connection, engine: 0, connections: 0, flushed: 0 }
    }

    /// Works until the end, and reads everything back then.
    pub(crate) async fn live(mut self, world: Arc<World>) {
        while !world.is_over() {
            let _flow = world.flow.read().await;
            self.hear_of_flushes(&world);
            self.work(&world).await;
        }
        // Troubles may go on for a moment: a flush among them.
        let _flow = world.flow.read().await;
        self.hear_of_flushes(&world);
        let all = model::all_keys(self.number);
        let found = self.read_back(&world, &all).await;
        let differs = differences(&self.model, &found);
        assert!(differs.is_empty(), "{self} at the end: {differs}");
        world.checked.fetch_add(all.len() as u64, Ordering::Relaxed);
    }

    fn hear_of_flushes(&mut self, world: &World) {
        let flushed = world.flushes.load(Ordering::Relaxed);
        if std::mem::replace(&mut self.flushed, flushed) != flushed {
            self.model.clear();
        }
    }

    async fn work(&mut self, world: &World) {
        let commands = self.plan();
        self.connect(world).await;
        let Some(mut connection) = self.connection.take() else { return };
        let mut replies = Vec::new();
        if world.interrupts[self.number].swap(false, Ordering::Relaxed) {
            connection.break_off(&commands, &mut self.random).await;
            self.settle(world, &commands, None).await;
            return;
        }
        let talked = self.within_reason(world, connection.talk(&commands, &mut replies)).await;
        world.commands.fetch_add(replies.len() as u64, Ordering::Relaxed);
        let mut transaction = None;
        let mut is_refused = false;
        for (at, (words, reply)) in commands.iter().zip(&replies).enumerate() {
            is_refused |= is_refusal(reply);
            if let Err(expected) = self.check(words, reply, &mut transaction) {
                let before: Vec<_> = commands[..=at].iter().map(brief_words).collect();
                panic!(
                    "{self}, after {before:?}: heard {}, not {}; {}",
                    brief(reply),
                    brief(&expected),
                    world.state()
                );
            }
            world.checked.fetch_add(1, Ordering::Relaxed);
        }
        match talked {
            Some(Ok(())) if !is_refused => self.connection = Some(connection),
            Some(Ok(())) => {
                // Another engine is the primary, or will be.
                world.refusals.fetch_add(1, Ordering::Relaxed);
                drop(connection);
                sleep(Duration::from_millis(20)).await;
            }
            Some(Err(_)) | None => {
                drop(connection);
                let rest = commands[replies.len()..].to_vec();
                self.settle(world, &rest, transaction).await;
            }
        }
    }

    /// What comes of it; nothing, if the other side was lost without a word.
    async fn within_reason<T>(&self, world: &World, what: impl Future<Output = T>) -> Option<T> {
        let begun = Instant::now();
        tokio::pin!(what);
        loop {
            if let Ok(done) = timeout(SILENCE, &mut what).await {
                return Some(done);
            }
            if self.way == Way::Valkey && world.was_cut_since(begun) {
                return None;
            }
            if begun.elapsed() > PATIENCE {
                let known = self.what_the_engine_knows(world).await;
                panic!("{self}: no reply; {}; {known}", world.state());
            }
        }
    }

    /// Whether it still has a session of ours.
    async fn what_the_engine_knows(&self, world: &World) -> String {
        let mut known = String::new();
        for question in [&["FERRITE", "CLIENTS"][..], &["CLIENT", "LIST"], &["INFO", "ferrite"]] {
            let asking = async {
                Connection::to_socket(&world.sockets[self.engine]).await?.ask(question).await
            };
            if let Ok(Ok(answer)) = timeout(PATIENCE, asking).await {
                known += &format!("\n{question:?}: {}", String::from_utf8_lossy(&answer));
            }
        }
        known
    }

    /// Commands that are sent together.
    fn plan(&mut self) -> Vec<Words> {
        let count = match self.random.below(10) {
            0..5 => 1,
            5..9 => 1 + self.random.below(16),
            _ => 1 + self.random.below(100),
        };
        let mut commands: Vec<Words> =
            (0..count).map(|_| model::command(&mut self.random, self.number)).collect();
        if self.random.below(6) == 0 {
            let from = self.random.below(count) as usize;
            let to = from + self.random.below(count - from as u64 + 1) as usize;
            commands.insert(to, vec![b"EXEC".to_vec()]);
            commands.insert(from, vec![b"MULTI".to_vec()]);
        }
        commands
    }

    /// Holds a reply against the model; what it should have been, if it differs.
    fn check(
        &mut self,
        words: &Words,
        reply: &[u8],
        begun: &mut Option<Begun>,
    ) -> Result<(), Vec<u8>> {
        let must = |expected: Vec<u8>| if reply == expected { Ok(()) } else { Err(expected) };
        match (words[0].as_slice(), begun.take()) {
            (b"MULTI", _) if reply == b"+OK\r\n" => *begun = Some(Begun::default()),
            (b"MULTI", _) => {
                return if is_refusal(reply) { Ok(()) } else { Err(b"+OK\r\n".to_vec()) };
            }
            (b"EXEC", None) => return must(b"-ERR EXEC without MULTI\r\n".to_vec()),
            (b"EXEC", Some(all)) if all.is_refused || is_refusal(reply) => {
                return if is_refusal(reply) { Ok(()) } else { Err(b"-EXECABORT".to_vec()) };
            }
            (b"EXEC", Some(all)) => {
                let mut expected = format!("*{}\r\n", all.queued.len()).into_bytes();
                all.queued.iter().for_each(|words| expected.extend(self.model.apply(words)));
                return must(expected);
            }
            (_, Some(mut all)) => {
                all.is_refused |= is_refusal(reply);
                all.queued.push(words.clone());
                *begun = Some(all);
                if !is_refusal(reply) {
                    return must(b"+QUEUED\r\n".to_vec());
                }
            }
            (_, None) if is_refusal(reply) => {}
            (_, None) => return must(self.model.apply(words)),
        }
        Ok(())
    }

    /// Its connection has ended, and of these commands some may have happened: the first few, in
    /// order.
    async fn settle(&mut self, world: &World, rest: &[Words], begun: Option<Begun>) {
        world.settled.fetch_add(1, Ordering::Relaxed);
        let mut queued = begun.map(|begun| begun.queued);
        let touched: BTreeSet<_> =
            queued.iter().flatten().chain(rest).flat_map(keys_of).cloned().collect();
        let mut states = vec![self.model.part(&touched)];
        for words in rest {
            let mut next = states.last().expect("one").clone();
            match (words[0].as_slice(), &mut queued) {
                (b"MULTI", _) => queued = Some(Vec::new()),
                (b"EXEC", _) => {
                    queued
                        .take()
                        .unwrap_or_default()
                        .iter()
                        .for_each(|words| drop(next.apply(words)));
                }
                (_, Some(queued)) => queued.push(words.clone()),
                (_, None) => drop(next.apply(words)),
            }
            states.push(next);
        }
        self.until_forgotten(world).await;
        let found = self.read_back(world, &touched).await;
        let Some(state) = states.iter().find(|state| differences(state, &found).is_empty()) else {
            let each: Vec<_> = states.iter().map(|state| differences(state, &found)).collect();
            let rest: Vec<_> = rest.iter().map(brief_words).collect();
            panic!(
                "{self}: after a cut in {rest:?} there is what no part of it leaves: {each:?}; {}",
                world.state()
            );
        };
        self.model.settle(&touched, state);
    }

    /// What the engine had of the last connection it may still be working on, until that is gone.
    async fn until_forgotten(&self, world: &World) {
        let name = format!("name={} ", self.name());
        let begun = Instant::now();
        loop {
            let listed = async {
                Connection::to_socket(&world.sockets[self.engine])
                    .await?
                    .ask(&["CLIENT", "LIST"])
                    .await
            };
            match timeout(PATIENCE, listed).await {
                Ok(Ok(list)) if !contains(&list, name.as_bytes()) => break,
                _ => {}
            }
            assert!(
                begun.elapsed() < PATIENCE,
                "{self}: its connection is never given up; {}",
                world.state()
            );
            sleep(Duration::from_millis(10)).await;
        }
        world.longest_ms.fetch_max(begun.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// What the engine has under these keys.
    async fn read_back(
        &mut self,
        world: &World,
        keys: &BTreeSet<Vec<u8>>,
    ) -> Vec<(Vec<u8>, Option<Value>)> {
        let commands: Vec<_> = keys.iter().map(|key| model::read_back(key)).collect();
        let begun = Instant::now();
        loop {
            assert!(begun.elapsed() < PATIENCE, "{self}: cannot read back; {}", world.state());
            self.connect(world).await;
            let Some(mut connection) = self.connection.take() else { continue };
            let mut replies = Vec::new();
            let talked = self.within_reason(world, connection.talk(&commands, &mut replies)).await;
            if matches!(talked, Some(Ok(()))) && !replies.iter().any(|reply| is_refusal(reply)) {
                self.connection = Some(connection);
                let values = replies.iter().map(|reply| value(reply));
                return keys.iter().cloned().zip(values).collect();
            }
        }
    }

    fn name(&self) -> String {
        format!("client{}-{}", self.number, self.connections)
    }

    /// To whoever is the primary, until that works.
    async fn connect(&mut self, world: &World) {
        let begun = Instant::now();
        while self.connection.is_none() {
            self.engine = world.primary.load(Ordering::Relaxed);
            self.connections += 1;
            let opening = async {
                let mut connection = Connection::new(self.open(world).await?);
                let answer = connection.ask(&["CLIENT", "SETNAME", &self.name()]).await?;
                if answer == b"+OK\r\n" {
                    Ok(connection)
                } else {
                    Err(io::Error::other(brief(&answer)))
                }
            };
            match timeout(SILENCE, opening).await {
                Ok(Ok(connection)) => {
                    self.connection = Some(connection);
                    world.connected.fetch_add(1, Ordering::Relaxed);
                }
                failed => {
                    world.unconnected.fetch_add(1, Ordering::Relaxed);
                    let failure = format!("{self}: {:?}", failed.map(Result::err));
                    world.failures.lock().expect("no panic").insert(self.way, failure);
                    assert!(begun.elapsed() < PATIENCE, "{self} cannot connect; {}", world.state());
                    sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    async fn open(&self, world: &World) -> io::Result<Box<dyn Both>> {
        let address = world.rdma[self.engine];
        Ok(match self.way {
            Way::Ferrite => Box::new(world.connector.connect(address).await?),
            Way::FerriteOrTcp => Box::new(world.yielding.connect(address).await?),
            Way::Valkey => {
                let options = ConnectOptions::new().local(world.local);
                let raw = world.fabric.connect_raw(address, &options).await?;
                Box::new(ValkeyStream::new(raw, Role::Client, &ValkeyConfig::default())?)
            }
            Way::Tcp => {
                let stream = TcpStream::connect(world.tcp[self.engine]).await?;
                stream.set_nodelay(true)?;
                Box::new(stream)
            }
        })
    }
}

impl std::fmt::Display for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} over {:?} to engine {}", self.name(), self.way, self.engine)
    }
}

/// A reply to a command of [`model::read_back`].
fn value(reply: &[u8]) -> Option<Value> {
    let text = |value: &Reply<'_>| match value {
        Reply::Bulk(text) => text.to_vec(),
        other => panic!("{other:?}"),
    };
    match Reply::parse(reply).expect("a reply") {
        Reply::Null => None,
        Reply::Bulk(text) => Some(Value::Text(text.to_vec())),
        Reply::Array(items) if items.is_empty() => None,
        Reply::Array(items) => Some(Value::List(items.iter().map(text).collect())),
        other => panic!("{other:?}"),
    }
}

/// Where the model and the engine differ. A hash was read as a list of fields and values.
fn differences(model: &Model, found: &[(Vec<u8>, Option<Value>)]) -> String {
    let mut told = String::new();
    for (key, found) in found {
        let found = match (model.get(key), found) {
            (Some(Value::Hash(_)), Some(Value::List(flat))) => {
                let flat: Vec<_> = flat.iter().cloned().collect();
                Some(Value::Hash(
                    flat.chunks(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect(),
                ))
            }
            (_, found) => found.clone(),
        };
        if model.get(key) != found.as_ref() {
            let [wanted, found] = [model.get(key), found.as_ref()]
                .map(|value| brief(format!("{value:?}").as_bytes()));
            told += &format!("{}: {found} is there, not {wanted}; ", brief(key));
        }
    }
    told
}

pub(crate) fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

fn brief(bytes: &[u8]) -> String {
    let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(80)]).escape_debug().to_string();
    if bytes.len() > 80 { format!("{shown}… ({} bytes)", bytes.len()) } else { shown }
}

fn brief_words(words: &Words) -> String {
    words.iter().map(|word| brief(&word[..word.len().min(24)])).collect::<Vec<_>>().join(" ")
}
