//! Clients without a password that use as much memory as they can, over TCP.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use ferrite_fabric::wire::{
    Features, Frame, GREETING_BYTES, Greeting, Hello, TcpFrame, TcpFrameKind,
};
use ferrite_testkit::handshake::HELLO;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// The size of an attack.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    /// Number of clients that send commands and read no reply.
    pub(crate) clients: usize,
    /// Number of bytes that each of these clients tries to send.
    pub(crate) client_bytes: u64,
    /// Number of links that begin a message and never finish it.
    pub(crate) links: usize,
    /// Number of unsolicited `Resume` frames.
    pub(crate) resumes: usize,
}

/// Number of `Resume` frames sent on one link. The first ends the link, so the others show what a
/// dead link costs.
const RESUMES_PER_LINK: usize = 1000;
/// Number of concurrent links for `Resume` frames.
const RESUMING: usize = 8;
/// The size in bytes of the kernel's send buffer of one attacker. It is small because it is not
/// what the test measures, and a thousand larger ones would use up the kernel's memory for sockets.
const SEND_BUFFER: u32 = 64 << 10;

/// How long a server may take to answer a greeting, before it is sent again.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);

/// What the attackers have done so far.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Number of clients that have connected at least once.
    pub(crate) clients: AtomicUsize,
    pub(crate) client_bytes: AtomicU64,
    /// Number of links that have sent as much of a message as their window allows.
    pub(crate) links: AtomicUsize,
    pub(crate) resumes: AtomicUsize,
}

impl Progress {
    fn covers(&self, size: &Size) -> bool {
        self.clients.load(Ordering::Relaxed) >= size.clients
            && self.links.load(Ordering::Relaxed) >= size.links
            && self.resumes.load(Ordering::Relaxed) >= size.resumes
    }
}

/// Attackers that run until they are stopped.
pub(crate) struct Attack {
    size: Size,
    progress: Arc<Progress>,
    stop: watch::Sender<bool>,
    thread: JoinHandle<()>,
}

impl Attack {
    /// Starts all attackers at once. If the target is a loopback address, they use many addresses.
    pub(crate) fn start(target: SocketAddr, size: Size) -> Self {
        let (stop, stopped) = watch::channel(false);
        let progress = Arc::new(Progress::default());
        let shared = Arc::clone(&progress);
        let thread = std::thread::spawn(move || {
            // In reality attackers have their own CPUs, so here they run at the lowest priority.
            let _ = rustix::process::setpriority_process(None, 19);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(run(target, size, shared, stopped));
        });
        Self { size, progress, stop, thread }
    }

    /// Returns whether every attacker is at work and all `Resume` frames are sent.
    pub(crate) fn is_complete(&self) -> bool {
        self.progress.covers(&self.size)
    }

    /// Closes all connections.
    pub(crate) fn stop(self) -> Arc<Progress> {
        let _ = self.stop.send(true);
        self.thread.join().expect("no panic of an attacker");
        self.progress
    }
}

async fn run(
    target: SocketAddr,
    size: Size,
    progress: Arc<Progress>,
    stopped: watch::Receiver<bool>,
) {
    let mut attackers = JoinSet::new();
    for number in 0..size.clients {
        let (progress, stopped) = (Arc::clone(&progress), stopped.clone());
        attackers.spawn(until(stopped, send_commands(target, number, size.client_bytes, progress)));
    }
    for number in 0..size.links {
        let (progress, stopped) = (Arc::clone(&progress), stopped.clone());
        attackers.spawn(until(stopped, begin_messages(target, number, progress)));
    }
    let rounds = size.resumes.div_ceil(RESUMES_PER_LINK);
    for first in 0..RESUMING {
        let (progress, stopped) = (Arc::clone(&progress), stopped.clone());
        attackers.spawn(until(stopped, async move {
            for number in (first..rounds).step_by(RESUMING) {
                while !send_resumes(target, number).await {}
                progress.resumes.fetch_add(RESUMES_PER_LINK, Ordering::Relaxed);
            }
        }));
    }
    while attackers.join_next().await.is_some() {}
}

/// Runs `act` until the attack stops. If `act` completes earlier, waits for the end.
async fn until(mut stopped: watch::Receiver<bool>, act: impl Future<Output = ()>) {
    tokio::select! {
        () = act => {}
        _ = stopped.wait_for(|stopped| *stopped) => return,
    }
    let _ = stopped.wait_for(|stopped| *stopped).await;
}

/// Connects. If the target is a loopback address, connects from one of 250 addresses, so that
/// limits per source address do not stop the attack.
async fn connect(target: SocketAddr, number: usize) -> io::Result<TcpStream> {
    loop {
        let socket = TcpSocket::new_v4()?;
        socket.set_send_buffer_size(SEND_BUFFER)?;
        if target.ip().is_loopback() {
            socket.bind((Ipv4Addr::new(127, 1, 0, 1 + (number % 250) as u8), 0).into())?;
        }
        match socket.connect(target).await {
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
            connected => return connected,
        }
    }
}

/// Sends commands as long as the server accepts them, and never reads. Half of the clients send
/// many small commands, the others a few long ones.
async fn send_commands(target: SocketAddr, number: usize, most: u64, progress: Arc<Progress>) {
    let commands = match number % 2 {
        0 => b"*1\r\n$4\r\nPING\r\n".repeat(4096),
        _ => [&b"*2\r\n$3\r\nGET\r\n$8000\r\n"[..], &[b'k'; 8000], b"\r\n"].concat().repeat(8),
    };
    let (mut sent, mut is_counted) = (0, false);
    while sent < most {
        let Ok(mut socket) = connect(target, number).await else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        if !std::mem::replace(&mut is_counted, true) {
            progress.clients.fetch_add(1, Ordering::Relaxed);
        }
        let mut at = 0;
        // The client reconnects if the server closes the connection.
        while sent < most
            && let Ok(count) = socket.write(&commands[at..]).await
        {
            at = (at + count) % commands.len();
            sent += count as u64;
            progress.client_bytes.fetch_add(count as u64, Ordering::Relaxed);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Opens a link over TCP. Also returns the server's hello. If a greeting is late, the server treats
/// the peer as a client of the engine and does not answer the greeting.
async fn greet(target: SocketAddr, number: usize) -> io::Result<(TcpStream, Hello)> {
    let greeting = greet_once(target, number);
    tokio::time::timeout(GREETING_TIMEOUT, greeting).await.map_err(io::Error::from)?
}

async fn greet_once(target: SocketAddr, number: usize) -> io::Result<(TcpStream, Hello)> {
    let mut socket = connect(target, number).await?;
    let hello = Hello { features: Features::MOVE, session: 1 + number as u64, ..HELLO };
    let greeting = Greeting { hello, resume: None };
    socket.write_all(&greeting.encode()).await?;
    let mut theirs = [0; GREETING_BYTES];
    socket.read_exact(&mut theirs).await?;
    let theirs = Greeting::decode(&theirs).map_err(|_| io::ErrorKind::InvalidData)?;
    Ok((socket, theirs.hello))
}

/// Sends the frames of one message up to the window, but never the last one. Sends no keepalives,
/// so the server ends the link. Then it reconnects.
async fn begin_messages(target: SocketAddr, number: usize, progress: Arc<Progress>) {
    let mut is_counted = false;
    loop {
        if let Ok((mut socket, theirs)) = greet(target, number).await
            && socket.write_all(&unfinished(&theirs)).await.is_ok()
        {
            if !std::mem::replace(&mut is_counted, true) {
                progress.links.fetch_add(1, Ordering::Relaxed);
            }
            let mut ignored = [0; 1024];
            while socket.read(&mut ignored).await.is_ok_and(|count| count > 0) {}
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Returns the frames of an unfinished message, as many as the server's window allows.
fn unfinished(theirs: &Hello) -> Vec<u8> {
    let len = theirs.segment_bytes;
    let frames = theirs.max_message_bytes.saturating_sub(1) / u64::from(len);
    let imm = Frame { control: false, more: true, channel: 0, consumed: 0 }.to_imm();
    let tcp_frame = TcpFrame { kind: TcpFrameKind::Frame, imm, len, op: 0, grant: 0, offset: 0 };
    let frame = [&tcp_frame.encode()[..], &vec![7; len as usize]].concat();
    frame.repeat(frames.min(theirs.window.into()) as usize)
}

/// Sends unsolicited `Resume` frames on a new link. Returns false if the link could not be opened.
async fn send_resumes(target: SocketAddr, number: usize) -> bool {
    let Ok((mut socket, _)) = greet(target, number).await else {
        tokio::time::sleep(Duration::from_millis(100)).await;
        return false;
    };
    let resume =
        TcpFrame { kind: TcpFrameKind::Resume, imm: 0, len: 0, op: 0, grant: 0, offset: 0 };
    // The server closes the link at the first frame.
    let _ = socket.write_all(&resume.encode().repeat(RESUMES_PER_LINK)).await;
    true
}
