//! Instructions in user space for one message or operation, from the post to the reaped completion:
//! ours alone.
//!
//! `cargo xtask instructions` runs this under callgrind and holds the figures against those in
//! `instructions.json`. Both ends are fabrics on the fake provider, on one thread; warm-up is over
//! before callgrind counts.
//!
//! What is ours: everything between the caller and the provider's functions, and from there to the
//! received message. What callgrind counted inside the fake's functions is taken off, by the calls
//! into them (`xtask/src/instructions.rs`), and so is the look at descriptors, which the clock
//! brings once in a millisecond and valgrind's slowness far more often.
#![expect(missing_docs, reason = "of what gungraun's macros make")]

use std::hint::black_box;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use ferrite_fabric::mem::{Buf, BufMut};
use ferrite_fabric::wire::{GrantToken, Rights};
use ferrite_fabric::{Fabric, Link, Rdma, Region};
use ferrite_verbs::fake::{DeviceSpec, World};
use gungraun::{
    Callgrind, LibraryBenchmarkConfig, library_benchmark, library_benchmark_group, main,
};

/// Counted in each run; `cargo xtask instructions` divides by it.
const MESSAGES: usize = 1000;
const WARM_UP: usize = 200;
const SMALL: usize = 64;
const LARGE: usize = 64 << 10;

/// Two fabrics and a link between them.
struct Pair {
    near: Fabric,
    far: Fabric,
    sender: Link,
    receiver: Link,
    /// For memory of the far end.
    grant: GrantToken,
    _region: Region,
    _world: World,
}

impl Pair {
    fn new() -> Self {
        let world = World::new();
        for (name, address) in [("near", [10, 0, 0, 1]), ("far", [10, 0, 0, 2])] {
            world.add_device(DeviceSpec::new(name, address.into()));
        }
        let fabric = |name: &str| {
            Fabric::builder(&world.verbs())
                .rdma(Rdma::Require)
                .device(name)
                .build()
                .expect("a fabric")
        };
        let (near, far) = (fabric("near"), fabric("far"));
        let mut listener = far.listen(([10, 0, 0, 2], 0).into()).expect("to listen");
        let mut connecting = pin!(near.connect(listener.local_addr()));
        let (mut sender, mut receiver) = (None, None);
        let (sender, receiver) = loop {
            if let (Some(sender), Some(receiver)) = (sender.take(), receiver.take()) {
                break (sender, receiver);
            }
            if sender.is_none()
                && let Poll::Ready(link) =
                    connecting.as_mut().poll(&mut Context::from_waker(Waker::noop()))
            {
                sender = Some(link.expect("a link"));
            }
            receiver = receiver.or_else(|| listener.try_accept().expect("to accept"));
            near.poll();
            far.poll();
        };
        let mut buf = far.buffer(LARGE).expect("a buffer");
        buf.fill(0);
        let rights = Rights::READ | Rights::WRITE;
        let region =
            receiver.register_memory(buf, rights).map_err(|(_, error)| error).expect("a region");
        let grant = region.grant(&receiver);
        Self { near, far, sender, receiver, grant, _region: region, _world: world }
    }

    fn buffer(&self, len: usize) -> Buf {
        let mut buf = self.near.buffer(len).expect("a buffer");
        buf.fill(7);
        buf.freeze()
    }

    /// Looks at both ends until the message is here.
    fn receive(&self) {
        loop {
            self.far.poll();
            if let Some(message) = self.receiver.try_recv().expect("a link") {
                black_box(&message);
                break;
            }
        }
        self.near.poll(); // takes the completion
    }

    /// From the caller's memory, without an answer.
    fn post(&self, messages: usize) {
        for _ in 0..messages {
            self.sender.post_bytes(0, black_box(&[7; SMALL])).expect("room");
            self.receive();
        }
    }

    /// From a buffer of the pool, awaited.
    fn send(&self, messages: usize) {
        self.near.block_on(async {
            for _ in 0..messages {
                let mut buf = self.near.buffer(SMALL).expect("a buffer");
                buf.copy_from_slice(black_box(&[7; SMALL]));
                self.sender.send(0, buf).await.expect("a link");
                self.receive();
            }
        });
    }

    fn write(&self, buf: &Buf, messages: usize) {
        self.near.block_on(async {
            for _ in 0..messages {
                let writing = self.sender.rdma_write(&self.grant, 0, black_box(buf.clone()));
                writing.expect("room").await.expect("a link");
            }
        });
    }

    fn read(&self, mut buf: BufMut, messages: usize) -> BufMut {
        self.near.block_on(async {
            for _ in 0..messages {
                let reading = self.sender.rdma_read(&self.grant, 0, buf);
                buf = reading.expect("room").await.expect("a link");
            }
            buf
        })
    }

    /// A message of several frames.
    fn post_large(&self, buf: &Buf, messages: usize) {
        for _ in 0..messages {
            self.sender.post(0, black_box(buf.clone())).map_err(|(_, error)| error).expect("room");
            self.receive();
        }
    }
}

fn to_post() -> Pair {
    let pair = Pair::new();
    pair.post(WARM_UP);
    pair
}

fn to_send() -> Pair {
    let pair = Pair::new();
    pair.send(WARM_UP);
    pair
}

fn to_write() -> (Pair, Buf) {
    let pair = Pair::new();
    let buf = pair.buffer(SMALL);
    pair.write(&buf, WARM_UP);
    (pair, buf)
}

fn to_read() -> (Pair, BufMut) {
    let pair = Pair::new();
    let buf = pair.near.buffer(SMALL).expect("a buffer");
    let buf = pair.read(buf, WARM_UP);
    (pair, buf)
}

fn to_post_large() -> (Pair, Buf) {
    let pair = Pair::new();
    let buf = pair.buffer(LARGE);
    pair.post_large(&buf, WARM_UP);
    (pair, buf)
}

// What is given back is dropped outside of what is counted.

#[library_benchmark(setup = to_post)]
#[bench::messages()]
fn post_64(pair: Pair) -> Pair {
    pair.post(MESSAGES);
    pair
}

#[library_benchmark(setup = to_send)]
#[bench::messages()]
fn send_64_awaited(pair: Pair) -> Pair {
    pair.send(MESSAGES);
    pair
}

#[library_benchmark(setup = to_write)]
#[bench::messages()]
fn write_64_awaited((pair, buf): (Pair, Buf)) -> (Pair, Buf) {
    pair.write(&buf, MESSAGES);
    (pair, buf)
}

#[library_benchmark(setup = to_read)]
#[bench::messages()]
fn read_64_awaited((pair, buf): (Pair, BufMut)) -> (Pair, BufMut) {
    let buf = pair.read(buf, MESSAGES);
    (pair, buf)
}

#[library_benchmark(setup = to_post_large)]
#[bench::messages()]
fn post_64k((pair, buf): (Pair, Buf)) -> (Pair, Buf) {
    pair.post_large(&buf, MESSAGES);
    (pair, buf)
}

library_benchmark_group!(
    name = messages,
    benchmarks = [post_64, send_64_awaited, write_64_awaited, read_64_awaited, post_64k]
);

main!(
    config = LibraryBenchmarkConfig::default().tool(Callgrind::with_args(["--cache-sim=no"])),
    library_benchmark_groups = messages
);
