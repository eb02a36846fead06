//! Sends replies to the client.

use std::io;
use std::sync::atomic::Ordering;
use std::task::Poll;

use tokio::io::AsyncWriteExt as _;

use super::InProcessSession;
use crate::in_process_engine::Client;

impl<C: Client> InProcessSession<'_, C> {
    /// Waits until the writes that the replies confirm are durable, if the engine requires that.
    pub(super) async fn settle(&mut self) {
        self.reads_since_send = 0;
        if std::mem::take(&mut self.must_settle) {
            self.engine.settled().await;
        }
    }

    /// Sends as many replies as the client accepts now, and checks the rest against the engine's
    /// limits.
    pub(super) async fn send_replies(&mut self) -> io::Result<()> {
        self.settle().await;
        while !self.replies.is_empty() {
            let (client, replies) = (&mut *self.client, &mut self.replies);
            let polled =
                std::future::poll_fn(|cx| Poll::Ready(replies.poll_write(client, cx))).await;
            match polled {
                Poll::Ready(Ok(0)) => return Err(io::ErrorKind::WriteZero.into()),
                Poll::Ready(written) => self.on_sent_to_client(written?).await?,
                Poll::Pending => break,
            }
        }
        self.note_held()?;
        self.check_output()
    }

    /// Sends all replies, however long the client takes, unless it is over the engine's soft limit
    /// for too long.
    pub(super) async fn write_replies(&mut self) -> io::Result<()> {
        self.write_replies_below(1).await
    }

    /// Sends replies until fewer than this number of bytes are left.
    pub(super) async fn write_replies_below(&mut self, bytes: usize) -> io::Result<()> {
        self.settle().await;
        while self.replies.len() >= bytes {
            let (client, replies) = (&mut *self.client, &mut self.replies);
            let written = std::future::poll_fn(|cx| replies.poll_write(client, cx));
            match self.output.watch(self.record.id(), written).await? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                count => self.on_sent_to_client(count).await?,
            }
        }
        Ok(())
    }

    /// Counts bytes that were sent to the client, and flushes its stream when all are sent.
    pub(super) async fn on_sent_to_client(&mut self, count: usize) -> io::Result<()> {
        self.moved().to_client.fetch_add(count as u64, Ordering::Relaxed);
        if !self.replies.is_empty() {
            self.pause_if_due(false).await;
            return Ok(());
        }
        self.replies.clear();
        self.check_output()?;
        self.client.flush().await
    }

    /// Updates the memory for long values. The client's link may have migrated to another device,
    /// or to TCP.
    pub(super) fn refresh_memory(&mut self) {
        self.replies.set_memory(self.client.memory().cloned());
    }
}
