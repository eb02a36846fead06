//! Memory that devices hold stays valid until they are done with it, whatever happens to futures,
//! links and fabrics meanwhile. The tests are small, so that Miri can run them (`cargo xtask
//! miri`).

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ferrite_fabric::mem::{BufMut, PoolConfig};
use ferrite_fabric::wire::Rights;
use ferrite_fabric::{Config, ErrorKind, Fabric, Link, Rdma};
use ferrite_verbs::fake::{DeviceSpec, Objects, World};

/// Number of receives that each side posts. The window is larger, so that more can be sent than
/// there are receives.
const RECEIVES: usize = 16;
const SEGMENT: usize = 8 << 10;
/// Length of a message in a buffer, in bytes. It is longer than the inline threshold, but short,
/// because every copied byte costs Miri a millisecond.
const LEN: usize = 40;
const INLINE: usize = 20;
/// A timeout that Miri does not reach.
const HOUR: Duration = Duration::from_secs(3600);

struct Pair {
    fabrics: [Fabric; 2],
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
        let fabrics =
            [("fake1", [10, 0, 0, 1]), ("fake2", [10, 0, 0, 2])].map(|(name, address)| {
                world.add_device(DeviceSpec::new(name, address.into()));
                let builder = Fabric::builder(&world.verbs())
                    .rdma(Rdma::Require)
                    .device(name)
                    .config(config.clone());
                builder.build().expect("a fabric")
            });
        let mut listener = fabrics[1].listen(([10, 0, 0, 2], 0).into()).expect("listen");
        let (near, far) = drive(&fabrics, async {
            futures_util::join!(fabrics[0].connect(listener.local_addr()), listener.accept())
        });
        drop(listener);
        Self { links: [near.expect("a link"), far.expect("a link")], fabrics }
    }

    fn drive<F: Future>(&self, future: F) -> F::Output {
        drive(&self.fabrics, future)
    }

    fn ends(&self) -> (&Link, &Link) {
        (&self.links[0], &self.links[1])
    }

    /// Returns a buffer of [`LEN`] bytes in a block as large as a receive: another size class would
    /// cost Miri seconds.
    fn buffer(&self, end: usize, fill: u8) -> BufMut {
        let mut buf = self.fabrics[end].buffer(SEGMENT).expect("a buffer");
        buf.set_len(LEN);
        buf.fill(fill);
        buf
    }
}

fn drive<F: Future>(fabrics: &[Fabric], future: F) -> F::Output {
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = poll(future.as_mut()) {
            return output;
        }
        for fabric in fabrics {
            fabric.progress();
        }
    }
}

fn poll<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Runs a test and checks that it leaves nothing behind.
fn run(test: impl FnOnce(&World, Pair)) {
    let world = World::new();
    let pair = Pair::new(&world);
    test(&world, pair);
    assert_eq!(world.objects(), Objects::default());
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

#[test]
fn messages_inline_and_in_buffers() {
    run(|_, pair| {
        let (near, far) = pair.ends();
        for len in [0, INLINE] {
            near.post_bytes(0, &vec![7; len]).expect("room in the queue");
            assert_eq!(pair.drive(far.recv()).expect("a message").to_vec(), vec![7; len]);
        }
        let parts = [1, 2].map(|fill| pair.buffer(0, fill).freeze());
        for count in [1, 2] {
            let sending = near.send_parts(1, parts[..count].to_vec());
            let (sent, message) = pair.drive(async { futures_util::join!(sending, far.recv()) });
            sent.expect("acknowledged");
            let message = message.expect("a message");
            assert_eq!((message.pieces().count(), message.len()), (count, count * LEN));
            assert_eq!(message.into_bytes(), [vec![1; LEN], vec![2; LEN]].concat()[..count * LEN]);
        }
    });
}

#[test]
fn messages_outlive_their_fabric() {
    let world = World::new();
    let pair = Pair::new(&world);
    let (near, far) = pair.ends();
    near.post_bytes(0, &[7; INLINE]).expect("room in the queue");
    let taken = pair.drive(far.recv()).expect("a message");
    near.post(0, pair.buffer(0, 8)).map_err(|(_, error)| error).expect("room in the queue");
    let bytes = pair.drive(far.recv()).expect("a message").into_bytes();
    drop(pair);
    assert_eq!((taken.to_vec(), &bytes[..]), (vec![7; INLINE], &[8; LEN][..]));
    drop((taken, bytes));
    assert_eq!(world.objects(), Objects::default());
}

#[test]
fn reads_and_writes_of_granted_memory() {
    run(|_, pair| {
        let (near, far) = pair.ends();
        let region = far.register_memory(pair.buffer(1, 1), Rights::READ | Rights::WRITE);
        let region = region.map_err(|(_, error)| error).expect("a region");
        let grant = region.grant(far);
        let source = pair.buffer(0, 9).freeze();
        for len in [5, 35] {
            let writing =
                near.rdma_write(&grant, 5, source.slice(..len)).expect("room in the queue");
            pair.drive(writing).expect("acknowledged");
        }
        let writing =
            near.rdma_write_imm(&grant, 0, source.slice(..2), 77).expect("room in the queue");
        pair.drive(writing).expect("acknowledged");
        assert_eq!(pair.drive(far.recv()).expect("a notice").notice(), Some(77));
        let copy = near.rdma_read(&grant, 0, pair.buffer(0, 0)).expect("room in the queue");
        let copy = pair.drive(copy).expect("read");
        assert_eq!(
            (&copy[..2], &copy[2..5], &copy[5..]),
            (&[9; 2][..], &[1; 3][..], &[9; LEN - 5][..])
        );
        let buf = pair.drive(region.revoke()).expect("buffer returned");
        assert_eq!(buf[..], copy[..]);
        let late = near.rdma_read(&grant, 0, copy).map(drop);
        assert_eq!(late.expect_err("revoked").error.kind(), ErrorKind::Denied);
    });
}

/// Sends more messages than the peer has receives. The device holds the rest until the peer posts
/// receives or the link ends.
fn fill(pair: &Pair) {
    let (near, _) = pair.ends();
    for _ in 0..RECEIVES + 4 {
        near.post(0, pair.buffer(0, 5)).map_err(|(_, error)| error).expect("room in the queue");
    }
    pair.fabrics[0].poll();
    assert!(pair.fabrics[0].stats().in_flight > 0);
}

#[test]
fn dropped_futures() {
    run(|_, pair| {
        let (near, far) = pair.ends();
        let region = far
            .register_memory(pair.buffer(1, 3), Rights::READ)
            .map_err(|(_, error)| error)
            .expect("a region");
        let grant = region.grant(far);
        fill(&pair);
        // This message is queued behind messages that the device cannot send yet.
        let mut sending = Box::pin(near.send(0, pair.buffer(0, 6)));
        assert!(poll(sending.as_mut()).is_pending());
        let reading = near.rdma_read(&grant, 0, pair.buffer(0, 0)).expect("room in the queue");
        drop((sending, reading));
        for _ in 0..RECEIVES + 5 {
            assert_eq!(pair.drive(far.recv()).expect("a message").len(), LEN);
        }
        pair.drive(near.close()).expect("closed cleanly");
    });
}

#[test]
fn aborted_link() {
    run(|_, pair| {
        fill(&pair);
        let (near, _) = pair.ends();
        let sending = near.send(0, pair.buffer(0, 6));
        near.abort();
        assert_eq!(pair.drive(sending).expect_err("the link is down").kind(), ErrorKind::Closed);
        pair.drive(near.ended()).expect("an abort is no failure on its own side");
        while pair.fabrics[0].stats().links > 0 {
            pair.fabrics[0].progress();
        }
        assert_eq!(pair.fabrics[0].stats().in_flight, 0);
    });
}

#[test]
fn dropped_fabric() {
    run(|_, pair| {
        fill(&pair);
        let (near, _) = pair.ends();
        let mut sending = Box::pin(near.send(0, pair.buffer(0, 6)));
        let _ = poll(sending.as_mut());
        let buf = pair.buffer(0, 1);
        drop(pair);
        assert_eq!(buf[..], [1; LEN]);
        assert!(matches!(poll(sending.as_mut()), Poll::Ready(Err(_))), "the future must fail");
    });
}

#[test]
fn removed_device() {
    run(|world, pair| {
        fill(&pair);
        world.remove_device("fake1");
        let (near, _) = pair.ends();
        let ended = pair.drive(near.ended()).expect_err("the device is gone");
        assert_eq!(ended.kind(), ErrorKind::DeviceGone);
        drop(pair);
    });
}
