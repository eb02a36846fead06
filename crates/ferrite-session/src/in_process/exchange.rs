//! What goes over the proxy connection, and comes back.

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

use super::limits::BEFORE_AUTH;
use super::replies::Replies;
use super::{Client, InProcessSession, OWN_REPLY_MAX, REPLIES_MAX};
use crate::engine::ProxyConnection;
use crate::pump::has_hung_up;

/// What a client sends while one of its commands is in the engine is read up to this. If the
/// command waits there (BLPOP and the like) more is read: the client's end must be seen.
const AHEAD_MAX: usize = 256 << 10;
/// How soon to look whether it waits, and how often at least.
const FIRST_LOOK: Duration = Duration::from_millis(1);
const LAST_LOOK: Duration = Duration::from_millis(100);
/// What is read of the client at once meanwhile.
const AHEAD: usize = 1 << 10;
/// What is read at once of a large command, and of the engine.
const STREAMED: usize = 64 << 10;
const HEARD: usize = 16 << 10;

/// What is to come over the connection.
pub(super) struct Awaited {
    /// A reply to a command of the session's own, before the others.
    own: bool,
    replies: usize,
}

impl Awaited {
    pub(super) fn replies(replies: usize) -> Self {
        Self { own: false, replies }
    }

    pub(super) fn own() -> Self {
        Self { own: true, replies: 0 }
    }

    /// Also a reply to a command of the session's own, before the others.
    pub(super) fn after_own(self, own: bool) -> Self {
        Self { own, ..self }
    }

    fn is_nothing(&self) -> bool {
        !self.own && self.replies == 0
    }
}

/// How it went there.
#[derive(PartialEq, Eq)]
pub(super) enum Met {
    Answered,
    /// The engine has hung up.
    Over,
    /// The engine has said what is no reply, as scripts can make it, or the client what is no
    /// command: where replies end cannot be told any more. This is still to be sent.
    Unclear {
        unsent: Vec<u8>,
    },
}

/// What has happened to a session.
pub(super) enum Event {
    /// So many bytes went to the engine.
    Sent(usize),
    /// So many bytes of replies went to the client.
    Replied(usize),
    /// So many bytes came from the engine.
    Heard(usize),
    /// The room was read into.
    Read,
}

/// Waits for the next event: bytes to the engine and replies to the client leave, the engine and
/// the client are read from where there is room.
pub(super) async fn next_event<C: Client>(
    (client, replies): (&mut C, &mut Replies),
    (writes, unsent): (&mut WriteHalf<ProxyConnection>, &[u8]),
    mut hears: Option<(&mut ReadHalf<ProxyConnection>, &mut Vec<u8>)>,
    mut room: Option<&mut ReadBuf<'_>>,
    engine_first: bool,
) -> io::Result<Event> {
    std::future::poll_fn(|cx| {
        if !unsent.is_empty()
            && let Poll::Ready(sent) = Pin::new(&mut *writes).poll_write(cx, unsent)
        {
            return Poll::Ready(match sent {
                // An engine that has hung up has said why: that is heard next, then the end.
                Err(error) if has_hung_up(&error) => Ok(Event::Sent(unsent.len())),
                sent => sent.map(Event::Sent),
            });
        }
        if !replies.is_empty()
            && let Poll::Ready(written) = replies.poll_write(client, cx)
        {
            return Poll::Ready(match written {
                Ok(0) => Err(io::ErrorKind::WriteZero.into()),
                written => written.map(Event::Replied),
            });
        }
        if engine_first && let Poll::Ready(heard) = poll_hear(&mut hears, cx) {
            return Poll::Ready(heard);
        }
        if let Some(room) = &mut room
            && let Poll::Ready(read) = Pin::new(&mut *client).poll_read(cx, room)
        {
            return Poll::Ready(read.map(|()| Event::Read));
        }
        if engine_first { Poll::Pending } else { poll_hear(&mut hears, cx) }
    })
    .await
}

fn poll_hear(
    hears: &mut Option<(&mut ReadHalf<ProxyConnection>, &mut Vec<u8>)>,
    cx: &mut Context<'_>,
) -> Poll<io::Result<Event>> {
    let Some((reads, heard)) = hears else { return Poll::Pending };
    let read = std::pin::pin!(reads.read_buf(&mut **heard));
    read.poll(cx).map(|heard| heard.map(Event::Heard))
}

impl<C: Client> InProcessSession<'_, C> {
    /// Sends this (and, if it is streaming, the command that has begun as it comes), and hears what
    /// is awaited. What the client sends meanwhile is kept, up to a limit.
    pub(super) async fn exchange(
        &mut self,
        mut unsent: Vec<u8>,
        mut awaited: Awaited,
        mut is_streaming: bool,
    ) -> io::Result<Met> {
        self.settle().await;
        self.own_reply.clear();
        let is_authenticated = self.access.is_authenticated();
        let mut ahead_max = if is_authenticated { AHEAD_MAX } else { BEFORE_AUTH };
        // Before authentication a run has few replies, and nobody waits for a client behind it.
        let replies_max = if is_authenticated || !is_streaming { REPLIES_MAX } else { BEFORE_AUTH };
        let mut ahead = vec![0; if is_streaming { STREAMED } else { AHEAD }];
        let (mut sent, mut client_ended, mut is_given_up) = (0, false, false);
        let mut look = FIRST_LOOK;
        loop {
            if is_streaming && sent == unsent.len() {
                match self.input.stream(&mut unsent) {
                    Ok(is_whole) => is_streaming = !is_whole,
                    Err(_) => return Ok(Met::Unclear { unsent: Vec::new() }),
                }
                self.moved().to_engine.fetch_add(unsent.len() as u64, Ordering::Relaxed);
                sent = 0;
            }
            if self.hear(&mut awaited).is_err() {
                return Ok(Met::Unclear { unsent: unsent.split_off(sent) });
            }
            if awaited.is_nothing() && sent == unsent.len() && !is_streaming {
                return Ok(Met::Answered);
            }
            let is_far_ahead = !is_streaming && self.input.ahead().len() >= ahead_max;
            if is_far_ahead && is_authenticated && !client_ended && self.record.is_blocked() {
                ahead_max = self.read_further_ahead(ahead_max)?;
                ahead.resize(STREAMED, 0);
                continue;
            }
            let reads_client =
                !client_ended && if is_streaming { sent == unsent.len() } else { !is_far_ahead };
            // The engine keeps the replies of a client that does not read, within its own limits.
            let hears = self.replies.len() < replies_max;
            self.note_held()?;
            self.heard.reserve(HEARD);
            let mut room = ReadBuf::new(&mut ahead);
            let event = next_event(
                (&mut *self.client, &mut self.replies),
                (&mut self.proxy_writes, &unsent[sent..]),
                hears.then_some((&mut self.proxy_reads, &mut self.heard)),
                reads_client.then_some(&mut room),
                true,
            );
            let event = self.output.watch(event);
            let looks = if client_ended { !is_given_up } else { is_far_ahead && is_authenticated };
            let event = if looks {
                timeout(look, event).await.ok().transpose()?
            } else {
                Some(event.await?)
            };
            let Some(event) = event else {
                if client_ended {
                    // A client without a login has its answer by now, and so has the session's own
                    // command.
                    let is_late =
                        look == LAST_LOOK && (!is_authenticated || self.record.id().is_none());
                    is_given_up = self.give_up_waiting(is_late).await?;
                }
                look = (look * 2).min(LAST_LOOK);
                continue;
            };
            match event {
                Event::Sent(count) => sent += count,
                Event::Replied(count) => self.on_replied(count).await?,
                Event::Heard(0) => {
                    self.write_replies().await?;
                    return Ok(Met::Over);
                }
                Event::Heard(_) => {}
                Event::Read if room.filled().is_empty() => {
                    (client_ended, look) = (true, FIRST_LOOK);
                    is_given_up = self.give_up_waiting(is_streaming).await?;
                }
                Event::Read => self.input.append(room.filled()),
            }
        }
    }

    /// The client has ended. As over a socket, what it asked before is answered, all of it; but a
    /// command that waits in the engine, or that is never answered (it never came to its end, say),
    /// is given up. Returns whether that is so.
    async fn give_up_waiting(&mut self, is_unanswered: bool) -> io::Result<bool> {
        let gives_up = is_unanswered || self.record.is_blocked();
        if gives_up {
            self.proxy_writes.shutdown().await?;
        }
        Ok(gives_up)
    }

    /// Looks at what the engine has said: replies are counted, and all but the session's own go to
    /// the client.
    pub(super) fn hear(&mut self, awaited: &mut Awaited) -> io::Result<()> {
        let mut rest = &self.heard[..];
        while !rest.is_empty() {
            let progress = match self.counter.feed(rest) {
                Ok(progress) => progress,
                Err(error) => {
                    self.replies.bytes().extend_from_slice(rest); // the client's to make sense of
                    self.heard.clear();
                    return Err(io::Error::other(error));
                }
            };
            let (piece, later) = rest.split_at(progress.consumed);
            let is_push = *self.is_push.get_or_insert(piece.first() == Some(&b'>'));
            if awaited.own && !is_push {
                let room = OWN_REPLY_MAX.saturating_sub(self.own_reply.len());
                self.own_reply.extend_from_slice(&piece[..piece.len().min(room)]);
            } else {
                self.replies.bytes().extend_from_slice(piece);
            }
            if progress.complete {
                self.is_push = None;
                if is_push {
                    // Nobody has asked for it.
                } else if awaited.own {
                    awaited.own = false;
                } else {
                    awaited.replies = awaited.replies.saturating_sub(1);
                }
            }
            rest = later;
        }
        self.heard.clear();
        Ok(())
    }
}
