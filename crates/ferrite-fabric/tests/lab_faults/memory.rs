//! Memory for receives runs out: peers are held back, and go on when it is back.

use std::time::{Duration, Instant};

use ferrite_fabric::mem::PoolConfig;
use ferrite_fabric::{Config, ErrorKind, Link, Message};

use crate::harness::{
    Clean, Host, OWN, PEER, TEST_TIMEOUT, any_port, join, pace, quick, until, within,
};
use crate::pair::{connect, show};

const MIB: usize = 1 << 20;
/// Nobody but the application can wake the fabric in this time: no sign of life is asked for.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// Peers repeat what met no receive within a millisecond, so that this is only for the machine.
const RECOVERED_WITHIN: Duration = Duration::from_secs(2);

/// 16 receives, of 256 that there is memory for.
fn small() -> Config {
    let memory =
        PoolConfig { memory_pool_max: 18 * MIB, receive_reserve: 2 * MIB, ..PoolConfig::default() };
    Config { memory, recv_queue_depth: 16, keepalive: KEEPALIVE, ..Config::default() }
}

fn numbered(number: u32) -> Vec<u8> {
    number.to_le_bytes().into_iter().cycle().take(4000).collect()
}

fn number(message: &Message) -> u32 {
    let bytes = message.to_vec();
    let number = u32::from_le_bytes(*bytes.first_chunk().expect("a number"));
    assert!(bytes == numbered(number), "message {number} as it was sent");
    number
}

/// Two links from the own host to a small one: here and there of each.
fn two_links(own: &Host, small: &Host) -> [(Link, Link); 2] {
    let mut listener = small.fabric.listen(any_port(PEER)).expect("a listener");
    [(); 2].map(|()| {
        let there = connect(own, listener.local_addr()).expect("a link");
        (there, within(TEST_TIMEOUT, "the link", listener.accept()).expect("a link"))
    })
}

/// An application that keeps every message it is given.
#[test]
fn a_hoarder() {
    const MESSAGES: u32 = 1000;
    let clean = Clean::begin();
    let own = Host::new(&[OWN.0], Config { keepalive: KEEPALIVE, ..Config::default() });
    let hoarder = Host::new(&[PEER.0], small());
    let [(greedy_there, greedy), (polite_there, polite)] = two_links(&own, &hoarder);
    let sender = std::thread::spawn(move || {
        within(TEST_TIMEOUT * 2, "sending", async {
            for number in 0..MESSAGES {
                greedy_there.send_bytes(0, &numbered(number)).await.expect("sent");
            }
        });
        greedy_there
    });
    let mut kept: Vec<Message> = Vec::new();
    until(TEST_TIMEOUT, "all memory is taken", || {
        while let Some(message) = greedy.try_recv().expect("the link is up") {
            assert_eq!(number(&message) as usize, kept.len(), "in order");
            kept.push(message);
        }
        hoarder.fabric.stats().receives_posted == 0
    });
    std::thread::sleep(Duration::from_millis(100)); // what was under way
    kept.extend(std::iter::from_fn(|| greedy.try_recv().expect("the link is up")));
    let stats = hoarder.fabric.stats();
    println!(
        "a hoarder has {} messages; {} receives are posted",
        kept.len(),
        stats.receives_posted
    );
    assert!(!sender.is_finished() && kept.len() < MESSAGES as usize, "{} messages", kept.len());
    assert_eq!(
        (stats.receives_posted, stats.memory.receive.in_use_bytes),
        (0, 2 * MIB as u64),
        "{stats:?}"
    );
    // The other link has done nothing wrong; it is held back all the same, and not broken.
    polite_there.post_bytes(0, b"hello").expect("posted");
    std::thread::sleep(Duration::from_millis(200));
    assert!(polite.try_recv().expect("the link is up").is_none(), "there is no receive for it");

    let begun = Instant::now();
    let mut next = kept.len() as u32;
    drop(kept);
    let limit = RECOVERED_WITHIN * pace();
    let hello = within(limit, "the other link goes on when memory is back", polite.recv())
        .expect("a message");
    assert_eq!(hello.to_vec(), b"hello");
    println!("memory is back: the other link goes on after {:.0?}", begun.elapsed());
    within(TEST_TIMEOUT, "the rest comes", async {
        while next < MESSAGES {
            assert_eq!(number(&greedy.recv().await.expect("a message")), next, "in order");
            next += 1;
        }
    });
    let greedy_there = join(sender, TEST_TIMEOUT, "the sender ends");
    drop((hello, greedy, greedy_there, polite, polite_there));
    own.finish();
    hoarder.finish();
    clean.end();
}

/// A message that the peer has no memory for cannot stop the peer's other links: it is refused, or
/// its link ends.
#[test]
fn a_message_larger_than_the_memory() {
    let clean = Clean::begin();
    let own = Host::new(&[OWN.0], quick());
    let host = Host::new(&[PEER.0], Config { keepalive: quick().keepalive, ..small() });
    let [(large_there, large), (polite_there, polite)] = two_links(&own, &host);
    let begun = Instant::now();
    let error = within(TEST_TIMEOUT, "sending", async {
        let bytes = vec![7; 8 * MIB];
        large_there.send_bytes(0, &bytes).await.expect_err("there is no memory for it")
    });
    show(&format!("a message larger than the memory, after {:.0?}", begun.elapsed()), &error);
    let typed = [ErrorKind::TooLarge, ErrorKind::LinkDown, ErrorKind::PeerStalled];
    assert!(typed.contains(&error.kind()), "{error:?}");
    polite_there.post_bytes(0, b"hello").expect("the other link is up");
    let hello = within(RECOVERED_WITHIN * pace(), "the other link goes on", polite.recv())
        .expect("a message");
    assert_eq!(hello.to_vec(), b"hello");
    drop((hello, large, large_there, polite, polite_there));
    own.finish();
    host.finish();
    clean.end();
}
