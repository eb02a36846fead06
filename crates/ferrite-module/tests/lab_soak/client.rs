//! A client that works on its own keys and compares every reply with its model of them.
//!
//! Connections are lost in the middle of commands. Then the engine may have run any number of the
//! commands without a reply, in order. The client reads its keys back to find out how many.

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

use crate::connection::{ByteStream, Connection};
use crate::model::{self, Model, Value, Words, is_refusal, keys_of};
use crate::world::World;
use ferrite_testkit::Random;

/// The most that any step may take, including the pause of a failover and the timeout of a link.
const TIMEOUT: Duration = Duration::from_secs(90);
/// How long to wait before checking for a lost peer. If the peer closed the connection while the
/// wire was cut, a client of Valkey Over RDMA notices that only by a probe, after 10 s or more.
/// Also the timeout of one attempt to connect.
const SILENCE: Duration = Duration::from_secs(4);

/// How a client connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Way {
    /// As a Ferrite peer, over RDMA only.
    Ferrite,
    /// As a Ferrite peer, over TCP if RDMA does not work at the moment.
    FerriteOrTcp,
    Valkey,
    /// To the engine's own port.
    Tcp,
}

/// An open transaction: its queued commands, and whether one of them was refused.
#[derive(Clone, Default)]
struct Transaction {
    queued: Vec<Words>,
    is_refused: bool,
}

pub(crate) struct Client {
    pub(crate) number: usize,
    way: Way,
    random: Random,
    model: Model,
    connection: Option<Connection>,
    /// The index of the engine that it is connected to.
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

    /// Works until the test is over, then reads all keys back.
    pub(crate) async fn run(mut self, world: Arc<World>) {
        while !world.is_over() {
            let _flow = world.flow.read().await;
            self.notice_flushes(&world);
            self.work(&world).await;
        }
        // The last fault may still be in progress, and it may be FLUSHALL.
        let _flow = world.flow.read().await;
        self.notice_flushes(&world);
        let all = model::all_keys(self.number);
        let found = self.read_back(&world, &all).await;
        let differing = differences(&self.model, &found);
        assert!(differing.is_empty(), "{self} at the end: {differing}");
        world.checked.fetch_add(all.len() as u64, Ordering::Relaxed);
    }

    /// Clears the model if FLUSHALL has run.
    fn notice_flushes(&mut self, world: &World) {
        let flushed = world.flushes.load(Ordering::Relaxed);
        if std::mem::replace(&mut self.flushed, flushed) != flushed {
            self.model.clear();
        }
    }

    /// Sends a batch of commands and checks their replies.
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
        let outcome =
            self.unless_peer_is_lost(world, connection.exchange(&commands, &mut replies)).await;
        world.commands.fetch_add(replies.len() as u64, Ordering::Relaxed);
        let mut transaction = None;
        let mut is_refused = false;
        for (at, (words, reply)) in commands.iter().zip(&replies).enumerate() {
            is_refused |= is_refusal(reply);
            if let Err(expected) = self.check(words, reply, &mut transaction) {
                let before: Vec<_> = commands[..=at].iter().map(brief_words).collect();
                panic!(
                    "{self}, after {before:?}: the reply is {}, expected {}; {}",
                    brief(reply),
                    brief(&expected),
                    world.state()
                );
            }
            world.checked.fetch_add(1, Ordering::Relaxed);
        }
        match outcome {
            Some(Ok(())) if !is_refused => self.connection = Some(connection),
            Some(Ok(())) => {
                // The other engine is the primary, or will be.
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

    /// Waits for `what`. Returns `None` if a client of Valkey Over RDMA may have lost its peer
    /// without notice, because the wire was cut.
    async fn unless_peer_is_lost<T>(
        &self,
        world: &World,
        what: impl Future<Output = T>,
    ) -> Option<T> {
        let started = Instant::now();
        tokio::pin!(what);
        loop {
            if let Ok(done) = timeout(SILENCE, &mut what).await {
                return Some(done);
            }
            if self.way == Way::Valkey && world.was_cut_since(started) {
                return None;
            }
            if started.elapsed() > TIMEOUT {
                let engine = self.engine_state(world).await;
                panic!("{self}: no reply; {}; {engine}", world.state());
            }
        }
    }

    /// Returns what the engine reports about its sessions and clients.
    async fn engine_state(&self, world: &World) -> String {
        let mut state = String::new();
        for words in [&["FERRITE", "CLIENTS"][..], &["CLIENT", "LIST"], &["INFO", "ferrite"]] {
            let asking = async {
                Connection::to_socket(&world.sockets[self.engine]).await?.ask(words).await
            };
            if let Ok(Ok(reply)) = timeout(TIMEOUT, asking).await {
                state += &format!("\n{words:?}: {}", String::from_utf8_lossy(&reply));
            }
        }
        state
    }

    /// Returns commands that are sent together.
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

    /// Compares a reply with the model.
    ///
    /// # Errors
    /// The expected reply, if the reply differs.
    fn check(
        &mut self,
        words: &Words,
        reply: &[u8],
        transaction: &mut Option<Transaction>,
    ) -> Result<(), Vec<u8>> {
        let must = |expected: Vec<u8>| if reply == expected { Ok(()) } else { Err(expected) };
        match (words[0].as_slice(), transaction.take()) {
            (b"MULTI", _) if reply == b"+OK\r\n" => *transaction = Some(Transaction::default()),
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
                *transaction = Some(all);
                if !is_refusal(reply) {
                    return must(b"+QUEUED\r\n".to_vec());
                }
            }
            (_, None) if is_refusal(reply) => {}
            (_, None) => return must(self.model.apply(words)),
        }
        Ok(())
    }

    /// Finds out which of the commands `rest` the engine has run before the connection was lost,
    /// and updates the model. The engine may have run any number of them, in order.
    async fn settle(&mut self, world: &World, rest: &[Words], transaction: Option<Transaction>) {
        world.settled.fetch_add(1, Ordering::Relaxed);
        let mut queued = transaction.map(|transaction| transaction.queued);
        let touched: BTreeSet<_> =
            queued.iter().flatten().chain(rest).flat_map(keys_of).cloned().collect();
        let mut states = vec![self.model.part(&touched)];
        for words in rest {
            let mut next = states.last().expect("at least one state").clone();
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
        self.wait_until_disconnected(world).await;
        let found = self.read_back(world, &touched).await;
        let Some(state) = states.iter().find(|state| differences(state, &found).is_empty()) else {
            let each: Vec<_> = states.iter().map(|state| differences(state, &found)).collect();
            let rest: Vec<_> = rest.iter().map(brief_words).collect();
            panic!(
                "{self}: the connection was lost in {rest:?}, and the keys match no prefix of it: \
                 {each:?}; {}",
                world.state()
            );
        };
        self.model.settle(&touched, state);
    }

    /// Waits until the engine has closed the last connection. Until then, the engine may still run
    /// commands of that connection.
    async fn wait_until_disconnected(&self, world: &World) {
        let name = format!("name={} ", self.name());
        let started = Instant::now();
        loop {
            let listed = async {
                Connection::to_socket(&world.sockets[self.engine])
                    .await?
                    .ask(&["CLIENT", "LIST"])
                    .await
            };
            match timeout(TIMEOUT, listed).await {
                Ok(Ok(list)) if !contains(&list, name.as_bytes()) => break,
                _ => {}
            }
            assert!(
                started.elapsed() < TIMEOUT,
                "{self}: the engine does not give up the connection; {}",
                world.state()
            );
            sleep(Duration::from_millis(10)).await;
        }
        world.longest_ms.fetch_max(started.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// Reads these keys from the engine.
    async fn read_back(
        &mut self,
        world: &World,
        keys: &BTreeSet<Vec<u8>>,
    ) -> Vec<(Vec<u8>, Option<Value>)> {
        let commands: Vec<_> = keys.iter().map(|key| model::read_back(key)).collect();
        let started = Instant::now();
        loop {
            assert!(
                started.elapsed() < TIMEOUT,
                "{self}: cannot read the keys back; {}",
                world.state()
            );
            self.connect(world).await;
            let Some(mut connection) = self.connection.take() else { continue };
            let mut replies = Vec::new();
            let outcome =
                self.unless_peer_is_lost(world, connection.exchange(&commands, &mut replies)).await;
            if matches!(outcome, Some(Ok(()))) && !replies.iter().any(|reply| is_refusal(reply)) {
                self.connection = Some(connection);
                let values = replies.iter().map(|reply| value(reply));
                return keys.iter().cloned().zip(values).collect();
            }
        }
    }

    fn name(&self) -> String {
        format!("client{}-{}", self.number, self.connections)
    }

    /// Connects to the primary. Tries again until that works.
    async fn connect(&mut self, world: &World) {
        let started = Instant::now();
        while self.connection.is_none() {
            self.engine = world.primary.load(Ordering::Relaxed);
            self.connections += 1;
            let opening = async {
                let mut connection = Connection::new(self.open(world).await?);
                let reply = connection.ask(&["CLIENT", "SETNAME", &self.name()]).await?;
                if reply == b"+OK\r\n" {
                    Ok(connection)
                } else {
                    Err(io::Error::other(brief(&reply)))
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
                    assert!(
                        started.elapsed() < TIMEOUT,
                        "{self} cannot connect; {}",
                        world.state()
                    );
                    sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    async fn open(&self, world: &World) -> io::Result<Box<dyn ByteStream>> {
        let address = world.rdma[self.engine];
        Ok(match self.way {
            Way::Ferrite => Box::new(world.connector.connect(address).await?),
            Way::FerriteOrTcp => Box::new(world.falling_back.connect(address).await?),
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

/// Returns the value in a reply to a command of [`model::read_back`].
fn value(reply: &[u8]) -> Option<Value> {
    let text = |value: &Reply<'_>| match value {
        Reply::Bulk(text) => text.to_vec(),
        other => panic!("an element is not a string: {other:?}"),
    };
    match Reply::parse(reply).expect("a reply") {
        Reply::Null => None,
        Reply::Bulk(text) => Some(Value::Text(text.to_vec())),
        Reply::Array(items) if items.is_empty() => None,
        Reply::Array(items) => Some(Value::List(items.iter().map(text).collect())),
        other => panic!("the reply is not a value: {other:?}"),
    }
}

/// Describes where the model and the engine differ. Hashes were read as lists of fields and values.
fn differences(model: &Model, found: &[(Vec<u8>, Option<Value>)]) -> String {
    let mut text = String::new();
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
            text += &format!("{}: found {found}, expected {wanted}; ", brief(key));
        }
    }
    text
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
