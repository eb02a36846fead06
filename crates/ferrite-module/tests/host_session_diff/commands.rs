//! Generates the commands of sessions.
//!
//! The replies of data commands depend only on the data: not on a random choice, the order of a
//! hash table or the clock. So the replies can be compared byte for byte.

use super::session::{Setup, Word};
use super::vocabulary::{ACL, CLIENT, COLLECTIONS, CONFIG, STRINGS, TRACKING};
use ferrite_testkit::Random;

/// The kind of a command. A session prefers some kinds and omits others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Strings,
    Collections,
    Keys,
    Large,
    Auth,
    Hello,
    Reset,
    Multi,
    Watch,
    Subscribe,
    Unsubscribe,
    Publish,
    Reply,
    Tracking,
    Client,
    Kill,
    Quit,
    Acl,
    Pause,
    Config,
    Select,
    Script,
    Blocking,
    Databases,
    Many,
    Unknown,
}

/// Each kind with its weight.
pub(crate) const KINDS: &[(Kind, u64)] = &[
    (Kind::Strings, 12),
    (Kind::Collections, 8),
    (Kind::Keys, 5),
    (Kind::Large, 3),
    (Kind::Auth, 4),
    (Kind::Hello, 4),
    (Kind::Reset, 2),
    (Kind::Multi, 6),
    (Kind::Watch, 3),
    (Kind::Subscribe, 3),
    (Kind::Unsubscribe, 3),
    (Kind::Publish, 3),
    (Kind::Reply, 3),
    (Kind::Tracking, 3),
    (Kind::Client, 3),
    (Kind::Kill, 1),
    (Kind::Quit, 1),
    (Kind::Acl, 3),
    (Kind::Pause, 1),
    (Kind::Config, 2),
    (Kind::Select, 3),
    (Kind::Script, 3),
    (Kind::Blocking, 3),
    (Kind::Databases, 2),
    (Kind::Many, 4),
    (Kind::Unknown, 2),
];

const KEYS: &[&str] = &[
    "low:a", "low:b", "public:a", "shared", "k1", "k2", "cnt", "list", "hash", "set", "zset", "str",
];
const CHANNELS: &[&str] = &["ch1", "ch2", "news", "low:ch"];
pub(crate) const PASSWORDS: &[(&str, &str)] =
    &[("admin", "right"), ("low", "p"), ("reader", "r"), ("default", "pw"), ("nobody", "x")];
/// Sizes around those at which the module treats values differently.
const SIZES: &[usize] = &[
    0,
    1,
    511,
    512,
    513,
    1 << 10,
    16 << 10,
    (32 << 10) - 1,
    32 << 10,
    (32 << 10) + 1,
    (64 << 10) - 9,
    64 << 10,
    (64 << 10) + 1,
    (256 << 10) - 20,
    256 << 10,
    (256 << 10) + 1,
    1 << 20,
    (1 << 20) + 1,
];

/// Returns a random element.
pub(crate) fn pick<T: Copy>(random: &mut Random, from: &[T]) -> T {
    from[random.below(from.len() as u64) as usize]
}

/// Returns true with this probability.
pub(crate) fn chance(random: &mut Random, percent: u64) -> bool {
    random.below(100) < percent
}

/// A generated command, and how long it may take.
pub(crate) struct Command {
    pub(crate) words: Vec<Word>,
    pub(crate) wait_ms: u64,
    /// The command may block until another client writes.
    pub(crate) may_block: bool,
}

pub(crate) struct CommandGenerator<'a> {
    pub(crate) random: &'a mut Random,
    pub(crate) setup: &'a Setup,
}

impl CommandGenerator<'_> {
    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        pick(self.random, from)
    }

    /// Generates a command from a line of words with placeholders: `K` is a key, `C` a channel, `N`
    /// a number or an invalid word, `V` a value, `#` the id of a client. In a word that begins with
    /// `normal_`, underscores become spaces.
    fn line(&mut self, line: &str) -> Command {
        let mut words = Vec::new();
        for word in line.split(' ') {
            words.push(match word {
                "K" => self.bytes(KEYS),
                "C" => self.bytes(CHANNELS),
                "N" => self.bytes(&["0", "1", "2", "-1", "7", "100", "x", ""]),
                "V" => self.bytes(&["v", "value", "10", "", "a\r\nb", "\0\u{7f}", "3.5"]),
                limit if limit.starts_with("normal_") => {
                    Word::Bytes(limit.replace('_', " ").into_bytes())
                }
                "#" => Word::Id(self.random.below(self.setup.clients as u64) as usize),
                word => Word::Bytes(word.as_bytes().to_vec()),
            });
        }
        if let Some(Word::Bytes(name)) = words.first_mut() {
            let typed =
                self.setup.typed(std::str::from_utf8(name).unwrap_or_default()).as_bytes().to_vec();
            *name = self.cased(typed);
        }
        Command { words, wait_ms: 0, may_block: false }
    }

    fn bytes(&mut self, from: &[&str]) -> Word {
        Word::Bytes(self.pick(from).as_bytes().to_vec())
    }

    /// Changes the case of some letters, which engines ignore in names of commands.
    fn cased(&mut self, name: Vec<u8>) -> Vec<u8> {
        match self.random.below(10) {
            0 => name.to_ascii_lowercase(),
            1 => name
                .iter()
                .enumerate()
                .map(|(at, b)| if at % 2 == 0 { b.to_ascii_lowercase() } else { *b })
                .collect(),
            _ => name,
        }
    }

    fn one_of(&mut self, lines: &[&str]) -> Command {
        let line = self.pick(lines);
        self.line(line)
    }

    pub(crate) fn generate(&mut self, kind: Kind) -> Command {
        match kind {
            Kind::Strings => self.one_of(STRINGS),
            Kind::Collections => self.one_of(COLLECTIONS),
            Kind::Keys => self.keys(),
            Kind::Large => self.large(),
            Kind::Auth => self.auth(),
            Kind::Hello => self.hello(),
            Kind::Reset => self.line("RESET"),
            Kind::Multi => {
                self.one_of(&["MULTI", "MULTI", "EXEC", "EXEC", "DISCARD", "MULTI x", "EXEC x"])
            }
            Kind::Watch => self.one_of(&["WATCH K", "WATCH K K", "UNWATCH", "WATCH"]),
            Kind::Subscribe => self.one_of(&[
                "SUBSCRIBE C",
                "SUBSCRIBE C C C",
                "PSUBSCRIBE ch*",
                "PSUBSCRIBE * n*",
                "SSUBSCRIBE C",
                "SUBSCRIBE",
            ]),
            Kind::Unsubscribe => self.one_of(&[
                "UNSUBSCRIBE",
                "UNSUBSCRIBE C",
                "UNSUBSCRIBE C C C C",
                "PUNSUBSCRIBE",
                "PUNSUBSCRIBE ch* x y",
                "SUNSUBSCRIBE",
                "SUNSUBSCRIBE C C",
            ]),
            Kind::Publish => self.one_of(&[
                "PUBLISH C V",
                "PUBLISH C V",
                "SPUBLISH C V",
                "PUBLISH C",
                "PUBSUB NUMSUB C C",
                "PUBSUB NUMPAT",
            ]),
            Kind::Reply => self.one_of(&[
                "CLIENT REPLY OFF",
                "CLIENT REPLY ON",
                "CLIENT REPLY ON",
                "CLIENT REPLY SKIP",
                "CLIENT REPLY SKIP",
                "CLIENT REPLY x",
            ]),
            Kind::Tracking => self.one_of(TRACKING),
            Kind::Client => self.one_of(CLIENT),
            Kind::Kill => self.one_of(&[
                "CLIENT KILL ID #",
                "CLIENT KILL ID #",
                "CLIENT KILL ID # SKIPME no",
                "CLIENT KILL USER low",
                "CLIENT KILL USER nobody",
                "CLIENT UNBLOCK #",
                "CLIENT UNBLOCK # ERROR",
            ]),
            Kind::Quit => self.line("QUIT"),
            Kind::Acl => self.one_of(ACL),
            Kind::Pause => self.pause(),
            Kind::Config => self.one_of(CONFIG),
            Kind::Select => self.one_of(&[
                "SELECT 0", "SELECT 1", "SELECT 2", "SELECT 3", "SELECT 9", "SELECT x", "SELECT",
            ]),
            Kind::Script => self.script(),
            Kind::Blocking => self.blocking(),
            // DBSIZE is left out, because it counts expired keys until the engine deletes them,
            // which depends on the clock.
            Kind::Databases => self.one_of(&[
                "SWAPDB 0 1",
                "SWAPDB 1 2",
                "SWAPDB 0 9",
                "MOVE K 1",
                "COPY K K DB 1",
                "FLUSHDB",
                "FLUSHALL",
            ]),
            Kind::Many => self.many(),
            Kind::Unknown => self.one_of(&[
                "NOSUCH K V",
                "GET",
                "SET K",
                "GET K K",
                "CLIENT",
                "CLIENT NOSUCH",
                "CONFIG",
                "OBJECT x K",
                "AUTH",
                "HELLO x",
            ]),
        }
    }

    fn keys(&mut self) -> Command {
        if chance(self.random, 10) {
            let mut command = self.line("SET K V PX 5");
            command.wait_ms = 30;
            return command;
        }
        self.one_of(&[
            "DEL K",
            "DEL K K",
            "EXISTS K K",
            "TYPE K",
            "RENAME K K",
            "RENAMENX K K",
            "EXPIRE K 0",
            "EXPIREAT K 4102444800",
            "PEXPIREAT K 1",
            "PERSIST K",
            "EXPIRETIME K",
            "TOUCH K",
            "UNLINK K",
            "OBJECT ENCODING K",
            "COPY K K",
            "SORT K ALPHA",
            "DUMP missing",
            "SET K V PXAT 1",
            "SET K V EXAT 4102444800",
        ])
    }

    fn large(&mut self) -> Command {
        let size = self.pick(SIZES);
        let mut command = self.one_of(&[
            "SET K",
            "SET K",
            "APPEND K",
            "RPUSH list",
            "HSET hash f",
            "ECHO",
            "GETSET K",
            "SADD set",
        ]);
        if chance(self.random, 40) {
            return self.one_of(&[
                "GET K",
                "MGET K K K",
                "GETRANGE K 0 70000",
                "LRANGE list 0 -1",
                "HGET hash f",
                "STRLEN K",
            ]);
        }
        let fill = b'a' + self.random.below(26) as u8;
        command.words.push(Word::Bytes(vec![fill; size]));
        command
    }

    fn credentials(&mut self) -> (&'static str, &'static str) {
        let (user, password) = self.pick(PASSWORDS);
        (user, if chance(self.random, 45) { "wrong" } else { password })
    }

    fn auth(&mut self) -> Command {
        let (user, password) = self.credentials();
        match self.random.below(10) {
            0 => self.line(&format!("AUTH {password}")),
            1 => self.line(&format!("AUTH {user} {password} more")),
            _ => self.line(&format!("AUTH {user} {password}")),
        }
    }

    fn hello(&mut self) -> Command {
        let protocol = self.pick(&["2", "3", "2", "3", "3", "4", "x"]);
        let (user, password) = self.credentials();
        match self.random.below(10) {
            0 => self.line("HELLO"),
            1 | 2 => self.line(&format!("HELLO {protocol}")),
            3 => self.line(&format!("HELLO {protocol} SETNAME n1")),
            4 => self.line(&format!("HELLO {protocol} AUTH {user} {password} SETNAME n2")),
            5 => self.line(&format!("HELLO {protocol} AUTH {user} {password} BAD")),
            _ => self.line(&format!("HELLO {protocol} AUTH {user} {password}")),
        }
    }

    /// Generates short pauses, which are over before another client sends. When a pause ends, the
    /// order of the commands of several clients is not defined.
    fn pause(&mut self) -> Command {
        let mut command = self.one_of(&[
            "CLIENT PAUSE 30 ALL",
            "CLIENT PAUSE 30 ALL",
            "CLIENT PAUSE 30 WRITE",
            "CLIENT UNPAUSE",
            "CLIENT PAUSE x",
        ]);
        if command.words.get(2) == Some(&Word::Bytes(b"30".to_vec())) {
            command.wait_ms = 60;
        }
        command
    }

    fn script(&mut self) -> Command {
        let script = self.pick(&[
            "return redis.call('GET', KEYS[1])",
            "return redis.call('INCR', KEYS[1])",
            "return redis.pcall('INCR', KEYS[1])",
            "return redis.call('SET', 'k2', ARGV[1])",
            "return {1, 2, {3, 'x'}, false}",
            "redis.setresp(3); return redis.call('HGETALL', KEYS[1])",
            "return redis.error_reply('MY error')",
            "return redis.call('SELECT', '1')",
            "return redis.call('PUBLISH', 'ch1', ARGV[1])",
            "return redis.acl_check_cmd('GET', KEYS[1])",
            "return redis.call('NOSUCH')",
            "syntax error",
        ]);
        let mut command = self.one_of(&["EVAL", "EVAL", "EVAL_RO"]);
        command.words.push(Word::Bytes(script.into()));
        command.words.extend(self.line("1 K V").words);
        command
    }

    fn blocking(&mut self) -> Command {
        let (line, wait_ms) = self.pick(&[
            ("BLPOP list 0", 0),
            ("BLPOP list K 0", 0),
            ("BRPOPLPUSH list k2 0", 0),
            ("BLMOVE list k1 LEFT RIGHT 0", 0),
            ("BZPOPMIN zset 0", 0),
            ("XREAD BLOCK 0 STREAMS stream $", 0),
            ("BLPOP never 0.02", 60),
            ("BLMPOP 0.02 1 never LEFT", 60),
            ("XREAD BLOCK 20 STREAMS never $", 60),
            ("WAIT 0 10", 0),
            ("WAIT 1 20", 60),
            ("BLPOP list x", 0),
        ]);
        Command {
            wait_ms,
            may_block: line.ends_with(" 0") || line.ends_with(" $"),
            ..self.line(line)
        }
    }

    /// Generates a command with many words, sometimes more than the engine or the module buffers as
    /// a whole.
    fn many(&mut self) -> Command {
        let count = self.pick(&[10, 1000, 1025, 5000, 44_000, 60_000, 60_000]);
        let mut command = self.one_of(&[
            "UNSUBSCRIBE",
            "UNSUBSCRIBE",
            "UNSUBSCRIBE",
            "PUNSUBSCRIBE",
            "SUNSUBSCRIBE",
            "SUBSCRIBE",
            "EXISTS",
            "RPUSH list",
            "SADD set",
            "MGET",
            "ECHO",
        ]);
        command
            .words
            .extend((0..count).map(|number| Word::Bytes(format!("c{number}").into_bytes())));
        command
    }
}
