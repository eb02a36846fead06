//! Ends the in-process part of a session: pins the session to the proxy path, or delivers the last
//! replies.

use std::io;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::io::AsyncReadExt as _;
use tokio::time::timeout;

use super::{InProcessSession, ServeOutcome};
use crate::in_process_engine::{Client, REPLIES_MAX};

/// How long to wait for the engine's last replies after it has freed the client, and then for the
/// client to accept them.
const LAST_REPLIES_TIMEOUT: Duration = Duration::from_secs(1);

impl<C: Client> InProcessSession<'_, C> {
    /// Pins the session to the proxy path. Closes it instead if the writes of called commands
    /// cannot be marked for a later WAIT.
    pub(super) async fn pin(mut self) -> io::Result<ServeOutcome> {
        // The session waits in the queue, but does not keep the permit, because from here on it
        // waits for its client.
        drop(self.acquire_permit().await?);
        if !self.mark_before_pin().await? {
            return Ok(ServeOutcome::Closed);
        }
        self.hand_over(Vec::new()).await
    }

    /// Hands the proxy connection over to the pump, with the bytes to send first. A session with
    /// unmarked writes is closed instead: the pump does not notice a WAIT, and the engine's reply
    /// to it would not cover these writes. A replica refuses WAIT, so the session stays open there.
    pub(super) async fn hand_over(mut self, mut unsent: Vec<u8>) -> io::Result<ServeOutcome> {
        self.write_replies().await?;
        if self.has_unmarked_writes && !self.record.refuses_wait() {
            self.warn_of_unmarked_writes();
            return Ok(ServeOutcome::Closed);
        }
        self.paths.pinned.fetch_add(1, Ordering::Relaxed);
        self.open.entry.held.set(0);
        unsent.extend_from_slice(self.input.pending());
        Ok(ServeOutcome::Pinned { proxy: self.proxy_reads.unsplit(self.proxy_writes), unsent })
    }

    /// Delivers the replies that the engine has sent before it freed the client. No command is
    /// called any more.
    pub(super) async fn deliver_last_replies(mut self) -> io::Result<ServeOutcome> {
        self.own_reply.clear();
        let (reads, received) = (&mut self.proxy_reads, &mut self.engine_bytes);
        let reading = async {
            while reads
                .read_buf(received)
                .await
                .is_ok_and(|count| count > 0 && received.len() < REPLIES_MAX)
            {}
        };
        let _ = timeout(LAST_REPLIES_TIMEOUT, reading).await;
        self.replies.bytes().append(&mut self.engine_bytes);
        let _ = timeout(LAST_REPLIES_TIMEOUT, self.write_replies()).await;
        Ok(ServeOutcome::Closed)
    }
}
