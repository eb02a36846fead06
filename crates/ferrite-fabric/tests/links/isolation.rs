//! Peers that reach for each other's memory: each has its own window and nothing else.

use ferrite_fabric::mem::{Exposed, Purpose};
use ferrite_fabric::{Arrival, Bare, Config, ConnectOptions, Engine, Error, ErrorKind, Listener, Strangers};
use futures_util::join;

use ferrite_fabric::wire::Rights;

use super::Fixture;
use super::pair::{Pair, clear, drive, failed, filled, until};

const WINDOW: usize = 4096;

/// A listener on `engines[1]` that takes peers of other protocols, and `engines[0]` from which they
/// come.
pub(crate) struct Scene {
    strangers: Strangers,
    listener: Listener,
    options: ConnectOptions,
    pub(crate) engines: [Engine; 2],
}

/// A connection: the peer's end, and the listener's with memory that the peer may write.
pub(crate) struct Guest {
    theirs: Bare,
    ours: Bare,
    window: Exposed,
}

impl Scene {
    pub(crate) fn new(fixture: &Fixture, config: &Config) -> Self {
        let [host, peer] = &fixture.hosts;
        let engines = [fixture.engine(peer, &Config::default()), fixture.engine(host, config)];
        let listener = engines[1].listen(host.any_port()).expect("listen");
        let options = ConnectOptions::new().local(peer.any_port());
        Self { strangers: listener.strangers(), listener, options, engines }
    }

    pub(crate) fn engines(&self) -> [&Engine; 2] {
        [&self.engines[0], &self.engines[1]]
    }

    pub(crate) fn refused(&self) -> Error {
        let calling = self.engines[0].connect_bare(self.listener.local_addr(), &self.options);
        failed(drive(&self.engines(), calling), "refused")
    }

    pub(crate) fn guest(&self) -> Guest {
        let calling = self.engines[0].connect_bare(self.listener.local_addr(), &self.options);
        let answering = async {
            let request = self.strangers.next().await?;
            self.strangers.accept(request).await
        };
        let (theirs, ours) = drive(&self.engines(), async { join!(calling, answering) });
        let (theirs, ours) = (theirs.expect("connected"), ours.expect("accepted"));
        let window = expose(&ours);
        Guest { theirs, ours, window }
    }

    /// `by` writes to where `whose` window is, with its key.
    pub(crate) fn write(&self, by: &Guest, whose: &Guest) {
        let remote = whose.window.remote();
        let bytes = filled(&self.engines[0], &[7; 64]);
        by.theirs.write(bytes, remote.addr, remote.rkey, 64).expect("asked");
    }

    /// Writes to its own window, and is heard.
    pub(crate) fn is_well(&self, guest: &Guest) {
        self.write(guest, guest);
        let arrival = drive(&self.engines(), guest.ours.arrival()).expect("an arrival");
        assert!(matches!(arrival, Arrival::Written { sum: 64, .. }), "{arrival:?}");
        assert_eq!(guest.first_byte(), 7);
    }

    fn count(&self) -> u64 {
        self.engines[1].stats().remote_access_errors
    }

    pub(crate) fn end(self, guests: Vec<Guest>) {
        let Self { strangers, listener, engines, .. } = self;
        drop((guests, strangers, listener));
        clear(engines);
    }
}

fn expose(to: &Bare) -> Exposed {
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
    let error = failed(drive(&scene.engines(), attacker.theirs.arrival()), "refused by the device");
    assert!([ErrorKind::Denied, ErrorKind::LinkDown].contains(&error.kind()), "{error}");
    until(&scene.engines(), "it is counted", || scene.count() == 1);
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
        until(&scene.engines(), "it is counted", || scene.count() == at as u64 + 1);
    }
    let error = scene.refused();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert!(error.to_string().contains("memory that is not its own"), "{error}");
    assert_eq!(scene.engines[1].stats().refused_after_access_errors, 1);
    scene.is_well(&victim);
    let [one, other] = attackers;
    scene.end(vec![victim, one, other]);
}

/// A token that is handed on is worth nothing on another link, and costs that link. Rights that
/// were not given neither.
pub(crate) fn a_grant_is_good_on_its_link_only(fixture: &Fixture) {
    let mut pair = Pair::new(fixture);
    let [thief, at] = pair.another(fixture);
    let region = pair.b.link.register_memory(pair.b.engine.buffer(100).expect("memory"), Rights::READ);
    let region = region.map_err(|(_, error)| error).expect("a region");
    let token = region.grant(&pair.b.link);
    // So that its queue pair has rights, too.
    let own = pair.b.link.register_memory(pair.b.engine.buffer(10).expect("memory"), Rights::READ);
    let own = own.map_err(|(_, error)| error).expect("a region");
    let own_token = own.grant(&at);
    let into = |pair: &Pair| pair.a.engine.buffer(10).expect("memory");
    let read = thief.rdma_read(&own_token, 0, into(&pair)).expect("asked");
    pair.drive(read).map_err(|error| error.error).expect("its own");

    let stolen = thief.rdma_read(&token, 0, into(&pair)).expect("asked");
    let error = pair.drive(stolen).expect_err("not its own").error;
    assert!([ErrorKind::Denied, ErrorKind::LinkDown].contains(&error.kind()), "{error}");
    pair.until("it is counted", || pair.b.engine.stats().remote_access_errors == 1);
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
    let before = scene.engines[1].stats().memory.receive.in_use_bytes;
    // The peer takes nothing meanwhile: nobody drives it.
    for _ in 0..20 {
        guest.ours.send_message(&[1; 32]).expect("queued");
        drop(guest.expose());
    }
    until(&scene.engines(), "it is all done", || guest.ours.done(None).messages == 20);
    until(&scene.engines(), "the memory is back", || {
        scene.engines[1].stats().memory.receive.in_use_bytes == before
    });
    assert_eq!(guest.window.remote(), remote);
    scene.is_well(&guest);
    assert_eq!(scene.count(), 0);
    scene.end(vec![guest]);
}
