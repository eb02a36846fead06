//! Reads the client's input.

use std::io;
use std::pin::Pin;
use std::task::Poll;

use tokio::io::ReadBuf;

use super::exchange::{Event, ExpectedReplies, next_event};
use super::{InProcessSession, OWN_REPLY_MAX};
use crate::in_process_engine::{BEFORE_AUTH, Client, READ_MAX};

/// The number of consecutive reads after which gathered replies are sent in any case.
pub(super) const READS_PER_SEND: u8 = 32;

impl<C: Client> InProcessSession<'_, C> {
    /// Waits for input from the client. Returns false if the client or the engine has disconnected.
    /// In the meantime replies are sent, and messages from the engine are forwarded.
    pub(super) async fn wait_for_input(&mut self) -> io::Result<bool> {
        if self.try_read_more().await {
            return Ok(true);
        }
        self.settle().await;
        let mut client_ended = false;
        loop {
            if client_ended && self.replies.is_empty() {
                return Ok(false);
            }
            self.note_held()?;
            let is_authenticated = self.access.is_authenticated();
            let may_read = !client_ended && (is_authenticated || self.replies.len() < BEFORE_AUTH);
            self.engine_bytes.reserve(OWN_REPLY_MAX);
            let mut room = ReadBuf::new(self.input.room(if is_authenticated {
                READ_MAX
            } else {
                BEFORE_AUTH
            }));
            let event = next_event(
                (&mut *self.client, &mut self.replies),
                (&mut self.proxy_writes, &[]),
                Some((&mut self.proxy_reads, &mut self.engine_bytes)),
                may_read.then_some(&mut room),
                false,
            );
            let event = self.output.watch(self.record.id(), event).await?;
            let count = room.filled().len();
            match event {
                // A client that has closed its side may still read replies.
                Event::ReadFromClient if count == 0 => client_ended = true,
                Event::ReadFromClient => {
                    self.input.advance(count);
                    return Ok(true);
                }
                Event::ReadFromEngine(0) => return Ok(false),
                Event::ReadFromEngine(_) => {
                    self.process_replies(&mut ExpectedReplies::of_client(0))?;
                }
                Event::SentToClient(count) => self.on_sent_to_client(count).await?,
                Event::SentToEngine(_) => {}
            }
        }
    }

    /// Reads more input if some has arrived, without waiting, and returns whether it has read any.
    ///
    /// In a pipeline of large values, replies wait until the commands that have already arrived are
    /// read. Sending each reply alone would cost a write here and a wakeup of the client. The end
    /// of the input is noticed later, when the replies have been sent.
    async fn try_read_more(&mut self) -> bool {
        let is_due = self.reads_since_send == READS_PER_SEND || !self.access.is_authenticated();
        if self.input.pending().is_empty() || self.replies.is_empty() || is_due {
            return false;
        }
        self.reads_since_send += 1;
        let (client, mut room) = (&mut *self.client, ReadBuf::new(self.input.room(READ_MAX)));
        std::future::poll_fn(|cx| {
            Poll::Ready(Pin::new(&mut *client).poll_read(cx, &mut room).is_ready())
        })
        .await;
        let count = room.filled().len();
        self.input.advance(count);
        count > 0
    }
}
