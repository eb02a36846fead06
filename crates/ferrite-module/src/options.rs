//! The module's settings: one table of names, defaults and limits, for the arguments of
//! `loadmodule` and for CONFIG.
//!
//! The arguments in `loadmodule ferrite.so rdma-port 6380 max-clients 500` become the defaults with
//! which the module registers `ferrite.rdma-port` and the other settings. A line
//! `ferrite.rdma-port 6381` in the engine's configuration file overrides such a default. CONFIG
//! REWRITE keeps the arguments and omits settings that have their defaults, so the file that it
//! writes gives the same settings again.

use std::ffi::CStr;
use std::net::IpAddr;
use std::time::Duration;

use ferrite_fabric::Rdma;
use ferrite_session::EngineAddress;

/// The type of a setting's value.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    /// A number from `range[0]` to `range[1]`. A size may have the engine's units (`64kb`).
    Number { range: [i64; 2], is_size: bool },
    /// One of these words. Its value is the word's index.
    Choice(&'static [&'static CStr]),
    /// A text that this function accepts. The function's error describes what it accepts.
    Text(fn(&str) -> Result<(), String>),
}

/// A setting.
#[derive(Debug)]
pub(crate) struct Setting {
    pub(crate) name: &'static CStr,
    pub(crate) kind: Kind,
    pub(crate) default: Default,
    /// CONFIG SET may change it.
    pub(crate) is_mutable: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Default {
    Number(i64),
    Text(&'static str),
}

/// The value of a setting. A choice is stored as its index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SettingValue {
    Number(i64),
    Text(String),
}

// Indexes into `SETTINGS`.
const RDMA_PORT: usize = 0;
const RDMA_BIND: usize = 1;
const RDMA_DEVICE: usize = 2;
const RDMA: usize = 3;
const RX_SIZE: usize = 4;
const RX_SIZE_MAX: usize = 5;
const MAX_CLIENTS: usize = 6;
const BUSY_POLL_US: usize = 7;
const ENGINE: usize = 8;
const CALL_PATH: usize = 9;
const POLLER_THREAD: usize = 10;
const SLICE_US: usize = 11;
const RDMA_SHARED_WINDOWS: usize = 12;
const ALLOW_CLEAR_TEXT: usize = 13;

/// The largest `max-clients`. It is below the fabric's limit of links, so that the gateway can
/// still tell further clients why it rejects them.
const CLIENTS_MAX: i64 = 16_000;
const WINDOW: [i64; 2] = [4 << 10, 2 << 20];
const POLICIES: [&CStr; 2] = [c"prefer", c"require"];
const NO_YES: [&CStr; 2] = [c"no", c"yes"];
const YES_NO: [&CStr; 2] = [c"yes", c"no"];

/// All settings. docs/book/src/operations/settings.md describes them.
pub(crate) const SETTINGS: [Setting; 14] = [
    number(c"rdma-port", 6380, [1, 65_535], false, false),
    text(c"rdma-bind", "auto", addresses),
    text(c"rdma-device", "", |_| Ok(())),
    choice(c"rdma", &POLICIES),
    number(c"rx-size", 64 << 10, WINDOW, true, true),
    number(c"rx-size-max", 2 << 20, WINDOW, true, true),
    number(c"max-clients", 10_000, [1, CLIENTS_MAX], false, true),
    number(c"busy-poll-us", 0, [0, 1_000_000], false, true),
    text(c"engine", "auto", engine),
    choice(c"call-path", &YES_NO),
    choice(c"poller-thread", &NO_YES),
    number(c"slice-us", 500, [50, 1_000_000], false, true),
    choice(c"rdma-shared-windows", &NO_YES),
    choice(c"allow-clear-text", &NO_YES),
];

const fn number(
    name: &'static CStr,
    default: i64,
    range: [i64; 2],
    is_size: bool,
    is_mutable: bool,
) -> Setting {
    Setting {
        name,
        kind: Kind::Number { range, is_size },
        default: Default::Number(default),
        is_mutable,
    }
}

/// Returns a setting whose default is the first choice.
const fn choice(name: &'static CStr, choices: &'static [&'static CStr]) -> Setting {
    Setting { name, kind: Kind::Choice(choices), default: Default::Number(0), is_mutable: false }
}

const fn text(
    name: &'static CStr,
    default: &'static str,
    check: fn(&str) -> Result<(), String>,
) -> Setting {
    Setting { name, kind: Kind::Text(check), default: Default::Text(default), is_mutable: false }
}

fn addresses(text: &str) -> Result<(), String> {
    let is_valid = text == "auto"
        || words(text).count() > 0 && words(text).all(|word| word.parse::<IpAddr>().is_ok());
    let expected = "auto (where the engine listens), or IP addresses of this host separated by \
                    commas, or 0.0.0.0 or :: for all";
    if is_valid { Ok(()) } else { Err(expected.into()) }
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split([',', ' ']).filter(|word| !word.is_empty())
}

fn engine(text: &str) -> Result<(), String> {
    if text == "auto" {
        return Ok(());
    }
    text.parse::<EngineAddress>().map(drop).map_err(|_| "auto, unix:/PATH or HOST:PORT".into())
}

/// The values of all settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Options([SettingValue; SETTINGS.len()]);

impl std::default::Default for Options {
    fn default() -> Self {
        Self(std::array::from_fn(|index| match SETTINGS[index].default {
            Default::Number(number) => SettingValue::Number(number),
            Default::Text(text) => SettingValue::Text(text.into()),
        }))
    }
}

impl Options {
    /// Parses `key value` pairs.
    ///
    /// # Errors
    /// The text names the wrong argument and says what was expected.
    pub(crate) fn from_arguments(arguments: &[String]) -> Result<Self, String> {
        let mut options = Self::default();
        for pair in arguments.chunks(2) {
            let name = pair[0].trim_start_matches("--").to_ascii_lowercase();
            let name = name.strip_prefix("ferrite.").unwrap_or(&name);
            let Some(index) =
                SETTINGS.iter().position(|setting| setting.name.to_bytes() == name.as_bytes())
            else {
                return Err(format!(
                    "unknown argument {:?}; the arguments are {}",
                    pair[0],
                    names()
                ));
            };
            let [_, value] = pair else {
                return Err(format!("argument {name} has no value: expected {}", allowed(index)));
            };
            let set = parse(index, value).and_then(|value| options.set(index, value).ok());
            set.ok_or_else(|| invalid_value(index, value))?;
        }
        Ok(options)
    }

    pub(crate) fn get(&self, index: usize) -> &SettingValue {
        &self.0[index]
    }

    /// Changes a setting.
    ///
    /// # Errors
    /// The value is outside of the setting's limits.
    pub(crate) fn set(&mut self, index: usize, value: SettingValue) -> Result<(), String> {
        let fits = match (&SETTINGS[index].kind, &value) {
            (Kind::Number { range: [min, max], .. }, SettingValue::Number(number)) => {
                (min..=max).contains(&number)
            }
            (Kind::Choice(choices), SettingValue::Number(number)) => {
                (0..choices.len() as i64).contains(number)
            }
            (Kind::Text(check), SettingValue::Text(text)) => check(text).is_ok(),
            _ => false,
        };
        if !fits {
            return Err(match value {
                SettingValue::Number(number) => invalid_value(index, &number.to_string()),
                SettingValue::Text(text) => invalid_value(index, &text),
            });
        }
        self.0[index] = value;
        Ok(())
    }

    fn number(&self, index: usize) -> i64 {
        match self.get(index) {
            SettingValue::Number(number) => *number,
            SettingValue::Text(_) => 0, // `set` prevents this
        }
    }

    fn text(&self, index: usize) -> &str {
        match self.get(index) {
            SettingValue::Text(text) => text,
            SettingValue::Number(_) => "",
        }
    }

    /// Returns the addresses to listen on; `None` if they are the engine's.
    pub(crate) fn bind(&self) -> Option<impl Iterator<Item = IpAddr>> {
        let text = self.text(RDMA_BIND);
        (text != "auto").then(|| words(text).filter_map(|word| word.parse().ok()))
    }

    pub(crate) fn port(&self) -> u16 {
        u16::try_from(self.number(RDMA_PORT)).unwrap_or(0)
    }

    /// Returns whether clients may connect without TLS although the engine requires TLS.
    pub(crate) fn allow_clear_text(&self) -> bool {
        self.number(ALLOW_CLEAR_TEXT) == 1 // of NO_YES
    }

    /// Returns the names of the devices to use. If there are none, all devices may be used.
    pub(crate) fn devices(&self) -> impl Iterator<Item = &str> {
        words(self.text(RDMA_DEVICE))
    }

    pub(crate) fn rdma(&self) -> Rdma {
        if self.number(RDMA) == 0 { Rdma::Prefer } else { Rdma::Require }
    }

    /// Returns the initial and the largest size of a client's window, in bytes.
    pub(crate) fn windows(&self) -> (u32, u32) {
        let [first, largest] =
            [RX_SIZE, RX_SIZE_MAX].map(|index| u32::try_from(self.number(index)).unwrap_or(0));
        (first, largest.max(first))
    }

    pub(crate) fn max_clients(&self) -> usize {
        usize::try_from(self.number(MAX_CLIENTS)).unwrap_or(0)
    }

    pub(crate) fn busy_poll_us(&self) -> u32 {
        u32::try_from(self.number(BUSY_POLL_US)).unwrap_or(0)
    }

    /// Returns whether sessions run on the engine's main thread and call commands there.
    pub(crate) fn call_path(&self) -> bool {
        self.number(CALL_PATH) == 0 // of YES_NO
    }

    /// Returns whether the thread `ferrite` drives the devices of such sessions instead of the main
    /// thread.
    pub(crate) fn poller_thread(&self) -> bool {
        self.number(POLLER_THREAD) == 1 // of NO_YES
    }

    /// Returns whether clients of Valkey Over RDMA are also served by devices that cannot isolate
    /// the memory of one client from another.
    pub(crate) fn shared_windows(&self) -> bool {
        self.number(RDMA_SHARED_WINDOWS) == 1 // of NO_YES
    }

    /// Returns how long sessions may run before the engine's event loop serves its other clients.
    pub(crate) fn slice(&self) -> Duration {
        Duration::from_micros(u64::try_from(self.number(SLICE_US)).unwrap_or(0))
    }

    /// Returns the engine's socket; `None` if it is to be found automatically.
    pub(crate) fn engine(&self) -> Option<EngineAddress> {
        self.text(ENGINE).parse().ok()
    }
}

fn names() -> String {
    let names: Vec<_> = SETTINGS.iter().map(|setting| setting.name.to_string_lossy()).collect();
    names.join(", ")
}

/// Describes the values that a setting may have.
fn allowed(index: usize) -> String {
    match &SETTINGS[index].kind {
        Kind::Number { range: [min, max], is_size: true } => {
            format!(
                "a size from {min} to {max} bytes (units as in the engine's configuration: kb, mb)"
            )
        }
        Kind::Number { range: [min, max], .. } => format!("a number from {min} to {max}"),
        Kind::Choice(choices) => {
            let choices: Vec<_> = choices.iter().map(|choice| choice.to_string_lossy()).collect();
            choices.join(" or ")
        }
        Kind::Text(check) => check("\0").err().unwrap_or_else(|| "text".into()),
    }
}

fn invalid_value(index: usize, value: &str) -> String {
    format!("{} {value:?}: expected {}", SETTINGS[index].name.to_string_lossy(), allowed(index))
}

/// Parses the value of an argument of `loadmodule`.
fn parse(index: usize, text: &str) -> Option<SettingValue> {
    Some(match &SETTINGS[index].kind {
        Kind::Number { is_size: true, .. } => SettingValue::Number(size(text)?),
        Kind::Number { .. } => SettingValue::Number(text.parse().ok()?),
        Kind::Choice(choices) => {
            let found = choices
                .iter()
                .position(|choice| choice.to_bytes().eq_ignore_ascii_case(text.as_bytes()))?;
            SettingValue::Number(found.try_into().ok()?)
        }
        Kind::Text(_) => SettingValue::Text(text.into()),
    })
}

/// Parses a size with the engine's units: `k` is 1,000 bytes, `kb` is 1,024.
fn size(text: &str) -> Option<i64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" => 1000,
        "kb" => 1 << 10,
        "m" => 1_000_000,
        "mb" => 1 << 20,
        _ => return None,
    };
    digits.parse::<i64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(arguments: &str) -> Result<Options, String> {
        Options::from_arguments(
            &arguments
                .split(' ')
                .filter(|word| !word.is_empty())
                .map(Into::into)
                .collect::<Vec<_>>(),
        )
    }

    #[test]
    fn defaults() {
        let options = options("").expect("valid arguments");
        assert!(options.bind().is_none() && options.port() == 6380 && !options.allow_clear_text());
        assert_eq!((options.rdma(), options.engine()), (Rdma::Prefer, None));
        assert_eq!(options.windows(), (64 << 10, 2 << 20));
        assert_eq!((options.max_clients(), options.busy_poll_us()), (10_000, 0));
        assert_eq!(options.devices().count(), 0);
        assert_eq!((options.call_path(), options.poller_thread()), (true, false));
        assert!(!options.shared_windows());
    }

    #[test]
    fn every_default_is_allowed() {
        let mut options = Options::default();
        for index in 0..SETTINGS.len() {
            let value = options.get(index).clone();
            options.set(index, value).expect("a valid default");
        }
    }

    #[test]
    fn arguments_are_pairs() {
        let given = options(
            "rdma-port 7000 RDMA-BIND ::1 rdma Require rx-size 1mb rx-size-max 64kb --max-clients 5 \
             ferrite.rdma-device rxe1,rxe2 engine unix:/run/x.sock",
        )
        .expect("valid arguments");
        let bind: Vec<_> = given.bind().expect("addresses").map(|ip| ip.to_string()).collect();
        assert_eq!((bind, given.port()), (vec!["::1".to_owned()], 7000));
        assert_eq!(given.rdma(), Rdma::Require);
        assert_eq!(given.windows(), (1 << 20, 1 << 20), "the largest is at least the initial");
        assert_eq!(given.max_clients(), 5);
        assert_eq!(given.devices().collect::<Vec<_>>(), ["rxe1", "rxe2"]);
        assert_eq!(given.engine(), Some(EngineAddress::Unix("/run/x.sock".into())));
    }

    #[test]
    fn errors_name_the_argument_and_the_expected_value() {
        let wrong = |arguments, words: &[&str]| {
            let error = options(arguments).expect_err(arguments);
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        };
        wrong("rdma-prot 1", &["\"rdma-prot\"", "rdma-port", "max-clients"]);
        wrong("rdma-port", &["rdma-port has no value", "from 1 to 65535"]);
        wrong("rdma-port 0", &["rdma-port \"0\"", "from 1 to 65535"]);
        wrong("rdma-port x", &["rdma-port \"x\""]);
        wrong("rdma-bind localhost", &["rdma-bind \"localhost\"", "IP addresses"]);
        wrong("rdma-bind 10.0.0.1,x", &["rdma-bind \"10.0.0.1,x\"", "auto"]);
        wrong("rdma-bind ,", &["rdma-bind \",\""]);
        wrong("rdma maybe", &["rdma \"maybe\"", "prefer or require"]);
        wrong("rx-size 4095", &["rx-size \"4095\"", "from 4096 to 2097152 bytes"]);
        wrong("rx-size 1tb", &["rx-size \"1tb\""]);
        wrong("engine localhost", &["engine \"localhost\"", "unix:/PATH"]);
    }

    #[test]
    fn sizes_have_the_engines_units() {
        for (text, bytes) in [
            ("64000", 64_000),
            ("64k", 64_000),
            ("64kb", 65_536),
            ("2MB", 2 << 20),
            ("1m", 1_000_000),
        ] {
            assert_eq!(size(text), Some(bytes), "{text}");
        }
        for wrong in ["", "k", "1x", "99999999999999999999", "9223372036854775807kb"] {
            assert_eq!(size(wrong), None, "{wrong}");
        }
    }
}
