//! Well-behaved clients, which measure their latency with and without an attack.

use ferrite_testkit::resp::Client;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const CLIENTS: usize = 4;
/// The pause between two requests of a client.
const PACE: Duration = Duration::from_millis(1);
/// The value of `phase` that stops the clients.
const STOP: usize = usize::MAX;

/// The latencies of requests, each a SET and a GET.
#[derive(Default)]
pub(crate) struct Latencies(Vec<Duration>);

impl Latencies {
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn percentile(&mut self, percent: usize) -> Duration {
        self.0.sort_unstable();
        self.0.get(self.0.len().saturating_sub(1) * percent / 100).copied().unwrap_or_default()
    }
}

/// Running honest clients.
pub(crate) struct Honest {
    phase: Arc<AtomicUsize>,
    threads: Vec<JoinHandle<[Latencies; 2]>>,
}

impl Honest {
    pub(crate) fn start(address: &str, password: &str) -> Self {
        let phase = Arc::new(AtomicUsize::new(0));
        let threads = (0..CLIENTS).map(|number| {
            let mut client = Client::to_tcp(address);
            client.ok(&["AUTH", password]);
            let phase = Arc::clone(&phase);
            std::thread::spawn(move || {
                let key = format!("honest:{number}");
                let mut latencies = <[Latencies; 2]>::default();
                loop {
                    let (started, current) = (Instant::now(), phase.load(Ordering::Relaxed));
                    let Some(latencies) = latencies.get_mut(current) else { break };
                    client.ok(&["SET", &key, "value"]);
                    assert_eq!(client.ask(&["GET", &key]), "$5\r\nvalue");
                    latencies.0.push(started.elapsed());
                    std::thread::sleep(PACE);
                }
                latencies
            })
        });
        Self { threads: threads.collect(), phase }
    }

    /// Sets whether the next requests count as requests during the attack.
    pub(crate) fn set_attacked(&self, is_attacked: bool) {
        self.phase.store(usize::from(is_attacked), Ordering::Relaxed);
    }

    /// Stops the clients. Returns the latencies without and with the attack.
    pub(crate) fn stop(self) -> [Latencies; 2] {
        self.phase.store(STOP, Ordering::Relaxed);
        let mut all = <[Latencies; 2]>::default();
        for thread in self.threads {
            let one = thread.join().expect("no panic of an honest client");
            all.iter_mut().zip(one).for_each(|(all, one)| all.0.extend(one.0));
        }
        all
    }
}
