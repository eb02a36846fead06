//! Peers that try to access each other's memory: each can write only its own window.

use ferrite_fabric::mem::{Exposed, Purpose};
use ferrite_fabric::{
    Arrival, Config, ConnectOptions, Error, ErrorKind, Fabric, ForeignPeers, Listener,
    RawConnection,
};
use futures_util::join;

use ferrite_fabric::wire::Rights;

use super::Fixture;
use super::pair::{Pair, clear, drive, failed, filled, until};

const WINDOW: usize = 4096;

/// `fabrics[1]` has a listener that accepts foreign peers; they connect from `fabrics[0]`.
pub(crate) struct ForeignPeerServer {
    foreign_peers: ForeignPeers,
    listener: Listener,
    options: ConnectOptions,
    pub(crate) fabrics: [Fabric; 2],
}

/// A connection: the peer's end, and the listener's end with memory that the peer may write.
pub(crate) struct Client {
    theirs: RawConnection,
    ours: RawConnection,
    window: Exposed,
}

impl ForeignPeerServer {
    pub(crate) fn new(fixture: &Fixture, config: &Config) -> Self {
        let [host, peer] = &fixture.hosts;
        let fabrics = [fixture.fabric(peer, &Config::default()), fixture.fabric(host, config)];
        let listener = fabrics[1].listen(host.any_port()).expect("listen");
        let options = ConnectOptions::new().local(peer.any_port());
        Self { foreign_peers: listener.foreign_peers(), listener, options, fabrics }
    }

    pub(crate) fn fabrics(&self) -> [&Fabric; 2] {
        [&self.fabrics[0], &self.fabrics[1]]
    }

    /// Connects, and returns the error of the refusal.
    pub(crate) fn refused(&self) -> Error {
        let calling = self.fabrics[0].connect_raw(self.listener.local_addr(), &self.options);
        failed(drive(&self.fabrics(), calling), "the listener must refuse")
    }

    /// Connects a peer and exposes a window to it.
    pub(crate) fn client(&self) -> Client {
        let calling = self.fabrics[0].connect_raw(self.listener.local_addr(), &self.options);
        let answering = async {
            let request = self.foreign_peers.next().await?;
            self.foreign_peers.accept(request).await
        };
        let (theirs, ours) = drive(&self.fabrics(), async { join!(calling, answering) });
        let (theirs, ours) = (theirs.expect("connected"), ours.expect("accepted"));
        let window = expose(&ours);
        Client { theirs, ours, window }
    }

    /// Writes from `by` to the address of the window of `whose`, with the key of that window.
    pub(crate) fn write(&self, by: &Client, whose: &Client) {
        let remote = whose.window.remote();
        let bytes = filled(&self.fabrics[0], &[7; 64]);
        by.theirs.write(bytes, remote.addr, remote.rkey, 64).expect("queued");
    }

    /// Checks that the peer can write its own window, and that the write is reported.
    pub(crate) fn check_write(&self, client: &Client) {
        self.write(client, client);
        let arrival = drive(&self.fabrics(), client.ours.arrival()).expect("an arrival");
        assert!(matches!(arrival, Arrival::Written { sum: 64, .. }), "{arrival:?}");
        assert_eq!(client.first_byte(), 7);
    }

    fn access_errors(&self) -> u64 {
        self.fabrics[1].stats().remote_access_errors
    }

    pub(crate) fn end(self, clients: Vec<Client>) {
        let Self { foreign_peers, listener, fabrics, .. } = self;
        drop((clients, foreign_peers, listener));
        clear(fabrics);
    }
}

fn expose(to: &RawConnection) -> Exposed {
    let mut buf = to.pool().take_uncharged(WINDOW, Purpose::Receive).expect("memory");
    buf.fill(0);
    to.expose(buf).map_err(|(_, error)| error).expect("exposed")
}

impl Client {
    /// Exposes another piece of memory to the peer.
    pub(crate) fn expose(&self) -> Exposed {
        expose(&self.ours)
    }

    fn first_byte(&self) -> u8 {
        let mut byte = [0];
        self.window.read(0, &mut byte);
        byte[0]
    }
}

/// The attacker knows the address and the key of another peer's window. Its own connection breaks,
/// and nothing else happens.
pub(crate) fn cannot_write_another_peers_window(fixture: &Fixture) {
    let server = ForeignPeerServer::new(fixture, &Config::default());
    let (victim, attacker) = (server.client(), server.client());
    server.write(&attacker, &victim);
    let error = failed(
        drive(&server.fabrics(), attacker.theirs.arrival()),
        "the device must refuse the write",
    );
    assert!([ErrorKind::Denied, ErrorKind::LinkDown].contains(&error.kind()), "{error}");
    until(&server.fabrics(), "the access error is counted", || server.access_errors() == 1);
    assert_eq!(victim.first_byte(), 0);
    server.check_write(&victim);
    assert_eq!(server.access_errors(), 1);
    server.end(vec![victim, attacker]);
}

/// A peer that causes two access errors is not admitted for a while. Existing connections stay.
pub(crate) fn refuses_peers_after_repeated_access_errors(fixture: &Fixture) {
    let server = ForeignPeerServer::new(fixture, &Config::default());
    let victim = server.client();
    let attackers = [server.client(), server.client()];
    for (at, attacker) in attackers.iter().enumerate() {
        server.write(attacker, &victim);
        until(&server.fabrics(), "the access error is counted", || {
            server.access_errors() == at as u64 + 1
        });
    }
    let error = server.refused();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert!(error.to_string().contains("memory that is not its own"), "{error}");
    assert_eq!(server.fabrics[1].stats().refused_after_access_errors, 1);
    server.check_write(&victim);
    let [one, other] = attackers;
    server.end(vec![victim, one, other]);
}

/// A grant token works only on the link that it was granted to. Its use on another link ends that
/// other link.
pub(crate) fn grants_work_only_on_their_link(fixture: &Fixture) {
    let mut pair = Pair::new(fixture);
    let [thief, at] = pair.another(fixture);
    let region =
        pair.b.link.register_memory(pair.b.fabric.buffer(100).expect("memory"), Rights::READ);
    let region = region.map_err(|(_, error)| error).expect("a region");
    let token = region.grant(&pair.b.link);
    // A grant of its own gives access rights to the queue pair of the thief's link, too.
    let own = pair.b.link.register_memory(pair.b.fabric.buffer(10).expect("memory"), Rights::READ);
    let own = own.map_err(|(_, error)| error).expect("a region");
    let own_token = own.grant(&at);
    let into = |pair: &Pair| pair.a.fabric.buffer(10).expect("memory");
    let read = thief.rdma_read(&own_token, 0, into(&pair)).expect("queued");
    pair.drive(read).map_err(|error| error.error).expect("the link reads its own grant");

    let stolen = thief.rdma_read(&token, 0, into(&pair)).expect("queued");
    let error = pair.drive(stolen).expect_err("the grant is for another link").error;
    assert!([ErrorKind::Denied, ErrorKind::LinkDown].contains(&error.kind()), "{error}");
    pair.until("the access error is counted", || pair.b.fabric.stats().remote_access_errors == 1);
    let read = pair.a.link.rdma_read(&token, 0, into(&pair)).expect("queued");
    pair.drive(read).map_err(|error| error.error).expect("the link that has the grant reads");
    drop((thief, at, region, own));
    pair.end();
}

/// Memory is dropped before its window is bound, because earlier requests are still pending. The
/// link continues, and the memory is returned.
pub(crate) fn dropping_memory_before_its_window_is_bound(fixture: &Fixture) {
    let server = ForeignPeerServer::new(fixture, &Config::default());
    let client = server.client();
    let remote = client.window.remote();
    let before = server.fabrics[1].stats().memory.receive.in_use_bytes;
    // The requests stay pending, because nobody drives the peer.
    for _ in 0..20 {
        client.ours.send_message(&[1; 32]).expect("queued");
        drop(client.expose());
    }
    until(&server.fabrics(), "all messages are done", || client.ours.done(None).messages == 20);
    until(&server.fabrics(), "the memory is returned", || {
        server.fabrics[1].stats().memory.receive.in_use_bytes == before
    });
    assert_eq!(client.window.remote(), remote);
    server.check_write(&client);
    assert_eq!(server.access_errors(), 0);
    server.end(vec![client]);
}
