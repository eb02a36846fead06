//! The keys that commands work on: every type, in every encoding that a few commands can create,
//! with and without an expiry. Both engines have the same keys.

/// Prefixes of keys. In a cluster, they put the keys into slots of three kinds.
#[derive(Clone, Copy)]
pub(crate) struct Tags {
    /// The prefix of almost all keys.
    pub(crate) main: &'static str,
    /// The prefix of some keys: another slot of the same node.
    pub(crate) other: &'static str,
    /// The prefix of a few keys, which are never created: a slot of another node.
    pub(crate) foreign: &'static str,
}

pub(crate) const PLAIN: Tags = Tags { main: "", other: "other:", foreign: "foreign:" };
/// Slots 3300, 7365 and 15495.
pub(crate) const SLOTS: Tags = Tags { main: "{b}", other: "{c}", foreign: "{a}" };

const STRINGS: &[&str] =
    &["str:raw", "str:short", "str:int", "str:float", "str:long", "str:volatile"];
const LISTS: &[&str] = &["list:small", "list:big"];
const SETS: &[&str] = &["set:int", "set:small", "set:big"];
const SORTED_SETS: &[&str] = &["zset:small", "zset:big", "zset:same"];
const HASHES: &[&str] = &["hash:small", "hash:big"];
const OTHERS: &[&str] = &["missing", "expired"];

/// Returns the keys that commands of this group are for.
pub(crate) fn of_group(group: &str) -> &'static [&'static str] {
    match group {
        "string" | "bitmap" => STRINGS,
        "list" => LISTS,
        "set" => SETS,
        "sorted-set" | "sorted_set" => SORTED_SETS,
        "hash" => HASHES,
        "stream" => &["stream:a"],
        "geo" => &["geo:a"],
        "hyperloglog" => &["hll:a", "hll:b"],
        _ => &[
            "str:raw",
            "str:int",
            "list:small",
            "set:small",
            "zset:small",
            "hash:small",
            "stream:a",
            "str:volatile",
        ],
    }
}

/// Returns all keys.
pub(crate) fn all() -> Vec<&'static str> {
    let single: &[&str] = &["stream:a", "geo:a", "hll:a", "hll:b"];
    [STRINGS, LISTS, SETS, SORTED_SETS, HASHES, single, OTHERS].concat()
}

/// Returns the commands that create the keys in database 0, which is empty.
pub(crate) fn commands(tags: Tags) -> Vec<Vec<Vec<u8>>> {
    let mut lines: Vec<String> = [
        "SET str:raw a_string_that_is_longer_than_what_fits_into_an_object_of_44_bytes",
        "SET str:short hello",
        "SET str:int 12345",
        "SET str:float 3.25",
        "SET str:volatile here EX 1000000",
        "SET expired gone PXAT 1",
        "RPUSH list:small a b c 1 2 3 a",
        "SADD set:int 1 2 3 500 -7",
        "SADD set:small a b c",
        "ZADD zset:small 1 a 2 b 3 c 2.5 d -inf low inf high",
        "ZADD zset:same 0 a 0 b 0 c 0 d 0 aa",
        "HSET hash:small f1 v1 f2 2 f3 3.5 n 10",
        "GEOADD geo:a 13.361389 38.115556 Palermo 15.087269 37.502669 Catania 2.35 48.85 Paris",
        "PFADD hll:a a b c d e",
        "PFADD hll:b d e f g",
        "XADD stream:a 1-1 f v",
        "XADD stream:a 1-2 f v g w",
        "XADD stream:a 5-0 f x",
        "XGROUP CREATE stream:a grp 0",
        "XREADGROUP GROUP grp c1 COUNT 2 STREAMS stream:a >",
    ]
    .map(str::to_owned)
    .into();
    let numbered = |count: usize, each: &dyn Fn(usize) -> String| {
        (0..count).map(each).collect::<Vec<_>>().join(" ")
    };
    lines.push(format!("SET str:long {}", "0123456789abcdef".repeat(1200)));
    lines.push(format!(
        "RPUSH list:big {}",
        numbered(600, &|at| format!("element-{at:04}-{}", "x".repeat(at % 40)))
    ));
    lines.push(format!("SADD set:big {}", numbered(300, &|at| format!("member-{at}"))));
    lines
        .push(format!("ZADD zset:big {}", numbered(300, &|at| format!("{} member-{at}", at % 97))));
    lines.push(format!("HSET hash:big {}", numbered(300, &|at| format!("field-{at} value-{at}"))));
    let commands = lines.iter().map(|line| {
        let mut words: Vec<Vec<u8>> =
            line.split(' ').map(|word| word.as_bytes().to_vec()).collect();
        let at = match &words[0][..] {
            b"XGROUP" => 2,
            b"XREADGROUP" => 7,
            _ => 1,
        };
        let key = [tags.main.as_bytes(), &words[at]].concat();
        words[at] = key;
        words
    });
    let second = ["SET", "str:raw", "in another place"].map(|word| word.as_bytes().to_vec());
    let second =
        [second[0].clone(), [tags.other.as_bytes(), &second[1]].concat(), second[2].clone()]
            .to_vec();
    commands.chain([second]).collect()
}
