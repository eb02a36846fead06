//! All nodes of a cluster give the same replies at both ports, in states that redirect or refuse
//! commands.

use ferrite_testkit::engine::engines;

use super::changes::make_primary;
use super::nodes::{Cluster, Node};
use crate::client::{Pair, words};

/// Commands that give the same reply when they are repeated. `@` stands for the hash tag of keys.
const LINES: &str = "GET @str|GET @long|GET @long|GET @none|SET @w v|GET @w|INCRBY @zero 0|EXISTS @str|EXISTS @none|EXISTS @str @none\
    |MGET @str|MGET @str @none|MGET @str @long|DEL @none|TYPE @list|LRANGE @list 0 -1|HGET @hash a|SMEMBERS @set|ZRANGE @z 0 -1 WITHSCORES\
    |OBJECT ENCODING @str|OBJECT ENCODING @none|OBJECT REFCOUNT @long|OBJECT HELP|XREAD COUNT 1 STREAMS @stream 0|XREAD STREAMS @stream @none 0 0\
    |XLEN @stream|XRANGE @stream - +|XINFO GROUPS @stream|EVAL return{redis.call('GET',KEYS[1])} 1 @str|EVAL return{1} 0|EVAL_RO return{KEYS[1]} 1 @str\
    |SPUBLISH @channel m|PUBLISH channel m|DBSIZE|PING|PING x|ECHO x|KEYS none|SCAN 0 MATCH none COUNT 100000|STRLEN @long|GETRANGE @long 0 5\
    |SETRANGE @w 0 v|EXPIRE @none 10|PERSIST @none|TTL @str|PFCOUNT @none|LCS @str @long LEN|SINTER @set|SINTER @set @set|SINTERCARD 1 @set\
    |ZUNION 1 @z|ZUNION 2 @z @z|ZRANGESTORE @z2 @z 0 -1|RENAME @none @none2|COPY @str @copy REPLACE|LMOVE @none @none2 LEFT LEFT|SORT @list\
    |SORT_RO @list|LMPOP 1 @none LEFT|BITCOUNT @str|BITOP NOT @bits @str|GEORADIUS @none 1 1 1 km|GEORADIUS_RO @none 1 1 1 km|HSCAN @hash 0\
    |TOUCH @str|TOUCH @str @none|UNLINK @none|GETDEL @none|GETEX @str|SET @str value|GET|GET @str x|SET @str|MSET @w v|MSET @w v @w2 v|DUMP @none\
    |WATCH @str|UNWATCH|LPUSHX @none a|XACK @stream g 0-0|HINCRBY @hash n 0|SELECT 0|SELECT 1|NOSUCH|NOSUCH @str|GETSET @w v|LPOP @none\
    |MULTI|GET @str|SET @w v|EXEC|MULTI|GET @str|DISCARD|SETEX @w 100 v";

/// Returns the commands on keys with this tag.
fn lines(tag: &str) -> Vec<String> {
    LINES.split('|').map(|line| line.replace('@', &format!("{{{tag}}}"))).collect()
}

/// Compares the replies of a node to a pipeline of commands.
#[track_caller]
fn compare_lines(state: &str, pair: &mut Pair, lines: &[String]) {
    let commands: Vec<_> = lines.iter().map(|line| words(line)).collect();
    let [module, native] = [&mut pair.module, &mut pair.native].map(|client| {
        client.send(&commands);
        client.replies(commands.len())
    });
    for (line, (module, native)) in lines.iter().zip(module.iter().zip(&native)) {
        let [module, native] = [module, native].map(|reply| reply.escape_ascii().to_string());
        assert_eq!(module, native, "{state}: {line}");
    }
}

/// Compares the replies of a node to all commands, with each of these tags.
#[track_caller]
fn compare(state: &str, pair: &mut Pair, tags: &[&str]) {
    tags.iter().for_each(|tag| compare_lines(state, pair, &lines(tag)));
}

/// Compares the replies of all nodes.
#[track_caller]
fn compare_all(state: &str, open: &mut [Vec<Pair>], tags: &[&str]) {
    for (number, pairs) in open.iter_mut().enumerate() {
        for (pair, kind) in pairs.iter_mut().zip(KINDS) {
            compare(&format!("{state}, node {number}, {kind}"), pair, tags);
        }
    }
}

fn make_keys(node: &Node, tag: &str) {
    let long = format!("SET @long {}", "v".repeat(1000));
    let keys = "SET @str value|SET @zero 0|RPUSH @list 3 1 2|HSET @hash a 1 b 2|SADD @set a b|ZADD @z 1 a 2 b\
        |XADD @stream 1-1 a b|XGROUP CREATE @stream g 0";
    for line in keys.split('|').chain([long.as_str()]) {
        let reply = node.ask(&line.replace('@', &format!("{{{tag}}}")));
        assert!(!reply.starts_with('-'), "{line}: {reply}");
    }
    // The commands create some keys when they first run.
    let mut client = node.server.client();
    lines(tag).iter().for_each(|line| drop(client.raw(&words(line))));
}

/// The kinds of connections that [`pairs`] opens.
const KINDS: [&str; 3] = ["RESP2", "RESP3", "READONLY"];

/// Opens connections to both ports of a node: in RESP2, in RESP3, and after READONLY.
fn pairs(node: &Node) -> Vec<Pair> {
    let greetings: [&[&str]; 3] = [&["PING"], &["HELLO", "3"], &["READONLY"]];
    let open = |greeting: &[&str]| {
        let mut pair = node.pair();
        for client in [&mut pair.module, &mut pair.native] {
            client.raw(greeting);
        }
        pair
    };
    greetings.into_iter().map(open).collect()
}

#[test]
fn nodes_reply_as_at_their_own_port() {
    for program in engines() {
        let mut cluster = Cluster::start(&program);
        let tags: Vec<Vec<_>> = (0..3).map(|node| cluster.tags(node, 2)).collect();
        for (node, tags) in cluster.nodes.iter().zip(&tags) {
            tags.iter().for_each(|(tag, _)| make_keys(node, tag));
        }
        let [own, other, changing] = [0, 1, 2].map(|shard: usize| tags[shard][0].0.as_str());
        let (leaving, coming) = (&tags[0][1], &tags[1][1]);
        let nodes = &cluster.nodes;
        let mut open: Vec<_> = nodes.iter().map(pairs).collect();
        compare_all("stable", &mut open, &[own, other]);

        // A slot leaves node 0 for node 1, and another one comes from there.
        for ((_, slot), [from, to]) in [(leaving, [0, 1]), (coming, [1, 0])] {
            let [from, to] = [from, to].map(|node| &nodes[node]);
            to.ok(&format!("CLUSTER SETSLOT {slot} IMPORTING {}", from.id));
            from.ok(&format!("CLUSTER SETSLOT {slot} MIGRATING {}", to.id));
        }
        compare_all("slots that move", &mut open, &[&leaving.0, &coming.0]);
        let asking: Vec<_> =
            lines(&coming.0).into_iter().flat_map(|line| ["ASKING".into(), line]).collect();
        // The commands create some keys when they first run.
        open[0][0].native.send(&asking.iter().map(|line| words(line)).collect::<Vec<_>>());
        open[0][0].native.replies(asking.len());
        for pair in &mut open[0][..2] {
            compare_lines("ASKING", pair, &asking);
            compare("after ASKING", pair, &[own, other, &leaving.0, &coming.0]);
        }
        for (_, slot) in [leaving, coming] {
            nodes[..2].iter().for_each(|node| node.ok(&format!("CLUSTER SETSLOT {slot} STABLE")));
        }

        // The sessions stay connected to nodes that change their roles.
        for (old, new) in [(2, 5), (5, 2)] {
            make_primary(&nodes[old], &nodes[new]);
            nodes[0].server.wait_until("news of the failover", || {
                let redirect = nodes[0].ask(&format!("GET {{{changing}}}str"));
                redirect.ends_with(&nodes[new].port)
            });
            for (node, role) in [(old, "a replica"), (new, "the primary")] {
                for (pair, kind) in open[node].iter_mut().zip(KINDS) {
                    compare(&format!("node {node} is {role}, {kind}"), pair, &[changing, other]);
                }
            }
        }

        // A replica without its primary.
        nodes[0].server.signal("KILL");
        nodes[3].server.wait_until("the loss of the primary", || {
            nodes[3].ask("INFO replication").contains("master_link_status:down")
        });
        for serves in ["yes", "no"] {
            nodes[3].ok(&format!("CONFIG SET replica-serve-stale-data {serves}"));
            for (pair, kind) in open[3].iter_mut().zip(KINDS) {
                let state = format!("without primary, stale data {serves}, {kind}");
                compare(&state, pair, &[own, other]);
            }
        }
        drop(open);
        cluster.nodes.remove(0);
        cluster.assert_healthy();
    }
}
