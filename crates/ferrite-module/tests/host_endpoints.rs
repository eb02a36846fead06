//! FERRITE ENDPOINTS in real clusters: the modules of all nodes find each other by the engine's own
//! cluster messages.

mod module {
    pub(crate) mod harness;
}

use std::collections::BTreeMap;
use std::io::Write as _;
use std::net::TcpStream;

use ferrite_testkit::cluster::{Cluster, Shape};
use ferrite_testkit::engine::engines;
use ferrite_testkit::{Engine, Random, Start};
use module::harness::start;

type Row = BTreeMap<String, String>;

/// Returns the rows of FERRITE ENDPOINTS as "node address port transport".
fn rows(engine: &Engine) -> Vec<String> {
    let rows: Vec<Row> = engine.ask(&["FERRITE", "ENDPOINTS"]);
    let text = |row: &Row| {
        assert!(row["age"].parse::<u64>().is_ok_and(|age| age < 60), "{row:?}");
        format!("{} {} {} {}", row["node"], row["address"], row["port"], row["transport"])
    };
    let mut texts: Vec<_> = rows.iter().map(text).collect();
    if let Some((_, others)) = texts.split_first_mut() {
        others.sort();
    }
    texts
}

/// Returns the rows that a node of the cluster should list: its own, then those of others.
fn expected(cluster: &Cluster, of: usize, listed: &[usize]) -> Vec<String> {
    let row = |number: usize| {
        let node = &cluster.nodes[number];
        format!("{} {} {} tcp", node.id, node.address.ip(), node.module_port)
    };
    let mut others: Vec<_> =
        listed.iter().filter(|number| **number != of).map(|number| row(*number)).collect();
    others.sort();
    [vec![row(of)], others].concat()
}

#[track_caller]
fn wait_for_rows(cluster: &Cluster, listed: &[usize]) {
    cluster.wait_until("the endpoints of the other nodes", |cluster, number| {
        !listed.contains(&number)
            || rows(&cluster.nodes[number].engine) == expected(cluster, number, listed)
    });
}

#[test]
fn every_node_lists_the_endpoints_of_all_modules() {
    for program in engines() {
        let shape = Shape { replicas: 1, without_module: &[2], ..Shape::primaries(&program, 3) };
        let mut cluster = Cluster::start(&shape);
        wait_for_rows(&cluster, &[0, 1, 3]);
        assert_eq!(cluster.nodes[0].engine.count("cluster_endpoints"), 2);
        let refusal = cluster.nodes[2].engine.refusal(&["FERRITE", "ENDPOINTS"]);
        assert!(refusal.contains("unknown command"), "{refusal}");

        // A node that joins later finds the others, and they find it.
        let joined = cluster.join(&shape);
        wait_for_rows(&cluster, &[0, 1, 3, joined]);

        // A node that starts again is listed again, and lists the others.
        cluster.nodes[joined].engine.restart();
        wait_for_rows(&cluster, &[0, 1, 3, joined]);

        // A node that fails, and one that leaves, are no longer listed.
        cluster.nodes[joined].engine.kill();
        let survivors = [0, 1, 3];
        wait_for_rows(&cluster, &survivors);
        let left = cluster.nodes[3].id.clone();
        let () = cluster.ask(3, &["CLUSTER", "RESET", "HARD"]);
        for number in [0, 1, 2] {
            let () = cluster.ask(number, &["CLUSTER", "FORGET", &left]);
        }
        cluster.wait_until("the node to be gone", |cluster, number| {
            ![0, 1].contains(&number)
                || rows(&cluster.nodes[number].engine) == expected(cluster, number, &[0, 1])
        });
        cluster.assert_healthy();
    }
}

#[test]
fn a_module_on_all_addresses_announces_the_nodes_address() {
    for program in engines() {
        let options = ["--bind", "0.0.0.0"];
        let shape = Shape { options: &options, ..Shape::primaries(&program, 3) };
        let mut cluster = Cluster::start(&shape);
        wait_for_rows(&cluster, &[0, 1, 2]);
        cluster.assert_healthy();
    }
}

#[test]
fn without_a_cluster_a_node_lists_itself() {
    for program in engines() {
        let mut server = start(&program, &[], &[]);
        let address = server.info("address");
        let (ip, port) = address.rsplit_once(':').expect("an address");
        assert_eq!(rows(&server), [format!(" {ip} {port} tcp")]);
        assert_eq!(server.count("cluster_endpoints"), 0);
        let reply = server.refusal(&["FERRITE", "ENDPOINTS", "all"]);
        assert!(reply.contains("wrong number of arguments"), "{reply}");
        server.assert_healthy();

        // Without a listener there is nothing to list.
        let mut server =
            Engine::start(&Start { program: &program, options: &[], module: Some(&[]) });
        assert_eq!(rows(&server), [""; 0]);
        server.assert_healthy();
    }
}

/// FERRITE ENDPOINTS needs its own permission and that of CLUSTER SLOTS, nothing else.
#[test]
fn ordinary_clients_may_list_endpoints() {
    for program in engines() {
        let mut server = start(&program, &[], &[]);
        for (rules, may) in [
            (&["+@all", "-@admin", "-@dangerous"][..], true),
            (&["+@read", "+ferrite|endpoints", "+cluster|slots"], true),
            (&["+@all", "-cluster|slots"], false),
            (&["+@all", "-ferrite|endpoints"], false),
        ] {
            let mut user = vec!["ACL", "SETUSER", "some", "reset", "on", ">pw"];
            user.extend(rules);
            let () = server.ask(&user);
            let mut connection = server.connection().expect("a connection");
            let () = redis::cmd("AUTH").arg(&["some", "pw"]).query(&mut connection).expect("AUTH");
            let answer =
                redis::cmd("FERRITE").arg("ENDPOINTS").query::<redis::Value>(&mut connection);
            assert_eq!(answer.is_ok(), may, "{rules:?} on {}: {answer:?}", program.display());
        }
        server.assert_healthy();
    }
}

/// A message on the cluster bus, as the module of this node would send it.
///
/// ```text
///  byte 0 "RCmb"  4 length  8 version  12 type  40 sender  2252 state  2256 module  2268 type
/// ```
fn bus_message(sender: &str, message: &[u8]) -> Vec<u8> {
    const HEADER: usize = 2256;
    const MODULE: u16 = 9;
    let mut bytes = vec![0; HEADER];
    let len = (HEADER + 13 + message.len()) as u32; // messages are short
    bytes[..4].copy_from_slice(b"RCmb");
    bytes[4..8].copy_from_slice(&len.to_be_bytes());
    bytes[8..10].copy_from_slice(&1_u16.to_be_bytes());
    bytes[12..14].copy_from_slice(&MODULE.to_be_bytes());
    bytes[40..80].copy_from_slice(sender.as_bytes());
    bytes.extend([0; 8]); // the one id of all modules whose names are not nine letters long
    bytes.extend((message.len() as u32).to_be_bytes());
    bytes.push(0xF6);
    bytes.extend(message);
    bytes
}

/// The cluster bus has no authentication, so anybody who reaches its port may send anything.
#[test]
fn malformed_cluster_messages_do_no_harm() {
    for program in engines() {
        let options = ["--cluster-node-timeout", "3600000"];
        let shape =
            Shape { without_module: &[1], options: &options, ..Shape::primaries(&program, 3) };
        let mut cluster = Cluster::start(&shape);
        wait_for_rows(&cluster, &[0, 2]);
        // Otherwise node 1 would connect to node 0 again, and its link would replace that of this
        // test.
        cluster.nodes[1].engine.signal("STOP");
        let [target, sender] = [&cluster.nodes[0], &cluster.nodes[1]];
        let valid = b"FRTE\x01\x00\x02\x01\x04\x18\xec\xc0\x00\x02\x01\x00\x01\x1b\x58";
        let mut bus = TcpStream::connect(target.bus_address()).expect("the bus");
        bus.write_all(&bus_message(&sender.id, valid)).expect("the connection is open");
        let is_listed = |row: &str| rows(&target.engine).contains(&format!("{} {row}", sender.id));
        target.engine.wait_until("the endpoints in the message", || {
            is_listed("192.0.2.1 6380 rdma") && is_listed("127.0.0.1 7000 tcp")
        });

        let mut random = Random::new(7);
        let mut bytes = Vec::new();
        for round in 0..20_000 {
            let mut message = valid.to_vec();
            message.truncate(random.index(valid.len() + 1));
            let at = random.index(valid.len());
            if at < message.len() {
                message[at] = random.below(256) as u8;
            }
            // Some claim to be sent by the node itself, or by a node that does not exist.
            let unknown = "f".repeat(40);
            let sender = [&sender.id, &sender.id, &target.id, &unknown][round % 4];
            bytes.extend(bus_message(sender, &message));
        }
        for large in [1 << 10, 1 << 20, 8 << 20] {
            bytes.extend(bus_message(&sender.id, &vec![0xFF; large]));
            let large = [b"FRTE\x01\x00\xff".to_vec(), vec![1; large]].concat();
            bytes.extend(bus_message(&sender.id, &large));
        }
        bus.write_all(&bytes).expect("the connection is open");
        bus.write_all(&bus_message(&sender.id, b"FRTE\x01\x00\x01\0\x01\0\x07"))
            .expect("the connection is open");
        target.engine.wait_until("the last message", || is_listed("127.0.0.1 7 tcp"));
        assert!(target.engine.count("cluster_rejected_messages") > 1000);
        assert_eq!(target.engine.count("cluster_endpoints"), 2);
        let log = target.engine.log();
        assert_eq!(log.matches("malformed announcement").count(), 1, "{log}");
        // The others are not affected: node 2 does not list what node 0 was told.
        assert_eq!(rows(&cluster.nodes[2].engine), expected(&cluster, 2, &[0, 2]));
        cluster.nodes[1].engine.signal("CONT");
        cluster.assert_healthy();
    }
}
