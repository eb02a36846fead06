//! Clients without a password that cost as much memory as they can, over TCP.

#[path = "../../../ferrite-fabric/tests/links/hello.rs"]
mod hello;

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use ferrite_fabric::wire::{
    Features, Frame, GREETING_BYTES, Greeting, Hello, TcpFrame, TcpFrameKind,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use hello::HELLO;

/// How much of each there is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    /// Clients that send commands and read no reply, and the bytes that each tries to send.
    pub(crate) clients: usize,
    pub(crate) client_bytes: u64,
    /// Links that begin a message and do not end it.
    pub(crate) links: usize,
    /// `Resume` frames that nothing has asked for.
    pub(crate) resumes: usize,
}

/// Frames sent on one link. The first ends it, so the others find out what a link that has ended
/// costs.
const RESUMES_PER_LINK: usize = 1000;
/// Links for `Resume` frames at a time.
const RESUMING: usize = 8;
/// What the kernel keeps for one attacker: it is not what is measured, and a thousand of them would
/// fill it.
const SEND_BUFFER: u32 = 64 << 10;

/// What the attackers have done so far.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Clients that are connected, or were until the other side hung up.
    pub(crate) clients: AtomicUsize,
    pub(crate) client_bytes: AtomicU64,
    /// Links that have sent as much of a message as their window takes.
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
    /// Starts all of them at once, from many addresses of this host.
    pub(crate) fn start(target: SocketAddr, size: Size) -> Self {
        let (stop, stopped) = watch::channel(false);
        let progress = Arc::new(Progress::default());
        let shared = Arc::clone(&progress);
        let thread = std::thread::spawn(move || {
            // In the field attackers have CPUs of their own: here they take what others leave.
            let _ = rustix::process::setpriority_process(None, 19);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(run(target, size, shared, stopped));
        });
        Self { size, progress, stop, thread }
    }

    /// Whether every attacker has begun, and all `Resume` frames are sent.
    pub(crate) fn is_complete(&self) -> bool {
        self.progress.covers(&self.size)
    }

    /// Ends all connections.
    pub(crate) fn stop(self) -> Arc<Progress> {
        let _ = self.stop.send(true);
        self.thread.join().expect("the attackers do not panic");
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
                send_resumes(target, number).await;
                progress.resumes.fetch_add(RESUMES_PER_LINK, Ordering::Relaxed);
            }
        }));
    }
    while attackers.join_next().await.is_some() {}
}

/// Does it, and keeps what it holds until the attack stops.
async fn until(mut stopped: watch::Receiver<bool>, act: impl Future<Output = ()>) {
    tokio::select! {
        () = act => {}
        _ = stopped.wait_for(|stopped| *stopped) => return,
    }
    let _ = stopped.wait_for(|stopped| *stopped).await;
}

/// A connection from one of 250 addresses: limits for each source alone do not hold the attack
/// back.
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

/// Sends commands as long as the other side takes them, and never reads. Half of the clients send
/// many small commands, half send few long ones.
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
        // It comes back if the other side hangs up.
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

/// A link over TCP, and what the other side said of itself.
async fn greet(target: SocketAddr, number: usize) -> io::Result<(TcpStream, Hello)> {
    let mut socket = connect(target, number).await?;
    let hello = Hello { features: Features::MOVE, session: 1 + number as u64, ..HELLO };
    let greeting = Greeting { hello, resume: None };
    socket.write_all(&greeting.encode()).await?;
    let mut theirs = [0; GREETING_BYTES];
    socket.read_exact(&mut theirs).await?;
    let theirs = Greeting::decode(&theirs).map_err(|_| io::ErrorKind::InvalidData)?;
    Ok((socket, theirs.hello))
}

/// Sends the frames of one message up to the window, and never the last. It comes back when the
/// link ends, since it answers nothing.
async fn begin_messages(target: SocketAddr, number: usize, progress: Arc<Progress>) {
    let mut is_counted = false;
    loop {
        if let Ok((mut socket, theirs)) = greet(target, number).await
            && socket.write_all(&unfinished(&theirs)).await.is_ok()
        {
            if !std::mem::replace(&mut is_counted, true) {
                progress.links.fetch_add(1, Ordering::Relaxed);
            }
            let mut heard = [0; 1024];
            while socket.read(&mut heard).await.is_ok_and(|count| count > 0) {}
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// As much of a message as the other side takes.
fn unfinished(theirs: &Hello) -> Vec<u8> {
    let len = theirs.segment_bytes;
    let frames = theirs.max_message_bytes.saturating_sub(1) / u64::from(len);
    let imm = Frame { control: false, more: true, channel: 0, consumed: 0 }.to_imm();
    let tcp_frame = TcpFrame { kind: TcpFrameKind::Frame, imm, len, op: 0, grant: 0, offset: 0 };
    let frame = [&tcp_frame.encode()[..], &vec![7; len as usize]].concat();
    frame.repeat(frames.min(theirs.window.into()) as usize)
}

async fn send_resumes(target: SocketAddr, number: usize) {
    let Ok((mut socket, _)) = greet(target, number).await else { return };
    let resume =
        TcpFrame { kind: TcpFrameKind::Resume, imm: 0, len: 0, op: 0, grant: 0, offset: 0 };
    // The other side hangs up at the first of them.
    let _ = socket.write_all(&resume.encode().repeat(RESUMES_PER_LINK)).await;
}
