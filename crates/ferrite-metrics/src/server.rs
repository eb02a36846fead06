//! The admin port's HTTP server. It has a thread of its own, so that the program never waits for
//! it.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd as _, RawFd};
use std::pin::Pin;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use ferrite_fabric::descriptors::lift;
use ferrite_session::{EngineAccess, EngineAddress, EngineSocket, probe_access};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE as CONTENT_TYPE_HEADER};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use crate::connections::{Activity, Connections};
use crate::exposition::Exposition;

/// The format of `/metrics`.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The number of threads for calls that may block in the kernel: reading metrics, and looking up a
/// name.
const BLOCKING_THREADS: usize = 2;
/// How long a connection may be idle or take to send a request.
const HEADER_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a connection may send requests. After that, `LAST_ANSWER_TIMEOUT` limits how long its
/// last answer may take. Without these limits, a few clients that do not read their answers would
/// occupy all connections for ever.
const CONNECTION_TIME: Duration = Duration::from_secs(60);
const LAST_ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long `/ready` waits for the program. Without an answer by then, the program is not ready.
const READY_TIMEOUT: Duration = Duration::from_secs(1);

/// The result of a check for `/ready`. The error says why the program is not ready.
pub type Ready = Pin<Box<dyn Future<Output = Result<(), String>> + Send>>;

/// What a program shows at its admin port. Threads of the server call these methods.
pub trait Program: Send + Sync + 'static {
    /// Writes the current metrics.
    fn metrics(&self, out: &mut Exposition);

    /// Finds out whether the program can serve clients.
    fn ready(&self) -> Ready;
}

/// An admin port that is not served yet.
#[derive(Debug)]
pub struct AdminPort {
    listener: TcpListener,
    address: SocketAddr,
}

/// A running admin port. Dropping it closes the port without a long wait, because the module drops
/// it on the engine's main thread.
#[derive(Debug)]
pub struct AdminServer {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Returns what to do about a TCP port that cannot be opened, as the end of a message.
#[must_use]
pub fn listen_hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "; choose another port, or stop the program that has it (`ss -ltnp` lists it)"
        }
        io::ErrorKind::AddrNotAvailable => {
            "; this host has no such address (`ip addr` lists those it has)"
        }
        io::ErrorKind::PermissionDenied => {
            "; ports below 1024 need root or CAP_NET_BIND_SERVICE: choose another port"
        }
        _ => "",
    }
}

impl AdminPort {
    /// Listens on `address`.
    ///
    /// # Errors
    /// Returns an error that says why the port cannot be opened.
    pub fn bind(address: SocketAddr) -> Result<Self, String> {
        let bound = || {
            let listener = TcpListener::from(lift(TcpListener::bind(address)?.into())?);
            listener.set_nonblocking(true)?;
            Ok(Self { address: listener.local_addr()?, listener })
        };
        bound().map_err(|error: io::Error| {
            let hint = listen_hint(&error);
            format!("cannot open the admin port at {address}: {error}{hint}")
        })
    }

    /// Returns the listening descriptor, for programs that close it in forked children.
    #[must_use]
    pub fn descriptor(&self) -> RawFd {
        self.listener.as_raw_fd()
    }

    /// Serves requests until the result is dropped.
    ///
    /// # Errors
    /// Returns an error if the runtime or the thread cannot be started.
    pub fn serve(self, program: Arc<dyn Program>) -> Result<AdminServer, String> {
        let Self { listener, address } = self;
        let failed = |error: io::Error| format!("cannot serve the admin port: {error}");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(BLOCKING_THREADS)
            .build()
            .map_err(failed)?;
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new().name("ferrite-admin".into()).spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    () = serve(listener, program) => {}
                    _ = stopped => {}
                }
            });
            // A thread may still be reading counters or looking up a name. Do not wait for it.
            runtime.shutdown_background();
        });
        let thread = Some(thread.map_err(failed)?);
        Ok(AdminServer { address, stop: Some(stop), thread })
    }
}

impl AdminServer {
    /// Returns the address that the server listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for AdminServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn serve(listener: TcpListener, program: Arc<dyn Program>) {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!(%error, "the admin port cannot be served");
            return;
        }
    };
    let mut connections = Connections::default();
    loop {
        let Ok(socket) = listener.accept().await.and_then(|(socket, _)| lifted(socket)) else {
            sleep(Duration::from_millis(100)).await; // for example, too many open files
            continue;
        };
        let (program, activity) = (Arc::clone(&program), connections.new_activity());
        let uses = Arc::clone(&activity);
        let task = tokio::spawn(async move {
            serve_client(socket, program, &uses).await;
        });
        connections.add(task.abort_handle(), activity);
    }
}

/// Answers the requests of a client until it closes the connection, or its time is over.
async fn serve_client<S>(socket: S, program: Arc<dyn Program>, activity: &Activity)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let answer = service_fn(|request| {
        let program = Arc::clone(&program);
        activity.begin();
        async move {
            let response = answer(&request, program).await;
            activity.end();
            Ok::<_, Infallible>(response)
        }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .serve_connection(TokioIo::new(socket), answer);
    let mut connection = std::pin::pin!(connection);
    // An error means that the client has gone, or speaks no HTTP.
    if timeout(CONNECTION_TIME, connection.as_mut()).await.is_err() {
        connection.as_mut().graceful_shutdown();
        let _ = timeout(LAST_ANSWER_TIMEOUT, connection).await;
    }
}

/// Moves a connection's descriptor to a high number, so that low numbers stay free for the program:
/// see [`lift`].
fn lifted(socket: TcpStream) -> io::Result<TcpStream> {
    let socket = std::net::TcpStream::from(lift(socket.into_std()?.into())?);
    TcpStream::from_std(socket)
}

async fn answer(request: &Request<Incoming>, program: Arc<dyn Program>) -> Response<Full<Bytes>> {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut response =
            text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD are allowed\n".into());
        response.headers_mut().insert(ALLOW, "GET, HEAD".parse().expect("valid"));
        return response;
    }
    match request.uri().path() {
        "/metrics" => {
            // A device in trouble may block the reader of its counters for seconds.
            let read = tokio::task::spawn_blocking(move || {
                let mut out = Exposition::default();
                program.metrics(&mut out);
                out.into_text()
            });
            let Ok(metrics) = read.await else {
                let why = "reading the metrics panicked; this is a bug\n";
                return text(StatusCode::INTERNAL_SERVER_ERROR, why.into());
            };
            let mut response = text(StatusCode::OK, metrics);
            let format = CONTENT_TYPE.parse().expect("valid");
            response.headers_mut().insert(CONTENT_TYPE_HEADER, format);
            response
        }
        "/ready" => match timeout(READY_TIMEOUT, program.ready()).await {
            Ok(Ok(())) => text(StatusCode::OK, "ready\n".into()),
            Ok(Err(why)) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
            Err(_) => text(
                StatusCode::SERVICE_UNAVAILABLE,
                "the readiness check took longer than 1 s\n".into(),
            ),
        },
        "/live" => text(StatusCode::OK, "live\n".into()),
        _ => text(
            StatusCode::NOT_FOUND,
            "not found; this port serves /metrics, /ready and /live\n".into(),
        ),
    }
}

fn text(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let format = "text/plain; charset=utf-8".parse().expect("valid");
    response.headers_mut().insert(CONTENT_TYPE_HEADER, format);
    response
}

/// Checks whether an engine answers a command. A reply that asks for a password is an answer.
///
/// # Errors
/// Returns an error that says why the engine does not answer.
pub async fn engine_answers(address: &EngineAddress) -> Result<(), String> {
    let name = format!("the engine at {address}");
    match EngineSocket::connect(address).await {
        Ok(socket) => server_answers(&name, socket).await,
        Err(error) => Err(format!("{name} does not answer: {error}")),
    }
}

/// Checks whether a server answers a command on a new connection, as [`engine_answers`] does.
///
/// # Errors
/// Returns an error that says why the server does not answer. An error reply is an answer only if
/// it asks for a password. For example, `-LOADING` and the error of a gateway without an engine are
/// no answers.
pub async fn server_answers<S>(name: &str, mut connection: S) -> Result<(), String>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    match probe_access(&mut connection).await {
        Ok(EngineAccess::Refused(why)) => {
            Err(format!("{name} refuses clients: {}", why.trim_end()))
        }
        Ok(_) => Ok(()),
        Err(error) => Err(format!("{name} does not answer: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use tokio::io::AsyncWriteExt as _;

    use super::*;

    /// A program that writes its metrics only after `end` has received something or was closed.
    struct Slow {
        begun: Sender<()>,
        end: Mutex<Receiver<()>>,
    }

    impl Program for Slow {
        fn metrics(&self, _: &mut Exposition) {
            let _ = self.begun.send(());
            let _ = self.end.lock().expect("no panic").recv();
        }

        fn ready(&self) -> Ready {
            Box::pin(async { Ok(()) })
        }
    }

    /// A client that sends a request and does not read the answer occupies one of the few
    /// connections, but not for ever.
    #[tokio::test(start_paused = true)]
    async fn ends_the_connection_of_a_client_that_does_not_read() {
        let (begun, end) = (channel().0, Mutex::new(channel().1));
        let activity = Connections::default().new_activity();
        let (mut client, socket) = tokio::io::duplex(64); // shorter than an answer
        client.write_all(b"GET /live HTTP/1.1\r\n\r\n").await.expect("sent");
        let served = serve_client(socket, Arc::new(Slow { begun, end }), &activity);
        let day = Duration::from_secs(86_400);
        timeout(day, served).await.expect("the connection ends");
    }

    fn request(address: SocketAddr, path: &str) -> std::net::TcpStream {
        let mut socket = std::net::TcpStream::connect(address).expect("the admin port");
        socket.set_read_timeout(Some(Duration::from_secs(30))).expect("set");
        write!(socket, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            .expect("sent");
        socket
    }

    /// A program with metrics that are longer than the kernel buffers for a connection.
    struct Long;

    impl Program for Long {
        fn metrics(&self, out: &mut Exposition) {
            out.gauge("long", &"x".repeat(16 << 20), 1);
        }

        fn ready(&self) -> Ready {
            Box::pin(async { Ok(()) })
        }
    }

    #[test]
    fn silent_clients_and_clients_that_do_not_read_keep_nobody_out() {
        let port = AdminPort::bind("127.0.0.1:0".parse().expect("an address")).expect("a port");
        let server = port.serve(Arc::new(Long)).expect("a thread");
        let silent = || std::net::TcpStream::connect(server.address()).expect("a connection");
        let does_not_read = || {
            let mut socket = request(server.address(), "/metrics");
            socket.read_exact(&mut [0; 1]).expect("the answer has begun");
            socket
        };
        let _silent: Vec<_> = (0..17).map(|_| silent()).collect();
        let _unread: Vec<_> = (0..17).map(|_| does_not_read()).collect();
        let mut answer = String::new();
        request(server.address(), "/live").read_to_string(&mut answer).expect("an answer");
        assert!(answer.ends_with("live\n"), "{answer}");
    }

    #[test]
    fn metrics_that_take_long_delay_nobody() {
        let ((begun, has_begun), (release, end)) = (channel(), channel());
        let port = AdminPort::bind("127.0.0.1:0".parse().expect("an address")).expect("a port");
        let slow = Slow { begun, end: Mutex::new(end) };
        let server = port.serve(Arc::new(slow)).expect("a thread");
        let _scrape = request(server.address(), "/metrics");
        has_begun.recv().expect("a scrape");
        let mut answer = String::new();
        request(server.address(), "/live").read_to_string(&mut answer).expect("an answer");
        assert!(answer.ends_with("live\n"), "{answer}");
        drop(server); // hangs if it waits for the scrape
        drop(release);
    }
}
