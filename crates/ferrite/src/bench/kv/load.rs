//! Connections that ask and count.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use ferrite_fabric::{Config, Fabric, Rdma};
use ferrite_proto::resp::{Limits, ReplyFramer, encode_command};
use ferrite_session::{Connector, client_config};
use hdrhistogram::Histogram;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::keys::{Keys, Random};
use super::{Options, Test};

/// Longest latency that is told apart, in nanoseconds: an hour.
const LONGEST_NS: u64 = 3_600_000_000_000;
/// How long a server may leave a request without an answer.
const PATIENCE: Duration = Duration::from_secs(30);

trait Duplex: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Duplex for S {}

/// What carried a test.
#[derive(Debug, Clone)]
pub(super) struct TransportInfo {
    pub(super) transport: String,
    pub(super) device: Option<String>,
    pub(super) fallback: Option<String>,
}

/// What came of a test.
pub(super) struct Run {
    pub(super) transport_info: Option<TransportInfo>,
    pub(super) seconds: f64,
    /// Within the measured time.
    pub(super) requests: u64,
    pub(super) errors: u64,
    /// What the server said to the first of them.
    pub(super) first_error: Option<String>,
    /// Sent later than they were due.
    pub(super) late: u64,
    /// The warm-up included.
    pub(super) all_requests: u64,
    /// Nanoseconds.
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

/// Everything that the threads share.
struct Plan {
    test: Test,
    keys: Keys,
    value: Vec<u8>,
}

/// One test.
pub(super) fn run(options: &Options, test: Test) -> anyhow::Result<Run> {
    let plan = Arc::new(Plan {
        test,
        keys: Keys::new(options.keys, options.zipf),
        value: vec![b'x'; options.size as usize],
    });
    // All connections begin when the last stands.
    let start = Arc::new(Barrier::new(options.connections as usize));
    let mut total = Run::new()?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..options.threads)
            .map(|thread| {
                let (plan, start) = (Arc::clone(&plan), Arc::clone(&start));
                scope.spawn(move || on_thread(options, thread, &plan, &start))
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

fn on_thread(
    options: &Options,
    thread: u32,
    plan: &Arc<Plan>,
    start: &Arc<Barrier>,
) -> anyhow::Result<Run> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut total = Run::new()?;
    runtime
        .block_on(async {
            let calling = Calling::new(options)?;
            let mut connections = JoinSet::new();
            let count = options.connections;
            for number in (thread..count).step_by(options.threads as usize) {
                let (stream, transport_info) = calling.connect().await.context("connecting")?;
                total.transport_info = total.transport_info.take().or(Some(transport_info));
                let asking = Asking::new(options, stream, number);
                let (plan, start) = (Arc::clone(plan), Arc::clone(start));
                connections.spawn(async move { asking.ask(&plan, &start).await });
            }
            while let Some(run) = connections.join_next().await {
                total.add(&run.context("a connection panicked")??);
            }
            Ok(())
        })
        .map(|()| total)
}

/// Writes every key once, so that there is something to read.
pub(super) fn fill(options: &Options) -> anyhow::Result<()> {
    const BATCH: u32 = 100;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (stream, _) = Calling::new(options)?.connect().await.context("connecting")?;
        let mut asking = Asking::new(options, stream, 0);
        asking.authenticate().await?;
        let value = vec![b'x'; options.size as usize];
        for first in (0..options.keys).step_by(BATCH as usize) {
            asking.out.clear();
            let last = (first + BATCH).min(options.keys);
            (first..last).for_each(|key| set(&mut asking.out, key, &value));
            let errors = asking.exchange(last - first).await?;
            ensure!(
                errors == 0,
                "the server refuses SET: {}",
                asking.first_error.unwrap_or_default()
            );
        }
        Ok(())
    })
}

/// How connections are opened.
enum Calling {
    Unix(std::path::PathBuf),
    Net { connector: Connector, server: SocketAddr },
}

impl Calling {
    fn new(options: &Options) -> anyhow::Result<Self> {
        if let Some(path) = &options.unix {
            return Ok(Self::Unix(path.clone()));
        }
        let server = options.server.context("no server")?;
        // answers of all of them at once
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
                let transport_info =
                    TransportInfo { transport: "Unix socket".into(), device: None, fallback: None };
                Ok((Box::new(UnixStream::connect(path).await?), transport_info))
            }
            Self::Net { connector, server } => {
                let session = connector.connect(*server).await?;
                let transport_info = TransportInfo {
                    transport: session.transport().to_string(),
                    device: session.device(),
                    fallback: session.fallback().map(ToString::to_string),
                };
                Ok((Box::new(session), transport_info))
            }
        }
    }
}

/// One connection.
struct Asking {
    stream: Box<dyn Duplex>,
    random: Random,
    pipeline: u32,
    gets: u8,
    auth: Option<String>,
    warmup: Duration,
    measured: Duration,
    /// Between two of its batches, in an open loop.
    every: Option<Duration>,
    framer: ReplyFramer,
    out: Vec<u8>,
    input: Vec<u8>,
    first_error: Option<String>,
}

impl Asking {
    fn new(options: &Options, stream: Box<dyn Duplex>, number: u32) -> Self {
        let each = |rate: u64| {
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
            every: options.rate.map(each),
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

    async fn ask(mut self, plan: &Plan, start: &Barrier) -> anyhow::Result<Run> {
        self.authenticate().await?;
        start.wait().await;
        let mut run = Run::new()?;
        let begun = Instant::now();
        let (mut from, mut until) = (begun + self.warmup, begun + self.warmup + self.measured);
        let mut is_warm = self.every.is_some();
        // Connections do not ask together, but one after the other.
        let mut due = begun
            + self.every.map_or(Duration::ZERO, |every| {
                every.mul_f64(self.random.next() as f64 / u64::MAX as f64)
            });
        loop {
            let mut now = Instant::now();
            if let Some(every) = self.every {
                now = wait_until(due).await;
                let late = now.saturating_duration_since(due) > every.max(Duration::from_millis(1));
                run.late += u64::from(late && due >= from) * u64::from(self.pipeline);
            } else {
                due = now;
                // The measured time begins here, not before: a batch of the warm-up may have taken
                // longer than both.
                if !is_warm && now >= from {
                    (from, until, is_warm) = (now, now + self.measured, true);
                }
            }
            if due >= until || now >= until + PATIENCE {
                break;
            }
            self.batch(plan);
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
            if let Some(every) = self.every {
                due += every;
            }
        }
        run.first_error = self.first_error.filter(|_| run.errors > 0);
        Ok(run)
    }

    /// Puts together what is asked next.
    fn batch(&mut self, plan: &Plan) {
        self.out.clear();
        for _ in 0..self.pipeline {
            let key = plan.keys.next(&mut self.random);
            let is_get = match plan.test {
                Test::Get => true,
                Test::Set => false,
                Test::Mixed => self.random.next() % 100 < u64::from(self.gets),
            };
            if is_get {
                let key = format!("key:{key}");
                encode_command([b"GET".as_slice(), key.as_bytes()], &mut self.out);
            } else {
                set(&mut self.out, key, &plan.value);
            }
        }
    }

    /// Sends what is put together and waits for as many answers; how many of them are errors.
    async fn exchange(&mut self, answers: u32) -> anyhow::Result<u32> {
        let exchanged = async {
            // Both at once: a server may stop reading until its answers are taken.
            let (mut reader, mut writer) = tokio::io::split(&mut self.stream);
            let writing = async {
                writer.write_all(&self.out).await?;
                writer.flush().await
            };
            let (framer, input, first_error) =
                (&mut self.framer, &mut self.input, &mut self.first_error);
            let reading = async {
                let (mut left, mut errors) = (answers, 0);
                while left > 0 {
                    let count = reader.read(input).await?;
                    if count == 0 {
                        return Err(hung_up(first_error.as_deref()));
                    }
                    let mut rest = &input[..count];
                    while !rest.is_empty() {
                        let is_error = !framer.is_inside() && rest[0] == b'-';
                        let progress = framer.feed(rest).map_err(io::Error::other)?;
                        if is_error {
                            errors += 1;
                            let said = String::from_utf8_lossy(&rest[..progress.consumed]);
                            first_error.get_or_insert_with(|| said.trim_end().to_owned());
                        }
                        left -= u32::from(progress.complete);
                        rest = &rest[progress.consumed..];
                    }
                }
                Ok(errors)
            };
            let (wrote, errors) = tokio::join!(writing, reading);
            // A server that refuses says why and hangs up: what it said matters more than what
            // could not be written.
            match (wrote, errors) {
                (Ok(()), errors) | (_, errors @ Err(_)) => errors,
                (Err(_), Ok(_)) if first_error.is_some() => Err(hung_up(first_error.as_deref())),
                (Err(error), Ok(_)) => Err(error),
            }
        };
        let done = tokio::time::timeout(PATIENCE, exchanged).await;
        Ok(done.context("no answer within 30 s")??)
    }
}

fn hung_up(said: Option<&str>) -> io::Error {
    let said = said.map_or(String::new(), |said| format!(": it said {said}"));
    io::Error::new(io::ErrorKind::UnexpectedEof, format!("the server hung up{said}"))
}

/// Waits for a moment, and not a millisecond longer, as sleeping alone might.
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

fn set(out: &mut Vec<u8>, key: u32, value: &[u8]) {
    let key = format!("key:{key}");
    encode_command([b"SET".as_slice(), key.as_bytes(), value], out);
}
