//! Several modules that announce themselves to each other, without an engine and with virtual time.

use super::*;

fn node(digit: u8, is_myself: bool) -> Node {
    let address = Some(IpAddr::from([10, 0, 0, digit]));
    Node { id: NodeId::of(b'0' + digit), address, is_myself, has_failed: false }
}

/// The nodes 1 to `count`, as the node `myself` sees them.
fn nodes(count: u8, myself: u8) -> Vec<Node> {
    (1..=count).map(|digit| node(digit, digit == myself)).collect()
}

fn listening(address: &str, has_rdma: bool) -> Vec<(SocketAddr, bool)> {
    vec![(address.parse().expect("an address"), has_rdma)]
}

fn module(address: &str) -> Endpoints {
    let mut endpoints = Endpoints::default();
    endpoints.set_own(listening(address, true).iter());
    endpoints
}

/// Delivers the messages of all modules for a number of seconds. Returns how many there were.
fn run(modules: &mut [Endpoints], now: &mut Instant, seconds: u32) -> usize {
    let count = modules.len() as u8;
    let mut sent = 0;
    for _ in 0..seconds {
        *now += TICK;
        for from in 0..modules.len() {
            for (to, message) in modules[from].tick(&nodes(count, from as u8 + 1), *now) {
                modules[from].note_sent(to, true, *now);
                let to = (1..=count).find(|digit| node(*digit, false).id == to).expect("a node");
                modules[to as usize - 1].receive(node(from as u8 + 1, false).id, &message, *now);
                sent += 1;
            }
        }
    }
    sent
}

/// Returns the rows of the list as texts: node, address, port, transport.
fn rows(endpoints: &Endpoints, now: Instant) -> Vec<String> {
    let Reply::Maps(rows) = endpoints.list(now) else { panic!("the reply is not a list") };
    let text = |(_, value): &(String, Value)| match value {
        Value::Text(text) => text.clone(),
        Value::Number(number) => number.to_string(),
    };
    let row = |row: &Vec<(String, Value)>| {
        let mut words: Vec<_> = row.iter().map(text).collect();
        words[0].truncate(1);
        words[..4].join(" ")
    };
    rows.iter().map(row).collect()
}

#[test]
fn every_node_lists_every_endpoint() {
    let mut now = Instant::now();
    let mut modules = [module("10.9.0.1:6380"), module("0.0.0.0:7000"), module("10.9.0.3:6380")];
    run(&mut modules, &mut now, 2);
    for (index, expected) in [
        ["1 10.9.0.1 6380 rdma", "2 10.0.0.2 7000 rdma", "3 10.9.0.3 6380 rdma"],
        ["2 10.0.0.2 7000 rdma", "1 10.9.0.1 6380 rdma", "3 10.9.0.3 6380 rdma"],
    ]
    .iter()
    .enumerate()
    {
        assert_eq!(rows(&modules[index], now), expected, "{index}");
    }
    assert_eq!(modules[0].peer_count(), 2);
}

/// Each node sends to each other node about every 10 s.
#[test]
fn repeats_announcements_at_a_low_rate() {
    let mut now = Instant::now();
    let mut modules = [module("10.9.0.1:1"), module("10.9.0.2:1"), module("10.9.0.3:1")];
    run(&mut modules, &mut now, 5);
    assert_eq!(run(&mut modules, &mut now, 100), 60);
    // A module that was restarted asks for announcements. The others answer at once, although they
    // sent their last ones a short time ago.
    modules[2] = module("10.9.0.3:2");
    run(&mut modules, &mut now, 2);
    assert_eq!(rows(&modules[2], now).len(), 3);
    assert_eq!(rows(&modules[2], now).len(), 3);
    assert!(rows(&modules[0], now).contains(&"3 10.9.0.3 2 rdma".to_owned()));
}

#[test]
fn announces_changes_at_once() {
    let mut now = Instant::now();
    let mut modules = [module("10.9.0.1:1"), module("10.9.0.2:1")];
    run(&mut modules, &mut now, 3);
    modules[1].set_own(listening("10.9.0.2:1", false).iter());
    run(&mut modules, &mut now, 2);
    assert!(rows(&modules[0], now)[1].starts_with("2 10.9.0.2 1 tcp"));
    modules[1].set_own([].iter());
    run(&mut modules, &mut now, 2);
    assert_eq!(rows(&modules[0], now).len(), 1, "a module without a listener has no endpoints");
}

#[test]
fn forgets_nodes_that_leave_fail_or_are_silent() {
    let mut now = Instant::now();
    let start = |now: &mut Instant| {
        let mut modules = [module("10.9.0.1:1"), module("10.9.0.2:1")];
        run(&mut modules, now, 1);
        assert_eq!(rows(&modules[0], *now).len(), 2);
        let [first, _] = modules;
        first
    };
    let mut module = start(&mut now);
    now += SILENCE_MAX;
    let Reply::Maps(list) = module.list(now) else { panic!("the reply is not a list") };
    assert_eq!(list[1][4], ("age".into(), Value::Number(51)));
    module.tick(&nodes(2, 1), now);
    assert_eq!(rows(&module, now)[1], "2 10.9.0.2 1 rdma");
    now += TICK;
    module.tick(&nodes(2, 1), now);
    assert_eq!(rows(&module, now).len(), 1, "a silent node is not listed");

    let mut module = start(&mut now);
    let failed = Node { has_failed: true, ..node(2, false) };
    module.tick(&[node(1, true), failed], now);
    assert_eq!(
        (rows(&module, now).len(), module.peer_count()),
        (1, 0),
        "a failed node is not listed"
    );
    module.tick(&nodes(2, 1), now);
    assert_eq!(rows(&module, now).len(), 2, "a node that works again is listed");

    let mut module = start(&mut now);
    module.tick(&nodes(1, 1), now);
    assert!(module.peers.is_empty(), "a node that has left is forgotten");
}

#[test]
fn malformed_and_foreign_messages_change_nothing() {
    let mut now = Instant::now();
    let mut modules = [module("10.9.0.1:1"), module("10.9.0.2:1")];
    run(&mut modules, &mut now, 2);
    let [mut module, _] = modules;
    let before = rows(&module, now);
    let sender = node(2, false).id;
    for message in [b"".as_slice(), b"other", b"FRTE\x02anything", b"FRTE\x01\x00\x09"] {
        module.receive(sender, message, now);
    }
    assert_eq!((rows(&module, now), module.rejected()), (before.clone(), 1));
    // Only nodes of the cluster count, so other senders cannot use memory.
    module.receive(node(7, false).id, b"FRTE\x01\x01\x00", now);
    assert_eq!((rows(&module, now), module.peers.len()), (before, 1));
}

#[test]
fn large_clusters_are_told_in_portions() {
    let now = Instant::now();
    let mut module = module("10.9.0.1:1");
    let numbered = |digit: u8| Node {
        id: NodeId::of(digit),
        address: None,
        is_myself: digit == 0,
        has_failed: false,
    };
    let all: Vec<_> = (0..=200).map(numbered).collect();
    let mut told = std::collections::BTreeSet::new();
    for second in 1..=2 {
        let now = now + TICK * second;
        let messages = module.tick(&all, now);
        assert!(messages.len() <= MESSAGES_MAX, "{}", messages.len());
        for (to, _) in messages {
            module.note_sent(to, true, now);
            told.insert(to);
        }
    }
    assert_eq!(told.len(), 200);
}

/// The engine still lists nodes that are gone, for example until they are forgotten on all nodes. It
/// sends nothing to them.
#[test]
fn nodes_that_are_gone_do_not_silence_the_others() {
    let numbered = |number: u8, has_failed| Node {
        id: NodeId::of(number),
        address: None,
        is_myself: number == 255,
        has_failed,
    };
    // All numbers of nodes that are gone are lower than those of the two that run.
    for gone in [140, 250] {
        let mut now = Instant::now();
        let mut all: Vec<_> = (0..gone).map(|number| numbered(number, number % 2 == 0)).collect();
        let alive = [253, 254].map(|number| numbered(number, false));
        all.extend(alive);
        all.push(numbered(255, false));
        let mut module = module("10.9.0.1:1");
        let mut last_told = [now; 2];
        for second in 0..200 {
            now += TICK;
            let messages = module.tick(&all, now);
            assert!(messages.len() <= MESSAGES_MAX, "{}", messages.len());
            let mut tried_gone = 0;
            for (to, _) in messages {
                let runs = alive.iter().position(|node| node.id == to);
                module.note_sent(to, runs.is_some(), now);
                match runs {
                    Some(index) => last_told[index] = now,
                    None => tried_gone += 1,
                }
            }
            assert!(tried_gone >= UNREACHABLE_MAX, "{gone}: they may come back");
            let waited = last_told.map(|told| now - told);
            let most = if second < 3 { TICK * 3 } else { REPEAT };
            assert!(waited.iter().all(|waited| *waited <= most), "{gone}, {second}: {waited:?}");
        }
    }
}

#[test]
fn own_endpoints_are_what_others_can_use() {
    let mut module = Endpoints::default();
    let listening: Vec<(SocketAddr, bool)> = [
        ("127.0.0.1:6380", false),
        ("[fe80::1]:6380", true),
        ("0.0.0.0:6380", false),
        ("[::]:6380", true),
        ("10.9.0.1:6380", true),
    ]
    .map(|(at, has_rdma)| (at.parse().expect("an address"), has_rdma))
    .into();
    module.set_own(listening.iter());
    let now = Instant::now();
    // Without a cluster there is no id, and no address for the wildcard.
    assert_eq!(rows(&module, now), ["  6380 rdma", " 10.9.0.1 6380 rdma", " 127.0.0.1 6380 tcp"]);
    module.tick(&[node(1, true)], now);
    assert_eq!(rows(&module, now)[0], "1 10.0.0.1 6380 rdma");
}
