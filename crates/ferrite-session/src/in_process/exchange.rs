//! Sends commands over the proxy connection, and receives their replies.

use std::future::Future as _;
use std::io;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{
    AsyncReadExt as _, AsyncWrite as _, AsyncWriteExt as _, ReadBuf, ReadHalf, WriteHalf,
};
use tokio::time::timeout;

use super::proxy_connection::ProxyConnection;
use super::{InProcessSession, OWN_REPLY_MAX};
use crate::in_process_engine::{BEFORE_AUTH, Client, REPLIES_MAX, Replies};
use crate::pump::is_disconnect;

/// How much input is read ahead while a command of the client runs in the engine. More is read if
/// the command is blocked there (BLPOP and the like), so that the client's disconnect is noticed.
const READ_AHEAD_MAX: usize = 256 << 10;
/// The first and the longest interval between checks whether the client is blocked.
const FIRST_CHECK: Duration = Duration::from_millis(1);
const LAST_CHECK: Duration = Duration::from_millis(100);
/// The size of a read of the client's input while one of its commands runs in the engine.
const READ_AHEAD: usize = 1 << 10;
/// The size of a read of a large command, and of input while the client is blocked in the engine.
const STREAM_READ: usize = 64 << 10;
/// The least room for a read from the engine.
const ENGINE_READ: usize = 16 << 10;

/// The replies that must still arrive over the proxy connection.
pub(super) struct ExpectedReplies {
    /// Whether a reply to a command of the session itself comes first.
    own: bool,
    /// The number of replies to the client's commands.
    replies: usize,
}

impl ExpectedReplies {
    /// Expects this number of replies to the client's commands.
    pub(super) fn of_client(replies: usize) -> Self {
        Self { own: false, replies }
    }

    /// Expects a reply to a command of the session itself.
    pub(super) fn own() -> Self {
        Self { own: true, replies: 0 }
    }

    /// If `own`, also expects a reply to a command of the session itself, before the other replies.
    pub(super) fn after_own(self, own: bool) -> Self {
        Self { own, ..self }
    }

    fn is_empty(&self) -> bool {
        !self.own && self.replies == 0
    }
}

/// The outcome of an exchange with the engine.
#[derive(PartialEq, Eq)]
pub(super) enum ExchangeOutcome {
    /// All replies have arrived.
    Answered,
    /// The engine has disconnected, or the session must disconnect the client.
    Disconnected,
    /// The ends of replies cannot be found any more. Either the engine has sent an invalid reply,
    /// which scripts can produce, or the client has sent an invalid command. The bytes in `unsent`
    /// must still be sent to the engine.
    OutOfSync { unsent: Vec<u8> },
}

/// An event of a session's connections.
pub(super) enum Event {
    /// This number of bytes was sent to the engine.
    SentToEngine(usize),
    /// This number of reply bytes was sent to the client.
    SentToClient(usize),
    /// This number of bytes was read from the engine.
    ReadFromEngine(usize),
    /// The client's input was read into `room` of [`next_event`].
    ReadFromClient,
}

/// Waits for the next event. Sends `unsent` to the engine and `replies` to the client. Reads from
/// the engine if `engine_input` is given, and from the client if `room` is given. If both have sent
/// something, `engine_first` decides which is read.
pub(super) async fn next_event<C: Client>(
    (client, replies): (&mut C, &mut Replies),
    (writes, unsent): (&mut WriteHalf<ProxyConnection>, &[u8]),
    mut engine_input: Option<(&mut ReadHalf<ProxyConnection>, &mut Vec<u8>)>,
    mut room: Option<&mut ReadBuf<'_>>,
    engine_first: bool,
) -> io::Result<Event> {
    std::future::poll_fn(|cx| {
        if !unsent.is_empty()
            && let Poll::Ready(sent) = Pin::new(&mut *writes).poll_write(cx, unsent)
        {
            return Poll::Ready(match sent {
                // The engine has disconnected. The bytes count as sent, so that the caller goes on
                // to read the engine's last reply and the end of the stream.
                Err(error) if is_disconnect(&error) => Ok(Event::SentToEngine(unsent.len())),
                sent => sent.map(Event::SentToEngine),
            });
        }
        if !replies.is_empty()
            && let Poll::Ready(written) = replies.poll_write(client, cx)
        {
            return Poll::Ready(match written {
                Ok(0) => Err(io::ErrorKind::WriteZero.into()),
                written => written.map(Event::SentToClient),
            });
        }
        if engine_first && let Poll::Ready(event) = poll_engine_read(&mut engine_input, cx) {
            return Poll::Ready(event);
        }
        if let Some(room) = &mut room
            && let Poll::Ready(read) = Pin::new(&mut *client).poll_read(cx, room)
        {
            return Poll::Ready(read.map(|()| Event::ReadFromClient));
        }
        if engine_first { Poll::Pending } else { poll_engine_read(&mut engine_input, cx) }
    })
    .await
}

fn poll_engine_read(
    engine_input: &mut Option<(&mut ReadHalf<ProxyConnection>, &mut Vec<u8>)>,
    cx: &mut Context<'_>,
) -> Poll<io::Result<Event>> {
    let Some((reads, received)) = engine_input else { return Poll::Pending };
    let read = std::pin::pin!(reads.read_buf(&mut **received));
    read.poll(cx).map(|count| count.map(Event::ReadFromEngine))
}

impl<C: Client> InProcessSession<'_, C> {
    /// Sends `unsent` to the engine, and receives the expected replies. If `is_streaming`, the
    /// command that has arrived in part is sent as it arrives. Other input from the client is read
    /// ahead in the meantime, up to a limit.
    pub(super) async fn exchange(
        &mut self,
        mut unsent: Vec<u8>,
        mut expected: ExpectedReplies,
        mut is_streaming: bool,
    ) -> io::Result<ExchangeOutcome> {
        self.settle().await;
        self.own_reply.clear();
        let is_authenticated = self.access.is_authenticated();
        let mut ahead_max = if is_authenticated { READ_AHEAD_MAX } else { BEFORE_AUTH };
        // Before authentication a run has few replies. They are all received even if the client
        // does not read, because other sessions wait for the permit.
        let replies_max = if is_authenticated || !is_streaming { REPLIES_MAX } else { BEFORE_AUTH };
        let read_size = match (is_streaming, is_authenticated) {
            (true, true) => STREAM_READ,
            (true, false) => BEFORE_AUTH,
            (false, _) => READ_AHEAD,
        };
        let mut read_buffer = vec![0; read_size];
        let (mut sent, mut client_ended, mut is_given_up) = (0, false, false);
        let mut check_interval = FIRST_CHECK;
        loop {
            if is_streaming && sent == unsent.len() {
                match self.input.stream(&mut unsent) {
                    Ok(is_whole) => is_streaming = !is_whole,
                    Err(_) => return Ok(ExchangeOutcome::OutOfSync { unsent: Vec::new() }),
                }
                self.moved().to_engine.fetch_add(unsent.len() as u64, Ordering::Relaxed);
                sent = 0;
            }
            if self.process_replies(&mut expected).is_err() {
                return Ok(ExchangeOutcome::OutOfSync { unsent: unsent.split_off(sent) });
            }
            if expected.is_empty() && sent == unsent.len() && !is_streaming {
                return Ok(ExchangeOutcome::Answered);
            }
            let is_far_ahead = !is_streaming && self.input.pending().len() >= ahead_max;
            if is_far_ahead && is_authenticated && !client_ended && self.record.is_blocked() {
                ahead_max = self.read_further_ahead(ahead_max)?;
                read_buffer.resize(STREAM_READ, 0);
                continue;
            }
            let reads_client =
                !client_ended && if is_streaming { sent == unsent.len() } else { !is_far_ahead };
            // If the client does not read, further replies stay in the engine, within its own
            // limits.
            let reads_engine = self.replies.len() < replies_max;
            self.note_held()?;
            self.engine_bytes.reserve(ENGINE_READ);
            let mut room = ReadBuf::new(&mut read_buffer);
            let event = next_event(
                (&mut *self.client, &mut self.replies),
                (&mut self.proxy_writes, &unsent[sent..]),
                reads_engine.then_some((&mut self.proxy_reads, &mut self.engine_bytes)),
                reads_client.then_some(&mut room),
                true,
            );
            let event = self.output.watch(self.record.id(), event);
            let checks_blocked =
                if client_ended { !is_given_up } else { is_far_ahead && is_authenticated };
            let event = if checks_blocked {
                timeout(check_interval, event).await.ok().transpose()?
            } else {
                Some(event.await?)
            };
            let Some(event) = event else {
                if client_ended {
                    // The engine replies sooner than this to a client that has not logged in, and
                    // to the session's own command. A reply that is still missing never comes.
                    let is_late = check_interval == LAST_CHECK
                        && (!is_authenticated || self.record.id().is_none());
                    is_given_up = self.give_up_waiting(is_late).await?;
                }
                check_interval = (check_interval * 2).min(LAST_CHECK);
                continue;
            };
            match event {
                Event::SentToEngine(count) => sent += count,
                Event::SentToClient(count) => self.on_sent_to_client(count).await?,
                Event::ReadFromEngine(0) => {
                    self.write_replies().await?;
                    return Ok(ExchangeOutcome::Disconnected);
                }
                Event::ReadFromEngine(_) => {}
                Event::ReadFromClient if room.filled().is_empty() => {
                    (client_ended, check_interval) = (true, FIRST_CHECK);
                    is_given_up = self.give_up_waiting(is_streaming).await?;
                }
                Event::ReadFromClient => self.input.append(room.filled()),
            }
        }
    }

    /// Gives up the pending commands of a client that has disconnected, and returns whether it has
    /// done so. As on an ordinary socket, commands that were sent before the disconnect still get
    /// their replies. They are given up only if the client is blocked in the engine, or if a
    /// command never gets a reply (because it is incomplete, for example).
    async fn give_up_waiting(&mut self, is_unanswered: bool) -> io::Result<bool> {
        let gives_up = is_unanswered || self.record.is_blocked();
        if gives_up {
            self.proxy_writes.shutdown().await?;
        }
        Ok(gives_up)
    }

    /// Processes the bytes from the engine: counts the replies, and passes them to the client,
    /// except replies to commands that the session itself sent.
    pub(super) fn process_replies(&mut self, expected: &mut ExpectedReplies) -> io::Result<()> {
        let mut rest = &self.engine_bytes[..];
        while !rest.is_empty() {
            let progress = match self.counter.feed(rest) {
                Ok(progress) => progress,
                Err(error) => {
                    // The client gets the invalid bytes unchanged, and must interpret them.
                    self.replies.bytes().extend_from_slice(rest);
                    self.engine_bytes.clear();
                    return Err(io::Error::other(error));
                }
            };
            let (piece, later) = rest.split_at(progress.consumed);
            let is_push = *self.is_push.get_or_insert(piece.first() == Some(&b'>'));
            if expected.own && !is_push {
                let room = OWN_REPLY_MAX.saturating_sub(self.own_reply.len());
                self.own_reply.extend_from_slice(&piece[..piece.len().min(room)]);
            } else {
                self.replies.bytes().extend_from_slice(piece);
            }
            if progress.complete {
                self.is_push = None;
                if is_push {
                    // A push message is not a reply to a command.
                } else if expected.own {
                    expected.own = false;
                } else {
                    expected.replies = expected.replies.saturating_sub(1);
                }
            }
            rest = later;
        }
        self.engine_bytes.clear();
        Ok(())
    }
}
