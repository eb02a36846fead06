//! Argument lists for a command, made from the engine's description of its arguments: valid ones,
//! and valid ones with a mistake. They are the same in each run.

use super::keys::{self, Tags};
use super::spec::{Argument, Spec};

/// How many argument lists to make for one command.
#[derive(Clone, Copy)]
pub(crate) struct Amount {
    pub(crate) good: usize,
    pub(crate) spoiled: usize,
}

pub(crate) type Words = Vec<Vec<u8>>;

/// Extreme values. Small positive numbers are left out: as an expiry time, they could expire while
/// the test runs. -2147483648 is left out: as a count, it would give a reply of that many elements.
const EDGES: &[&[u8]] = &[
    b"",
    b"0",
    b"-1",
    b"-3",
    b"4294967296",
    b"9223372036854775807",
    b"-9223372036854775808",
    b"9223372036854775808",
    b"18446744073709551616",
    b"99999999999999999999999999",
    b"1.5",
    b"-0",
    b"+1",
    b" 1",
    b"1 ",
    b"0x10",
    b"nan",
    b"-inf",
    b"+INF",
    b"1e400",
    b"1e-400",
    b"*",
    b"(",
    b"[",
    b"$",
    b"nonsense",
    b"\0\xff\r\n\x80",
    b"\xf0\x9f\xa6\x80",
];
/// Extreme values for the arguments of blocking commands. None of them blocks for long.
const WAITS: &[&[u8]] = &[b"-1", b"abc", b"", b"nan", b"1e400", b"9223372036854775808", b"-0.5"];
const VALUES: &[&[u8]] = &[
    b"a",
    b"b",
    b"f1",
    b"f2",
    b"1",
    b"2",
    b"hello",
    b"member-7",
    b"field-7",
    b"",
    b"\0\x01\xfe\r\n",
    b"10.25",
    b"Palermo",
];
const SCRIPTS: &[&str] = &[
    "return {KEYS[1], ARGV[1]}",
    "return redis.call('TYPE', KEYS[1])",
    "return redis.pcall('INCR', KEYS[1])",
    "return redis.call('GET', KEYS[1])",
    "return redis.error_reply('MINE no')",
    "return {1, 2.9, 'x', false, {true, {}}}",
    "redis.setresp(3); return {double=3.25}",
    "return redis.call('PING'",
    "return undefined_name",
    "#!lua flags=no-writes\nreturn redis.call('SET', KEYS[1] or 'k', 1)",
];

/// Returns all cases of a command: its name with different arguments.
pub(crate) fn cases(spec: &Spec, tags: Tags, amount: Amount) -> Vec<Words> {
    let random = Random::seeded(&spec.name);
    let mut generator = Generator { spec, tags, random, count: None };
    let mut cases = vec![spec.words()];
    for _ in 0..amount.good {
        cases.push(generator.good());
    }
    for _ in 0..amount.spoiled {
        let good = generator.good();
        cases.push(generator.spoiled(good));
    }
    let many = std::iter::repeat_n(b"x".to_vec(), 20);
    cases.push(spec.words().into_iter().chain(many).collect());
    if spec.container {
        cases.push([spec.words(), vec![b"no-such-subcommand".to_vec()]].concat());
    }
    cases
}

struct Generator<'a> {
    spec: &'a Spec,
    tags: Tags,
    random: Random,
    /// The value of the last argument `numkeys`.
    count: Option<usize>,
}

impl Generator<'_> {
    /// Returns a valid case.
    fn good(&mut self) -> Words {
        self.count = None;
        let mut words = self.spec.words();
        if self.random.one_in(2) {
            words.iter_mut().for_each(|word| self.random.change_case(word));
        }
        let spec = self.spec;
        spec.arguments.iter().for_each(|argument| self.argument(argument, &mut words));
        words
    }

    fn argument(&mut self, argument: &Argument, into: &mut Words) {
        if argument.optional && self.random.one_in(2) {
            return;
        }
        let times = match self.count {
            Some(count) if argument.kind == "key" && argument.multiple => count,
            _ if argument.multiple => 1 + self.random.below(3),
            _ => 1,
        };
        for time in 0..times {
            if let Some(token) =
                argument.token.as_ref().filter(|_| time == 0 || argument.multiple_token)
            {
                let mut token =
                    if token == "\"\"" { Vec::new() } else { token.clone().into_bytes() };
                self.random.change_case(&mut token);
                into.push(token);
            }
            match argument.kind.as_str() {
                "oneof" if !argument.parts.is_empty() => {
                    let part = &argument.parts[self.random.below(argument.parts.len())];
                    self.argument(&Argument { optional: false, ..part.clone() }, into);
                }
                "block" => argument.parts.iter().for_each(|part| self.argument(part, into)),
                "pure-token" => {}
                "key" => into.push(self.key()),
                _ => {
                    let value = self.value(argument);
                    into.push(value);
                }
            }
        }
    }

    fn key(&mut self) -> Vec<u8> {
        let all = keys::all();
        let matching = keys::of_group(&self.spec.group);
        let name = match self.random.below(10) {
            0..6 => matching[self.random.below(matching.len())],
            _ => all[self.random.below(all.len())],
        };
        let tag = match self.random.below(12) {
            0 => self.tags.other,
            1 => self.tags.foreign,
            _ => self.tags.main,
        };
        format!("{tag}{name}").into_bytes()
    }

    fn value(&mut self, argument: &Argument) -> Vec<u8> {
        let pick =
            |random: &mut Random, from: &[&str]| from[random.below(from.len())].as_bytes().to_vec();
        let random = &mut self.random;
        let blocking = self.spec.waits();
        match (argument.kind.as_str(), argument.name.as_str()) {
            ("integer", "numkeys") => {
                let count = 1 + random.below(3);
                self.count = Some(count);
                count.to_string().into_bytes()
            }
            ("double", "timeout") => pick(random, &["0.01", "0.001", ".02"]),
            ("integer", "timeout" | "milliseconds") if blocking => pick(random, &["1", "10"]),
            (_, "seconds" | "milliseconds" | "ttl" | "min-idle-time" | "ms" | "timeout") => {
                pick(random, &["100000", "99999999", "0", "-5"])
            }
            ("unix-time", name) if name.contains("milli") => {
                pick(random, &["99999999999999", "1", "0", "-1"])
            }
            ("unix-time", _) => pick(random, &["99999999999", "1", "0", "-1"]),
            (_, "cursor") => b"0".to_vec(),
            (_, "script") => pick(random, SCRIPTS),
            (_, "group" | "groupname") => pick(random, &["grp", "nobody"]),
            (_, "consumer" | "consumername") => pick(random, &["c1", "c2"]),
            (_, "id" | "start" | "end" | "lastid" | "id-or-$" | "id_or_dollar")
                if self.spec.group == "stream" =>
            {
                pick(random, &["0", "1-1", "1-2", "5-0", "9-9", "-", "+", "$", ">", "*", "(1-1"])
            }
            (_, "min" | "max" | "start" | "stop") if self.spec.group.starts_with("sorted") => {
                pick(random, &["-inf", "+inf", "(1", "2", "[a", "(c", "-", "+", "0", "-1"])
            }
            (_, "longitude" | "latitude") => pick(random, &["13.5", "2", "-45.25", "86", "181"]),
            ("integer", _) => pick(random, &["0", "1", "2", "3", "5", "-1", "-2", "100"]),
            ("double", _) => pick(random, &["1.5", "-0.25", "0", "1e3", "200", "3.0"]),
            ("pattern", _) => pick(random, &["*", "str*", "h?llo", "[a-c]*", "nothing", "\\*"]),
            _ if random.one_in(15) => b"long value ".repeat(1800),
            _ => VALUES[random.below(VALUES.len())].to_vec(),
        }
    }

    /// Removes, adds, swaps or replaces a word.
    fn spoiled(&mut self, mut words: Words) -> Words {
        let fixed = self.spec.words().len();
        let random = &mut self.random;
        match random.below(8) {
            0 if words.len() > fixed => {
                words.pop();
            }
            1 if words.len() > fixed => {
                words.remove(fixed + random.below(words.len() - fixed));
            }
            2 => words.insert(
                fixed + random.below(words.len() - fixed + 1),
                VALUES[random.below(VALUES.len())].to_vec(),
            ),
            3 if words.len() > fixed + 1 => {
                let (one, other) = (fixed + random.below(words.len() - fixed), words.len() - 1);
                words.swap(one, other);
            }
            _ if words.len() > fixed => {
                let edges = if self.spec.waits() { WAITS } else { EDGES };
                let at = fixed + random.below(words.len() - fixed);
                words[at] = edges[random.below(edges.len())].to_vec();
            }
            _ => words.push(EDGES[random.below(EDGES.len())].to_vec()),
        }
        words
    }
}

/// The random number generator SplitMix64.
struct Random(u64);

impl Random {
    fn seeded(name: &str) -> Self {
        Self(name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        }))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    /// Changes the case of some letters, which commands and options ignore.
    fn change_case(&mut self, word: &mut [u8]) {
        match self.below(3) {
            0 => word.make_ascii_uppercase(),
            1 => word.iter_mut().step_by(2).for_each(u8::make_ascii_uppercase),
            _ => {}
        }
    }
}
