//! Peers without manners: each loses its own link, with the reason, and nobody else notices.

use std::time::{Duration, Instant};

use ferrite_fabric::wire::{Control, Rights};
use ferrite_fabric::{Config, ErrorKind, Fabric, Link, Listener};
use ferrite_verbs::Status;

use super::hello::HELLO;
use super::pair::{buffer, clear, drive, failed, meet, once, pass, pattern};
use super::random::Random;
use super::verbs_peer::{VerbsPeer, frame};
use super::{Fixture, KIB};

/// A fabric with a link to a good peer and one to a peer that knows no manners.
struct Scene {
    /// The good peer.
    good: Fabric,
    /// The one that must not be harmed.
    host: Fabric,
    good_links: [Link; 2],
    listener: Listener,
    /// To the bad peer.
    link: Link,
    verbs_peer: VerbsPeer,
}

impl Scene {
    fn new(fixture: &Fixture, config: &Config) -> Self {
        let [host, peer] = &fixture.hosts;
        let (good, fabric) =
            (fixture.fabric(peer, &Config::default()), fixture.fabric(host, config));
        let mut listener = fabric.listen(host.any_port()).expect("listen");
        let good_links = meet(&good, peer, &fabric, &mut listener);
        let (verbs_peer, answer) =
            VerbsPeer::call(fixture, listener.local_addr(), &HELLO.encode(), &[&fabric])
                .expect("a link");
        let hello = ferrite_fabric::wire::Hello::decode(&answer).expect("a hello");
        assert_eq!(hello.channels, config.channels);
        let link = drive(&[&fabric], listener.accept()).expect("a link");
        assert_eq!(link.peer_hello(), HELLO);
        Self { good, host: fabric, good_links, listener, link, verbs_peer }
    }

    /// The bad peer's link must end for this reason; then everything else must work.
    fn ends(self, why: &str) {
        let error = failed(drive(&[&self.host], self.link.ended()), why);
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        assert!(error.to_string().contains(why), "{why}: {error}");
        let receiving = failed(drive(&[&self.host], async { loop_recv(&self.link).await }), why);
        assert_eq!(receiving.kind(), ErrorKind::Protocol, "{receiving}");
        assert_eq!(failed(self.link.post_bytes(0, b"x"), why).kind(), ErrorKind::Protocol);
        assert_eq!(self.host.stats().failed_links, 1);
        self.others_are_well();
    }

    fn others_are_well(self) {
        let Self { good, host, good_links: [there, here], listener, link, verbs_peer } = self;
        let bytes = pattern(1, 100 * KIB);
        for (from, to) in [(&there, &here), (&here, &there)] {
            from.post_bytes(0, &bytes).expect("room");
            let message = drive(&[&good, &host], to.recv()).expect("a message");
            assert!(message.to_vec() == bytes, "another content");
        }
        link.abort(); // the verbs_peer peer would not answer to a farewell
        drop((there, here, listener, link));
        let pools = [good.pool().clone(), host.pool().clone()];
        clear([good, host]);
        pools.iter().for_each(super::pair::assert_unused);
        drop(verbs_peer);
    }
}

/// Takes messages until there are none any more.
async fn loop_recv(link: &Link) -> Result<(), ferrite_fabric::Error> {
    loop {
        link.recv().await?;
    }
}

pub(crate) fn without_immediate_data(fixture: &Fixture) {
    let mut scene = Scene::new(fixture, &Config::default());
    scene.verbs_peer.post(None, b"hello");
    scene.ends("without immediate data");
}

pub(crate) fn more_than_the_window(fixture: &Fixture) {
    let mut scene = Scene::new(fixture, &Config { window: 8, ..Config::default() });
    for _ in 0..9 {
        scene.verbs_peer.post(Some(frame(false, false, 0, 0)), b"hello");
    }
    scene.ends("more frames than it had credits for");
}

/// Exactly the window is no offence, taken or not.
pub(crate) fn exactly_the_window(fixture: &Fixture) {
    let mut scene = Scene::new(fixture, &Config { window: 8, ..Config::default() });
    for round in 0..3 {
        for _ in 0..8 {
            let sent =
                scene.verbs_peer.send(Some(frame(false, false, 0, 0)), b"hello", &[&scene.host]);
            assert_eq!(sent, Status::SUCCESS);
        }
        for _ in 0..8 {
            drive(&[&scene.host], scene.link.recv()).expect("a message");
        }
        // The host says so: half a window at a time.
        let mut consumed = 0;
        let deadline = Instant::now() + super::PATIENCE;
        while consumed != 8 * (round + 1) {
            pass(&[&scene.host]);
            for (imm, bytes) in scene.verbs_peer.received() {
                assert_eq!(Control::decode(&bytes), Ok(Control::Credit));
                consumed = imm.expect("immediate data") as u16;
            }
            assert!(Instant::now() < deadline, "no credit came back: {consumed}");
        }
    }
    scene.others_are_well();
}

pub(crate) fn credits_for_nothing(fixture: &Fixture) {
    let mut scene = Scene::new(fixture, &Config::default());
    scene.link.post_bytes(0, b"one").expect("room");
    scene.verbs_peer.post(Some(frame(false, false, 0, 2)), b"hello");
    scene.ends("credits for frames that were never sent");
}

pub(crate) fn credits_taken_back(fixture: &Fixture) {
    let mut scene = Scene::new(fixture, &Config::default());
    for _ in 0..3 {
        scene.link.post_bytes(0, b"one").expect("room");
    }
    assert_eq!(
        scene.verbs_peer.send(Some(frame(false, false, 0, 3)), b"x", &[&scene.host]),
        Status::SUCCESS
    );
    scene.verbs_peer.post(Some(frame(false, false, 0, 2)), b"x");
    scene.ends("credits for frames that were never sent");
}

pub(crate) fn unknown_control(fixture: &Fixture) {
    let mut scene = Scene::new(fixture, &Config::default());
    scene.verbs_peer.post(Some(frame(true, false, 0, 0)), &[200; 16]);
    scene.ends("unknown kind 200");
    let mut scene = Scene::new(fixture, &Config::default());
    scene.verbs_peer.post(Some(frame(true, false, 0, 0)), &[1; 8]);
    scene.ends("a control message of 8 bytes");
}

pub(crate) fn no_such_channel(fixture: &Fixture) {
    let mut scene = Scene::new(fixture, &Config { channels: 4, ..Config::default() });
    scene.verbs_peer.post(Some(frame(false, false, 3, 0)), b"fine");
    scene.verbs_peer.post(Some(frame(false, false, 4, 0)), b"not so");
    assert_eq!(drive(&[&scene.host], scene.link.recv()).expect("the first").to_vec(), b"fine");
    scene.ends("channel 4, of 4");
}

/// A message that never ends: by large pieces, by small ones, by none at all.
pub(crate) fn endless_message(fixture: &Fixture) {
    let config = Config { max_message_bytes: 256 << 10, ..Config::default() };
    let mut scene = Scene::new(fixture, &config);
    for number in 0..33 {
        scene.verbs_peer.post(Some(frame(false, true, number % 2, 0)), &[1; 8 * KIB]);
    }
    scene.ends("more than 262144 bytes");
    let mut scene = Scene::new(fixture, &config);
    scene.verbs_peer.post(Some(frame(false, true, 0, 0)), &[]);
    scene.ends("an empty frame");
}

/// A byte at a time takes a whole receive each: that is bounded, too.
pub(crate) fn endless_message_of_crumbs(fixture: &Fixture) {
    let config = Config { max_message_bytes: 256 << 10, window: 64, ..Config::default() };
    let mut scene = Scene::new(fixture, &config);
    let idle = scene.host.stats().memory.receive.in_use_bytes;
    let most = idle + 4 * config.max_message_bytes + 64 * 8192;
    for _ in 0..2000 {
        if scene.link.failure().is_some() {
            break;
        }
        scene.verbs_peer.send(Some(frame(false, true, 0, 0)), b"x", &[&scene.host]);
        drop(scene.verbs_peer.received());
        let held = scene.host.stats().memory.receive.in_use_bytes;
        assert!(held <= most, "{held} bytes are held for one message, {idle} when idle");
    }
    scene.ends("more than 128 frames of messages under way");
}

pub(crate) fn answers_to_no_farewell(fixture: &Fixture) {
    let mut scene = Scene::new(fixture, &Config::default());
    scene.verbs_peer.control(Control::FinAck, &[]);
    scene.ends("a farewell that was not sent");
}

pub(crate) fn words_after_the_last(fixture: &Fixture) {
    let mut scene = Scene::new(fixture, &Config::default());
    scene.verbs_peer.post(Some(frame(true, false, 0, 0)), &Control::Fin.encode());
    scene.verbs_peer.post(Some(frame(false, false, 0, 0)), b"one more thing");
    scene.ends("a frame after the last");
}

/// Questions without end, whose answers nobody takes.
pub(crate) fn endless_questions(fixture: &Fixture) {
    let mut scene = Scene::new(fixture, &Config { send_queue_depth: 16, ..Config::default() });
    scene.verbs_peer.deaf = true;
    for number in 0..3000 {
        if scene.link.failure().is_some() {
            break;
        }
        scene.verbs_peer.send(
            Some(frame(true, false, 0, 0)),
            &Control::Ping(number).encode(),
            &[&scene.host],
        );
    }
    scene.ends("more questions than answers fit");
}

/// Questions whose answers are taken: each is answered.
pub(crate) fn questions_are_answered(fixture: &Fixture) {
    let mut scene = Scene::new(fixture, &Config::default());
    let mut answers = Vec::new();
    for number in 0..500 {
        assert_eq!(
            scene.verbs_peer.control(Control::Ping(number), &[&scene.host]),
            Status::SUCCESS
        );
        let deadline = Instant::now() + super::PATIENCE;
        while answers.len() as u64 <= number {
            pass(&[&scene.host]);
            answers.extend(
                scene.verbs_peer.received().into_iter().map(|(_, bytes)| Control::decode(&bytes)),
            );
            assert!(Instant::now() < deadline, "no answer to {number}");
        }
    }
    let expected: Vec<_> = (0..500).map(|number| Ok(Control::Pong(number))).collect();
    assert_eq!(answers, expected);
    scene.others_are_well();
}

/// More than a receive takes: the device ends the link, and it alone.
pub(crate) fn longer_than_a_segment(fixture: &Fixture) {
    let mut scene = Scene::new(fixture, &Config::default());
    scene.verbs_peer.post(Some(frame(false, false, 0, 0)), &[1; 8 * KIB + 1]);
    let error = failed(drive(&[&scene.host], scene.link.ended()), "too long");
    assert!([ErrorKind::LinkDown, ErrorKind::Protocol].contains(&error.kind()), "{error}");
    assert!(!error.to_string().contains("flushed"), "{error}");
    scene.others_are_well();
}

/// It goes without a word.
pub(crate) fn vanishes(fixture: &Fixture) {
    let Scene { good, host, good_links, listener, link, verbs_peer } =
        Scene::new(fixture, &Config::default());
    drop(verbs_peer);
    let begun = Instant::now();
    let error = failed(drive(&[&host], link.recv()), "nobody is there");
    assert_eq!(error.kind(), ErrorKind::LinkDown, "{error}");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    drop((good_links, listener, link));
    clear([good, host]);
}

/// It takes, and never says so: that is no offence, and no memory grows; when asked it must answer.
pub(crate) fn never_gives_credit(fixture: &Fixture) {
    let config = Config {
        send_queue_messages: 10,
        keepalive: Duration::from_millis(200),
        peer_timeout: Duration::from_millis(300),
        ..Config::default()
    };
    let mut scene = Scene::new(fixture, &config);
    let mut posted = 0;
    while scene.link.post_bytes(0, &[1; 300]).is_ok() {
        posted += 1;
        assert!(posted < 1000, "it takes without end");
    }
    assert_eq!(posted, usize::from(HELLO.window) + 10);
    let error =
        failed(drive(&[&scene.host, &scene.good], scene.link.ended()), "it does not answer");
    assert_eq!(error.kind(), ErrorKind::PeerStalled, "{error}");
    let data =
        scene.verbs_peer.received().into_iter().filter(|(_, bytes)| bytes.len() == 300).count();
    assert_eq!(data, usize::from(HELLO.window));
    scene.others_are_well();
}

/// It does not listen when a grant is taken back: it has its time, then its next access costs it
/// the link.
pub(crate) fn ignores_a_revocation(fixture: &Fixture) {
    let config = Config { peer_timeout: Duration::from_millis(300), ..Config::default() };
    let mut scene = Scene::new(fixture, &config);
    let buf = buffer(&scene.host, &[1; 1000]);
    let region = scene.link.register_memory(buf, Rights::READ).expect("a region");
    let token = region.grant(&scene.link);
    assert_eq!(scene.verbs_peer.read(&token, &[&scene.host]), (Status::SUCCESS, vec![1; 1000]));
    let mut revoking = region.revoke();
    let begun = Instant::now();
    let mut buf = loop {
        pass(&[&scene.host]);
        if let Some(buf) = once(&mut revoking) {
            break buf.expect("revoked");
        }
        let (status, bytes) = scene.verbs_peer.read(&token, &[]);
        assert_eq!((status, bytes), (Status::SUCCESS, vec![1; 1000]), "until its time is over");
        assert!(begun.elapsed() < Duration::from_secs(5), "the owner waits for ever");
    };
    assert!(begun.elapsed() >= Duration::from_millis(290), "{:?}", begun.elapsed());
    buf.fill(0xee);
    let (status, bytes) = scene.verbs_peer.read(&token, &[&scene.host]);
    assert_eq!(status, Status::REMOTE_ACCESS);
    assert!(!bytes.contains(&0xee), "not one byte is read");
    drop((buf, revoking));
    scene.others_are_well();
}

/// It takes back one grant after the other, as an owner does that has many in its life: that is no
/// offence.
pub(crate) fn revocations_without_end(fixture: &Fixture) {
    const AT_A_TIME: usize = 50;
    let mut scene = Scene::new(fixture, &Config::default());
    let mut grants = 0..70_000 / fixture.slower as u64;
    while !grants.is_empty() {
        for grant in grants.by_ref().take(AT_A_TIME) {
            scene.verbs_peer.post(Some(frame(true, false, 0, 0)), &Control::Revoke(grant).encode());
        }
        let deadline = Instant::now() + super::PATIENCE;
        let mut answers = 0;
        while answers < AT_A_TIME {
            answers += scene.verbs_peer.received().len();
            pass(&[&scene.host, &scene.good]); // it takes longer than a keepalive
            assert!(
                Instant::now() < deadline,
                "{answers} answers, then {:?}",
                scene.link.failure()
            );
        }
    }
    assert!(scene.link.failure().is_none(), "{:?}", scene.link.failure());
    scene.others_are_well();
}

/// Anything at all.
pub(crate) fn babble(fixture: &Fixture) {
    let rounds = 20 / fixture.slower.min(10) as u64;
    for seed in 1..=rounds {
        let mut random = Random::new(seed);
        let config = Config { max_message_bytes: 256 << 10, channels: 4, ..Config::default() };
        let mut scene = Scene::new(fixture, &config);
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
            if scene.verbs_peer.send(imm, &bytes, &[&scene.host]) != Status::SUCCESS {
                break;
            }
            drop(scene.verbs_peer.received());
            while let Ok(Some(message)) = scene.link.try_recv() {
                drop(message);
            }
        }
        if seed == rounds {
            scene.others_are_well();
        } else if let Some(error) = scene.link.failure() {
            assert!([ErrorKind::Protocol, ErrorKind::Closed].contains(&error.kind()), "{error}");
        }
    }
}
