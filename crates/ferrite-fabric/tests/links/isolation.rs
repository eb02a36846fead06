//! Peers that reach for each other's memory: each has its own window and nothing else.

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

/// A listener on `fabrics[1]` that takes peers of other protocols, and `fabrics[0]` from which they
/// come.
pub(crate) struct Scene {
    foreign_peers: ForeignPeers,
    listener: Listener,
    options: ConnectOptions,
    pub(crate) fabrics: [Fabric; 2],
}

/// A connection: the peer's end, and the listener's with memory that the peer may write.
pub(crate) struct Guest {
    theirs: RawConnection,
    ours: RawConnection,
    window: Exposed,
}

impl Scene {
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

    pub(crate) fn refused(&self) -> Error {
        let calling = self.fabrics[0].connect_raw(self.listener.local_addr(), &self.options);
        failed(drive(&self.fabrics(), calling), "refused")
    }

    pub(crate) fn guest(&self) -> Guest {
        let calling = self.fabrics[0].connect_raw(self.listener.local_addr(), &self.options);
        let answering = async {
            let request = self.foreign_peers.next().await?;
            self.foreign_peers.accept(request).await
        };
        let (theirs, ours) = drive(&self.fabrics(), async { join!(calling, answering) });
        let (theirs, ours) = (theirs.expect("connected"), ours.expect("accepted"));
        let window = expose(&ours);
        Guest { theirs, ours, window }
    }

    /// `by` writes to where `whose` window is, with its key.
    pub(crate) fn write(&self, by: &Guest, whose: &Guest) {
        let remote = whose.window.remote();
        let bytes = filled(&self.fabrics[0], &[7; 64]);
        by.theirs.write(bytes, remote.addr, remote.rkey, 64).expect("asked");
    }

    /// Writes to its own window, and is heard.
    pub(crate) fn is_well(&self, guest: &Guest) {
        self.write(guest, guest);
        let arrival = drive(&self.fabrics(), guest.ours.arrival()).expect("an arrival");
        assert!(matches!(arrival, Arrival::Written { sum: 64, .. }), "{arrival:?}");
        assert_eq!(guest.first_byte(), 7);
    }

    fn count(&self) -> u64 {
        self.fabrics[1].stats().remote_access_errors
    }

    pub(crate) fn end(self, guests: Vec<Guest>) {
        let Self { foreign_peers, listener, fabrics, .. } = self;
        drop((guests, foreign_peers, listener));
        clear(fabrics);
    }
}

fn expose(to: &RawConnection) -> Exposed {
    let mut buf = to.pool().take_uncharged(WINDOW, Purpose::Receive).expect("memory");
    buf.fill(0);
    to.expose(buf).map_err(|(_, error)| error).expect("exposed")
}

impl Guest {
    /// Another piece of memory that the peer may write.
    pub(crate) fn expose(&self) -> Exposed {
        expose(&self.ours)
    }

    fn first_byte(&self) -> u8 {
        let mut byte = [0];
        self.window.read(0, &mut byte);
        byte[0]
    }
}

/// The attacker knows the address and the key of another's window: its own connection breaks, and
/// nothing else happens.
pub(crate) fn another_peers_window_is_out_of_reach(fixture: &Fixture) {
    let scene = Scene::new(fixture, &Config::default());
    let (victim, attacker) = (scene.guest(), scene.guest());
    scene.write(&attacker, &victim);
    let error = failed(drive(&scene.fabrics(), attacker.theirs.arrival()), "refused by the device");
    assert!([ErrorKind::Denied, ErrorKind::LinkDown].contains(&error.kind()), "{error}");
    until(&scene.fabrics(), "it is counted", || scene.count() == 1);
    assert_eq!(victim.first_byte(), 0);
    scene.is_well(&victim);
    assert_eq!(scene.count(), 1);
    scene.end(vec![victim, attacker]);
}

/// One that does so again is not let in for a while. Who is there stays.
pub(crate) fn who_reaches_for_others_memory_is_turned_away(fixture: &Fixture) {
    let scene = Scene::new(fixture, &Config::default());
    let victim = scene.guest();
    let attackers = [scene.guest(), scene.guest()];
    for (at, attacker) in attackers.iter().enumerate() {
        scene.write(attacker, &victim);
        until(&scene.fabrics(), "it is counted", || scene.count() == at as u64 + 1);
    }
    let error = scene.refused();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert!(error.to_string().contains("memory that is not its own"), "{error}");
    assert_eq!(scene.fabrics[1].stats().refused_after_access_errors, 1);
    scene.is_well(&victim);
    let [one, other] = attackers;
    scene.end(vec![victim, one, other]);
}

/// A token that is handed on is worth nothing on another link, and costs that link. Rights that
/// were not given neither.
pub(crate) fn a_grant_is_good_on_its_link_only(fixture: &Fixture) {
    let mut pair = Pair::new(fixture);
    let [thief, at] = pair.another(fixture);
    let region =
        pair.b.link.register_memory(pair.b.fabric.buffer(100).expect("memory"), Rights::READ);
    let region = region.map_err(|(_, error)| error).expect("a region");
    let token = region.grant(&pair.b.link);
    // So that its queue pair has rights, too.
    let own = pair.b.link.register_memory(pair.b.fabric.buffer(10).expect("memory"), Rights::READ);
    let own = own.map_err(|(_, error)| error).expect("a region");
    let own_token = own.grant(&at);
    let into = |pair: &Pair| pair.a.fabric.buffer(10).expect("memory");
    let read = thief.rdma_read(&own_token, 0, into(&pair)).expect("asked");
    pair.drive(read).map_err(|error| error.error).expect("its own");

    let stolen = thief.rdma_read(&token, 0, into(&pair)).expect("asked");
    let error = pair.drive(stolen).expect_err("not its own").error;
    assert!([ErrorKind::Denied, ErrorKind::LinkDown].contains(&error.kind()), "{error}");
    pair.until("it is counted", || pair.b.fabric.stats().remote_access_errors == 1);
    let read = pair.a.link.rdma_read(&token, 0, into(&pair)).expect("asked");
    pair.drive(read).map_err(|error| error.error).expect("who was given it reads it");
    drop((thief, at, region, own));
    pair.end();
}

/// Memory that is given up before its window is bound, because what was asked before waits: the
/// link goes on, and the memory comes back.
pub(crate) fn given_up_before_it_is_bound(fixture: &Fixture) {
    let scene = Scene::new(fixture, &Config::default());
    let guest = scene.guest();
    let remote = guest.window.remote();
    let before = scene.fabrics[1].stats().memory.receive.in_use_bytes;
    // The peer takes nothing meanwhile: nobody drives it.
    for _ in 0..20 {
        guest.ours.send_message(&[1; 32]).expect("queued");
        drop(guest.expose());
    }
    until(&scene.fabrics(), "it is all done", || guest.ours.done(None).messages == 20);
    until(&scene.fabrics(), "the memory is back", || {
        scene.fabrics[1].stats().memory.receive.in_use_bytes == before
    });
    assert_eq!(guest.window.remote(), remote);
    scene.is_well(&guest);
    assert_eq!(scene.count(), 0);
    scene.end(vec![guest]);
}
