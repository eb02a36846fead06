//! The expected contents of a client's own keys: a model of a few commands, whose replies are
//! compared with those of the real engine.

use ferrite_testkit::Random;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

pub(crate) type Words = Vec<Vec<u8>>;

const STRINGS: u64 = 12;
const COUNTERS: u64 = 6;
const LISTS: u64 = 4;
const HASHES: u64 = 4;
const FIELDS: u64 = 12;
/// LTRIM shortens lists to this length.
const LIST_MAX: usize = 32;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Value {
    Text(Vec<u8>),
    List(VecDeque<Vec<u8>>),
    Hash(BTreeMap<Vec<u8>, Vec<u8>>),
}

/// The keys of one client, which no other client uses.
#[derive(Clone, Debug, Default)]
pub(crate) struct Model {
    keys: BTreeMap<Vec<u8>, Value>,
}

const WRONG_TYPE: &[u8] = b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n";
const NO_INTEGER: &[u8] = b"-ERR value is not an integer or out of range\r\n";
const OK: &[u8] = b"+OK\r\n";

fn number(value: impl std::fmt::Display) -> Vec<u8> {
    format!(":{value}\r\n").into_bytes()
}

fn bulk(value: &[u8]) -> Vec<u8> {
    [format!("${}\r\n", value.len()).as_bytes(), value, b"\r\n"].concat()
}

fn bulk_or_nil(value: Option<&[u8]>) -> Vec<u8> {
    value.map_or_else(|| b"$-1\r\n".to_vec(), bulk)
}

fn array(items: impl ExactSizeIterator<Item = Vec<u8>>) -> Vec<u8> {
    let mut reply = format!("*{}\r\n", items.len()).into_bytes();
    items.for_each(|item| reply.extend(item));
    reply
}

/// Returns whether a reply is an error that an engine sends while it changes its role, loads, or
/// rejects clients.
pub(crate) fn is_refusal(reply: &[u8]) -> bool {
    ["-READONLY", "-LOADING", "-MASTERDOWN", "-UNBLOCKED", "-EXECABORT", "-DENIED"]
        .iter()
        .any(|word| reply.starts_with(word.as_bytes()))
}

impl Model {
    /// Applies a command and returns the expected reply.
    pub(crate) fn apply(&mut self, words: &Words) -> Vec<u8> {
        let name = String::from_utf8_lossy(&words[0]).into_owned();
        match (name.as_str(), &words[1..]) {
            ("SET", [key, value]) => {
                self.keys.insert(key.clone(), Value::Text(value.clone()));
                OK.to_vec()
            }
            ("MSET", pairs) => {
                for pair in pairs.chunks(2) {
                    self.keys.insert(pair[0].clone(), Value::Text(pair[1].clone()));
                }
                OK.to_vec()
            }
            ("MGET", keys) => array(keys.iter().map(|key| match self.keys.get(key) {
                Some(Value::Text(text)) => bulk(text),
                _ => bulk_or_nil(None),
            })),
            ("DEL", keys) => {
                number(keys.iter().filter(|key| self.keys.remove(*key).is_some()).count())
            }
            ("EXISTS", [key]) => number(u8::from(self.keys.contains_key(key))),
            // The test ends before the key expires.
            ("EXPIRE", [key, _]) => number(u8::from(self.keys.contains_key(key))),
            (
                "GET" | "STRLEN" | "APPEND" | "GETRANGE" | "INCRBY" | "SETRANGE",
                [key, rest @ ..],
            ) => self.on_text(&name, key, rest),
            (
                "RPUSH" | "LPUSH" | "LPOP" | "RPOP" | "LLEN" | "LRANGE" | "LTRIM",
                [key, rest @ ..],
            ) => self.on_list(&name, key, rest),
            ("HSET" | "HGET" | "HDEL" | "HLEN" | "HINCRBY", [key, rest @ ..]) => {
                self.on_hash(&name, key, rest)
            }
            _ => unreachable!("the model does not have the command {name}"),
        }
    }

    fn on_text(&mut self, name: &str, key: &[u8], rest: &[Vec<u8>]) -> Vec<u8> {
        let text = match self.keys.get_mut(key) {
            None => None,
            Some(Value::Text(text)) => Some(text),
            Some(_) => return WRONG_TYPE.to_vec(),
        };
        match name {
            "GET" => bulk_or_nil(text.map(|text| text.as_slice())),
            "STRLEN" => number(text.map_or(0, |text| text.len())),
            "GETRANGE" => {
                let text = text.map_or(&[][..], |text| text);
                let [from, to] =
                    [0, 1].map(|at| parse(&rest[at]).expect("a number that we sent") as usize);
                bulk(text.get(from..text.len().min(to + 1)).unwrap_or_default())
            }
            "INCRBY" => {
                let add = parse(&rest[0]).expect("a number that we sent");
                let Some(sum) =
                    text.map_or(Some(0), |text| parse(text)).and_then(|now| now.checked_add(add))
                else {
                    return NO_INTEGER.to_vec();
                };
                self.keys.insert(key.to_vec(), Value::Text(sum.to_string().into_bytes()));
                number(sum)
            }
            _ => {
                let mut new = text.cloned().unwrap_or_default();
                if name == "APPEND" {
                    new.extend_from_slice(&rest[0]);
                } else {
                    let (at, piece) =
                        (parse(&rest[0]).expect("a number that we sent") as usize, &rest[1]);
                    new.resize(new.len().max(at + piece.len()), 0);
                    new[at..at + piece.len()].copy_from_slice(piece);
                }
                let length = new.len();
                self.keys.insert(key.to_vec(), Value::Text(new));
                number(length)
            }
        }
    }

    fn on_list(&mut self, name: &str, key: &[u8], rest: &[Vec<u8>]) -> Vec<u8> {
        let mut list = match self.keys.get(key) {
            None => VecDeque::new(),
            Some(Value::List(list)) => list.clone(),
            Some(_) => return WRONG_TYPE.to_vec(),
        };
        let reply = match name {
            "RPUSH" => {
                list.extend(rest.iter().cloned());
                number(list.len())
            }
            "LPUSH" => {
                rest.iter().for_each(|item| list.push_front(item.clone()));
                number(list.len())
            }
            "LPOP" => bulk_or_nil(list.pop_front().as_deref()),
            "RPOP" => bulk_or_nil(list.pop_back().as_deref()),
            "LLEN" => number(list.len()),
            "LRANGE" => array(list.iter().map(|item| bulk(item))),
            _ => {
                list.truncate(LIST_MAX);
                OK.to_vec()
            }
        };
        self.put(key, Value::List(list));
        reply
    }

    fn on_hash(&mut self, name: &str, key: &[u8], rest: &[Vec<u8>]) -> Vec<u8> {
        let mut hash = match self.keys.get(key) {
            None => BTreeMap::new(),
            Some(Value::Hash(hash)) => hash.clone(),
            Some(_) => return WRONG_TYPE.to_vec(),
        };
        let reply = match name {
            "HSET" => {
                let new =
                    |pair: &[Vec<u8>]| hash.insert(pair[0].clone(), pair[1].clone()).is_none();
                number(rest.chunks(2).map(new).filter(|new| *new).count())
            }
            "HGET" => bulk_or_nil(hash.get(&rest[0]).map(Vec::as_slice)),
            "HDEL" => number(rest.iter().filter(|field| hash.remove(*field).is_some()).count()),
            "HLEN" => number(hash.len()),
            _ => {
                let now = hash.get(&rest[0]).map_or(Some(0), |value| parse(value));
                let Some(sum) = now.and_then(|now| {
                    now.checked_add(parse(&rest[1]).expect("a number that we sent"))
                }) else {
                    return b"-ERR hash value is not an integer\r\n".to_vec();
                };
                hash.insert(rest[0].clone(), sum.to_string().into_bytes());
                number(sum)
            }
        };
        self.put(key, Value::Hash(hash));
        reply
    }

    /// Stores a value. An empty list or hash removes the key.
    fn put(&mut self, key: &[u8], value: Value) {
        let is_empty = match &value {
            Value::List(list) => list.is_empty(),
            Value::Hash(hash) => hash.is_empty(),
            Value::Text(_) => false,
        };
        if is_empty {
            self.keys.remove(key);
        } else {
            self.keys.insert(key.to_vec(), value);
        }
    }

    pub(crate) fn get(&self, key: &[u8]) -> Option<&Value> {
        self.keys.get(key)
    }

    /// Returns a model of only these keys.
    pub(crate) fn part(&self, keys: &BTreeSet<Vec<u8>>) -> Self {
        let entry = |key: &Vec<u8>| Some((key.clone(), self.keys.get(key)?.clone()));
        Self { keys: keys.iter().filter_map(entry).collect() }
    }

    /// Replaces these keys by those of `part`.
    pub(crate) fn settle(&mut self, keys: &BTreeSet<Vec<u8>>, part: &Self) {
        self.keys.retain(|key, _| !keys.contains(key));
        self.keys.extend(part.keys.iter().map(|(key, value)| (key.clone(), value.clone())));
    }

    pub(crate) fn clear(&mut self) {
        self.keys.clear();
    }
}

/// Parses a number as the engine does: no plus sign, no leading zeros, nothing before or after.
fn parse(text: &[u8]) -> Option<i64> {
    let text = std::str::from_utf8(text).ok()?;
    let value: i64 = text.parse().ok()?;
    (value.to_string() == text).then_some(value)
}

/// Returns every key that a client may have.
pub(crate) fn all_keys(client: usize) -> BTreeSet<Vec<u8>> {
    let of = |kind: char, count: u64| (0..count).map(move |at| key(client, kind, at));
    of('s', STRINGS).chain(of('c', COUNTERS)).chain(of('l', LISTS)).chain(of('h', HASHES)).collect()
}

fn key(client: usize, kind: char, at: u64) -> Vec<u8> {
    format!("client{client}:{kind}{at}").into_bytes()
}

/// Returns the keys that a command names.
pub(crate) fn keys_of(words: &Words) -> impl Iterator<Item = &Vec<u8>> {
    words.iter().skip(1).filter(|word| word.starts_with(b"client"))
}

/// Returns the command that reads a key of this kind back.
pub(crate) fn read_back(key: &[u8]) -> Words {
    let kind = key.iter().position(|byte| *byte == b':').map_or(b's', |colon| key[colon + 1]);
    match kind {
        b'l' => vec![b"LRANGE".to_vec(), key.to_vec(), b"0".to_vec(), b"-1".to_vec()],
        b'h' => vec![b"HGETALL".to_vec(), key.to_vec()],
        _ => vec![b"GET".to_vec(), key.to_vec()],
    }
}

/// Returns arbitrary bytes, mostly few.
fn bytes(random: &mut Random) -> Vec<u8> {
    let most = match random.below(100) {
        0..70 => 64,
        70..90 => 4 << 10,
        90..98 => 64 << 10,
        _ => 256 << 10,
    };
    let (length, first) = (1 + random.below(most), random.below(1 << 30));
    (0..length).map(|at| (first.wrapping_add(at).wrapping_mul(0x9e37_79b9) >> 13) as u8).collect()
}

/// Returns a random command on a client's own keys.
pub(crate) fn command(random: &mut Random, client: usize) -> Words {
    let string = |random: &mut Random| key(client, 's', random.below(STRINGS));
    let counter = |random: &mut Random| key(client, 'c', random.below(COUNTERS));
    let list = |random: &mut Random| key(client, 'l', random.below(LISTS));
    let hash = |random: &mut Random| key(client, 'h', random.below(HASHES));
    let any = |random: &mut Random| match random.below(4) {
        0 => string(random),
        1 => counter(random),
        2 => list(random),
        _ => hash(random),
    };
    let field = |random: &mut Random| format!("field{}", random.below(FIELDS)).into_bytes();
    let small = |random: &mut Random| (random.below(2000) as i64 - 1000).to_string().into_bytes();
    let (name, rest): (&str, Words) = match random.below(30) {
        0..4 => ("SET", vec![string(random), bytes(random)]),
        4..10 => ("GET", vec![string(random)]),
        10 => ("APPEND", vec![string(random), format!("{:x}", random.below(1 << 20)).into_bytes()]),
        11 => ("STRLEN", vec![string(random)]),
        12 => {
            let from = random.below(1000);
            let to = from + random.below(70_000);
            (
                "GETRANGE",
                vec![string(random), from.to_string().into_bytes(), to.to_string().into_bytes()],
            )
        }
        13 => (
            "SETRANGE",
            vec![string(random), random.below(5000).to_string().into_bytes(), b"piece".to_vec()],
        ),
        14..17 => ("INCRBY", vec![counter(random), small(random)]),
        17 => ("DEL", vec![any(random), any(random)]),
        18 => ("EXISTS", vec![any(random)]),
        19 => ("RPUSH", vec![list(random), bytes(random), b"x".to_vec()]),
        20 => ("LPUSH", vec![list(random), b"y".to_vec(), small(random)]),
        21 => (["LPOP", "RPOP"][random.below(2) as usize], vec![list(random)]),
        22 => ("LTRIM", vec![list(random), b"0".to_vec(), (LIST_MAX - 1).to_string().into_bytes()]),
        23 => ("LRANGE", vec![list(random), b"0".to_vec(), b"-1".to_vec()]),
        24 => {
            ("HSET", vec![hash(random), field(random), bytes(random), b"n".to_vec(), small(random)])
        }
        25 => ("HGET", vec![hash(random), field(random)]),
        26 => ("HINCRBY", vec![hash(random), b"n".to_vec(), small(random)]),
        // `any` may choose a key of the wrong type.
        27 => (["HLEN", "LLEN", "STRLEN"][random.below(3) as usize], vec![any(random)]),
        28 => ("MGET", vec![string(random), counter(random), list(random)]),
        _ => match random.below(3) {
            0 => ("EXPIRE", vec![any(random), b"100000".to_vec()]),
            1 => ("HDEL", vec![hash(random), field(random), field(random)]),
            _ => ("MSET", vec![string(random), bytes(random), counter(random), small(random)]),
        },
    };
    std::iter::once(name.as_bytes().to_vec()).chain(rest).collect()
}
