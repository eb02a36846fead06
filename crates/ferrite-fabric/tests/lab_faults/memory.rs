//! The receive memory runs out: peers wait, and continue when memory is free again.

use std::time::{Duration, Instant};

use ferrite_fabric::mem::PoolConfig;
use ferrite_fabric::{Config, ErrorKind, Link, Message};
use ferrite_testkit::lab::{
    Host, LeakCheck, OWN, PEER, TEST_TIMEOUT, any_port, short_timeouts, slowdown,
};
use ferrite_testkit::{join, until, within};

use crate::pair::{connect, show};

const MIB: usize = 1 << 20;
/// Long enough that no keepalive wakes the fabric during a test. Only the application can wake it.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// The limit for a link to continue once there is memory. Peers retry within a millisecond when
/// there was no receive, so this only allows for a slow machine.
const RECOVERED_WITHIN: Duration = Duration::from_secs(2);

/// Returns settings with 16 posted receives and memory for 256.
fn small_memory() -> Config {
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
    assert!(bytes == numbered(number), "message {number} was changed");
    number
}

/// Opens two links from the local host to the host with little memory. Returns both ends of each.
fn two_links(own: &Host, small: &Host) -> [(Link, Link); 2] {
    let mut listener = small.fabric.listen(any_port(PEER)).expect("a listener");
    [(); 2].map(|()| {
        let there = connect(own, listener.local_addr()).expect("a link");
        (there, within(TEST_TIMEOUT, "the link", listener.accept()).expect("a link"))
    })
}

/// An application keeps every message that it receives, until the peers have to wait.
#[test]
fn peers_wait_while_all_messages_are_kept() {
    const MESSAGES: u32 = 1000;
    let leak_check = LeakCheck::begin();
    let own = Host::new(&[OWN.0], Config { keepalive: KEEPALIVE, ..Config::default() });
    let keeper = Host::new(&[PEER.0], small_memory());
    let [(kept_link_there, kept_link), (other_there, other)] = two_links(&own, &keeper);
    let sender = std::thread::spawn(move || {
        within(TEST_TIMEOUT * 2, "sending", async {
            for number in 0..MESSAGES {
                kept_link_there.send_bytes(0, &numbered(number)).await.expect("sent");
            }
        });
        kept_link_there
    });
    let mut kept: Vec<Message> = Vec::new();
    until(TEST_TIMEOUT, "all memory is taken", || {
        while let Some(message) = kept_link.try_recv().expect("the link is up") {
            assert_eq!(number(&message) as usize, kept.len(), "messages out of order");
            kept.push(message);
        }
        // This also waits for messages in flight.
        let stats = keeper.fabric.stats();
        stats.receives_posted == 0 && stats.memory.receive.in_use_bytes == 2 * MIB as u64
    });
    let stats = keeper.fabric.stats();
    println!(
        "the application keeps {} messages; {} receives are posted",
        kept.len(),
        stats.receives_posted
    );
    assert!(!sender.is_finished() && kept.len() < MESSAGES as usize, "{} messages", kept.len());
    assert_eq!(
        (stats.receives_posted, stats.memory.receive.in_use_bytes),
        (0, 2 * MIB as u64),
        "{stats:?}"
    );
    // The other link did nothing wrong. It has to wait as well, but does not break.
    other_there.post_bytes(0, b"hello").expect("posted");
    std::thread::sleep(Duration::from_millis(200));
    assert!(
        other.try_recv().expect("the link is up").is_none(),
        "there must be no receive for the message"
    );

    let begun = Instant::now();
    let mut next = kept.len() as u32;
    drop(kept);
    let limit = RECOVERED_WITHIN * slowdown();
    let hello = within(limit, "the other link continues when memory is free", other.recv())
        .expect("a message");
    assert_eq!(hello.to_vec(), b"hello");
    println!("memory is free: the other link continues after {:.0?}", begun.elapsed());
    within(TEST_TIMEOUT, "the remaining messages arrive", async {
        while next < MESSAGES {
            assert_eq!(
                number(&kept_link.recv().await.expect("a message")),
                next,
                "messages out of order"
            );
            next += 1;
        }
    });
    let kept_link_there = join(sender, TEST_TIMEOUT, "the sender ends");
    drop((hello, kept_link, kept_link_there, other, other_there));
    own.finish();
    keeper.finish();
    leak_check.end();
}

/// The peer has no memory for a large message. The message is rejected, or its link ends, so that
/// it cannot block the peer's other links.
#[test]
fn message_larger_than_the_memory_blocks_no_other_link() {
    let leak_check = LeakCheck::begin();
    let own = Host::new(&[OWN.0], short_timeouts());
    let host =
        Host::new(&[PEER.0], Config { keepalive: short_timeouts().keepalive, ..small_memory() });
    let [(large_there, large), (other_there, other)] = two_links(&own, &host);
    let begun = Instant::now();
    let error = within(TEST_TIMEOUT, "sending", async {
        let bytes = vec![7; 8 * MIB];
        large_there.send_bytes(0, &bytes).await.expect_err("the peer has no memory for it")
    });
    show(&format!("a message larger than the memory, after {:.0?}", begun.elapsed()), &error);
    let typed = [ErrorKind::TooLarge, ErrorKind::LinkDown, ErrorKind::PeerStalled];
    assert!(typed.contains(&error.kind()), "{error:?}");
    other_there.post_bytes(0, b"hello").expect("the other link is up");
    let hello = within(RECOVERED_WITHIN * slowdown(), "the other link continues", other.recv())
        .expect("a message");
    assert_eq!(hello.to_vec(), b"hello");
    drop((hello, large, large_there, other, other_there));
    own.finish();
    host.finish();
    leak_check.end();
}
