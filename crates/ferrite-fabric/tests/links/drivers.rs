//! The ways to drive a fabric: under tokio, on a thread, from the caller's own event loop.
//! Everything that waits is woken.

use std::future::Future;
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use ferrite_fabric::mem::PoolConfig;
use ferrite_fabric::wire::{GrantToken, Rights};
use ferrite_fabric::{Config, ConnectOptions, Error, ErrorKind, Fabric, Link, Listener};
use futures_util::join;
use rustix::event::{PollFd, PollFlags, Timespec, epoll};
use tokio::runtime::Builder;
use tokio::time::timeout;

use super::pair::{Pair, assert_unused, buffer, connect, filled, pattern, poll_once};
use super::{Fixture, KIB, TEST_TIMEOUT};
use ferrite_testkit::Random;

const CLIENTS: u64 = 4;

/// Echoes every message until the peer closes.
async fn echo(link: Link) -> Result<(), Error> {
    loop {
        match link.recv().await {
            Ok(message) => {
                let (channel, parts) = (message.channel(), message.into_pieces());
                // Received memory belongs to the same pool, so nothing is copied.
                link.send_parts(channel, parts).await?;
            }
            Err(error) if error.kind() == ErrorKind::Closed => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

/// Sends messages, checks the echoes, then closes.
async fn check_echoes(link: Link, client: u64, rounds: u64) -> Result<(), Error> {
    for round in 0..rounds {
        let len = (round as usize * 1327 + client as usize) % (40 * KIB);
        let bytes = pattern(client << 32 | round, len);
        let (sent, answer) =
            join!(link.send((round % 5) as u16, filled(link.fabric(), &bytes)), link.recv());
        sent?;
        assert!(answer?.to_vec() == bytes, "client {client}: the echo of round {round} differs");
    }
    link.close().await
}

/// Makes two fabrics, and a listener on the second.
fn fabrics(fixture: &Fixture, config: &Config) -> (Fabric, Fabric, Listener) {
    let [host, peer] = &fixture.hosts;
    let [a, b] = [peer, host].map(|host| fixture.fabric(host, config));
    let listener = b.listen(host.any_port()).expect("listen");
    (a, b, listener)
}

fn under_tokio(fixture: &Fixture, mut builder: Builder) {
    let runtime = builder.enable_all().build().expect("a runtime");
    for busy_poll_us in [0, 50] {
        let (a, b, mut listener) = fabrics(fixture, &Config { busy_poll_us, ..Config::default() });
        let pools = [a.pool().clone(), b.pool().clone()];
        let rounds = 60 / fixture.work_divisor.min(10) as u64;
        runtime.block_on(async {
            let driving = [tokio::spawn(a.drive()), tokio::spawn(b.drive())];
            let mut tasks = Vec::new();
            for client in 0..CLIENTS {
                let begun = Instant::now();
                let calling = connect(&a, &fixture.hosts[1], &listener);
                let (there, here) =
                    timeout(TEST_TIMEOUT, async { join!(calling, listener.accept()) })
                        .await
                        .expect("a link in time");
                assert!(
                    begun.elapsed() < Duration::from_secs(4),
                    "the handshake took {:?}",
                    begun.elapsed()
                );
                tasks.push(tokio::spawn(check_echoes(there.expect("connect"), client, rounds)));
                tasks.push(tokio::spawn(echo(here.expect("accept"))));
            }
            for task in tasks {
                let done = timeout(TEST_TIMEOUT, task).await.expect("answers in time");
                done.expect("the task did not panic").expect("closed cleanly");
            }
            // The drivers end when the last handle on the fabrics is dropped.
            drop((a, b, listener));
            for driver in driving {
                let driven = timeout(TEST_TIMEOUT, driver).await.expect("the driver ends in time");
                driven.expect("the task did not panic").expect("driver ends");
            }
        });
        pools.iter().for_each(assert_unused);
    }
}

pub(crate) fn tokio_on_several_threads(fixture: &Fixture) {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(2);
    under_tokio(fixture, builder);
}

pub(crate) fn tokio_on_one_thread(fixture: &Fixture) {
    under_tokio(fixture, Builder::new_current_thread());
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits for a future that another thread drives. Returns `None` when the time limit is over.
fn wait<F: Future>(future: F, timeout: Duration) -> Option<F::Output> {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    let deadline = Instant::now() + timeout;
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return Some(output);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        thread::park_timeout(left);
    }
}

fn in_time<F: Future>(future: F) -> F::Output {
    wait(future, TEST_TIMEOUT).expect("the future is ready in time")
}

/// Each fabric is driven by a thread of its own, and clients run on other threads.
pub(crate) fn dedicated_threads(fixture: &Fixture) {
    for busy_poll_us in [0, 50] {
        let (a, b, mut listener) = fabrics(fixture, &Config { busy_poll_us, ..Config::default() });
        let pools = [a.pool().clone(), b.pool().clone()];
        let rounds = 60 / fixture.work_divisor.min(10) as u64;
        let driving = [&a, &b].map(|fabric| fabric.spawn_thread().expect("a thread"));
        thread::scope(|scope| {
            for client in 0..CLIENTS {
                let calling = connect(&a, &fixture.hosts[1], &listener);
                let (there, here) = in_time(async { join!(calling, listener.accept()) });
                let (there, here) = (there.expect("connect"), here.expect("accept"));
                scope.spawn(move || {
                    in_time(check_echoes(there, client, rounds)).expect("closed cleanly");
                });
                scope.spawn(move || in_time(echo(here)).expect("closed cleanly"));
            }
        });
        drop((a, b, listener));
        for thread in driving {
            ferrite_testkit::join(thread, TEST_TIMEOUT, "the end of the driver thread");
        }
        pools.iter().for_each(assert_unused);
    }
}

/// Several threads send on one link while another receives. Each sender drives the fabric with its
/// own future.
pub(crate) fn one_link_many_threads(fixture: &Fixture) {
    const SENDERS: u16 = 4;
    let (a, b, mut listener) = fabrics(fixture, &Config::default());
    let each = 300 / fixture.work_divisor as u64;
    let driving = b.spawn_thread().expect("a thread");
    let calling = connect(&a, &fixture.hosts[1], &listener);
    let (there, here) = a.block_on(async { join!(calling, listener.accept()) });
    let (there, here) = (there.expect("connect"), here.expect("accept"));
    thread::scope(|scope| {
        for channel in 0..SENDERS {
            let (a, there) = (&a, &there);
            // The senders take turns at driving the fabric.
            scope.spawn(move || {
                for number in 0..each {
                    let buf = filled(a, &pattern(number, (number % 700) as usize));
                    a.block_on(there.send(channel, buf)).expect("acknowledged");
                }
            });
        }
        scope.spawn(|| {
            let mut next = [0; SENDERS as usize];
            for _ in 0..each * u64::from(SENDERS) {
                let message = in_time(here.recv()).expect("a message");
                let number = &mut next[usize::from(message.channel())];
                assert!(
                    message.to_vec() == pattern(*number, (*number % 700) as usize),
                    "message {number} is missing or was changed"
                );
                *number += 1;
            }
        });
    });
    a.block_on(there.close()).expect("closed cleanly");
    drop((there, here, listener, b));
    driving.join().expect("the thread did not panic");
}

/// Runs a plain epoll loop that knows only the fabrics' descriptors. A wait that reaches its time
/// limit means a lost wake-up.
fn run_in_epoll_loop(fixture: &Fixture, busy_poll_us: u32, trigger: epoll::EventFlags) {
    let pair = Pair::with(fixture, &Config { busy_poll_us, ..Config::default() });
    let rounds = 200 / fixture.work_divisor.min(10) as u64;
    let poll = epoll::create(epoll::CreateFlags::CLOEXEC).expect("epoll");
    let ends = [&pair.a, &pair.b];
    for (token, end) in (0..).zip(ends) {
        let data = epoll::EventData::new_u64(token);
        epoll::add(&poll, end.fabric.as_fd(), data, epoll::EventFlags::IN | trigger)
            .expect("epoll");
    }
    let bytes = |round: u64| pattern(round, (round as usize * 997) % (20 * KIB));
    let timeout = Timespec { tv_sec: 5, tv_nsec: 0 };
    let mut asked = 0;
    let mut answered = 0;
    pair.a.link.post_bytes(0, &bytes(asked)).expect("room in the queue");
    for end in ends {
        end.fabric.progress();
    }
    while answered < rounds {
        // Before the loop waits again, it handles everything that `progress` delivered.
        let mut busy = true;
        while std::mem::take(&mut busy) {
            while let Some(message) = pair.b.link.try_recv().expect("link is up") {
                pair.b.link.post_bytes(0, &message.to_vec()).expect("room in the queue");
                pair.b.fabric.progress();
                busy = true;
            }
            while let Some(message) = pair.a.link.try_recv().expect("link is up") {
                assert!(
                    message.to_vec() == bytes(answered),
                    "the echo of round {answered} differs"
                );
                (answered, asked) = (answered + 1, asked + 1);
                pair.a.link.post_bytes(0, &bytes(asked)).expect("room in the queue");
                pair.a.fabric.progress();
                busy = true;
            }
        }
        let mut events =
            [epoll::Event { flags: epoll::EventFlags::IN, data: epoll::EventData::new_u64(0) }; 4];
        let ready = epoll::wait(&poll, &mut events[..], Some(&timeout)).expect("epoll");
        assert!(ready > 0, "lost wake-up in round {answered}");
        for event in &events[..ready] {
            ends[event.data.u64() as usize].fabric.progress();
        }
    }
    drop(poll);
    pair.end();
}

pub(crate) fn epoll_loop_level_triggered(fixture: &Fixture) {
    for busy_poll_us in [0, 50] {
        run_in_epoll_loop(fixture, busy_poll_us, epoll::EventFlags::empty());
    }
}

pub(crate) fn epoll_loop_edge_triggered(fixture: &Fixture) {
    for busy_poll_us in [0, 50] {
        run_in_epoll_loop(fixture, busy_poll_us, epoll::EventFlags::ET);
    }
}

pub(crate) fn idle_fabrics_sleep(fixture: &Fixture) {
    let (a, b, mut listener) = fabrics(fixture, &Config::default());
    let driving = [&a, &b].map(|fabric| fabric.spawn_thread().expect("a thread"));
    let calling = connect(&a, &fixture.hosts[1], &listener);
    let links = in_time(async { join!(calling, listener.accept()) });
    let (there, here) = (links.0.expect("connect"), links.1.expect("accept"));
    in_time(there.send_bytes(0, b"hello")).expect("acknowledged");
    in_time(here.recv()).expect("a message");
    thread::sleep(Duration::from_millis(100));
    let before = [&a, &b].map(|fabric| fabric.stats().passes);
    thread::sleep(Duration::from_millis(500));
    let after = [&a, &b].map(|fabric| fabric.stats().passes);
    for (before, after) in before.into_iter().zip(after) {
        assert!(
            after - before < 1000,
            "{} passes in half a second without traffic",
            after - before
        );
    }
    drop((there, here, listener, a, b));
    driving.into_iter().for_each(|thread| thread.join().expect("the thread did not panic"));
}

/// Memory that the application releases is posted again, although nothing notifies the fabric.
pub(crate) fn reposts_released_memory(fixture: &Fixture) {
    let memory =
        PoolConfig { receive_reserve: 2 << 20, memory_pool_max: 64 << 20, ..PoolConfig::default() };
    let config = Config { memory, recv_queue_depth: 64, ..Config::default() };
    let (a, b, mut listener) = fabrics(fixture, &config);
    let driving = [&a, &b].map(|fabric| fabric.spawn_thread().expect("a thread"));
    let calling = connect(&a, &fixture.hosts[1], &listener);
    let links = in_time(async { join!(calling, listener.accept()) });
    let (there, here) = (links.0.expect("connect"), links.1.expect("accept"));
    for number in 0..600_u64 {
        there.post_bytes(0, &pattern(number, 300)).expect("room in the queue");
    }
    let mut kept = Vec::new();
    while let Some(message) = wait(here.recv(), Duration::from_secs(2)) {
        kept.push(message.expect("link is up"));
        assert!(kept.len() <= 256, "more messages than fit in 2 MiB");
    }
    let mut received = kept.len() as u64;
    assert!(received >= 128, "only {received} messages in 2 MiB");
    kept.clear();
    while received < 600 {
        let message = wait(here.recv(), TEST_TIMEOUT).expect("messages continue");
        assert!(
            message.expect("link is up").to_vec() == pattern(received, 300),
            "message {received} is missing or was changed"
        );
        received += 1;
    }
    drop((there, here, listener, a, b));
    driving.into_iter().for_each(|thread| thread.join().expect("the thread did not panic"));
}

/// Threads connect, send, read, abort and drop links at random, while others drive the fabrics.
pub(crate) fn threads_use_links_at_random(fixture: &Fixture) {
    let (a, b, mut listener) = fabrics(fixture, &Config { window: 8, ..Config::default() });
    let pools = [a.pool().clone(), b.pool().clone()];
    let driving = [&a, &b].map(|fabric| fabric.spawn_thread().expect("a thread"));
    let rounds = 60 / fixture.work_divisor.min(10) as u64;
    let (target, over) = (listener.local_addr(), &std::sync::atomic::AtomicBool::new(false));
    thread::scope(|scope| {
        let callers: Vec<_> = (0..3)
            .map(|seed| {
                let a = &a;
                scope.spawn(move || {
                    let mut random = Random::new(seed);
                    let options = ConnectOptions::new().local(fixture.hosts[1].any_port());
                    for _ in 0..rounds {
                        let link = in_time(a.connect_with(target, &options)).expect("a link");
                        use_at_random(&link, &mut random);
                    }
                })
            })
            .collect();
        let serving = scope.spawn(|| {
            let mut random = Random::new(9);
            while !over.load(std::sync::atomic::Ordering::Acquire) {
                let Some(link) = wait(listener.accept(), Duration::from_millis(20)) else {
                    continue;
                };
                let (link, seed) = (link.expect("listener is up"), random.below(1 << 30));
                scope.spawn(move || use_at_random(&link, &mut Random::new(seed)));
            }
            listener
        });
        for caller in callers {
            caller.join().expect("the thread did not panic");
        }
        over.store(true, std::sync::atomic::Ordering::Release);
        drop(serving.join().expect("the thread did not panic"));
    });
    drop((a, b));
    driving.into_iter().for_each(|thread| thread.join().expect("the thread did not panic"));
    pools.iter().for_each(assert_unused);
}

/// Uses a link at random, then ends it in a random way.
fn use_at_random(link: &Link, random: &mut Random) {
    let buf = buffer(link.fabric(), &pattern(1, 4096));
    let region = link.register_memory(buf, Rights::READ).expect("a region");
    let _ = link.post_bytes(0, &region.grant(link).encode());
    let mut token = None;
    let mut kept = Vec::new();
    for _ in 0..30 {
        match random.below(5) {
            0 => drop(link.post_bytes(1, &pattern(2, random.below(20_000) as usize))),
            1 => kept.push(link.send(2, filled(link.fabric(), &[1; 10_000]))),
            2 => kept.iter_mut().for_each(|sending| drop(poll_once(sending))),
            3 => {
                if let Some(Ok(message)) = wait(link.recv(), Duration::from_millis(2))
                    && message.channel() == 0
                {
                    token = Some(GrantToken::decode(&message.to_vec()).expect("a grant"));
                }
            }
            _ => {
                let Some(token) = &token else { continue };
                let Ok(reading) =
                    link.rdma_read(token, 0, link.fabric().buffer(4096).expect("memory"))
                else {
                    continue;
                };
                if random.below(2) == 0
                    && let Ok(buf) = in_time(reading)
                {
                    assert!(
                        buf[..] == pattern(1, 4096),
                        "the read returned bytes that were not granted"
                    );
                }
            }
        }
    }
    match random.below(4) {
        0 => link.abort(),
        1 => drop(in_time(region.revoke())),
        2 => drop(wait(link.close(), Duration::from_millis(50))),
        _ => {}
    }
}

/// If the callback of `progress_with` breaks off, later calls continue until everything is done. An
/// idle fabric sleeps, even if the callback always breaks off.
pub(crate) fn progress_continues_after_a_break(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let is_readable = || {
        let mut fds = [PollFd::new(&pair.b.fabric, PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).expect("poll") > 0
    };
    let run_until_idle = |how: ControlFlow<(), bool>| {
        let begun = Instant::now();
        while pair.a.fabric.progress() > 0
            || pair.b.fabric.progress_with(|| how) != ControlFlow::Continue(0)
            || is_readable()
        {
            assert!(begun.elapsed() < TEST_TIMEOUT, "the fabric does not become idle");
        }
    };
    run_until_idle(ControlFlow::Continue(false));
    pair.a.link.post_bytes(0, b"something to do").expect("room in the queue");
    let begun = Instant::now();
    while pair.b.fabric.progress_with(|| ControlFlow::Break(())).is_continue() {
        pair.a.fabric.progress();
        assert!(begun.elapsed() < TEST_TIMEOUT, "the message does not arrive");
    }
    assert!(is_readable(), "the descriptor must be readable while there may be more work");
    run_until_idle(ControlFlow::Break(()));
    assert_eq!(
        pair.b.link.try_recv().expect("link is up").expect("a message").to_vec(),
        b"something to do"
    );
    pair.end();
}
