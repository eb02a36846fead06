//! Raw connections, which carry other protocols: two ends connect and exchange arbitrary bytes.

use std::time::Duration;

use ferrite_fabric::mem::{Exposed, Purpose};
use ferrite_fabric::{
    Arrival, Config, ConnectOptions, Done, ErrorKind, Fabric, Listener, RawConnection,
};
use futures_util::join;

use super::Fixture;
use super::pair::{clear, drive, failed, filled, pattern, run_for, until};

/// Both ends: `a` connected, `b` accepted it as a foreign peer.
struct Ends {
    a: RawConnection,
    b: RawConnection,
    fabrics: [Fabric; 2],
    listener: Listener,
}

impl Ends {
    fn connect(fixture: &Fixture, config: &Config) -> Self {
        let [b_host, a_host] = &fixture.hosts;
        let fabrics = [fixture.fabric(a_host, config), fixture.fabric(b_host, config)];
        let listener = fabrics[1].listen(b_host.any_port()).expect("listen");
        let foreign_peers = listener.foreign_peers();
        let options = ConnectOptions::new().local(a_host.any_port());
        let calling = fabrics[0].connect_raw(listener.local_addr(), &options);
        let answering = async {
            let request = foreign_peers.next().await?;
            assert!(request.private_data.iter().all(|byte| *byte == 0), "no hello of ours is sent");
            foreign_peers.accept(request).await
        };
        let (a, b) = drive(&[&fabrics[0], &fabrics[1]], async { join!(calling, answering) });
        drop(foreign_peers);
        Self { a: a.expect("connected"), b: b.expect("accepted"), fabrics, listener }
    }

    fn fabrics(&self) -> [&Fabric; 2] {
        [&self.fabrics[0], &self.fabrics[1]]
    }

    fn arrival(&self, at: &RawConnection) -> Arrival {
        drive(&self.fabrics(), at.arrival()).expect("an arrival")
    }

    /// Exposes memory of `of` that the other end may write.
    fn window(&self, of: &RawConnection, bytes: usize) -> Exposed {
        let mut buf = of.pool().take_uncharged(bytes, Purpose::Receive).expect("memory");
        buf.fill(0);
        of.expose(buf).map_err(|(_, error)| error).expect("exposed")
    }

    fn end(self) {
        let Self { a, b, fabrics, listener } = self;
        let closing = (a.close(), b.close());
        drop((a, b));
        let (first, second) =
            drive(&[&fabrics[0], &fabrics[1]], async { join!(closing.0, closing.1) });
        first.and(second).expect("closed cleanly");
        drop(listener);
        clear(fabrics);
    }
}

/// Messages and writes arrive in order, and the written bytes are in place.
pub(crate) fn messages_and_writes_arrive_in_order(fixture: &Fixture) {
    let ends = Ends::connect(fixture, &Config::default());
    for (from, to) in [(&ends.a, &ends.b), (&ends.b, &ends.a)] {
        let window = ends.window(to, 64 << 10);
        let remote = window.remote();
        from.send_message(b"before").expect("sent");
        let bytes = pattern(7, 10_000);
        let (small, large) = bytes.split_at(100);
        from.write_quietly(filled(from.fabric(), small), remote.addr, remote.rkey, 100)
            .expect("written");
        from.write(filled(from.fabric(), large), remote.addr + 100, remote.rkey, 9900)
            .expect("written");
        from.send_message(&[9; 32]).expect("sent");
        assert!(matches!(ends.arrival(to), Arrival::Message(message) if message[..] == *b"before"));
        let (mut announced, mut notices) = (0, 0);
        while announced < 10_000 {
            let Arrival::Written { notices: more, sum, .. } = ends.arrival(to) else {
                panic!("a message arrived before the writes")
            };
            (announced, notices) = (announced + sum, notices + more);
        }
        assert_eq!((announced, notices), (10_000, 2));
        let mut written = vec![0; 10_000];
        window.read(0, &mut written);
        assert!(written == bytes);
        assert!(matches!(ends.arrival(to), Arrival::Message(message) if message[..] == [9; 32]));
        let all = Done { messages: 2, writes: 2 };
        until(&ends.fabrics(), "all requests are acknowledged", || from.done(None) == all);
    }
    ends.end();
}

/// With many more writes than the send queue holds, all arrive before the close does.
pub(crate) fn closing_delivers_pending_writes(fixture: &Fixture) {
    let ends = Ends::connect(fixture, &Config { send_queue_depth: 16, ..Config::default() });
    let window = ends.window(&ends.b, 64 << 10);
    let remote = window.remote();
    for at in 0..500 {
        let buf = filled(ends.a.fabric(), &[at as u8; 64]);
        ends.a.write_quietly(buf, remote.addr + at * 64, remote.rkey, 64).expect("written");
    }
    drop(ends.a.close());
    let refused = failed(ends.a.send_message(b"more"), "it is closing");
    assert_eq!(refused.kind(), ErrorKind::Closed, "{refused}");
    let mut announced = 0;
    let error = loop {
        match drive(&ends.fabrics(), ends.b.arrival()) {
            Ok(Arrival::Written { sum, .. }) => announced += sum,
            Ok(Arrival::Message(_)) => panic!("no message was sent"),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    assert_eq!(announced, 500 * 64);
    let mut last = [0; 64];
    window.read(499 * 64, &mut last);
    assert_eq!(last, [499_u64 as u8; 64]);
    drop(window);
    ends.end();
}

/// A write outside the exposed memory ends the connection, at both ends.
pub(crate) fn writing_outside_the_window_ends_the_connection(fixture: &Fixture) {
    let ends = Ends::connect(fixture, &Config::default());
    let window = ends.window(&ends.b, 4096);
    let remote = window.remote();
    let outside = remote.addr + remote.len - 10;
    ends.a.write(filled(ends.a.fabric(), &[1; 64]), outside, remote.rkey, 64).expect("queued");
    let error =
        failed(drive(&ends.fabrics(), ends.a.arrival()), "the device must refuse the write");
    assert!([ErrorKind::Denied, ErrorKind::LinkDown].contains(&error.kind()), "{error}");
    failed(drive(&ends.fabrics(), ends.b.arrival()), "the other end must fail too");
    let Ends { a, b, fabrics, listener } = ends;
    drop((a, b, window, listener));
    clear(fabrics);
}

/// Idle connections stay open, and no keepalives are sent on them.
pub(crate) fn idle_connections_stay_open(fixture: &Fixture) {
    let config = Config {
        keepalive: Duration::from_millis(50),
        peer_timeout: Duration::from_millis(50),
        ..Config::default()
    };
    let ends = Ends::connect(fixture, &config);
    run_for(&ends.fabrics(), Duration::from_millis(500));
    assert!(ends.a.failure().is_none() && ends.b.failure().is_none());
    assert_eq!((ends.a.stats().recv_ops, ends.b.stats().recv_ops), (0, 0));
    ends.a.send_message(b"still here").expect("sent");
    assert!(
        matches!(ends.arrival(&ends.b), Arrival::Message(message) if message[..] == *b"still here")
    );
    ends.end();
}

/// A listener refuses foreign peers while nothing handles them.
pub(crate) fn refused_without_a_handler(fixture: &Fixture) {
    let [b_host, a_host] = &fixture.hosts;
    let fabrics = [a_host, b_host].map(|host| fixture.fabric(host, &Config::default()));
    let listener = fabrics[1].listen(b_host.any_port()).expect("listen");
    let options = ConnectOptions::new().local(a_host.any_port());
    let calling = fabrics[0].connect_raw(listener.local_addr(), &options);
    let error = failed(drive(&[&fabrics[0], &fabrics[1]], calling), "no foreign peer handler");
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    drop(listener);
    clear(fabrics);
}
