//! Numbered commands on several sessions at once. They show that no command is lost, repeated or
//! reordered while a session changes its transport, and for how long a session had no reply.
//!
//! Each session counts with `INCR` on a key of its own and lets the server repeat each number with
//! `ECHO`. So every byte of every reply is known before it arrives.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::task::JoinHandle;

use crate::resp::encode;
use crate::wait::until_async;

/// Sends numbered commands on sessions until it is stopped.
#[derive(Debug)]
pub struct NumberedCommands {
    stop: Arc<AtomicBool>,
    counts: Vec<Arc<Counts>>,
    sessions: Vec<JoinHandle<Result<(), String>>>,
}

/// What a session has done so far.
#[derive(Debug)]
struct Counts {
    begun: Instant,
    answered: AtomicU64,
    /// Microseconds after `begun`.
    last_reply_us: AtomicU64,
    longest_gap_us: AtomicU64,
}

impl Counts {
    fn since_begun(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    fn note(&self, commands: u64) {
        let now = self.since_begun();
        let gap = now.saturating_sub(self.last_reply_us.swap(now, Ordering::Relaxed));
        self.longest_gap_us.fetch_max(gap, Ordering::Relaxed);
        self.answered.fetch_add(commands, Ordering::Relaxed);
    }
}

impl NumberedCommands {
    /// Starts a task for each stream, on the caller's tokio runtime. The keys begin with `prefix`,
    /// and must not exist.
    #[must_use]
    pub fn start<S>(streams: impl IntoIterator<Item = S>, prefix: &str) -> Self
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let stop = Arc::new(AtomicBool::new(false));
        let (mut counts, mut sessions) = (Vec::new(), Vec::new());
        for (number, stream) in streams.into_iter().enumerate() {
            let count = Arc::new(Counts {
                begun: Instant::now(),
                answered: AtomicU64::new(0),
                last_reply_us: AtomicU64::new(0),
                longest_gap_us: AtomicU64::new(0),
            });
            let key = format!("{prefix}:{number}");
            sessions.push(tokio::spawn(ask(stream, key, Arc::clone(&stop), Arc::clone(&count))));
            counts.push(count);
        }
        Self { stop, counts, sessions }
    }

    /// Waits until each session has received `more` further replies.
    ///
    /// # Panics
    /// If a session fails, or does not receive them in time. The message contains `what`, which
    /// describes the moment.
    pub async fn wait_for(&self, more: u64, what: &str) {
        let answered = |counts: &Arc<Counts>| counts.answered.load(Ordering::Relaxed);
        let goals: Vec<_> = self.counts.iter().map(|counts| answered(counts) + more).collect();
        until_async(&format!("{more} replies on each session, {what}"), async || {
            let ended = self.sessions.iter().any(JoinHandle::is_finished);
            ended || self.counts.iter().zip(&goals).all(|(counts, goal)| answered(counts) >= *goal)
        })
        .await;
        assert!(
            !self.sessions.iter().any(JoinHandle::is_finished) || self.is_stopping(),
            "a session has ended, {what}; `stop` would tell why"
        );
    }

    fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Returns the longest time that a session was without a reply since the last call.
    #[must_use]
    pub fn take_longest_gap(&self) -> Duration {
        let longest = self.counts.iter().map(|counts| {
            let last = counts.last_reply_us.load(Ordering::Relaxed);
            let open = counts.since_begun().saturating_sub(last);
            counts.longest_gap_us.swap(0, Ordering::Relaxed).max(open)
        });
        Duration::from_micros(longest.max().unwrap_or(0))
    }

    /// Stops the sessions. Returns the number of replies.
    ///
    /// # Panics
    /// If a reply was not the expected one, or a session has failed.
    pub async fn stop(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        for (number, session) in self.sessions.into_iter().enumerate() {
            let done = session.await.expect("no panic");
            done.unwrap_or_else(|why| panic!("session {number}: {why}"));
        }
        self.counts.iter().map(|counts| counts.answered.load(Ordering::Relaxed)).sum()
    }
}

/// Returns the word that the server repeats: the number, and in some cases many more bytes.
fn word(number: u64) -> Vec<u8> {
    let len = match number % 64 {
        13 => 20_000,
        42 => 100_000,
        _ => 0,
    };
    let mut word = format!("{number} ").into_bytes();
    word.extend((word.len()..len).map(|at| b'a' + ((at as u64 ^ number) % 26) as u8));
    word
}

async fn ask<S>(
    mut stream: S,
    key: String,
    stop: Arc<AtomicBool>,
    counts: Arc<Counts>,
) -> Result<(), String>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut number = 0;
    let (mut commands, mut expected, mut replies) = (Vec::new(), Vec::new(), Vec::new());
    while !stop.load(Ordering::Relaxed) {
        commands.clear();
        expected.clear();
        let batch = 1 + number % 5;
        for number in number + 1..=number + batch {
            let word = word(number);
            encode(&[b"INCR", key.as_bytes()], &mut commands);
            encode(&[b"ECHO", &word[..]], &mut commands);
            expected.extend_from_slice(format!(":{number}\r\n${}\r\n", word.len()).as_bytes());
            expected.extend_from_slice(&word);
            expected.extend_from_slice(b"\r\n");
        }
        replies.resize(expected.len(), 0);
        let exchanged = async {
            stream.write_all(&commands).await?;
            stream.flush().await?;
            stream.read_exact(&mut replies).await
        };
        exchanged.await.map_err(|error| format!("after number {number}: {error}"))?;
        if replies != expected {
            let at = replies.iter().zip(&expected).position(|(one, other)| one != other);
            let near = |bytes: &[u8]| {
                let at = at.unwrap_or(0);
                let part = &bytes[at.saturating_sub(20)..bytes.len().min(at + 20)];
                String::from_utf8_lossy(part).into_owned()
            };
            let (got, wanted) = (near(&replies), near(&expected));
            return Err(format!("after number {number}: {got:?} instead of {wanted:?}"));
        }
        number += batch;
        counts.note(2 * batch);
    }
    Ok(())
}

/// The longest gaps of several losses.
#[derive(Debug, Default)]
pub struct Gaps(Vec<Duration>);

impl Gaps {
    /// Adds the longest gap of a loss.
    pub fn add(&mut self, gap: Duration) {
        self.0.push(gap);
    }

    /// Returns the longest gap.
    #[must_use]
    pub fn longest(&self) -> Duration {
        self.0.iter().copied().max().unwrap_or_default()
    }

    /// Returns the median.
    #[must_use]
    pub fn median(&self) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        sorted.get(sorted.len() / 2).copied().unwrap_or_default()
    }
}
