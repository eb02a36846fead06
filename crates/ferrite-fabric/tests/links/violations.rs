//! Peers that violate the protocol: each loses its own link with an error that says why. No other
//! link is affected.

use std::time::{Duration, Instant};

use ferrite_fabric::wire::{Control, Rights};
use ferrite_fabric::{Config, ErrorKind, Fabric, Link, Listener};
use ferrite_verbs::Status;

use super::pair::{buffer, clear, drive, failed, open_link, pass, pattern, poll_once};
use super::verbs_peer::{VerbsPeer, frame};
use super::{Fixture, KIB};
use ferrite_testkit::Random;
use ferrite_testkit::handshake::HELLO;

/// A fabric with one link to a well-behaved peer and one to a peer that violates the protocol.
struct ViolationHarness {
    /// The fabric of the well-behaved peer.
    well_behaved: Fabric,
    /// The fabric under test, which must not be harmed.
    host: Fabric,
    well_behaved_links: [Link; 2],
    listener: Listener,
    /// The link to the misbehaving peer.
    link: Link,
    verbs_peer: VerbsPeer,
}

impl ViolationHarness {
    fn new(fixture: &Fixture, config: &Config) -> Self {
        let [host, peer] = &fixture.hosts;
        let (well_behaved, fabric) =
            (fixture.fabric(peer, &Config::default()), fixture.fabric(host, config));
        let mut listener = fabric.listen(host.any_port()).expect("listen");
        let well_behaved_links = open_link(&well_behaved, peer, &fabric, &mut listener);
        let (verbs_peer, answer) =
            VerbsPeer::connect(fixture, listener.local_addr(), &HELLO.encode(), &[&fabric])
                .expect("a link");
        let hello = ferrite_fabric::wire::Hello::decode(&answer).expect("a hello");
        assert_eq!(hello.channels, config.channels);
        let link = drive(&[&fabric], listener.accept()).expect("a link");
        assert_eq!(link.peer_hello(), HELLO);
        Self { well_behaved, host: fabric, well_behaved_links, listener, link, verbs_peer }
    }

    /// Checks that the misbehaving peer's link ends for this reason and that everything else works.
    fn check_ends_with(self, why: &str) {
        let error = failed(drive(&[&self.host], self.link.ended()), why);
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        assert!(error.to_string().contains(why), "{why}: {error}");
        let receiving =
            failed(drive(&[&self.host], async { receive_until_error(&self.link).await }), why);
        assert_eq!(receiving.kind(), ErrorKind::Protocol, "{receiving}");
        assert_eq!(failed(self.link.post_bytes(0, b"x"), why).kind(), ErrorKind::Protocol);
        assert_eq!(self.host.stats().failed_links, 1);
        self.check_other_link();
    }

    /// Checks that the other link still works and that all memory is returned.
    fn check_other_link(self) {
        let Self {
            well_behaved,
            host,
            well_behaved_links: [there, here],
            listener,
            link,
            verbs_peer,
        } = self;
        let bytes = pattern(1, 100 * KIB);
        for (from, to) in [(&there, &here), (&here, &there)] {
            from.post_bytes(0, &bytes).expect("room in the queue");
            let message = drive(&[&well_behaved, &host], to.recv()).expect("a message");
            assert!(message.to_vec() == bytes, "content differs");
        }
        link.abort(); // the verbs peer would not answer a Fin
        drop((there, here, listener, link));
        let pools = [well_behaved.pool().clone(), host.pool().clone()];
        clear([well_behaved, host]);
        pools.iter().for_each(super::pair::assert_unused);
        drop(verbs_peer);
    }
}

/// Receives messages until the link fails.
async fn receive_until_error(link: &Link) -> Result<(), ferrite_fabric::Error> {
    loop {
        link.recv().await?;
    }
}

pub(crate) fn frame_without_immediate_data(fixture: &Fixture) {
    let mut harness = ViolationHarness::new(fixture, &Config::default());
    harness.verbs_peer.post(None, b"hello");
    harness.check_ends_with("without immediate data");
}

pub(crate) fn exceeds_the_window(fixture: &Fixture) {
    let mut harness = ViolationHarness::new(fixture, &Config { window: 8, ..Config::default() });
    for _ in 0..9 {
        harness.verbs_peer.post(Some(frame(false, false, 0, 0)), b"hello");
    }
    harness.check_ends_with("more frames than it had credits for");
}

/// Filling the window exactly is allowed, whether or not the messages are taken.
pub(crate) fn may_fill_the_window(fixture: &Fixture) {
    let mut harness = ViolationHarness::new(fixture, &Config { window: 8, ..Config::default() });
    for round in 0..3 {
        for _ in 0..8 {
            let sent = harness.verbs_peer.send(
                Some(frame(false, false, 0, 0)),
                b"hello",
                &[&harness.host],
            );
            assert_eq!(sent, Status::SUCCESS);
        }
        for _ in 0..8 {
            drive(&[&harness.host], harness.link.recv()).expect("a message");
        }
        // The host returns credits, half a window at a time.
        let mut consumed = 0;
        let deadline = Instant::now() + super::TEST_TIMEOUT;
        while consumed != 8 * (round + 1) {
            pass(&[&harness.host]);
            for (imm, bytes) in harness.verbs_peer.received() {
                assert_eq!(Control::decode(&bytes), Ok(Control::Credit));
                consumed = imm.expect("immediate data") as u16;
            }
            assert!(Instant::now() < deadline, "credits for only {consumed} frames came back");
        }
    }
    harness.check_other_link();
}

pub(crate) fn credits_for_unsent_frames(fixture: &Fixture) {
    let mut harness = ViolationHarness::new(fixture, &Config::default());
    harness.link.post_bytes(0, b"one").expect("room in the queue");
    harness.verbs_peer.post(Some(frame(false, false, 0, 2)), b"hello");
    harness.check_ends_with("credits for frames that were never sent");
}

pub(crate) fn credits_that_decrease(fixture: &Fixture) {
    let mut harness = ViolationHarness::new(fixture, &Config::default());
    for _ in 0..3 {
        harness.link.post_bytes(0, b"one").expect("room in the queue");
    }
    assert_eq!(
        harness.verbs_peer.send(Some(frame(false, false, 0, 3)), b"x", &[&harness.host]),
        Status::SUCCESS
    );
    harness.verbs_peer.post(Some(frame(false, false, 0, 2)), b"x");
    harness.check_ends_with("credits for frames that were never sent");
}

pub(crate) fn invalid_control_messages(fixture: &Fixture) {
    let mut harness = ViolationHarness::new(fixture, &Config::default());
    harness.verbs_peer.post(Some(frame(true, false, 0, 0)), &[200; 16]);
    harness.check_ends_with("unknown kind 200");
    let mut harness = ViolationHarness::new(fixture, &Config::default());
    harness.verbs_peer.post(Some(frame(true, false, 0, 0)), &[1; 8]);
    harness.check_ends_with("a control message of 8 bytes");
}

pub(crate) fn unknown_channel(fixture: &Fixture) {
    let mut harness = ViolationHarness::new(fixture, &Config { channels: 4, ..Config::default() });
    harness.verbs_peer.post(Some(frame(false, false, 3, 0)), b"fine");
    harness.verbs_peer.post(Some(frame(false, false, 4, 0)), b"not so");
    assert_eq!(
        drive(&[&harness.host], harness.link.recv()).expect("first message").to_vec(),
        b"fine"
    );
    harness.check_ends_with("channel 4, but there are only 4 channels");
}

/// Messages that never end fail the link. With full frames on two channels, the unfinished messages
/// of both channels together become too large. An empty frame fails the link at once.
pub(crate) fn endless_message(fixture: &Fixture) {
    let config = Config { max_message_bytes: 256 << 10, ..Config::default() };
    let mut harness = ViolationHarness::new(fixture, &config);
    for number in 0..33 {
        harness.verbs_peer.post(Some(frame(false, true, number % 2, 0)), &[1; 8 * KIB]);
    }
    harness.check_ends_with("more than 262144 bytes");
    let mut harness = ViolationHarness::new(fixture, &config);
    harness.verbs_peer.post(Some(frame(false, true, 0, 0)), &[]);
    harness.check_ends_with("an empty frame");
}

/// Each one-byte frame takes a whole receive, so the number of frames is bounded as well.
pub(crate) fn endless_message_of_one_byte_frames(fixture: &Fixture) {
    let config = Config { max_message_bytes: 256 << 10, window: 64, ..Config::default() };
    let mut harness = ViolationHarness::new(fixture, &config);
    let idle = harness.host.stats().memory.receive.in_use_bytes;
    let most = idle + 4 * config.max_message_bytes + 64 * 8192;
    for _ in 0..2000 {
        if harness.link.failure().is_some() {
            break;
        }
        harness.verbs_peer.send(Some(frame(false, true, 0, 0)), b"x", &[&harness.host]);
        drop(harness.verbs_peer.received());
        let held = harness.host.stats().memory.receive.in_use_bytes;
        assert!(held <= most, "{held} bytes are held for one message, {idle} when idle");
    }
    harness.check_ends_with("more than 128 frames of unfinished messages");
}

pub(crate) fn fin_ack_without_fin(fixture: &Fixture) {
    let mut harness = ViolationHarness::new(fixture, &Config::default());
    harness.verbs_peer.control(Control::FinAck, &[]);
    harness.check_ends_with("FinAck, but no Fin was sent");
}

pub(crate) fn frame_after_fin(fixture: &Fixture) {
    let mut harness = ViolationHarness::new(fixture, &Config::default());
    harness.verbs_peer.post(Some(frame(true, false, 0, 0)), &Control::Fin.encode());
    harness.verbs_peer.post(Some(frame(false, false, 0, 0)), b"one more thing");
    harness.check_ends_with("a data frame after Fin");
}

/// Floods the link with pings and never takes the pongs.
pub(crate) fn ping_flood(fixture: &Fixture) {
    let mut harness =
        ViolationHarness::new(fixture, &Config { send_queue_depth: 16, ..Config::default() });
    harness.verbs_peer.deaf = true;
    for number in 0..3000 {
        if harness.link.failure().is_some() {
            break;
        }
        harness.verbs_peer.send(
            Some(frame(true, false, 0, 0)),
            &Control::Ping(number).encode(),
            &[&harness.host],
        );
    }
    harness.check_ends_with("too many requests that wait for an answer");
}

/// Every ping gets a pong as long as the peer takes them.
pub(crate) fn pings_are_answered(fixture: &Fixture) {
    let mut harness = ViolationHarness::new(fixture, &Config::default());
    let mut answers = Vec::new();
    for number in 0..500 {
        assert_eq!(
            harness.verbs_peer.control(Control::Ping(number), &[&harness.host]),
            Status::SUCCESS
        );
        let deadline = Instant::now() + super::TEST_TIMEOUT;
        while answers.len() as u64 <= number {
            pass(&[&harness.host]);
            answers.extend(
                harness.verbs_peer.received().into_iter().map(|(_, bytes)| Control::decode(&bytes)),
            );
            assert!(Instant::now() < deadline, "no pong for ping {number}");
        }
    }
    let expected: Vec<_> = (0..500).map(|number| Ok(Control::Pong(number))).collect();
    assert_eq!(answers, expected);
    harness.check_other_link();
}

/// A peer sends a frame larger than a receive. The device ends this link and no other.
pub(crate) fn frame_larger_than_a_receive(fixture: &Fixture) {
    let mut harness = ViolationHarness::new(fixture, &Config::default());
    harness.verbs_peer.post(Some(frame(false, false, 0, 0)), &[1; 8 * KIB + 1]);
    let error =
        failed(drive(&[&harness.host], harness.link.ended()), "frame larger than a receive");
    assert!([ErrorKind::LinkDown, ErrorKind::Protocol].contains(&error.kind()), "{error}");
    assert!(!error.to_string().contains("flushed"), "{error}");
    harness.check_other_link();
}

/// The peer disappears without closing.
pub(crate) fn peer_disappears(fixture: &Fixture) {
    let ViolationHarness { well_behaved, host, well_behaved_links, listener, link, verbs_peer } =
        ViolationHarness::new(fixture, &Config::default());
    drop(verbs_peer);
    let begun = Instant::now();
    let error = failed(drive(&[&host], link.recv()), "the peer is gone");
    assert_eq!(error.kind(), ErrorKind::LinkDown, "{error}");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    drop((well_behaved_links, listener, link));
    clear([well_behaved, host]);
}

/// A peer that never returns credit violates nothing, and memory use stays bounded. But the peer
/// must answer pings.
pub(crate) fn never_returns_credit(fixture: &Fixture) {
    let config = Config {
        send_queue_messages: 10,
        keepalive: Duration::from_millis(200),
        peer_timeout: Duration::from_millis(300),
        ..Config::default()
    };
    let mut harness = ViolationHarness::new(fixture, &config);
    let mut posted = 0;
    while harness.link.post_bytes(0, &[1; 300]).is_ok() {
        posted += 1;
        assert!(posted < 1000, "the queue is unbounded");
    }
    assert_eq!(posted, usize::from(HELLO.window) + 10);
    let error = failed(
        drive(&[&harness.host, &harness.well_behaved], harness.link.ended()),
        "the peer does not answer",
    );
    assert_eq!(error.kind(), ErrorKind::PeerStalled, "{error}");
    let data =
        harness.verbs_peer.received().into_iter().filter(|(_, bytes)| bytes.len() == 300).count();
    assert_eq!(data, usize::from(HELLO.window));
    harness.check_other_link();
}

/// A peer that ignores a revocation may use the grant until `peer_timeout` is over. Its next access
/// then ends its link.
pub(crate) fn ignores_a_revocation(fixture: &Fixture) {
    let config = Config { peer_timeout: Duration::from_millis(300), ..Config::default() };
    let mut harness = ViolationHarness::new(fixture, &config);
    let buf = buffer(&harness.host, &[1; 1000]);
    let region = harness.link.register_memory(buf, Rights::READ).expect("a region");
    let token = region.grant(&harness.link);
    assert_eq!(harness.verbs_peer.read(&token, &[&harness.host]), (Status::SUCCESS, vec![1; 1000]));
    let mut revoking = region.revoke();
    let begun = Instant::now();
    let mut buf = loop {
        pass(&[&harness.host]);
        if let Some(buf) = poll_once(&mut revoking) {
            break buf.expect("revoked");
        }
        let (status, bytes) = harness.verbs_peer.read(&token, &[]);
        assert_eq!(
            (status, bytes),
            (Status::SUCCESS, vec![1; 1000]),
            "the grant works until peer_timeout is over"
        );
        assert!(begun.elapsed() < Duration::from_secs(5), "the revocation never ends");
    };
    assert!(begun.elapsed() >= Duration::from_millis(290), "{:?}", begun.elapsed());
    buf.fill(0xee);
    let (status, bytes) = harness.verbs_peer.read(&token, &[&harness.host]);
    assert_eq!(status, Status::REMOTE_ACCESS);
    assert!(!bytes.contains(&0xee), "bytes were read after the revocation");
    drop((buf, revoking));
    harness.check_other_link();
}

/// A peer may revoke any number of grants. This one revokes 50 at a time.
pub(crate) fn may_revoke_many_grants(fixture: &Fixture) {
    const AT_A_TIME: usize = 50;
    let mut harness = ViolationHarness::new(fixture, &Config::default());
    let mut grants = 0..70_000 / fixture.work_divisor as u64;
    while !grants.is_empty() {
        for grant in grants.by_ref().take(AT_A_TIME) {
            harness
                .verbs_peer
                .post(Some(frame(true, false, 0, 0)), &Control::Revoke(grant).encode());
        }
        let deadline = Instant::now() + super::TEST_TIMEOUT;
        let mut answers = 0;
        while answers < AT_A_TIME {
            answers += harness.verbs_peer.received().len();
            // Drives both fabrics, because the test takes longer than the keepalive interval.
            pass(&[&harness.host, &harness.well_behaved]);
            assert!(
                Instant::now() < deadline,
                "only {answers} answers, link failure: {:?}",
                harness.link.failure()
            );
        }
    }
    assert!(harness.link.failure().is_none(), "{:?}", harness.link.failure());
    harness.check_other_link();
}

/// Random frames end the link only with a protocol error or a close.
pub(crate) fn random_frames(fixture: &Fixture) {
    let rounds = 20 / fixture.work_divisor.min(10) as u64;
    for seed in 1..=rounds {
        let mut random = Random::new(seed);
        let config = Config { max_message_bytes: 256 << 10, channels: 4, ..Config::default() };
        let mut harness = ViolationHarness::new(fixture, &config);
        for _ in 0..100 {
            let imm = match random.below(8) {
                0 => random.below(1 << 31) as u32 * 2,
                _ => frame(random.below(4) == 0, random.below(3) == 0, random.below(5) as u16, 0),
            };
            let mut bytes = pattern(seed, random.below(300) as usize);
            if let Some(kind) = bytes.first_mut() {
                *kind = random.below(9) as u8;
            }
            let imm = (random.below(50) > 0).then_some(imm);
            if harness.verbs_peer.send(imm, &bytes, &[&harness.host]) != Status::SUCCESS {
                break;
            }
            drop(harness.verbs_peer.received());
            while let Ok(Some(message)) = harness.link.try_recv() {
                drop(message);
            }
        }
        if seed == rounds {
            harness.check_other_link();
        } else if let Some(error) = harness.link.failure() {
            assert!([ErrorKind::Protocol, ErrorKind::Closed].contains(&error.kind()), "{error}");
        }
    }
}
