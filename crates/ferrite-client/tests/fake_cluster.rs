//! The cluster client on the fake provider, with RDMA endpoints that do not answer. The node is a
//! program of this test, because no engine has the module here.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ferrite_client::redis::AsyncCommands as _;
use ferrite_client::{Client, ClusterConnection, Fabric, NodeTransport, Rdma, SessionTransport};
use ferrite_fabric::{Config, ListenOptions};
use ferrite_verbs::fake::{DeviceSpec, World};

/// The number of addresses that the node's module announces, the most that a module has.
const ENDPOINTS: usize = 8;
const LIMIT: Duration = Duration::from_secs(2);

/// Whether the node has closed a connection after the command `GET close`. It does so once.
static HAS_CLOSED: AtomicBool = AtomicBool::new(false);

/// Starts the only node of a cluster, whose module announces addresses of the first host.
fn node() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let client = client.expect("a client");
            std::thread::spawn(move || serve(client, address.port()));
        }
    });
    address
}

fn serve(client: TcpStream, port: u16) {
    let mut writer = client.try_clone().expect("a clone");
    let mut reader = BufReader::new(client);
    while let Some(command) = read_command(&mut reader) {
        let words: Vec<_> = command.iter().map(String::as_str).collect();
        let reply = match &words[..] {
            ["CLUSTER", "SLOTS"] => {
                format!("*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$0\r\n\r\n:{port}\r\n$1\r\na\r\n")
            }
            ["CLUSTER", "MYID"] => "$1\r\na\r\n".into(),
            ["FERRITE", "ENDPOINTS"] => {
                let row = |index| {
                    format!(
                        "*8\r\n+node\r\n+a\r\n+address\r\n+10.0.0.1\r\n+port\r\n:{}\r\n\
                         +transport\r\n+rdma\r\n",
                        6380 + index
                    )
                };
                let rows: String = (0..ENDPOINTS).map(row).collect();
                format!("*{ENDPOINTS}\r\n{rows}")
            }
            ["GET", "close"] if !HAS_CLOSED.swap(true, Ordering::Relaxed) => return,
            ["GET", key] => format!("${}\r\n{key}\r\n", key.len()),
            _ => "+OK\r\n".into(),
        };
        if writer.write_all(reply.as_bytes()).is_err() {
            return;
        }
    }
}

/// Reads a command; `None` at the end of the connection.
fn read_command(reader: &mut BufReader<TcpStream>) -> Option<Vec<String>> {
    let number = |reader: &mut BufReader<TcpStream>| {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|read| *read > 0)?;
        line.trim_end().get(1..)?.parse::<usize>().ok()
    };
    let count = number(reader)?;
    let mut words = Vec::new();
    for _ in 0..count {
        let mut word = vec![0; number(reader)? + 2];
        reader.read_exact(&mut word).ok()?;
        word.truncate(word.len() - 2);
        words.push(String::from_utf8(word).ok()?);
    }
    Some(words)
}

fn world() -> World {
    let world = World::new();
    for (device, ip) in [("rxe1", "10.0.0.1"), ("rxe2", "10.0.0.2")] {
        world.add_device(DeviceSpec::new(device, ip.parse().expect("an address")));
    }
    world
}

fn fabric(world: &World, device: &str) -> Fabric {
    let fabric = Fabric::builder(&world.verbs()).rdma(Rdma::Prefer).config(Config::default());
    let fabric = fabric.device(device).build().expect("a fabric");
    tokio::spawn(fabric.drive());
    fabric
}

/// All endpoints together may take no longer than the limit for connecting. Then the client uses
/// TCP, and says why.
#[tokio::test(flavor = "multi_thread")]
async fn endpoints_that_do_not_answer_delay_tcp_once() {
    let world = world();
    world.black_hole("rxe1", "rxe2");
    let (connection, took) = connect_and_get(&world).await;
    let used = connection.transports();
    assert!(used.iter().all(is_over_tcp), "{used:?}");
    assert!(used.iter().any(|part| part.transport_info.fallback.is_some()), "{used:?}");
    // The server is asked twice for its endpoints: as the server that was given to the client, and
    // perhaps once more as the node of the slots.
    assert!(took >= LIMIT / 2 && took < LIMIT * 3, "{took:?}");
}

/// The module accepts the connection over RDMA and never answers the login.
#[tokio::test(flavor = "multi_thread")]
async fn login_without_an_answer_delays_tcp_once() {
    let world = world();
    let module = fabric(&world, "rxe1");
    let last = 6380 + ENDPOINTS as u16 - 1;
    let address = SocketAddr::from(([10, 0, 0, 1], last));
    let options = ListenOptions::new().rdma(Rdma::Require);
    let mut listener = module.listen_with(address, &options).expect("listen");
    let accepting = tokio::spawn(async move {
        let mut links = Vec::new();
        while let Ok(link) = listener.accept().await {
            links.push(link);
        }
    });
    let (mut connection, took) = connect_and_get(&world).await;
    assert!(took < LIMIT * 3, "{took:?}");
    // Now the client knows the endpoint, so it begins the next connection over RDMA.
    let begun = Instant::now();
    let value: String = connection.get("close").await.expect("GET on a new connection");
    let took = begun.elapsed();
    assert_eq!(value, "close");
    accepting.abort();
    let used = connection.transports();
    assert!(module.stats().accepted > 0, "the client has connected over RDMA");
    let over_rdma = used.iter().filter(|part| !is_over_tcp(part));
    assert_eq!(over_rdma.map(|part| part.received_bytes).sum::<u64>(), 0, "{used:?}");
    assert!(took < LIMIT * 3, "{took:?}");
}

fn is_over_tcp(part: &NodeTransport) -> bool {
    part.transport_info.transport == SessionTransport::Tcp
}

/// Connects to the cluster and runs a command. Also returns how long it took.
async fn connect_and_get(world: &World) -> (ClusterConnection, Duration) {
    let client = Client::builder(&fabric(world, "rxe2"), node());
    let client = client.rdma(Rdma::Prefer).connect_timeout(LIMIT);
    let begun = Instant::now();
    let mut connection = client.cluster().build().connect().await.expect("a cluster");
    let value: String = connection.get("key").await.expect("GET");
    assert_eq!(value, "key");
    (connection, begun.elapsed())
}
