//! What goes over the client's own connection, and comes back.

use std::io;
use std::sync::atomic::Ordering;

use ferrite_proto::Effect;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{AHEAD, Client, HEAD, Lane, REPLIES_MAX};

/// What a client sends while one of its commands waits in the engine is read up to this: its end must be seen.
const AHEAD_MAX: usize = 256 << 10;
/// What is read at once of a large command, and of the engine.
const STREAMED: usize = 64 << 10;
const HEARD: usize = 16 << 10;

/// What is to come over the connection.
pub(super) struct Awaited {
    /// Replies that are nobody's, before the others.
    pub(super) swallowed: usize,
    pub(super) replies: usize,
    /// Of the last one's command.
    pub(super) effect: Effect,
}

/// How it went there.
#[derive(PartialEq, Eq)]
pub(super) enum Met {
    Answered,
    /// The engine has hung up.
    Over,
    /// It has said what no reply is, as scripts can make it: where replies end cannot be told any more. This is still to be sent.
    Unclear {
        unsent: Vec<u8>,
    },
}

impl<C: Client> Lane<'_, C> {
    /// Sends this (and, if it is streaming, the command that has begun as it comes), and hears what is awaited. What the client sends
    /// meanwhile is kept.
    pub(super) async fn exchange(
        &mut self,
        mut unsent: Vec<u8>,
        mut awaited: Awaited,
        mut is_streaming: bool,
    ) -> io::Result<Met> {
        let mut ahead = Vec::new();
        let (mut sent, mut client_ended) = (0, false);
        loop {
            if is_streaming && sent == unsent.len() {
                is_streaming = !self.input.stream(&mut unsent);
                self.moved.to_engine.fetch_add(unsent.len() as u64, Ordering::Relaxed);
                sent = 0;
            }
            if self.hear(&mut awaited).is_err() {
                return Ok(Met::Unclear { unsent: unsent.split_off(sent) });
            }
            if self.replies.len() >= REPLIES_MAX {
                self.flush().await?;
            }
            if awaited.swallowed + awaited.replies == 0 && sent == unsent.len() && !is_streaming {
                return Ok(Met::Answered);
            }
            let reads_client = !client_ended
                && if is_streaming { sent == unsent.len() } else { self.input.ahead().len() < AHEAD_MAX };
            ahead.clear();
            ahead.reserve(if is_streaming { STREAMED } else { AHEAD });
            self.heard.reserve(HEARD);
            tokio::select! {
                biased;
                written = self.engine_writes.write(&unsent[sent..]), if sent < unsent.len() => sent += written?,
                heard = self.engine_reads.read_buf(&mut self.heard) => if heard? == 0 {
                    self.flush().await?;
                    return Ok(Met::Over);
                },
                read = self.client.read_buf(&mut ahead), if reads_client => {
                    if read? == 0 {
                        // As over a socket: what was asked before is answered, what waits is given up.
                        client_ended = true;
                        self.engine_writes.shutdown().await?;
                    }
                    self.input.append(&ahead);
                },
            }
        }
    }

    /// Looks at what the engine has said: replies are counted, and all but those that are swallowed go to the client.
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
            let seen = piece.len().min(HEAD - self.head.len().min(HEAD));
            self.head.extend_from_slice(&piece[..seen]);
            let is_push = self.head.first() == Some(&b'>');
            if is_push || awaited.swallowed == 0 {
                self.replies.bytes().extend_from_slice(piece);
            }
            if progress.complete {
                if !is_push && awaited.swallowed > 0 {
                    awaited.swallowed -= 1;
                } else if !is_push && awaited.replies > 0 {
                    awaited.replies -= 1;
                    if awaited.replies == 0 {
                        let effect = std::mem::replace(&mut awaited.effect, Effect::Nothing);
                        self.standing.answered(effect, &self.head);
                    }
                }
                self.head.clear();
            }
            rest = later;
        }
        self.heard.clear();
        Ok(())
    }
}
