//! Several threads drive one fabric: every waiting thread is woken, even if another thread took the
//! event.

use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use ferrite_fabric::{Config, Fabric, Link, Rdma};
use ferrite_verbs::fake::{DeviceSpec, World};

/// Far longer than needed. After a lost wake-up, a test would wait forever.
const TEST_TIMEOUT: Duration = Duration::from_secs(if cfg!(miri) { 600 } else { 20 });
const ROUNDS: usize = if cfg!(miri) { 10 } else { 2000 };

/// A fabric with a link to itself.
struct Loopback {
    fabric: Fabric,
    links: [Link; 2],
    _world: World,
}

/// Makes a fabric that polls for at most `busy_poll_us`, with a link to itself.
fn loopback(busy_poll_us: u32) -> Loopback {
    let world = World::new();
    world.add_device(DeviceSpec::new("fake1", [10, 0, 0, 1].into()));
    let keepalive = Duration::from_secs(600);
    let config =
        Config { busy_poll_us, recv_queue_depth: 32, cq_size: 256, keepalive, ..Config::default() };
    let fabric = Fabric::builder(&world.verbs())
        .rdma(Rdma::Require)
        .config(config)
        .build()
        .expect("a fabric");
    let mut listener = fabric.listen(([10, 0, 0, 1], 0).into()).expect("listen");
    let address = listener.local_addr();
    let (there, here) =
        fabric.block_on(async { futures_util::join!(fabric.connect(address), listener.accept()) });
    Loopback { fabric, links: [there.expect("a link"), here.expect("a link")], _world: world }
}

/// Runs `act` with a time limit, so that a lost wake-up fails the test instead of hanging it.
fn with_time_limit(act: impl FnOnce() + Send + 'static) {
    let (done, finished) = mpsc::channel();
    let acting = thread::spawn(move || {
        act();
        let _ = done.send(());
    });
    match finished.recv_timeout(TEST_TIMEOUT) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("a wake-up was lost"),
        _ => acting.join().expect("the test passes"),
    }
}

/// Waits for a future without driving the fabric.
fn wait_without_driving<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        thread::park();
    }
}

/// Sends messages and waits for the answer to each.
fn ask(fabric: &Fabric, link: &Link) {
    for round in 0..ROUNDS {
        link.post_bytes(0, &round.to_le_bytes()).expect("room in the queue");
        let answer = fabric.block_on(link.recv()).expect("an answer");
        assert_eq!(answer.to_vec(), round.to_le_bytes());
    }
}

/// Answers each message.
fn answer(fabric: &Fabric, link: &Link) {
    for _ in 0..ROUNDS {
        let question = fabric.block_on(link.recv()).expect("a question");
        link.post_bytes(0, &question.to_vec()).expect("room in the queue");
    }
}

fn ping_pong(loopback: &Loopback) {
    let [there, here] = loopback.links.clone();
    let fabric = loopback.fabric.clone();
    let answering = thread::spawn(move || answer(&fabric, &here));
    ask(&loopback.fabric, &there);
    answering.join().expect("answering thread");
}

#[test]
fn two_threads_that_block() {
    with_time_limit(|| ping_pong(&loopback(0)));
}

#[test]
fn two_threads_that_block_and_a_driver() {
    with_time_limit(|| {
        let loopback = loopback(0);
        let driver = loopback.fabric.spawn_thread().expect("a thread");
        ping_pong(&loopback);
        drop(loopback);
        driver.join().expect("driver ends");
    });
}

#[test]
fn one_that_blocks_while_another_polls() {
    with_time_limit(|| {
        let loopback = loopback(0);
        let [there, here] = loopback.links.clone();
        let fabric = loopback.fabric.clone();
        let asking = thread::spawn(move || ask(&fabric, &there));
        for _ in 0..ROUNDS {
            let question = loop {
                loopback.fabric.poll();
                if let Some(question) = here.try_recv().expect("a link") {
                    break question;
                }
                thread::yield_now();
            };
            here.post_bytes(0, &question.to_vec()).expect("room in the queue");
        }
        asking.join().expect("asking thread");
    });
}

/// Two threads poll for their answers and sometimes sleep. No wake-up is lost between polling and
/// sleeping.
#[test]
fn two_threads_that_poll_adaptively() {
    for busy_poll_us in [5, Config::default().busy_poll_us] {
        with_time_limit(move || ping_pong(&loopback(busy_poll_us)));
    }
}

/// The program's own event loop calls the fabric while nothing arrives. The calls soon stop
/// busy-polling.
#[test]
fn a_loop_without_answers_stops_polling() {
    const LONGEST_US: u32 = 100_000;
    const CALLS_THAT_POLL: usize = 18; // 100 ms, halved until less than 1 us is left
    const FEW: u64 = 10;
    let loopback = loopback(LONGEST_US);
    let calls = (0..1_000).map(|_| {
        let before = loopback.fabric.stats().passes;
        loopback.fabric.progress();
        loopback.fabric.stats().passes - before
    });
    let polled = calls.filter(|passes| *passes > FEW).count();
    assert!(polled <= CALLS_THAT_POLL, "{polled} of 1,000 calls polled");
}

/// A driver that polls for answers sleeps when there are none to wait for.
#[test]
fn an_idle_driver_sleeps_for_good() {
    with_time_limit(|| {
        let loopback = loopback(Config::default().busy_poll_us);
        let driver = loopback.fabric.spawn_thread().expect("a thread");
        ping_pong(&loopback);
        let asleep = loopback.fabric.stats().sleeps;
        while loopback.fabric.stats().sleeps == asleep {
            thread::yield_now();
        }
        let passes = loopback.fabric.stats().passes;
        thread::sleep(Duration::from_millis(500));
        let made = loopback.fabric.stats().passes - passes;
        assert!(made < 200, "{made} passes in half a second");
        drop(loopback);
        driver.join().expect("driver ends");
    });
}

#[test]
fn several_drivers_all_end() {
    with_time_limit(|| {
        for _ in 0..50 {
            let loopback = loopback(0);
            let drivers = [(); 3].map(|()| loopback.fabric.spawn_thread().expect("a thread"));
            wait_without_driving(loopback.links[0].close()).expect("closed cleanly");
            drop(loopback);
            drivers.into_iter().for_each(|driver| driver.join().expect("driver ends"));
        }
    });
}

/// Opens and closes links on a thread that does not drive the fabric, so that connection manager
/// events, calls and timers occur at the same time.
fn open_and_close_links(loopback: &Loopback) {
    let mut listener = loopback.fabric.listen(([10, 0, 0, 1], 0).into()).expect("listen");
    let address = listener.local_addr();
    for _ in 0..ROUNDS / 10 {
        let (there, here) = wait_without_driving(async {
            futures_util::join!(loopback.fabric.connect(address), listener.accept())
        });
        let (there, here) = (there.expect("a link"), here.expect("a link"));
        there.post_bytes(0, b"hello").expect("room in the queue");
        assert_eq!(wait_without_driving(here.recv()).expect("a message").to_vec(), b"hello");
        wait_without_driving(there.close()).expect("closed cleanly");
    }
}

#[test]
fn links_open_and_close_with_a_driver() {
    with_time_limit(|| {
        let loopback = loopback(0);
        let driver = loopback.fabric.spawn_thread().expect("a thread");
        open_and_close_links(&loopback);
        drop(loopback);
        driver.join().expect("driver ends");
    });
}

#[cfg(feature = "tokio")]
#[test]
fn links_open_and_close_under_tokio() {
    with_time_limit(|| {
        let loopback = loopback(0);
        let driving = loopback.fabric.drive();
        let driver = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(driving).expect("driver ends");
        });
        open_and_close_links(&loopback);
        drop(loopback);
        driver.join().expect("driver thread ends");
    });
}
