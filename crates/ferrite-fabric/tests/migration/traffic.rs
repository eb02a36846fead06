//! Checked traffic in both directions: no message may be lost, repeated, reordered or changed.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferrite_fabric::{ErrorKind, Link};
use ferrite_testkit::wait::{comes_true, until_or};

/// Sends messages on a link in both directions until it is stopped.
pub(crate) struct Traffic {
    stop: Arc<AtomicBool>,
    received: [Arc<AtomicU64>; 2],
    longest_gap_us: Arc<AtomicU64>,
    /// The errors that ended the traffic.
    errors: Arc<Mutex<Vec<String>>>,
    threads: Vec<JoinHandle<Result<(), String>>>,
}

/// Returns the bytes of message `number`: length and content depend on the number and the seed.
fn content(number: u64, seed: u64) -> Vec<u8> {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let len = match next() % 8 {
        0..4 => next() % 64,
        4..6 => next() % 1000,
        6 => next() % 20_000,
        _ => next() % 100_000,
    };
    let mut bytes = number.to_le_bytes().to_vec();
    while (bytes.len() as u64) < len {
        bytes.extend_from_slice(&next().to_le_bytes());
    }
    bytes
}

/// Waits for a future on this thread: the fabrics have threads of their own.
fn wait<F: std::future::Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut context = std::task::Context::from_waker(&waker);
    let mut future = std::pin::pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            std::task::Poll::Ready(output) => return output,
            std::task::Poll::Pending => std::thread::park_timeout(Duration::from_millis(50)),
        }
    }
}

impl Traffic {
    /// Starts traffic between the two ends of a link. Other threads drive both fabrics.
    pub(crate) fn start(ends: &[Link; 2], seed: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let received = [Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0))];
        let longest_gap_us = Arc::new(AtomicU64::new(0));
        let errors = Arc::new(Mutex::new(Vec::new()));
        let record_error = |errors: &Arc<Mutex<Vec<String>>>, result: Result<(), String>| {
            result.inspect_err(|error| lock(errors).push(error.clone()))
        };
        let mut threads = Vec::new();
        for (at, end) in ends.iter().enumerate() {
            let (from, to) = (end.clone(), ends[1 - at].clone());
            let seed = seed ^ at as u64;
            let stopped = Arc::clone(&stop);
            let reason = Arc::clone(&errors);
            threads.push(std::thread::spawn(move || {
                record_error(&reason, send(&from, seed, &stopped))
            }));
            let (count, gap) = (Arc::clone(&received[1 - at]), Arc::clone(&longest_gap_us));
            let reason = Arc::clone(&errors);
            threads.push(std::thread::spawn(move || {
                record_error(&reason, receive(&to, seed, &count, &gap))
            }));
        }
        Self { stop, received, longest_gap_us, errors, threads }
    }

    /// Returns the number of messages received at each end.
    pub(crate) fn received(&self) -> [u64; 2] {
        [0, 1].map(|at| self.received[at].load(Ordering::Relaxed))
    }

    fn ended(&self) -> Option<String> {
        if !self.threads.iter().any(JoinHandle::is_finished) {
            return None;
        }
        // Other threads may report errors soon, too. Some threads wait until the test ends them.
        let _ = comes_true(Duration::from_millis(300), || {
            self.threads.iter().all(JoinHandle::is_finished)
        });
        Some(lock(&self.errors).join("; "))
    }

    /// Waits until `more` messages have arrived at both ends. Returns how long that took.
    pub(crate) fn wait_for(&self, more: u64, limit: Duration, what: &str) -> Duration {
        let (begun, before) = (Instant::now(), self.received());
        let arrived = || {
            let now = self.received();
            if (0..2).all(|at| now[at] >= before[at] + more) {
                return true;
            }
            if let Some(ended) = self.ended() {
                panic!("{what}: the traffic has ended: {ended}");
            }
            false
        };
        until_or(limit, &format!("{more} more messages arrive ({what})"), arrived, || {
            format!("{before:?} messages had arrived before, {:?} now", self.received())
        });
        begun.elapsed()
    }

    /// Returns the longest time without a message since the last call.
    pub(crate) fn take_longest_gap(&self) -> Duration {
        Duration::from_micros(self.longest_gap_us.swap(0, Ordering::Relaxed))
    }

    /// Stops the traffic and checks that everything that was sent has arrived.
    pub(crate) fn stop(mut self) -> [u64; 2] {
        self.stop.store(true, Ordering::Relaxed);
        for thread in std::mem::take(&mut self.threads) {
            if let Err(what) = thread.join().expect("the thread did not panic") {
                panic!("{what}");
            }
        }
        self.received()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

const CHANNEL: u16 = 3;

fn send(link: &Link, seed: u64, stop: &AtomicBool) -> Result<(), String> {
    let mut number = 0;
    while !stop.load(Ordering::Relaxed) {
        let bytes = content(number, seed);
        let sent = if number % 3 == 0 {
            wait(link.send_bytes(CHANNEL, &bytes))
        } else {
            post(link, &bytes)
        };
        sent.map_err(|error| format!("message {number} was not sent: {error}"))?;
        number += 1;
    }
    // An empty message is the last one.
    wait(link.send_bytes(CHANNEL, &[]))
        .map_err(|error| format!("the last message was not sent: {error}"))
}

/// Posts a message as soon as there is room.
fn post(link: &Link, bytes: &[u8]) -> Result<(), ferrite_fabric::Error> {
    loop {
        match link.post_bytes(CHANNEL, bytes) {
            Err(error) if error.kind() == ErrorKind::Full => {
                std::thread::sleep(Duration::from_micros(200));
            }
            posted => return posted,
        }
    }
}

fn receive(
    link: &Link,
    seed: u64,
    count: &AtomicU64,
    longest_gap_us: &AtomicU64,
) -> Result<(), String> {
    let mut number = 0;
    let mut last = Instant::now();
    loop {
        let message = wait(link.recv())
            .map_err(|error| format!("message {number} was not received: {error:?}"))?;
        let gap = u64::try_from(last.elapsed().as_micros()).unwrap_or(u64::MAX);
        longest_gap_us.fetch_max(gap, Ordering::Relaxed);
        last = Instant::now();
        if message.is_empty() {
            return Ok(());
        }
        let bytes = message.to_vec();
        let expected = content(number, seed);
        if bytes != expected {
            let got = bytes.first_chunk().map(|first| u64::from_le_bytes(*first));
            return Err(format!(
                "message {number} of {} bytes: received {} bytes that claim to be message {got:?}",
                expected.len(),
                bytes.len()
            ));
        }
        number += 1;
        count.store(number, Ordering::Relaxed);
    }
}
