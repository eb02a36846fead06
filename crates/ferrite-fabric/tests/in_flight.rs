//! Memory that devices have: whatever becomes of futures, links and engines meanwhile, it stays until they are done
//! with it. Small, so that Miri can go through it (`cargo xtask miri`).

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ferrite_fabric::mem::PoolConfig;
use ferrite_fabric::wire::Rights;
use ferrite_fabric::{Config, Engine, ErrorKind, Link};
use ferrite_verbs::fake::{DeviceSpec, Objects, World};

/// Receives of each side; the window is larger, so that more can be sent than there is room for.
const RECEIVES: usize = 16;
const SEGMENT: usize = 8 << 10;
/// Longer than what goes inline, and of the same size class: another would cost Miri seconds.
const LEN: usize = 1100;
/// Under Miri a second is nothing.
const HOUR: Duration = Duration::from_secs(3600);

struct Pair {
    engines: [Engine; 2],
    links: [Link; 2],
}

impl Pair {
    fn new(world: &World) -> Self {
        let config = Config {
            memory: PoolConfig {
                memory_pool_max: 8 << 20,
                receive_reserve: 4 << 20,
                thread_cache_blocks: 4,
                ..PoolConfig::default()
            },
            busy_poll_us: 0,
            recv_queue_depth: RECEIVES as u32,
            recv_buffer_size: SEGMENT as u32,
            send_queue_depth: 32,
            cq_size: 128,
            inline_threshold: 32,
            connection_timeout: HOUR,
            keepalive: HOUR,
            close_timeout: HOUR,
            ..Config::default()
        };
        let engines = [("fake1", [10, 0, 0, 1]), ("fake2", [10, 0, 0, 2])].map(|(name, address)| {
            world.add_device(DeviceSpec::new(name, address.into()));
            let builder = Engine::builder(&world.verbs()).device(name).config(config.clone());
            builder.build().expect("an engine")
        });
        let mut listener = engines[1].listen(([10, 0, 0, 2], 0).into()).expect("to listen");
        let (near, far) = drive(&engines, async {
            futures_util::join!(engines[0].connect(listener.local_addr()), listener.accept())
        });
        drop(listener);
        Self { links: [near.expect("a link"), far.expect("a link")], engines }
    }

    fn drive<F: Future>(&self, future: F) -> F::Output {
        drive(&self.engines, future)
    }

    fn ends(&self) -> (&Link, &Link) {
        (&self.links[0], &self.links[1])
    }

    fn buffer(&self, len: usize, fill: u8) -> ferrite_fabric::mem::BufMut {
        let mut buf = self.engines[0].buffer(len).expect("a buffer");
        buf.fill(fill);
        buf
    }
}

fn drive<F: Future>(engines: &[Engine], future: F) -> F::Output {
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = poll(future.as_mut()) {
            return output;
        }
        for engine in engines {
            engine.progress();
        }
    }
}

fn poll<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Runs a test; nothing may be left of it.
fn run(test: impl FnOnce(&World, Pair)) {
    let world = World::new();
    let pair = Pair::new(&world);
    test(&world, pair);
    assert_eq!(world.objects(), Objects::default());
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

#[test]
fn messages_inline_in_one_buffer_and_in_many() {
    run(|_, pair| {
        let (near, far) = pair.ends();
        for len in [0, 20, LEN, SEGMENT + 1] {
            near.post_bytes(0, &vec![7; len]).expect("room");
            assert_eq!(pair.drive(far.recv()).expect("a message").to_vec(), vec![7; len]);
            let buf = pair.buffer(len.max(LEN), 8);
            let (sent, message) = pair.drive(async { futures_util::join!(near.send(1, buf), far.recv()) });
            sent.expect("an acknowledgement");
            assert_eq!(message.expect("a message").into_bytes(), vec![8; len.max(LEN)]);
        }
        let parts = vec![pair.buffer(LEN, 1).freeze(), pair.buffer(LEN, 2).freeze().slice(..10)];
        let (sent, message) =
            pair.drive(async { futures_util::join!(near.send_parts(2, parts), far.recv()) });
        sent.expect("an acknowledgement");
        assert_eq!(message.expect("a message").len(), LEN + 10);
    });
}

#[test]
fn messages_outlive_their_engine() {
    let world = World::new();
    let pair = Pair::new(&world);
    let (near, far) = pair.ends();
    near.post_bytes(0, &[7; 20]).expect("room");
    let taken = pair.drive(far.recv()).expect("a message");
    near.post_bytes(0, &[8; SEGMENT + 1]).expect("room");
    let bytes = pair.drive(far.recv()).expect("a message").into_bytes();
    drop(pair);
    assert_eq!((taken.to_vec(), &bytes[..]), (vec![7; 20], &[8; SEGMENT + 1][..]));
    drop(taken);
    assert_eq!(world.objects(), Objects::default());
}

#[test]
fn reads_and_writes_of_granted_memory() {
    run(|_, pair| {
        let (near, far) = pair.ends();
        let mut buf = pair.engines[1].buffer(LEN).expect("a buffer");
        buf.fill(1);
        let region = far.register_memory(buf, Rights::READ | Rights::WRITE).map_err(|(_, error)| error);
        let region = region.expect("a region");
        let grant = region.grant(far);
        let source = pair.buffer(LEN, 9).freeze();
        for len in [10, 100] {
            let writing = near.rdma_write(&grant, 20, source.slice(..len)).expect("room");
            pair.drive(writing).expect("an acknowledgement");
        }
        let writing =
            near.rdma_write_imm(&grant, 0, pair.buffer(LEN, 6).freeze().slice(..5), 77).expect("room");
        pair.drive(writing).expect("an acknowledgement");
        assert_eq!(pair.drive(far.recv()).expect("a notice").notice(), Some(77));
        let copy = near.rdma_read(&grant, 0, pair.buffer(LEN, 0)).expect("room");
        let copy = pair.drive(copy).expect("bytes");
        assert_eq!((&copy[..5], &copy[5..20], &copy[20..120]), (&[6; 5][..], &[1; 15][..], &[9; 100][..]));
        let buf = pair.drive(region.revoke()).expect("the buffer");
        assert_eq!(buf.len(), LEN);
        let late = near.rdma_read(&grant, 0, pair.buffer(LEN, 0)).map(drop);
        assert_eq!(late.expect_err("revoked").error.kind(), ErrorKind::Denied);
    });
}

/// More than the peer has receives for: the device keeps the rest until it is given up.
fn fill(pair: &Pair) {
    let (near, _) = pair.ends();
    for _ in 0..RECEIVES + 4 {
        near.post(0, pair.buffer(LEN, 5)).map_err(|(_, error)| error).expect("room");
    }
    pair.engines[0].poll();
    assert!(pair.engines[0].stats().in_flight > 0);
}

#[test]
fn futures_that_nobody_waits_for() {
    run(|_, pair| {
        let (near, far) = pair.ends();
        let mut buf = pair.engines[1].buffer(LEN).expect("a buffer");
        buf.fill(3);
        let region = far.register_memory(buf, Rights::READ).map_err(|(_, error)| error).expect("a region");
        let grant = region.grant(far);
        fill(&pair);
        // Behind what the device cannot send yet.
        let mut sending = Box::pin(near.send(0, pair.buffer(LEN, 6)));
        assert!(poll(sending.as_mut()).is_pending());
        let reading = near.rdma_read(&grant, 0, pair.buffer(LEN, 0)).expect("room");
        drop((sending, reading));
        for _ in 0..RECEIVES + 5 {
            assert_eq!(pair.drive(far.recv()).expect("a message").len(), LEN);
        }
        pair.drive(near.close()).expect("a good end");
    });
}

#[test]
fn a_link_that_is_given_up() {
    run(|_, pair| {
        fill(&pair);
        let (near, _) = pair.ends();
        let sending = near.send(0, pair.buffer(LEN, 6));
        near.abort();
        assert_eq!(pair.drive(sending).expect_err("it is down").kind(), ErrorKind::Closed);
        pair.drive(near.ended()).expect("as was wished");
        while pair.engines[0].stats().links > 0 {
            pair.engines[0].progress();
        }
        assert_eq!(pair.engines[0].stats().in_flight, 0);
    });
}

#[test]
fn an_engine_that_is_given_up() {
    run(|_, pair| {
        fill(&pair);
        let (near, _) = pair.ends();
        let mut sending = Box::pin(near.send(0, pair.buffer(LEN, 6)));
        let _ = poll(sending.as_mut());
        let buf = pair.buffer(LEN, 1);
        drop(pair);
        assert_eq!(buf[..], [1; LEN]);
        assert!(matches!(poll(sending.as_mut()), Poll::Ready(Err(_))), "nobody would answer");
    });
}

#[test]
fn a_device_that_goes() {
    run(|world, pair| {
        fill(&pair);
        world.remove_device("fake1");
        let (near, _) = pair.ends();
        let ended = pair.drive(near.ended()).expect_err("its device is gone");
        assert_eq!(ended.kind(), ErrorKind::DeviceGone);
        drop(pair);
    });
}
