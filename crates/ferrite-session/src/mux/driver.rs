//! The task that drives a multiplexed link. It makes no decision about the protocol: it passes
//! everything that arrives to `Mux`, and does what `Mux` returns.

use std::collections::{HashMap, VecDeque};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use ferrite_fabric::mem::{Buf, BufMut, Purpose};
use ferrite_fabric::{Error, ErrorKind, Link, Message, Sending};
use ferrite_proto::mux::{
    Cause, Class, Config, ConfigError, End, Ended, Filled, Mux, OpenError, Received, Route, Side,
    StreamId,
};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Sleep;

use super::local::Local;
use super::socket::MuxSocket;
use super::wakers::Woken;
use super::{Command, MuxFailure, Shared};

/// Maximum number of messages to receive before something is sent.
const RECEIVE_BATCH: usize = 32;
/// Maximum number of rounds before other tasks run.
const ROUNDS: usize = 16;
/// Messages up to this size are copied, so that they do not occupy a block for the largest message.
const SMALL: usize = 4 << 10;
/// How long to wait for memory of the pool.
const MEMORY_RETRY: Duration = Duration::from_millis(1);

/// How often to ask the connections of streams without credit whether they have failed.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Drives the streams of a link.
pub struct MuxDriver<S: MuxSocket> {
    link: Link,
    mux: Mux,
    streams: HashMap<StreamId, Local<S>>,
    woken: Arc<Woken>,
    commands: mpsc::UnboundedReceiver<Command<S>>,
    /// Whether every handle is gone.
    has_no_handles: bool,
    incoming: mpsc::UnboundedSender<(StreamId, Route)>,
    /// The messages that the link has accepted and not sent yet, by class; the oldest first.
    in_flight: [VecDeque<Sending>; Class::ALL.len()],
    /// The wait for memory.
    memory: Option<Pin<Box<Sleep>>>,
    /// The wait for the next look at streams without credit.
    check: Option<Pin<Box<Sleep>>>,
    shared: Arc<Shared>,
}

impl<S: MuxSocket> MuxDriver<S> {
    pub(super) fn new(
        link: Link,
        side: Side,
        config: Config,
        commands: mpsc::UnboundedReceiver<Command<S>>,
        incoming: mpsc::UnboundedSender<(StreamId, Route)>,
        shared: &Arc<Shared>,
    ) -> Result<Self, ConfigError> {
        Ok(Self {
            link,
            mux: Mux::new(side, config)?,
            streams: HashMap::new(),
            woken: Arc::default(),
            commands,
            has_no_handles: false,
            incoming,
            in_flight: Default::default(),
            memory: None,
            check: None,
            shared: Arc::clone(shared),
        })
    }

    /// Carries streams until the link ends. Returns after an orderly end: this side has sent GOAWAY
    /// and all streams have ended, or the peer has closed the link without streams.
    ///
    /// # Errors
    /// Returns an error if the link failed, or if the peer violated the protocol. The local
    /// connections of all streams are reset.
    pub async fn run(mut self) -> Result<(), MuxFailure> {
        let result = poll_fn(|cx| self.poll(cx)).await;
        self.update_state();
        self.reset_all();
        match &result {
            Ok(()) => self.link.close().await?,
            Err(_) => self.link.abort(),
        }
        result
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), MuxFailure>> {
        self.woken.set_task(cx.waker());
        for _ in 0..ROUNDS {
            let has_progress = match self.run_round(cx) {
                Ok(has_progress) => has_progress,
                // The peer has closed the link after its streams have ended.
                Err(MuxFailure::Link(error))
                    if error.kind() == ErrorKind::Closed && self.mux.streams() == 0 =>
                {
                    return Poll::Ready(Ok(()));
                }
                Err(error) => return Poll::Ready(Err(error)),
            };
            self.update_state();
            let is_sent = self.in_flight.iter().all(VecDeque::is_empty);
            if self.mux.is_drained() && is_sent {
                return Poll::Ready(Ok(()));
            }
            if !has_progress {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Does everything that can be done now. Returns whether there was anything.
    fn run_round(&mut self, cx: &mut Context<'_>) -> Result<bool, MuxFailure> {
        let mut has_progress = self.poll_commands(cx);
        has_progress |= self.poll_link(cx)?;
        has_progress |= self.poll_sockets();
        has_progress |= self.poll_failures(cx);
        has_progress |= self.poll_sent(cx)?;
        has_progress |= self.send(cx)?;
        Ok(has_progress)
    }

    fn poll_commands(&mut self, cx: &mut Context<'_>) -> bool {
        let mut has_progress = false;
        while !self.has_no_handles {
            match self.commands.poll_recv(cx) {
                Poll::Ready(Some(command)) => self.obey(command),
                Poll::Ready(None) => self.has_no_handles = true,
                Poll::Pending => break,
            }
            has_progress = true;
        }
        has_progress
    }

    fn obey(&mut self, command: Command<S>) {
        match command {
            Command::Open { class, route, socket, opened } => match self.mux.open(class, route) {
                Ok(stream) => {
                    self.insert(stream, Some(socket));
                    self.mux.set_ready(stream);
                    let _ = opened.send(Ok(stream)); // the stream lives without its opener
                }
                Err(error) => give_back(socket, error, opened),
            },
            Command::Accept { stream, socket } => match self.streams.get_mut(&stream) {
                Some(local) => {
                    local.connect(socket);
                    self.mux.set_ready(stream);
                    self.flush(stream);
                }
                None => socket.reset(), // the stream has ended meanwhile
            },
            Command::Refuse { stream, cause } => self.reset(stream, cause),
            Command::GoAway => self.mux.go_away(),
        }
        self.poll_ended();
    }

    /// Resets all local connections, also those that wait to be opened or accepted. A program must
    /// not take the end of the driver for the end of its stream.
    fn reset_all(&mut self) {
        for (_, local) in self.streams.drain() {
            local.reset();
        }
        self.commands.close();
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::Open { socket, opened, .. } => {
                    give_back(socket, OpenError::Ended, opened);
                }
                Command::Accept { socket, .. } => socket.reset(),
                Command::Refuse { .. } | Command::GoAway => {}
            }
        }
    }

    fn insert(&mut self, stream: StreamId, socket: Option<S>) {
        let waker = self.woken.waker(stream);
        self.streams.insert(stream, Local::new(socket, waker));
    }

    /// Receives messages.
    fn poll_link(&mut self, cx: &mut Context<'_>) -> Result<bool, MuxFailure> {
        for at in 0..RECEIVE_BATCH {
            // The future borrows this clone, so that `self` can be used below.
            let link = self.link.clone();
            let received = Pin::new(&mut link.recv()).poll(cx);
            match received {
                Poll::Ready(message) => self.receive(&message?)?,
                Poll::Pending => return Ok(at > 0),
            }
        }
        Ok(true)
    }

    fn receive(&mut self, message: &Message) -> Result<(), MuxFailure> {
        if message.notice().is_some() {
            return Ok(()); // nothing was granted, so the peer has written nothing
        }
        let now = Instant::now();
        for mut piece in message.pieces() {
            while let Some(received) = self.mux.handle_piece(message.channel(), &mut piece, now)? {
                match received {
                    Received::Opened { stream, route } => self.on_opened(stream, route),
                    Received::Data { stream, bytes } => self.on_data(stream, bytes),
                    Received::Fin { stream } => self.on_fin(stream),
                }
                self.poll_ended();
            }
            self.poll_ended();
        }
        self.mux.handle_message_end()?;
        Ok(())
    }

    fn on_opened(&mut self, stream: StreamId, route: Route) {
        self.insert(stream, None);
        if self.incoming.send((stream, route)).is_err() {
            self.reset(stream, Cause::REFUSED); // nobody accepts streams
        }
    }

    fn on_data(&mut self, stream: StreamId, bytes: &[u8]) {
        let Some(local) = self.streams.get_mut(&stream) else { return };
        match local.deliver(bytes) {
            Ok(taken) => self.mux.consume(stream, taken),
            Err(_) => self.reset(stream, Cause::CONNECTION_LOST),
        }
    }

    fn on_fin(&mut self, stream: StreamId) {
        let Some(local) = self.streams.get_mut(&stream) else { return };
        if local.end().is_err() {
            self.reset(stream, Cause::CONNECTION_LOST);
        }
    }

    /// Handles the local connections that are ready: tells `Mux` that they may have bytes to send,
    /// and passes received bytes to them. Returns whether there were any.
    fn poll_sockets(&mut self) -> bool {
        let mut streams = Vec::new();
        self.woken.take(&mut streams);
        for stream in &streams {
            self.mux.set_ready(*stream);
            self.flush(*stream);
        }
        !streams.is_empty()
    }

    /// Resets the streams without credit whose connection has failed. Returns whether it was time
    /// to look.
    fn poll_failures(&mut self, cx: &mut Context<'_>) -> bool {
        let check = self.check.get_or_insert_with(|| Box::pin(tokio::time::sleep(CHECK_INTERVAL)));
        if check.as_mut().poll(cx).is_pending() {
            return false;
        }
        self.check = None;
        let streams = self.streams.iter();
        let failed = streams.filter(|(id, local)| self.mux.credit(**id) == 0 && local.has_failed());
        let failed: Vec<_> = failed.map(|(id, _)| *id).collect();
        for stream in failed {
            self.reset(stream, Cause::CONNECTION_LOST);
        }
        true
    }

    fn flush(&mut self, stream: StreamId) {
        let Some(local) = self.streams.get_mut(&stream) else { return };
        match local.flush() {
            Ok(taken) => self.mux.consume(stream, taken),
            Err(_) => self.reset(stream, Cause::CONNECTION_LOST),
        }
        self.poll_ended();
    }

    /// Resets a stream at both ends.
    fn reset(&mut self, stream: StreamId, cause: Cause) {
        self.mux.reset(stream, cause);
        if let Some(local) = self.streams.remove(&stream) {
            local.reset();
        }
    }

    /// Closes the local connections of streams that have ended.
    fn poll_ended(&mut self) {
        while let Some(Ended { stream, end }) = self.mux.poll_ended() {
            let Some(local) = self.streams.remove(&stream) else { continue };
            match end {
                End::Finished => drop(local), // the connection was shut down before
                End::Reset(_) | End::ResetByPeer(_) => local.reset(),
            }
        }
    }

    /// Removes the messages that the link has sent, and tells `Mux` about them. Returns whether
    /// there were any.
    fn poll_sent(&mut self, cx: &mut Context<'_>) -> Result<bool, MuxFailure> {
        let mut has_progress = false;
        for class in Class::ALL {
            let queue = &mut self.in_flight[usize::from(class.channel())];
            while let Some(sending) = queue.front_mut()
                && let Poll::Ready(result) = Pin::new(sending).poll(cx)
            {
                check_sent(&self.link, result)?;
                queue.pop_front();
                self.mux.handle_sent(class);
                has_progress = true;
            }
        }
        Ok(has_progress)
    }

    /// Packs and sends the messages that are ready, as long as there is memory for them.
    fn send(&mut self, cx: &mut Context<'_>) -> Result<bool, MuxFailure> {
        let mut has_progress = false;
        // It ends with this call: a driver that has nothing to send holds no memory of the pool.
        let mut scratch = None;
        for class in Class::ALL {
            while self.mux.has_output(class) {
                match self.poll_message(class, &mut scratch, cx) {
                    Poll::Ready(Some(message)) => {
                        let mut sending = self.link.send(class.channel(), message);
                        match Pin::new(&mut sending).poll(cx) {
                            Poll::Ready(result) => {
                                check_sent(&self.link, result)?;
                                self.mux.handle_sent(class);
                            }
                            Poll::Pending => {
                                self.in_flight[usize::from(class.channel())].push_back(sending);
                            }
                        }
                    }
                    Poll::Ready(None) => {}
                    Poll::Pending => return Ok(has_progress),
                }
                has_progress = true;
                self.poll_ended();
            }
        }
        Ok(has_progress)
    }

    /// Packs the next message of a class. Waits while there is no memory for it. A buffer that it
    /// does not hand out is left in `unused`, for the next call.
    fn poll_message(
        &mut self,
        class: Class,
        unused: &mut Option<BufMut>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Buf>> {
        let mut scratch = match unused.take() {
            Some(scratch) => scratch,
            None => ready!(self.poll_memory(self.mux.config().message_bytes, cx)),
        };
        let (streams, now) = (&mut self.streams, Instant::now());
        let mut failed = Vec::new();
        let len = self.mux.poll_message(class, &mut scratch, now, |stream, room| {
            let filled = streams.get_mut(&stream).map(|local| local.fill(room));
            if let Some(Filled::Failed(_)) = filled {
                failed.push(stream);
            }
            filled.unwrap_or(Filled::Failed(Cause::CONNECTION_LOST))
        });
        for local in failed.iter().filter_map(|stream| self.streams.remove(stream)) {
            local.reset();
        }
        let Some(len) = len else {
            *unused = Some(scratch);
            return Poll::Ready(None);
        };
        if len <= SMALL
            && let Ok(mut small) = self.link.pool().take_uncharged(len, Purpose::Send)
        {
            small.copy_from_slice(&scratch[..len]);
            *unused = Some(scratch);
            return Poll::Ready(Some(small.freeze()));
        }
        scratch.set_len(len);
        Poll::Ready(Some(scratch.freeze()))
    }

    /// Takes memory from the pool. If there is none, tries again later: other links return some.
    fn poll_memory(&mut self, bytes: usize, cx: &mut Context<'_>) -> Poll<BufMut> {
        loop {
            if let Some(wait) = &mut self.memory {
                ready!(wait.as_mut().poll(cx));
                self.memory = None;
            }
            match self.link.pool().take_uncharged(bytes, Purpose::Send) {
                Ok(buf) => return Poll::Ready(buf),
                Err(_) => self.memory = Some(Box::pin(tokio::time::sleep(MEMORY_RETRY))),
            }
        }
    }

    fn update_state(&self) {
        let mut state = self.shared.lock();
        state.stats = self.mux.stats();
        state.streams = self.mux.streams();
        state.held_bytes = self.mux.held_bytes();
        state.most_held_bytes = state.most_held_bytes.max(state.held_bytes);
        state.is_peer_going_away = self.mux.is_peer_going_away();
    }
}

impl<S: MuxSocket> Drop for MuxDriver<S> {
    fn drop(&mut self) {
        self.reset_all(); // does nothing after `run`, but the task may have been dropped
    }
}

/// Returns the connection of a stream that cannot be opened. Resets it if nobody takes it.
fn give_back<S: MuxSocket>(
    socket: S,
    error: OpenError,
    opened: oneshot::Sender<Result<StreamId, (S, OpenError)>>,
) {
    if let Err(Err((socket, _))) = opened.send(Err((socket, error))) {
        socket.reset();
    }
}

/// Checks the result of sending a message. Ignores the error if the link has ended: messages of the
/// peer may still wait to be received, and receiving reports the end after them.
fn check_sent(link: &Link, result: Result<(), Error>) -> Result<(), MuxFailure> {
    match result {
        Err(error) if error.kind() != ErrorKind::Closed && link.failure().is_none() => {
            Err(error.into())
        }
        _ => Ok(()),
    }
}

impl<S: MuxSocket> std::fmt::Debug for MuxDriver<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MuxDriver")
            .field("link", &self.link)
            .field("streams", &self.streams.len())
            .finish_non_exhaustive()
    }
}
