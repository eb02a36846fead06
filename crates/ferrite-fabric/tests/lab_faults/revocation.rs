//! Revocation under load: peers read a region in tight loops while its owner revokes it and reuses
//! the memory.
//!
//! The owner is the local host. One child reads over the link that has the grant. It learns of the
//! revocation and keeps its link. Another child, the thief, obtained the token elsewhere and keeps
//! reading. It loses its link, and no other link is affected. Neither child ever reads a byte that
//! the owner writes after the revocation. A third link of the owner has traffic all the time.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use ferrite_fabric::wire::{GrantToken, Rights};
use ferrite_fabric::{ConnectOptions, Error, ErrorKind, Fabric, Link, Listener};
use ferrite_testkit::lab::{Host, OWN, PEER, TEST_TIMEOUT, any_port, short_timeouts, slowdown};
use ferrite_testkit::process::{PeerProcess, role};
use ferrite_testkit::within;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;

use crate::pair::{Pair, show};

const BYTES: usize = 16 << 10;
/// The content of the memory while it is granted, and after the revocation.
const OLD: u8 = 0xAA;
const NEW: u8 = 0x55;
const ROUNDS: usize = 10;
/// Number of reads that a child has in flight.
const AT_ONCE: usize = 4;
/// The limit for a revocation. The reader answers when its few reads in flight are done.
const REVOKED_WITHIN: Duration = Duration::from_secs(1);

#[test]
fn revokes_while_peers_read() {
    if let Some(role) = role() {
        let (reader_kind, target) = role.split_once(' ').expect("a role and an address");
        let target = target.parse().expect("an address");
        let host = Host::new(&[PEER.0], short_timeouts());
        match reader_kind {
            "reader" => read_until_revoked(&host.fabric, target),
            _ => read_after_revocation(&host.fabric, target),
        }
        host.finish();
        return;
    }
    // The pair is the third link. Its local fabric also accepts the links of the two child
    // processes.
    let pair = Pair::start(short_timeouts(), short_timeouts());
    let fabric = pair.own.fabric.clone();
    let mut listener = fabric.listen(any_port(OWN)).expect("a listener");
    let target = listener.local_addr();
    let start = |reader_kind: &str| {
        PeerProcess::start(
            "revocation::revokes_while_peers_read",
            &format!("{reader_kind} {target}"),
        )
    };
    let reader = start("reader");
    let reader_link = accept(&mut listener);
    let thief = start("thief");
    let mut buf = fabric.buffer(BYTES).expect("a buffer");
    let mut longest = Duration::ZERO;
    for round in 0..ROUNDS {
        let thief_link = accept(&mut listener);
        buf.fill(OLD);
        let region = reader_link
            .register_memory(buf, Rights::READ)
            .map_err(|(_, error)| error)
            .expect("a region");
        let token = region.grant(&reader_link).encode(); // valid only on this link
        for link in [&reader_link, &thief_link] {
            within(TEST_TIMEOUT, "the token is sent", link.send_bytes(0, &token)).expect("sent");
            within(TEST_TIMEOUT, "the token is used", link.recv()).expect("a message");
        }
        let begun = Instant::now();
        buf = within(REVOKED_WITHIN * slowdown(), "revoked", region.revoke())
            .expect("buffer returned");
        longest = longest.max(begun.elapsed());
        buf.fill(NEW);
        let error = within(TEST_TIMEOUT, "the thief's link ends", thief_link.ended())
            .expect_err("the thief's link must fail");
        if round == 0 {
            show("the thief's link, at the owner", &error);
        }
        assert_eq!(error.kind(), ErrorKind::LinkDown, "{error:?}");
        // The reader's own fabric refused its reads. Its link still works.
        let message = within(TEST_TIMEOUT, "the reader reports the refusal", reader_link.recv())
            .expect("reader's link is up");
        assert_eq!(message.to_vec(), b"denied");
        assert!(buf.iter().all(|byte| *byte == NEW), "the memory was written");
    }
    println!("{ROUNDS} revocations under load, the slowest took {longest:.1?}");
    drop(buf);
    drop(listener);
    within(TEST_TIMEOUT, "closing", reader_link.close()).expect("closed cleanly");
    drop(reader_link);
    for process in [reader, thief] {
        assert_eq!(process.finish(), Vec::<String>::new(), "a child reported an error");
    }
    drop(fabric);
    pair.survives("revocation under load");
}

fn accept(listener: &mut Listener) -> Link {
    within(TEST_TIMEOUT, "a child connects", listener.accept()).expect("a link")
}

fn connect(fabric: &Fabric, target: SocketAddr) -> Result<Link, Error> {
    let options = ConnectOptions::new().local(any_port(PEER));
    within(TEST_TIMEOUT, "a connect", fabric.connect_with(target, &options))
}

/// Plays the reader, which learns of the revocation: its own fabric refuses further reads.
fn read_until_revoked(fabric: &Fabric, target: SocketAddr) {
    let link = connect(fabric, target).expect("a link");
    within(TEST_TIMEOUT * 4, "all rounds", async {
        loop {
            let token = match link.recv().await {
                Ok(message) => GrantToken::decode(&message.to_vec()).expect("a grant"),
                Err(error) if error.kind() == ErrorKind::Closed => return,
                Err(error) => panic!("{error}"),
            };
            let error = read_until_error(&link, &token).await;
            assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
            assert!(link.failure().is_none(), "{:?}", link.failure());
            link.send_bytes(0, b"denied").await.expect("the link is up");
        }
    });
}

/// Plays the thief, which obtained the token elsewhere: its reads fail when the owner's device
/// refuses one.
fn read_after_revocation(fabric: &Fabric, target: SocketAddr) {
    for round in 0..ROUNDS {
        let link = connect(fabric, target).expect("a link");
        let token = within(TEST_TIMEOUT, "the token", link.recv()).expect("a message");
        let token = GrantToken::decode(&token.to_vec()).expect("a grant");
        let error = within(TEST_TIMEOUT, "reads end", read_until_error(&link, &token));
        if round == 0 {
            show("the thief's link, at the thief", &error);
        }
        // The owner's device refuses the read, and the owner's fabric disconnects. On a busy host,
        // the thief may notice the disconnect first.
        let expected = [ErrorKind::Denied, ErrorKind::LinkDown];
        assert!(expected.contains(&error.kind()), "{error:?}");
        assert!(
            link.failure().is_some_and(|failure| expected.contains(&failure.kind())),
            "the link must be down"
        );
    }
}

/// Reads as fast as it can, checks every byte, and returns the error that ended the reads. Tells
/// the owner after the first 20 reads.
async fn read_until_error(link: &Link, token: &GrantToken) -> Error {
    let read = || async {
        let buf = link.fabric().buffer(BYTES)?;
        Ok::<_, Error>(link.rdma_read(token, 0, buf)?.await?)
    };
    let mut reads: FuturesUnordered<_> = (0..AT_ONCE).map(|_| read()).collect();
    let (mut count, mut end) = (0, None);
    while let Some(done) = reads.next().await {
        match done {
            Ok(buf) => {
                let wrong = buf.iter().position(|byte| *byte != OLD);
                assert_eq!(
                    wrong,
                    None,
                    "byte {wrong:?} was never granted: {:?}",
                    wrong.map(|at| buf[at])
                );
                count += 1;
                if count == 20 {
                    link.post_bytes(0, b"reading").expect("posted");
                }
                if end.is_none() {
                    reads.push(read());
                }
            }
            Err(error) => end = end.or(Some(error)),
        }
    }
    end.expect("reads continue until one fails")
}
