//! Revocation under fire: peers read a region in tight loops while its owner takes it back and uses
//! the memory for something else.
//!
//! The owner is the own host. One child reads over the link that it was given the grant on: it
//! hears of the end, and keeps its link. Another has the token from elsewhere and reads on: it
//! loses its link, and nobody else does. Neither ever sees a byte of what the memory was used for
//! afterwards. A third link of the owner has traffic all the time.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use ferrite_fabric::wire::{GrantToken, Rights};
use ferrite_fabric::{ConnectOptions, Error, ErrorKind, Fabric, Link, Listener};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;

use crate::harness::{Host, OWN, PEER, TEST_TIMEOUT, any_port, pace, quick, within};
use crate::pair::{Pair, show};
use crate::process::{Process, role};

const BYTES: usize = 16 << 10;
/// What is granted, and what the memory holds when it no longer is.
const OLD: u8 = 0xAA;
const NEW: u8 = 0x55;
const ROUNDS: usize = 10;
/// Reads that a child has under way.
const AT_ONCE: usize = 4;
/// The readers answer when what they have under way is done: a few reads.
const REVOKED_WITHIN: Duration = Duration::from_secs(1);

#[test]
fn under_fire() {
    if let Some(role) = role() {
        let (who, target) = role.split_once(' ').expect("a role and an address");
        let target = target.parse().expect("an address");
        let host = Host::new(&[PEER.0], quick());
        match who {
            "reader" => read_until_told(&host.fabric, target),
            _ => read_in_any_case(&host.fabric, target),
        }
        host.finish();
        return;
    }
    // The third link, and the fabric of all of them.
    let pair = Pair::start(quick(), quick());
    let fabric = pair.own.fabric.clone();
    let mut listener = fabric.listen(any_port(OWN)).expect("a listener");
    let target = listener.local_addr();
    let start = |who: &str| Process::start("revocation::under_fire", &format!("{who} {target}"));
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
        let token = region.grant(&reader_link).encode(); // not to the thief
        for link in [&reader_link, &thief_link] {
            within(TEST_TIMEOUT, "the token goes", link.send_bytes(0, &token)).expect("sent");
            within(TEST_TIMEOUT, "it is used", link.recv()).expect("a message");
        }
        let begun = Instant::now();
        buf = within(REVOKED_WITHIN * pace(), "revoked", region.revoke()).expect("the buffer");
        longest = longest.max(begun.elapsed());
        buf.fill(NEW);
        let error = within(TEST_TIMEOUT, "the thief's link ends", thief_link.ended())
            .expect_err("by an error");
        if round == 0 {
            show("at the owner, the link of the one that does not listen", &error);
        }
        assert_eq!(error.kind(), ErrorKind::LinkDown, "{error:?}");
        // Reads of the other child were refused by its own fabric; its link works.
        let message =
            within(TEST_TIMEOUT, "the reader goes on", reader_link.recv()).expect("its link is up");
        assert_eq!(message.to_vec(), b"denied");
        assert!(buf.iter().all(|byte| *byte == NEW), "nobody wrote");
    }
    println!("{ROUNDS} revocations under fire, the slowest took {longest:.1?}");
    drop(buf);
    drop(listener);
    within(TEST_TIMEOUT, "closing", reader_link.close()).expect("closed in good order");
    drop(reader_link);
    for process in [reader, thief] {
        assert_eq!(process.finish(), Vec::<String>::new(), "it has nothing to complain about");
    }
    drop(fabric);
    pair.survives("revocation under fire");
}

fn accept(listener: &mut Listener) -> Link {
    within(TEST_TIMEOUT, "a child connects", listener.accept()).expect("a link")
}

fn connect(fabric: &Fabric, target: SocketAddr) -> Result<Link, Error> {
    let options = ConnectOptions::new().local(any_port(PEER));
    within(TEST_TIMEOUT, "a connect", fabric.connect_with(target, &options))
}

/// The role of the one that listens: its reads end by a refusal of its own fabric.
fn read_until_told(fabric: &Fabric, target: SocketAddr) {
    let link = connect(fabric, target).expect("a link");
    within(TEST_TIMEOUT * 4, "all rounds", async {
        loop {
            let token = match link.recv().await {
                Ok(message) => GrantToken::decode(&message.to_vec()).expect("a grant"),
                Err(error) if error.kind() == ErrorKind::Closed => return,
                Err(error) => panic!("{error}"),
            };
            let error = read_on(&link, &token).await;
            assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
            assert!(link.failure().is_none(), "{:?}", link.failure());
            link.send_bytes(0, b"denied").await.expect("the link is up");
        }
    });
}

/// The role of the one that has the token from elsewhere: its reads end when the owner's device
/// refuses one.
fn read_in_any_case(fabric: &Fabric, target: SocketAddr) {
    for round in 0..ROUNDS {
        let link = connect(fabric, target).expect("a link");
        let token = within(TEST_TIMEOUT, "the token", link.recv()).expect("a message");
        let token = GrantToken::decode(&token.to_vec()).expect("a grant");
        let error = within(TEST_TIMEOUT, "reads end", read_on(&link, &token));
        if round == 0 {
            show("at the one that does not listen", &error);
        }
        // The owner's device refuses and its fabric hangs up: on a busy host the second can be
        // heard first.
        let expected = [ErrorKind::Denied, ErrorKind::LinkDown];
        assert!(expected.contains(&error.kind()), "{error:?}");
        assert!(
            link.failure().is_some_and(|failure| expected.contains(&failure.kind())),
            "its link is down"
        );
    }
}

/// Reads as fast as it can, looks at every byte, and says how it ended. After some it tells the
/// owner.
async fn read_on(link: &Link, token: &GrantToken) -> Error {
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
                    "byte {wrong:?} is none that was granted: {:?}",
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
    end.expect("reads go on until one fails")
}
