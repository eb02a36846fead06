//! The class `Stream`: a session with the methods of a Python socket that redis-py calls.
//!
//! Every call that may wait releases Python's lock. A call waits in short slices, so that it
//! notices signals (Ctrl-C). One thread may receive while another sends. If a third thread closes
//! the stream, both calls raise an error.
//!
//! With a timeout of 0, calls do not wait. A call that would wait raises `BlockingIOError`. The
//! eventfd of [`Stream::fileno`] becomes readable when the caller should call again.

use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use ferrite_fabric::Rdma;
use ferrite_session::{Connector, Session, TransportObserver};
use pyo3::exceptions::{PyBlockingIOError, PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rustix::event::{EventfdFlags, eventfd};
use tokio::io::{AsyncWrite as _, WriteHalf};
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::background::Background;
use crate::buffer::{Source, Target};
use crate::input::{Bulk, BulkProgress, Input};

/// The longest wait between two checks for signals.
const SLICE: Duration = Duration::from_millis(200);

/// A connection to a server, over RDMA or TCP.
#[pyclass(frozen, module = "ferrite._native")]
pub(crate) struct Stream {
    background: Arc<Background>,
    /// `None` after `close`.
    input: Mutex<Option<Input>>,
    output: Mutex<Option<WriteHalf<Session>>>,
    closing: Notify,
    is_closed: AtomicBool,
    timeout: Mutex<Option<Duration>>,
    /// Wakes an event loop; created at the first call of `fileno`.
    event: OnceLock<Arc<Event>>,
    peer: SocketAddr,
    observer: TransportObserver,
}

#[pymethods]
impl Stream {
    /// Connects to `address`, an IP address with a port. The timeout, in seconds, applies to RDMA
    /// and to TCP separately.
    #[staticmethod]
    #[pyo3(signature = (address, rdma="prefer", timeout=None, local_address=None))]
    fn connect(
        py: Python<'_>,
        address: &str,
        rdma: &str,
        timeout: Option<f64>,
        local_address: Option<&str>,
    ) -> PyResult<Self> {
        let peer: SocketAddr = parsed(address)?;
        let rdma: Rdma = rdma.parse().map_err(PyValueError::new_err)?;
        let local = local_address.map(parsed::<IpAddr>).transpose()?;
        let timeout = duration(timeout)?;
        let background = py.detach(Background::of_this_process)?;
        let fabric = py.detach(|| background.fabric(rdma))?;
        let mut connector = Connector::new(&fabric).rdma(rdma);
        if let Some(local) = local {
            connector = connector.local(SocketAddr::new(local, 0));
        }
        if let Some(timeout) = timeout {
            connector = connector.timeout(timeout);
        }
        let mut connecting = Box::pin(connector.connect(peer));
        let session = wait(py, &background, None, |cx, _| {
            connecting.as_mut().poll(cx).map_err(|error| with_remedy(rdma, error))
        })?;
        Ok(Self::new(background.clone(), peer, session))
    }

    /// Receives up to `size` bytes. Returns no bytes when the server has closed.
    fn recv<'py>(&self, py: Python<'py>, size: usize) -> PyResult<Bound<'py, PyBytes>> {
        let mut received = vec![0; size];
        let len = self.receive(py, &mut received)?;
        Ok(PyBytes::new(py, &received[..len]))
    }

    /// Receives into `buffer`. Returns the number of bytes, or 0 when the server has closed.
    #[pyo3(signature = (buffer, nbytes=0))]
    fn recv_into(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        nbytes: usize,
    ) -> PyResult<usize> {
        let mut target = Target::of(buffer)?;
        let bytes = target.bytes();
        let size = if nbytes == 0 { bytes.len() } else { nbytes.min(bytes.len()) };
        self.receive(py, &mut bytes[..size])
    }

    /// Receives a bulk reply with its value into `buffer`. Returns the value's size, or -1 for a
    /// null. Returns None for any other reply, which stays unread. A value larger than the buffer
    /// is dropped.
    #[pyo3(signature = (buffer, timeout=None))]
    fn recv_bulk_into(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<Option<isize>> {
        let mut target = Target::of(buffer)?;
        let (out, mut progress) = (target.bytes(), BulkProgress::Header);
        let bulk = self.wait_for(py, duration(timeout)?, |cx, clock| {
            let moved = || *clock = Instant::now();
            with(&self.input, |input| input.poll_bulk(cx, &mut progress, out, moved))
        })?;
        Ok(match bulk {
            Bulk::Value(size) => Some(isize::try_from(size).unwrap_or(isize::MAX)),
            Bulk::Null => Some(-1),
            Bulk::Other => None,
        })
    }

    /// Puts received bytes back, so that they are received next.
    fn unrecv(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<()> {
        let source = Source::of(data)?;
        let bytes = source.bytes();
        py.detach(|| match lock(&self.input).as_mut() {
            Some(input) => {
                input.unread(bytes);
                Ok(())
            }
            None => Err(closed().into()),
        })
    }

    /// Sends all bytes of `data`.
    fn sendall(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<()> {
        let source = Source::of(data)?;
        let mut left = source.bytes();
        self.wait(py, |cx, clock| {
            while !left.is_empty() {
                let sent = std::task::ready!(self.poll_send(cx, left))?;
                left = &left[sent..];
                *clock = Instant::now();
            }
            Poll::Ready(Ok(()))
        })
    }

    /// Sends some bytes of `data`. Returns their number.
    fn send(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<usize> {
        let source = Source::of(data)?;
        let bytes = source.bytes();
        self.wait(py, |cx, _| self.poll_send(cx, bytes))
    }

    /// Waits until there are bytes to receive, or the server has closed. Returns False if the
    /// timeout passes first.
    #[pyo3(signature = (timeout=None))]
    fn can_recv(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let limit = duration(timeout)?;
        let ready =
            self.wait_for(py, limit, |cx, _| with(&self.input, |input| input.poll_readable(cx)));
        match ready {
            Ok(()) => Ok(true),
            Err(error) if error.is_instance_of::<PyTimeoutError>(py) => Ok(false),
            Err(error) if error.is_instance_of::<PyBlockingIOError>(py) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns whether a call has seen that the server has closed, and all bytes were received.
    /// Also true once this stream is closed.
    fn is_at_end(&self, py: Python<'_>) -> bool {
        py.detach(|| lock(&self.input).as_ref().is_none_or(Input::is_at_end))
    }

    /// Sets the time limit, in seconds, of a wait without progress. None means no limit, and 0
    /// means not to wait. `connect`, `recv_bulk_into` and `can_recv` have limits of their own.
    #[pyo3(signature = (timeout))]
    fn settimeout(&self, timeout: Option<f64>) -> PyResult<()> {
        *lock(&self.timeout) = duration(timeout)?;
        Ok(())
    }

    fn gettimeout(&self) -> Option<f64> {
        lock(&self.timeout).map(|timeout| timeout.as_secs_f64())
    }

    /// Returns the eventfd that becomes readable when a call that would have waited may continue.
    fn fileno(&self) -> PyResult<RawFd> {
        if let Some(event) = self.event.get() {
            return Ok(event.0.as_raw_fd());
        }
        let new = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let new = Arc::new(Event(new.map_err(io::Error::from)?));
        Ok(self.event.get_or_init(|| new).0.as_raw_fd())
    }

    fn getpeername(&self) -> (String, u16) {
        (self.peer.ip().to_string(), self.peer.port())
    }

    /// The transport that the stream uses now: RDMA or TCP, in words.
    #[getter]
    fn transport(&self) -> String {
        self.observer.transport().to_string()
    }

    /// Whether the stream uses RDMA now.
    #[getter]
    fn is_rdma(&self) -> bool {
        self.observer.device().is_some()
    }

    /// The RDMA device, if the stream uses RDMA now.
    #[getter]
    fn device(&self) -> Option<String> {
        self.observer.device()
    }

    /// Why the stream uses TCP now although RDMA is preferred.
    #[getter]
    fn fallback(&self) -> Option<String> {
        self.observer.fallback().map(|fallback| fallback.to_string())
    }

    /// Makes the waiting calls of other threads fail, and all later calls that send or receive.
    /// `how` exists for compatibility: both directions end.
    fn shutdown(&self, how: i32) {
        let _ = how;
        self.is_closed.store(true, Ordering::SeqCst);
        self.closing.notify_waiters();
    }

    /// Closes the stream. Bytes that were sent are still delivered.
    fn close(&self, py: Python<'_>) {
        self.shutdown(0);
        if self.background.is_of_this_process() {
            py.detach(|| {
                let _runtime = self.background.handle().enter();
                drop((lock(&self.input).take(), lock(&self.output).take()));
            });
        }
    }
}

impl Stream {
    fn new(background: Arc<Background>, peer: SocketAddr, session: Session) -> Self {
        let observer = session.observer();
        let (input, output) = tokio::io::split(session);
        Self {
            background,
            input: Mutex::new(Some(Input::new(input))),
            output: Mutex::new(Some(output)),
            closing: Notify::new(),
            is_closed: AtomicBool::new(false),
            timeout: Mutex::new(None),
            event: OnceLock::new(),
            peer,
            observer,
        }
    }

    fn receive(&self, py: Python<'_>, out: &mut [u8]) -> PyResult<usize> {
        self.wait(py, |cx, _| with(&self.input, |input| input.poll_read(cx, out)))
    }

    fn poll_send(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        with(&self.output, |output| Pin::new(output).poll_write(cx, bytes))
    }

    fn wait<T: Send>(
        &self,
        py: Python<'_>,
        poll: impl FnMut(&mut Context<'_>, &mut Instant) -> Poll<io::Result<T>> + Send,
    ) -> PyResult<T> {
        let limit = *lock(&self.timeout);
        self.wait_for(py, limit, poll)
    }

    fn wait_for<T: Send>(
        &self,
        py: Python<'_>,
        limit: Option<Duration>,
        mut poll: impl FnMut(&mut Context<'_>, &mut Instant) -> Poll<io::Result<T>> + Send,
    ) -> PyResult<T> {
        if !self.background.is_of_this_process() {
            return Err(PyErr::from(closed()));
        }
        if limit == Some(Duration::ZERO) {
            return self.try_once(py, poll);
        }
        let mut closing = Box::pin(self.closing.notified());
        wait(py, &self.background, limit, |cx, clock| {
            if self.is_closed.load(Ordering::SeqCst) || closing.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Err(closed()));
            }
            poll(cx, clock)
        })
    }

    fn try_once<T: Send>(
        &self,
        py: Python<'_>,
        mut poll: impl FnMut(&mut Context<'_>, &mut Instant) -> Poll<io::Result<T>> + Send,
    ) -> PyResult<T> {
        let polled = py.detach(|| {
            let _runtime = self.background.handle().enter();
            let waker = self.event.get().map(|event| Waker::from(event.clone()));
            let waker = waker.as_ref().unwrap_or(Waker::noop());
            if self.is_closed.load(Ordering::SeqCst) {
                return Poll::Ready(Err(closed()));
            }
            poll(&mut Context::from_waker(waker), &mut Instant::now())
        });
        match polled {
            Poll::Ready(done) => Ok(done?),
            Poll::Pending => {
                let would_block = rustix::io::Errno::AGAIN.raw_os_error();
                Err(PyBlockingIOError::new_err((would_block, "the call would wait")))
            }
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let halves = (lock(&self.input).take(), lock(&self.output).take());
        if self.background.is_of_this_process() {
            let _runtime = self.background.handle().enter();
            drop(halves);
        } else {
            std::mem::forget(halves); // they belong to the parent process
        }
    }
}

/// A waker that makes an eventfd readable.
struct Event(OwnedFd);

impl Wake for Event {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // The write fails only if the counter is full, and then the eventfd is readable anyway.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

/// Calls `poll` until it is ready, without Python's lock. `poll` gets the time of the last progress
/// and may update it, because the limit applies to a wait without progress.
fn wait<T: Send>(
    py: Python<'_>,
    background: &Background,
    limit: Option<Duration>,
    mut poll: impl FnMut(&mut Context<'_>, &mut Instant) -> Poll<io::Result<T>> + Send,
) -> PyResult<T> {
    let mut progress = Instant::now();
    loop {
        let left = limit.map(|limit| limit.saturating_sub(progress.elapsed()));
        let slice = left.unwrap_or(SLICE).min(SLICE);
        let polling = poll_fn(|cx| poll(cx, &mut progress));
        match py.detach(|| background.handle().block_on(async { timeout(slice, polling).await })) {
            Ok(done) => return Ok(done?),
            Err(_) if limit.is_some_and(|limit| progress.elapsed() >= limit) => {
                return Err(PyTimeoutError::new_err("timed out"));
            }
            Err(_) => py.check_signals()?,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Polls one half, and locks it only during this poll.
fn with<H, T>(
    half: &Mutex<Option<H>>,
    poll: impl FnOnce(&mut H) -> Poll<io::Result<T>>,
) -> Poll<io::Result<T>> {
    match lock(half).as_mut() {
        Some(half) => poll(half),
        None => Poll::Ready(Err(closed())),
    }
}

fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "the stream is closed")
}

/// Adds the remedy for missing RDMA if RDMA is required. If RDMA is only preferred, TCP has failed
/// as well, so missing RDMA is not the cause.
fn with_remedy(rdma: Rdma, error: io::Error) -> io::Error {
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref::<ferrite_fabric::Error>());
    match cause.and_then(ferrite_fabric::Error::remedy) {
        Some(remedy) if rdma == Rdma::Require => {
            io::Error::new(error.kind(), format!("{error}; to do: {remedy}"))
        }
        _ => error,
    }
}

fn parsed<T: std::str::FromStr<Err: std::fmt::Display>>(text: &str) -> PyResult<T> {
    text.parse().map_err(|error| PyValueError::new_err(format!("{text:?}: {error}")))
}

fn duration(seconds: Option<f64>) -> PyResult<Option<Duration>> {
    let duration = seconds.map(Duration::try_from_secs_f64).transpose();
    duration.map_err(|error| PyValueError::new_err(format!("timeout {seconds:?}: {error}")))
}
