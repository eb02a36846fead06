//! The connections of a test: they send requests and measure the replies.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use ferrite_fabric::{Config, Fabric, Rdma};
use ferrite_proto::resp::{Limits, ReplyFramer, encode_command};
use ferrite_session::{Connector, client_config};
use ferrite_verbs::Verbs;
use hdrhistogram::Histogram;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::interrupt::Interrupt;
use super::key_space::KeySpace;
use super::keys::{Keys, Random};
use super::{Options, Test};

/// The longest latency of the histogram, in nanoseconds: an hour.
const LONGEST_NS: u64 = 3_600_000_000_000;
/// How long a server may take to answer a batch.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

trait Duplex: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Duplex for S {}

/// The transport of a test.
#[derive(Debug, Clone)]
pub(super) struct TransportInfo {
    pub(super) transport: String,
    pub(super) device: Option<String>,
    /// Whether the device is emulated in software.
    pub(super) software: bool,
    pub(super) fallback: Option<String>,
}

/// The result of a test.
pub(super) struct Run {
    pub(super) transport_info: Option<TransportInfo>,
    pub(super) seconds: f64,
    /// Requests within the measured time.
    pub(super) requests: u64,
    pub(super) errors: u64,
    /// The first error reply of the server.
    pub(super) first_error: Option<String>,
    /// Requests that were sent later than they were due.
    pub(super) late: u64,
    /// Requests with those of the warm-up.
    pub(super) all_requests: u64,
    /// In nanoseconds.
    pub(super) latency: Histogram<u64>,
}

impl Run {
    fn new() -> anyhow::Result<Self> {
        Ok(Self {
            transport_info: None,
            seconds: 0.0,
            requests: 0,
            errors: 0,
            first_error: None,
            late: 0,
            all_requests: 0,
            latency: Histogram::new_with_bounds(1, LONGEST_NS, 3)?,
        })
    }

    fn add(&mut self, other: &Self) {
        self.transport_info = self.transport_info.take().or_else(|| other.transport_info.clone());
        self.seconds = self.seconds.max(other.seconds);
        self.requests += other.requests;
        self.errors += other.errors;
        self.first_error = self.first_error.take().or_else(|| other.first_error.clone());
        self.late += other.late;
        self.all_requests += other.all_requests;
        self.latency += &other.latency;
    }
}

/// The parameters that the threads share.
struct Plan {
    test: Test,
    keys: Keys,
    key_space: Arc<KeySpace>,
    value: Vec<u8>,
}

/// Runs one test.
pub(super) fn run(
    options: &Options,
    test: Test,
    key_space: &Arc<KeySpace>,
    interrupt: &Interrupt,
) -> anyhow::Result<Run> {
    let plan = Arc::new(Plan {
        test,
        keys: Keys::new(options.keys, options.zipf),
        key_space: Arc::clone(key_space),
        value: vec![b'x'; options.size as usize],
    });
    // All connections start when the last one is open.
    let start = Arc::new(Barrier::new(options.connections as usize));
    let mut total = Run::new()?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..options.threads)
            .map(|thread| {
                let (plan, start) = (Arc::clone(&plan), Arc::clone(&start));
                scope.spawn(move || run_thread(options, thread, &plan, &start, interrupt))
            })
            .collect();
        for thread in threads {
            match thread.join() {
                Ok(run) => total.add(&run?),
                Err(_) => bail!("a thread panicked"),
            }
        }
        Ok(())
    })?;
    Ok(total)
}

fn run_thread(
    options: &Options,
    thread: u32,
    plan: &Arc<Plan>,
    start: &Arc<Barrier>,
    interrupt: &Interrupt,
) -> anyhow::Result<Run> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut total = Run::new()?;
    runtime
        .block_on(interrupt.unless_interrupted(async {
            let dialer = Dialer::new(options)?;
            let mut connections = JoinSet::new();
            let count = options.connections;
            for number in (thread..count).step_by(options.threads as usize) {
                let (stream, transport_info) = dialer.connect().await.context("cannot connect")?;
                total.transport_info = total.transport_info.take().or(Some(transport_info));
                let connection = LoadConnection::new(options, stream, number);
                let (plan, start) = (Arc::clone(plan), Arc::clone(start));
                connections.spawn(async move { connection.run(&plan, &start).await });
            }
            while let Some(run) = connections.join_next().await {
                total.add(&run.context("a connection panicked")??);
            }
            Ok(())
        }))
        .map(|()| total)
}

/// Writes every key once, for tests that read.
pub(super) fn fill(
    options: &Options,
    keys: &KeySpace,
    interrupt: &Interrupt,
) -> anyhow::Result<()> {
    let value = vec![b'x'; options.size as usize];
    let filling = for_each_key(options, "SET", |key, out| set(out, keys, key, &value));
    block_on(interrupt.unless_interrupted(filling))
}

/// Removes the keys of the run.
pub(super) fn remove(options: &Options, keys: &KeySpace) -> anyhow::Result<()> {
    // One command for each key: in a cluster, the keys of a command must be in one slot.
    block_on(for_each_key(options, "DEL", |key, out| {
        encode_command([b"DEL".as_slice(), keys.name(key).as_bytes()], out);
    }))
}

fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}

/// Sends the command that `encode` appends for each key, over one connection.
async fn for_each_key(
    options: &Options,
    command: &str,
    encode: impl Fn(u32, &mut Vec<u8>),
) -> anyhow::Result<()> {
    const BATCH: u32 = 100;
    let (stream, _) = Dialer::new(options)?.connect().await.context("cannot connect")?;
    let mut connection = LoadConnection::new(options, stream, 0);
    connection.authenticate().await?;
    for first in (0..options.keys).step_by(BATCH as usize) {
        connection.out.clear();
        let last = (first + BATCH).min(options.keys);
        (first..last).for_each(|key| encode(key, &mut connection.out));
        let errors = connection.exchange(last - first).await?;
        ensure!(
            errors == 0,
            "the server rejects {command}: {}",
            connection.first_error.unwrap_or_default()
        );
    }
    Ok(())
}

/// Opens connections.
enum Dialer {
    Unix(std::path::PathBuf),
    Net { connector: Connector, server: SocketAddr },
}

impl Dialer {
    fn new(options: &Options) -> anyhow::Result<Self> {
        if let Some(path) = &options.unix {
            return Ok(Self::Unix(path.clone()));
        }
        let server = options.server.context("no server given")?;
        // Enough receives for replies on all connections at once.
        let recv_queue_depth = options.connections.saturating_mul(4).clamp(64, 512);
        let config =
            Config { busy_poll_us: options.busy_poll_us, recv_queue_depth, ..client_config() };
        let fabric = Fabric::system().rdma(options.rdma).config(config).build()?;
        if options.rdma != Rdma::Forbid {
            tokio::spawn(fabric.drive());
        }
        let connector = Connector::new(&fabric).rdma(options.rdma);
        let connector = match options.local {
            Some(local) => connector.local(local),
            None => connector,
        };
        Ok(Self::Net { connector, server })
    }

    async fn connect(&self) -> io::Result<(Box<dyn Duplex>, TransportInfo)> {
        match self {
            Self::Unix(path) => {
                let transport_info = TransportInfo {
                    transport: "Unix socket".into(),
                    device: None,
                    software: false,
                    fallback: None,
                };
                Ok((Box::new(UnixStream::connect(path).await?), transport_info))
            }
            Self::Net { connector, server } => {
                let session = connector.connect(*server).await?;
                let transport_info = TransportInfo {
                    transport: session.transport().to_string(),
                    software: session.device().is_some_and(|device| is_software(&device)),
                    device: session.device(),
                    fallback: session.fallback().map(ToString::to_string),
                };
                Ok((Box::new(session), transport_info))
            }
        }
    }
}

fn is_software(device: &str) -> bool {
    let verbs = Verbs::system().ok();
    let device = verbs.and_then(|verbs| verbs.device(device).ok());
    device.is_some_and(|device| device.quirks().is_software)
}

/// One connection.
struct LoadConnection {
    stream: Box<dyn Duplex>,
    random: Random,
    pipeline: u32,
    gets: u8,
    auth: Option<String>,
    warmup: Duration,
    measured: Duration,
    /// The time between two batches of this connection, in an open loop.
    interval: Option<Duration>,
    framer: ReplyFramer,
    out: Vec<u8>,
    input: Vec<u8>,
    first_error: Option<String>,
}

impl LoadConnection {
    fn new(options: &Options, stream: Box<dyn Duplex>, number: u32) -> Self {
        let interval = |rate: u64| {
            let batches =
                rate as f64 / f64::from(options.connections) / f64::from(options.pipeline);
            Duration::from_secs_f64(1.0 / batches)
        };
        Self {
            stream,
            random: Random::new(u64::from(number) + 1),
            pipeline: options.pipeline,
            gets: options.gets,
            auth: options.auth.clone().or_else(|| std::env::var("REDISCLI_AUTH").ok()),
            warmup: options.warmup,
            measured: options.seconds,
            interval: options.rate.map(interval),
            framer: ReplyFramer::new(Limits::default()),
            out: Vec::new(),
            input: vec![0; 64 << 10],
            first_error: None,
        }
    }

    async fn authenticate(&mut self) -> anyhow::Result<()> {
        let Some(password) = self.auth.clone() else { return Ok(()) };
        self.out.clear();
        encode_command([b"AUTH".as_slice(), password.as_bytes()], &mut self.out);
        let errors = self.exchange(1).await?;
        ensure!(errors == 0, "AUTH: {}", self.first_error.take().unwrap_or_default());
        Ok(())
    }

    async fn run(mut self, plan: &Plan, start: &Barrier) -> anyhow::Result<Run> {
        self.authenticate().await?;
        start.wait().await;
        let mut run = Run::new()?;
        let started = Instant::now();
        let (mut from, mut until) = (started + self.warmup, started + self.warmup + self.measured);
        let mut is_warm = self.interval.is_some();
        // A random offset spreads the connections over the interval.
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
                run.late += u64::from(late && due >= from) * u64::from(self.pipeline);
            } else {
                due = now;
                // The measured time starts here, not before: a batch of the warm-up may have taken
                // longer than warm-up and measured time together.
                if !is_warm && now >= from {
                    (from, until, is_warm) = (now, now + self.measured, true);
                }
            }
            if due >= until || now >= until + REPLY_TIMEOUT {
                break;
            }
            self.build_batch(plan);
            let errors = self.exchange(self.pipeline).await?;
            let done = Instant::now();
            let count = u64::from(self.pipeline);
            run.all_requests += count;
            if due >= from {
                run.requests += count;
                run.errors += u64::from(errors);
                let took = done.saturating_duration_since(due).as_nanos();
                run.latency
                    .saturating_record_n(u64::try_from(took).unwrap_or(LONGEST_NS).max(1), count);
                run.seconds = done.saturating_duration_since(from).as_secs_f64();
            }
            if let Some(interval) = self.interval {
                due += interval;
            }
        }
        run.first_error = self.first_error.filter(|_| run.errors > 0);
        Ok(run)
    }

    /// Encodes the next batch of requests.
    fn build_batch(&mut self, plan: &Plan) {
        self.out.clear();
        for _ in 0..self.pipeline {
            let key = plan.keys.next(&mut self.random);
            let is_get = match plan.test {
                Test::Get => true,
                Test::Set => false,
                Test::Mixed => self.random.next() % 100 < u64::from(self.gets),
            };
            if is_get {
                let key = plan.key_space.name(key);
                encode_command([b"GET".as_slice(), key.as_bytes()], &mut self.out);
            } else {
                set(&mut self.out, &plan.key_space, key, &plan.value);
            }
        }
    }

    /// Sends the batch and waits for `replies` replies. Returns the number of errors among them.
    async fn exchange(&mut self, replies: u32) -> anyhow::Result<u32> {
        let exchanged = async {
            // Reads while it writes: a server may stop reading until its replies are read.
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
                        left -= u32::from(progress.complete);
                        rest = &rest[progress.consumed..];
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

fn closed_by_server(reply: Option<&str>) -> io::Error {
    let reply = reply.map_or(String::new(), |reply| format!(", after replying {reply}"));
    io::Error::new(io::ErrorKind::UnexpectedEof, format!("the server closed the connection{reply}"))
}

/// Waits until `due`, more exactly than by sleeping alone. Returns the current time.
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

fn set(out: &mut Vec<u8>, keys: &KeySpace, key: u32, value: &[u8]) {
    keys.mark_written();
    encode_command([b"SET".as_slice(), keys.name(key).as_bytes(), value], out);
}
