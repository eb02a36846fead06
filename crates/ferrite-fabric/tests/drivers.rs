//! Several that drive one fabric at a time: whoever waits for something learns of it, also when
//! another took the event that told of it.

use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use ferrite_fabric::{Config, Fabric, Link, Rdma};
use ferrite_verbs::fake::{DeviceSpec, World};

/// Far longer than it takes: a wake-up that is lost is never made up for.
const TEST_TIMEOUT: Duration = Duration::from_secs(if cfg!(miri) { 600 } else { 20 });
const ROUNDS: usize = if cfg!(miri) { 10 } else { 2000 };

struct Scene {
    fabric: Fabric,
    links: [Link; 2],
    _world: World,
}

/// A fabric that sleeps at once, with a link to itself.
fn scene(busy_poll_us: u32) -> Scene {
    let world = World::new();
    world.add_device(DeviceSpec::new("fake1", [10, 0, 0, 1].into()));
    let config = Config { busy_poll_us, recv_queue_depth: 32, cq_size: 256, ..Config::default() };
    let fabric = Fabric::builder(&world.verbs())
        .rdma(Rdma::Require)
        .config(config)
        .build()
        .expect("a fabric");
    let mut listener = fabric.listen(([10, 0, 0, 1], 0).into()).expect("to listen");
    let address = listener.local_addr();
    let (there, here) =
        fabric.block_on(async { futures_util::join!(fabric.connect(address), listener.accept()) });
    Scene { fabric, links: [there.expect("a link"), here.expect("a link")], _world: world }
}

/// Fails instead of hanging.
fn in_time(act: impl FnOnce() + Send + 'static) {
    let (done, finished) = mpsc::channel();
    let acting = thread::spawn(move || {
        act();
        let _ = done.send(());
    });
    match finished.recv_timeout(TEST_TIMEOUT) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("somebody was not woken"),
        _ => acting.join().expect("it to pass"),
    }
}

/// WaitSet for a future without driving the fabric.
fn idle<F: Future>(future: F) -> F::Output {
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

/// Asks and waits for the answer, again and again.
fn ask(fabric: &Fabric, link: &Link) {
    for round in 0..ROUNDS {
        link.post_bytes(0, &round.to_le_bytes()).expect("room");
        let answer = fabric.block_on(link.recv()).expect("an answer");
        assert_eq!(answer.to_vec(), round.to_le_bytes());
    }
}

fn answer(fabric: &Fabric, link: &Link) {
    for _ in 0..ROUNDS {
        let question = fabric.block_on(link.recv()).expect("a question");
        link.post_bytes(0, &question.to_vec()).expect("room");
    }
}

fn ping_pong(scene: &Scene) {
    let [there, here] = scene.links.clone();
    let fabric = scene.fabric.clone();
    let answering = thread::spawn(move || answer(&fabric, &here));
    ask(&scene.fabric, &there);
    answering.join().expect("answers");
}

#[test]
fn two_threads_that_block() {
    in_time(|| ping_pong(&scene(0)));
}

#[test]
fn two_threads_that_block_beside_a_driver() {
    in_time(|| {
        let scene = scene(0);
        let driver = scene.fabric.spawn_thread().expect("a thread");
        ping_pong(&scene);
        drop(scene);
        driver.join().expect("the end");
    });
}

#[test]
fn one_that_blocks_while_another_polls_by_hand() {
    in_time(|| {
        let scene = scene(0);
        let [there, here] = scene.links.clone();
        let fabric = scene.fabric.clone();
        let asking = thread::spawn(move || ask(&fabric, &there));
        for _ in 0..ROUNDS {
            let question = loop {
                scene.fabric.poll();
                if let Some(question) = here.try_recv().expect("a link") {
                    break question;
                }
                thread::yield_now();
            };
            here.post_bytes(0, &question.to_vec()).expect("room");
        }
        asking.join().expect("questions");
    });
}

#[test]
fn two_drivers_both_end() {
    in_time(|| {
        for _ in 0..50 {
            let scene = scene(0);
            let drivers = [(); 3].map(|()| scene.fabric.spawn_thread().expect("a thread"));
            idle(scene.links[0].close()).expect("a good end");
            drop(scene);
            drivers.into_iter().for_each(|driver| driver.join().expect("the end"));
        }
    });
}

/// Links come and go while their driver sleeps: events of the connection manager, calls and the
/// clock at once.
fn come_and_go(scene: &Scene) {
    let mut listener = scene.fabric.listen(([10, 0, 0, 1], 0).into()).expect("to listen");
    let address = listener.local_addr();
    for _ in 0..ROUNDS / 10 {
        let (there, here) =
            idle(async { futures_util::join!(scene.fabric.connect(address), listener.accept()) });
        let (there, here) = (there.expect("a link"), here.expect("a link"));
        there.post_bytes(0, b"hello").expect("room");
        assert_eq!(idle(here.recv()).expect("a message").to_vec(), b"hello");
        idle(there.close()).expect("a good end");
    }
}

#[test]
fn links_come_and_go_beside_a_driver() {
    in_time(|| {
        let scene = scene(0);
        let driver = scene.fabric.spawn_thread().expect("a thread");
        come_and_go(&scene);
        drop(scene);
        driver.join().expect("the end");
    });
}

#[cfg(feature = "tokio")]
#[test]
fn links_come_and_go_under_tokio() {
    in_time(|| {
        let scene = scene(0);
        let driving = scene.fabric.drive();
        let driver = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(driving).expect("the end");
        });
        come_and_go(&scene);
        drop(scene);
        driver.join().expect("the end");
    });
}
