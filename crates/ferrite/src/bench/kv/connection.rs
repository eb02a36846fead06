//! One connection of a test: sends requests and measures the replies.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use ferrite_proto::resp::{Limits, ReplyFramer, encode_command};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::Barrier;

use super::command::{Requests, Values};
use super::dial::Duplex;
use super::key_space::KeySpace;
use super::keys::{Keys, Random};
use super::primaries::Primaries;
use super::run::{LONGEST_NS, Run, SharedRun};
use super::{Options, Test};

/// How long a server may take to answer a batch. In an open loop, this is also how long after the
/// measured time a connection may still send batches that are overdue.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

/// The parameters that all connections of a turn share.
pub(super) struct Plan {
    pub(super) requests: Arc<Requests>,
    pub(super) keys: Keys,
    pub(super) key_count: u32,
    pub(super) key_space: Arc<KeySpace>,
    pub(super) value: Vec<u8>,
    /// How long to measure, after the warm-up.
    pub(super) measured: Duration,
    /// The primaries, in a cluster.
    pub(super) primaries: Option<Primaries>,
}

impl Plan {
    /// Returns whether the connection with this number may use a key.
    fn may_use(&self, connection: u32, key: u32) -> bool {
        self.primaries
            .as_ref()
            .is_none_or(|primaries| primaries.has(primaries.of_connection(connection), key))
    }
}

/// One connection.
pub(super) struct LoadConnection {
    number: u32,
    stream: Box<dyn Duplex>,
    random: Random,
    pipeline: u32,
    gets: u8,
    /// The arguments of AUTH: a password, or a user and a password; empty without a password.
    credentials: Vec<String>,
    warmup: Duration,
    /// The time between two batches of this connection, in an open loop.
    interval: Option<Duration>,
    framer: ReplyFramer,
    pub(super) out: Vec<u8>,
    input: Vec<u8>,
    pub(super) first_error: Option<String>,
}

impl LoadConnection {
    pub(super) fn new(options: &Options, stream: Box<dyn Duplex>, number: u32) -> Self {
        let interval = |rate: u64| {
            let batches =
                rate as f64 / f64::from(options.connections) / f64::from(options.pipeline);
            Duration::from_secs_f64(1.0 / batches)
        };
        Self {
            number,
            stream,
            random: Random::new(u64::from(number) + 1),
            pipeline: options.pipeline,
            gets: options.gets,
            credentials: options.credentials(),
            warmup: options.warmup,
            interval: options.rate.map(interval),
            framer: ReplyFramer::new(Limits::default()),
            out: Vec::new(),
            input: vec![0; 64 << 10],
            first_error: None,
        }
    }

    pub(super) async fn authenticate(&mut self) -> anyhow::Result<()> {
        if self.credentials.is_empty() {
            return Ok(());
        }
        let words: Vec<&str> =
            ["AUTH"].into_iter().chain(self.credentials.iter().map(String::as_str)).collect();
        self.out.clear();
        encode_command(words, &mut self.out);
        let errors = self.exchange(1).await?;
        ensure!(errors == 0, "AUTH: {}", self.first_error.take().unwrap_or_default());
        Ok(())
    }

    /// Sends a command, and returns its whole reply.
    pub(super) async fn ask(&mut self, words: &[&str]) -> anyhow::Result<Vec<u8>> {
        self.out.clear();
        encode_command(words, &mut self.out);
        let asked = async {
            self.stream.write_all(&self.out).await?;
            self.stream.flush().await?;
            let (mut reply, mut framer) = (Vec::new(), ReplyFramer::new(Limits::default()));
            loop {
                let count = self.stream.read(&mut self.input).await?;
                if count == 0 {
                    return Err(closed_by_server(None));
                }
                let progress = framer.feed(&self.input[..count]).map_err(io::Error::other)?;
                reply.extend_from_slice(&self.input[..progress.consumed]);
                if progress.complete {
                    return Ok(reply);
                }
            }
        };
        let done = tokio::time::timeout(REPLY_TIMEOUT, asked).await;
        Ok(done.context("the server did not answer within 30 s")??)
    }

    /// Sends requests until the time is over. Records every batch in `shared`, so that a failure
    /// does not lose earlier results.
    pub(super) async fn run(
        &mut self,
        plan: &Plan,
        start: &Barrier,
        shared: &SharedRun,
    ) -> anyhow::Result<()> {
        self.authenticate().await?;
        start.wait().await;
        let started = Instant::now();
        let (mut from, mut until) = (started + self.warmup, started + self.warmup + plan.measured);
        let mut is_warm = self.interval.is_some();
        // In an open loop, a random offset spreads the connections over the interval.
        let mut due = started
            + self.interval.map_or(Duration::ZERO, |interval| {
                interval.mul_f64(self.random.next() as f64 / u64::MAX as f64)
            });
        loop {
            let mut now = Instant::now();
            if let Some(interval) = self.interval {
                now = wait_until(due).await;
                let late =
                    now.saturating_duration_since(due) > interval.max(Duration::from_millis(1));
                if late && due >= from {
                    shared.lock().late += u64::from(self.pipeline);
                }
            } else {
                due = now;
                // The measured time starts with the first batch after the warm-up, not at a fixed
                // time: the last batch of the warm-up may take longer than warm-up and measured
                // time together.
                if !is_warm && now >= from {
                    (from, until, is_warm) = (now, now + plan.measured, true);
                }
            }
            if due >= until || now >= until + REPLY_TIMEOUT {
                return Ok(());
            }
            self.build_batch(plan);
            let errors = self.exchange(self.pipeline).await;
            let errors = errors.context("cannot measure on this connection")?;
            self.record(&mut shared.lock(), due, from, errors);
            if let Some(interval) = self.interval {
                due += interval;
            }
        }
    }

    /// Adds an answered batch to the result. A batch of the warm-up only counts in `all_requests`.
    fn record(&self, run: &mut Run, due: Instant, from: Instant, errors: u32) {
        let done = Instant::now();
        let count = u64::from(self.pipeline);
        run.all_requests += count;
        if due < from {
            return;
        }
        run.requests += count;
        run.errors += u64::from(errors);
        if errors > 0 && run.first_error.is_none() {
            run.first_error.clone_from(&self.first_error);
        }
        let took = done.saturating_duration_since(due).as_nanos();
        run.latency.saturating_record_n(u64::try_from(took).unwrap_or(LONGEST_NS).max(1), count);
        run.seconds = done.saturating_duration_since(from).as_secs_f64();
    }

    /// Encodes the next batch of requests.
    fn build_batch(&mut self, plan: &Plan) {
        self.out.clear();
        let number = self.number;
        let is_own = |key| plan.may_use(number, key);
        for _ in 0..self.pipeline {
            let test = match &*plan.requests {
                Requests::Test(test) => *test,
                Requests::Command(template) => {
                    let values = Values {
                        key_space: &plan.key_space,
                        keys: &plan.keys,
                        is_own: &is_own,
                        key_count: plan.key_count,
                        data: &plan.value,
                    };
                    template.encode(&values, &mut self.random, &mut self.out);
                    continue;
                }
            };
            let key = plan.keys.next_of(&mut self.random, is_own);
            let is_get = match test {
                Test::Get => true,
                Test::Set => false,
                Test::Mixed => self.random.next() % 100 < u64::from(self.gets),
            };
            if is_get {
                let key = plan.key_space.name(key);
                encode_command([b"GET".as_slice(), key.as_bytes()], &mut self.out);
            } else {
                encode_set(&mut self.out, &plan.key_space, key, &plan.value);
            }
        }
    }

    /// Sends the batch and waits for `replies` replies. Returns the number of errors among them.
    pub(super) async fn exchange(&mut self, replies: u32) -> anyhow::Result<u32> {
        let exchanged = async {
            // Reads while it writes, because a server may stop reading until its replies are read.
            let (mut reader, mut writer) = tokio::io::split(&mut self.stream);
            let writing = async {
                writer.write_all(&self.out).await?;
                writer.flush().await
            };
            let (framer, input, first_error) =
                (&mut self.framer, &mut self.input, &mut self.first_error);
            let reading = async {
                let (mut left, mut errors) = (replies, 0);
                while left > 0 {
                    let count = reader.read(input).await?;
                    if count == 0 {
                        return Err(closed_by_server(first_error.as_deref()));
                    }
                    let mut rest = &input[..count];
                    while !rest.is_empty() {
                        let is_error = !framer.is_inside() && rest[0] == b'-';
                        let progress = framer.feed(rest).map_err(io::Error::other)?;
                        if is_error {
                            errors += 1;
                            let reply = String::from_utf8_lossy(&rest[..progress.consumed]);
                            first_error.get_or_insert_with(|| reply.trim_end().to_owned());
                        }
                        rest = &rest[progress.consumed..];
                        let complete = u32::from(progress.complete);
                        left = left.checked_sub(complete).ok_or_else(too_many_replies)?;
                    }
                }
                Ok(errors)
            };
            let (wrote, errors) = tokio::join!(writing, reading);
            // A server that rejects a client sends the reason and closes the connection. That reply
            // matters more than the failed write.
            match (wrote, errors) {
                (Ok(()), errors) | (_, errors @ Err(_)) => errors,
                (Err(_), Ok(_)) if first_error.is_some() => {
                    Err(closed_by_server(first_error.as_deref()))
                }
                (Err(error), Ok(_)) => Err(error),
            }
        };
        let done = tokio::time::timeout(REPLY_TIMEOUT, exchanged).await;
        Ok(done.context("the server did not answer within 30 s")??)
    }
}

fn too_many_replies() -> io::Error {
    let message = "the server sent more replies than requests; SUBSCRIBE, MONITOR and other \
                   commands with several replies cannot be measured";
    io::Error::new(io::ErrorKind::InvalidData, message)
}

fn closed_by_server(reply: Option<&str>) -> io::Error {
    let reply = reply.map_or(String::new(), |reply| format!(", after replying {reply}"));
    io::Error::new(io::ErrorKind::UnexpectedEof, format!("the server closed the connection{reply}"))
}

/// Waits until `due`. Sleeps first, then polls the clock, because a sleep may end too late. Returns
/// the current time.
async fn wait_until(due: Instant) -> Instant {
    const EARLY: Duration = Duration::from_millis(2);
    if let Some(early) = due.checked_sub(EARLY).filter(|early| *early > Instant::now()) {
        tokio::time::sleep_until(early.into()).await;
    }
    loop {
        let now = Instant::now();
        if now >= due {
            return now;
        }
        tokio::task::yield_now().await;
    }
}

/// Appends a SET of a key of the run.
pub(super) fn encode_set(out: &mut Vec<u8>, keys: &KeySpace, key: u32, value: &[u8]) {
    keys.mark_written();
    encode_command([b"SET".as_slice(), keys.name(key).as_bytes(), value], out);
}
