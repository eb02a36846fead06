//! Runs the connections of a test, on one or more threads.

use std::future::Future;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use ferrite_fabric::Rdma;
use ferrite_proto::resp::encode_command;
use tokio::sync::{Barrier, watch};
use tokio::task::JoinSet;

use super::Options;
use super::command::Requests;
use super::connection::{LoadConnection, Plan, encode_set};
use super::dial::Dialer;
use super::interrupt::Interrupt;
use super::key_space::KeySpace;
use super::keys::Keys;
use super::primaries::{Primaries, name_node};
use super::run::{Run, SharedRun};

/// Time between two calls of [`Turn::on_tick`].
const TICK: Duration = Duration::from_millis(200);

/// One measurement over one transport.
pub(super) struct Turn<'a> {
    pub(super) options: &'a Options,
    pub(super) rdma: Rdma,
    pub(super) requests: &'a Arc<Requests>,
    pub(super) measured: Duration,
    pub(super) key_space: &'a Arc<KeySpace>,
    pub(super) interrupt: &'a Interrupt,
    /// Receives the time and the number of requests since the start, at intervals.
    pub(super) on_tick: Option<&'a (dyn Fn(Duration, u64) + Sync)>,
}

/// The state that the threads of a turn share.
struct Shared {
    plan: Plan,
    /// All connections start when the last one is open and authenticated.
    start: Barrier,
    /// The results so far, one for each connection.
    runs: Vec<SharedRun>,
}

impl Turn<'_> {
    /// Runs all connections. If one connection fails, all end. Returns the results up to that
    /// point, and the failure.
    pub(super) fn run(&self) -> anyhow::Result<(Run, Option<anyhow::Error>)> {
        let Options { connections, threads, keys, zipf, size, .. } = *self.options;
        let primaries = find_primaries(self.options, self.rdma, self.key_space)?;
        let shared = Arc::new(Shared {
            plan: Plan {
                requests: Arc::clone(self.requests),
                keys: Keys::new(keys, zipf),
                key_count: keys,
                key_space: Arc::clone(self.key_space),
                value: vec![b'x'; size as usize],
                measured: self.measured,
                primaries,
            },
            start: Barrier::new(connections as usize),
            runs: (0..connections).map(|_| SharedRun::new()).collect::<Result<_, _>>()?,
        });
        let (stop, stopped) = watch::channel(false);
        let (end, ended) = mpsc::channel::<()>();
        let failure = std::thread::scope(|scope| {
            if let Some(on_tick) = self.on_tick {
                let (shared, started) = (&shared, Instant::now());
                scope.spawn(move || {
                    while ended.recv_timeout(TICK) == Err(mpsc::RecvTimeoutError::Timeout) {
                        let requests = shared.runs.iter().map(|run| run.lock().all_requests).sum();
                        on_tick(started.elapsed(), requests);
                    }
                });
            }
            let threads: Vec<_> = (0..threads)
                .map(|thread| {
                    let (shared, stop, stopped) = (&shared, &stop, stopped.clone());
                    scope.spawn(move || {
                        let done = self.run_thread(thread, shared, stopped);
                        if done.is_err() {
                            stop.send_replace(true);
                        }
                        done
                    })
                })
                .collect();
            let outcomes = threads.into_iter().map(|thread| {
                thread.join().unwrap_or_else(|_| Err(anyhow!("a thread panicked"))).err()
            });
            let failure = outcomes.fold(None, Option::or);
            drop(end);
            failure
        });
        let mut total = Run::new()?;
        shared.runs.iter().for_each(|run| total.add_concurrent(&run.lock()));
        Ok((total, failure))
    }

    /// Runs the connections of one thread until the measured time is over, another thread fails or
    /// a signal arrives.
    fn run_thread(
        &self,
        thread: u32,
        shared: &Arc<Shared>,
        mut stopped: watch::Receiver<bool>,
    ) -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let running = async {
            let dialer = Dialer::new(self.options, self.rdma)?;
            let mut connections = JoinSet::new();
            let Options { connections: count, threads, .. } = *self.options;
            for number in (thread..count).step_by(threads as usize) {
                let connecting = dialer.connect_number(number, shared.plan.primaries.as_ref());
                let (stream, transport_info) = connecting.await.context("cannot connect")?;
                let mut connection = LoadConnection::new(self.options, stream, number);
                let shared = Arc::clone(shared);
                connections.spawn(async move {
                    let run = &shared.runs[number as usize];
                    run.lock().transport_info = Some(transport_info);
                    let done = connection.run(&shared.plan, &shared.start, run).await;
                    if let Some(info) = &mut run.lock().transport_info {
                        info.add_moves();
                    }
                    name_node(done, shared.plan.primaries.as_ref(), number)
                });
            }
            while let Some(done) = connections.join_next().await {
                done.context("a connection panicked")??;
            }
            Ok(())
        };
        runtime.block_on(self.interrupt.unless_interrupted(async {
            tokio::select! {
                biased;
                _ = stopped.wait_for(|is_stopped| *is_stopped) => Ok(()),
                done = running => done,
            }
        }))
    }
}

/// Writes every key once, for tests that read. Calls `on_tick` with the number of keys written so
/// far.
pub(super) fn fill(
    options: &Options,
    rdma: Rdma,
    keys: &KeySpace,
    interrupt: &Interrupt,
    on_tick: impl Fn(u32),
) -> anyhow::Result<()> {
    let value = vec![b'x'; options.size as usize];
    let encode = |key, out: &mut Vec<u8>| encode_set(out, keys, key, &value);
    let filling = for_each_key(options, (rdma, keys), "SET", encode, on_tick);
    block_on(interrupt.unless_interrupted(filling))
}

/// Removes the keys of the run.
pub(super) fn remove(options: &Options, rdma: Rdma, keys: &KeySpace) -> anyhow::Result<()> {
    // One command for each key: in a cluster, the keys of a command must be in one slot.
    let encode = |key, out: &mut Vec<u8>| {
        encode_command([b"DEL".as_slice(), keys.name(key).as_bytes()], out);
    };
    block_on(for_each_key(options, (rdma, keys), "DEL", encode, |_| ()))
}

fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}

/// Sends the command that `encode` appends for each key. Uses one connection, or, in a cluster, one
/// connection to each primary.
async fn for_each_key(
    options: &Options,
    (rdma, keys): (Rdma, &KeySpace),
    command: &str,
    encode: impl Fn(u32, &mut Vec<u8>),
    on_tick: impl Fn(u32),
) -> anyhow::Result<()> {
    const BATCH: usize = 100;
    let primaries = match options.cluster {
        true => Some(Primaries::find(options, rdma, keys).await?),
        false => None,
    };
    let dialer = Dialer::new(options, rdma)?;
    let mut done = 0;
    // One connection for each primary: the connections with the lowest numbers.
    for number in 0..primaries.as_ref().map_or(1, Primaries::count) {
        let connecting = dialer.connect_number(number as u32, primaries.as_ref());
        let (stream, _) = connecting.await.context("cannot connect")?;
        let mut connection = LoadConnection::new(options, stream, 0);
        name_node(connection.authenticate().await, primaries.as_ref(), number as u32)?;
        let is_own =
            |key: &u32| primaries.as_ref().is_none_or(|primaries| primaries.has(number, *key));
        let own: Vec<_> = (0..options.keys).filter(is_own).collect();
        for batch in own.chunks(BATCH) {
            connection.out.clear();
            batch.iter().for_each(|key| encode(*key, &mut connection.out));
            let errors = connection.exchange(batch.len() as u32).await;
            let errors = name_node(errors, primaries.as_ref(), number as u32)?;
            ensure!(
                errors == 0,
                "the server rejects {command}: {}",
                connection.first_error.unwrap_or_default()
            );
            done += batch.len() as u32;
            on_tick(done);
        }
    }
    Ok(())
}

/// Returns the primaries of the cluster, with `--cluster`.
fn find_primaries(
    options: &Options,
    rdma: Rdma,
    keys: &KeySpace,
) -> anyhow::Result<Option<Primaries>> {
    match options.cluster {
        true => block_on(Primaries::find(options, rdma, keys)).map(Some),
        false => Ok(None),
    }
}
