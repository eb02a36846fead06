//! The requests of a test: GET and SET, or a command of the user with placeholders.

use std::borrow::Cow;

use ferrite_proto::resp::{encode_command, split_line};

use super::Test;
use super::key_space::KeySpace;
use super::keys::{Keys, Random};
use crate::choice::name;

/// The requests of a test.
pub(super) enum Requests {
    Test(Test),
    Command(Template),
}

impl Requests {
    /// Returns the name of the test in results.
    pub(super) fn name(&self) -> String {
        match self {
            Self::Test(test) => name(test),
            Self::Command(template) => template.text.clone(),
        }
    }

    /// Returns whether the test reads keys that must be written before.
    pub(super) fn needs_keys(&self) -> bool {
        matches!(self, Self::Test(Test::Get | Test::Mixed))
    }
}

/// A command of the user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Template {
    text: String,
    words: Vec<Vec<Part>>,
}

/// A part of a word.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(Vec<u8>),
    Key,
    Data,
    RandomInteger,
}

const PLACEHOLDERS: [(&[u8], Part); 3] =
    [(b"__key__", Part::Key), (b"__data__", Part::Data), (b"__rand_int__", Part::RandomInteger)];

/// The values that replace placeholders.
pub(super) struct Values<'a> {
    pub(super) key_space: &'a KeySpace,
    pub(super) keys: &'a Keys,
    /// Which keys the connection may use.
    pub(super) is_own: &'a dyn Fn(u32) -> bool,
    pub(super) key_count: u32,
    pub(super) data: &'a [u8],
}

impl Template {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let words = split_line(text.as_bytes()).map_err(|error| error.to_string())?;
        if words.is_empty() {
            return Err("expected a command, such as \"SET __key__ __data__\"".into());
        }
        Ok(Self { text: text.to_owned(), words: words.iter().map(|word| parts(word)).collect() })
    }

    /// Appends the command with a value for each placeholder.
    pub(super) fn encode(&self, values: &Values<'_>, random: &mut Random, out: &mut Vec<u8>) {
        let words: Vec<_> =
            self.words.iter().map(|parts| fill_word(parts, values, random)).collect();
        encode_command(words, out);
    }
}

/// Splits a word at its placeholders.
fn parts(mut word: &[u8]) -> Vec<Part> {
    let mut parts = Vec::new();
    while !word.is_empty() {
        let found = PLACEHOLDERS.iter().filter_map(|(name, part)| {
            let at = word.windows(name.len()).position(|window| window == *name)?;
            Some((at, name.len(), part))
        });
        let Some((at, length, part)) = found.min_by_key(|(at, ..)| *at) else {
            parts.push(Part::Text(word.to_vec()));
            break;
        };
        if at > 0 {
            parts.push(Part::Text(word[..at].to_vec()));
        }
        parts.push(part.clone());
        word = &word[at + length..];
    }
    parts
}

/// Returns a word with values for its placeholders. Most words have one part, which is not copied.
fn fill_word<'a>(parts: &'a [Part], values: &Values<'a>, random: &mut Random) -> Cow<'a, [u8]> {
    let mut value = |part: &'a Part| -> Cow<'a, [u8]> {
        match part {
            Part::Text(text) => text.into(),
            Part::Data => values.data.into(),
            Part::Key => {
                values.key_space.mark_written();
                values
                    .key_space
                    .name(values.keys.next_of(random, values.is_own))
                    .into_bytes()
                    .into()
            }
            // Twelve digits, as in redis-benchmark.
            Part::RandomInteger => {
                let number = random.next() % u64::from(values.key_count.max(1));
                format!("{number:012}").into_bytes().into()
            }
        }
    };
    match parts {
        [part] => value(part),
        _ => parts.iter().fold(Vec::new(), |word, part| [&word[..], &value(part)].concat()).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(text: &str) -> String {
        let template = Template::parse(text).expect("a command");
        let key_space = KeySpace::new();
        let values = Values {
            key_space: &key_space,
            keys: &Keys::new(1, None),
            is_own: &|_| true,
            key_count: 1,
            data: b"xxx",
        };
        let mut out = Vec::new();
        template.encode(&values, &mut Random::new(1), &mut out);
        assert_eq!(key_space.is_written(), text.contains("__key__"), "{text}");
        String::from_utf8(out).expect("UTF-8").replace(key_space.prefix(), "PREFIX")
    }

    #[test]
    fn replaces_placeholders() {
        assert_eq!(
            encoded("SET __key__ __data__"),
            "*3\r\n$3\r\nSET\r\n$24\r\nPREFIX0\r\n$3\r\nxxx\r\n"
        );
        assert_eq!(
            encoded("LPUSH l:__rand_int__ \"a b__data__\" ''"),
            "*4\r\n$5\r\nLPUSH\r\n$14\r\nl:000000000000\r\n$6\r\na bxxx\r\n$0\r\n\r\n"
        );
        assert_eq!(encoded("PING"), "*1\r\n$4\r\nPING\r\n");
    }

    #[test]
    fn rejects_empty_commands_and_open_quotes() {
        assert!(Template::parse("  ").is_err_and(|error| error.contains("expected a command")));
        assert!(Template::parse("GET \"a").is_err_and(|error| error.contains("quotes")));
    }
}
