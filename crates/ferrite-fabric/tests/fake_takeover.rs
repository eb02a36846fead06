//! A third party cannot take over a link, and connects do not use RDMA if the options forbid it. On
//! the fake provider and this host's TCP. The test plays the peer by hand and can send anything.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use ferrite_fabric::wire::{
    Address, Features, GREETING_BYTES, Greeting, Hello, Resume, TCP_FRAME_HEADER_BYTES, TcpFrame,
    TcpFrameKind,
};
use ferrite_fabric::{
    Config, ConnectMode, ConnectOptions, ErrorKind, Fabric, Link, Rdma, Transport,
};
use ferrite_testkit::handshake;
use ferrite_verbs::fake::{DeviceSpec, World};
use ferrite_verbs::{Access, ConnectParams, QueuePairConfig, RecvRequest, Verbs, cm};

const TEST_TIMEOUT: Duration = Duration::from_secs(20);
const OURS: &str = "127.0.0.1:0";
const THEIRS: &str = "127.0.0.2:0";

/// The peer's session id of the link.
const SESSION: u64 = 77;
const HELLO: Hello =
    Hello { features: Features::from_bits(7), session: SESSION, ..handshake::HELLO };

fn address(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

fn world() -> (World, Verbs) {
    let world = World::new();
    for (device, ip) in [("fake1", OURS), ("fake2", THEIRS)] {
        world.add_device(DeviceSpec::new(device, address(ip).ip()));
    }
    let verbs = world.verbs();
    (world, verbs)
}

fn fabric(verbs: &Verbs) -> Fabric {
    let fabric =
        Fabric::builder(verbs).device("fake1").config(Config::default()).build().expect("a fabric");
    fabric.spawn_thread().expect("a thread");
    fabric
}

/// Accepts a TCP connection and reads the greeting.
fn accept_greeting(listener: &TcpListener) -> (TcpStream, Greeting) {
    let (mut socket, _) = listener.accept().expect("a connection");
    socket.set_read_timeout(Some(TEST_TIMEOUT)).expect("a time limit");
    let mut greeting = [0; GREETING_BYTES];
    socket.read_exact(&mut greeting).expect("a greeting");
    (socket, Greeting::decode(&greeting).expect("a Ferrite greeting"))
}

/// Returns the body of the next TCP frame of this kind.
fn read_frame(socket: &mut TcpStream, kind: TcpFrameKind) -> Vec<u8> {
    loop {
        let mut head = [0; TCP_FRAME_HEADER_BYTES];
        socket.read_exact(&mut head).expect("a TCP frame");
        let tcp_frame = TcpFrame::decode(&head).expect("a known kind");
        let mut body = vec![0; tcp_frame.follows()];
        socket.read_exact(&mut body).expect("frame body");
        if tcp_frame.kind == kind {
            return body;
        }
    }
}

/// An attacker who forges packets must know the next packet number, so it must not be predictable.
#[test]
fn packet_numbers_differ_from_connection_to_connection() {
    let (_world, verbs) = world();
    let fabric = fabric(&verbs);
    let listener = TcpListener::bind(THEIRS).expect("listen");
    let peer = listener.local_addr().expect("an address");
    let numbers: Vec<u32> = (0..4)
        .map(|_| {
            let options = ConnectOptions::new().local(address(OURS)).mode(ConnectMode::TcpFirst);
            let connecting = fabric.connect_with(peer, &options);
            let (mut socket, _) = accept_greeting(&listener);
            socket
                .write_all(&Greeting { hello: HELLO, resume: None }.encode())
                .expect("the hello is sent");
            let offered = read_frame(&mut socket, TcpFrameKind::Offer);
            drop(connecting);
            Address::decode(&offered).expect("an address").psn
        })
        .collect();
    // These are random numbers of 24 bits. Two of the four are equal in about one of three million
    // runs. Three equal numbers are too rare to occur.
    let mut distinct = numbers.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert!(distinct.len() >= 3, "{numbers:?}");
}

/// Opens an RDMA link to a peer made of plain verbs, breaks it, and answers the fabric's TCP
/// connection with `reply`. Returns that connection, the link and the fabric.
fn resumed(reply: impl FnOnce(Resume) -> Option<Resume>) -> (TcpStream, Link, Fabric) {
    let (world, verbs) = world();
    let fabric = fabric(&verbs);
    // Binds the real TCP port first. In the fake connection manager, every port is free.
    let tcp = TcpListener::bind(address(THEIRS)).expect("a port");
    let peer = tcp.local_addr().expect("an address");
    let listener = cm::Listener::bind(&verbs, peer, 4).expect("the same port over RDMA");
    let connecting = fabric.connect_with(peer, &ConnectOptions::new().local(address(OURS)));

    let request = listener.next_request(TEST_TIMEOUT).expect("a request").expect("in time");
    let context = verbs.device("fake2").and_then(|device| device.open()).expect("device");
    let domain = context.allocate_protection_domain().expect("domain");
    let cq = context.create_completion_queue(64, None, 0).expect("queue");
    let region = domain.allocate(16 << 10, Access::REMOTE_WRITE).expect("region");
    let qp = domain
        .create_queue_pair(&QueuePairConfig {
            max_send_wr: 8,
            max_recv_wr: 8,
            ..QueuePairConfig::new(&cq)
        })
        .expect("queue pair");
    let hello = HELLO.encode();
    let params = ConnectParams {
        qp_num: 0,
        srq: false,
        private_data: &hello,
        reads_in: 4,
        reads_out: 4,
        retries: 6,
        rnr_retries: 7,
    };
    cm::accept(&request, &qp, Access::REMOTE_WRITE, &params, TEST_TIMEOUT).expect("accept");
    qp.post_recv(&[RecvRequest::new(0, &[region.sge(0..8 << 10)])]).expect("post");
    let link = fabric.block_on(connecting).expect("a link");
    assert_eq!(link.transport(), Transport::Rdma);

    assert!(world.break_queue_pair(link.qp_num().expect("on RDMA")));
    let (mut socket, greeting) = accept_greeting(&tcp);
    let asked = greeting.resume.expect("resumes an existing link");
    assert_eq!(asked.yours, SESSION);
    let greeting = Greeting { hello: HELLO, resume: reply(asked) };
    socket.write_all(&greeting.encode()).expect("answer");
    (socket, link, fabric)
}

#[test]
fn resumes_a_link_for_the_peer_that_knows_both_ids() {
    let (mut socket, link, _fabric) =
        resumed(|asked| Some(Resume { yours: asked.mine, mine: asked.yours, received: 0 }));
    link.post_bytes(0, b"secret").expect("posted");
    while read_frame(&mut socket, TcpFrameKind::Frame) != b"secret" {} // skips keepalives
}

#[test]
fn rejects_a_resume_answer_for_another_link() {
    type Reply = fn(Resume) -> Option<Resume>;
    let replies: [Reply; 4] = [
        |asked| Some(Resume { yours: asked.mine ^ 1, mine: asked.yours, received: 0 }),
        |asked| Some(Resume { yours: asked.mine, mine: asked.yours ^ 1, received: 0 }),
        |asked| Some(Resume { yours: asked.yours, mine: asked.mine, received: 0 }),
        |_| None,
    ];
    for reply in replies {
        let (mut socket, link, fabric) = resumed(reply);
        let _ = link.post_bytes(0, b"secret"); // the link may have ended
        let error = fabric.block_on(link.ended()).expect_err("the link must fail");
        assert!(error.to_string().contains("was not for this link"), "{error}");
        let mut received = Vec::new();
        let _ = socket.read_to_end(&mut received); // the connection may be reset
        assert!(received.is_empty(), "{received:?}");
    }
}

/// RDMA payload is not encrypted, and these connects have no fallback to TCP.
#[test]
fn rejects_rdma_connects_that_the_options_forbid() {
    let (_world, verbs) = world();
    let fabric = fabric(&verbs);
    let peer = address("127.0.0.2:7000");
    let local = || ConnectOptions::new().local(address(OURS));
    for (options, word) in [
        (local().require_encryption(), "encryption"),
        (local().rdma(Rdma::Forbid), "forbid"),
        (local().rdma(Rdma::Prefer).require_encryption(), "encryption"),
    ] {
        let raw = fabric.block_on(fabric.connect_raw(peer, &options)).map(drop);
        let either = fabric.block_on(fabric.connect_either(peer, &options)).map(drop);
        for outcome in [raw, either] {
            let error = outcome.expect_err("the options forbid RDMA");
            assert_eq!(error.kind(), ErrorKind::Misuse, "{options:?}: {error}");
            assert!(error.to_string().contains(word), "{options:?}: {error}");
        }
    }
}
