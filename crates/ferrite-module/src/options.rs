//! The module's settings: values of the table in `ferrite-config`, given as arguments of
//! `loadmodule` and through CONFIG.
//!
//! The arguments in `loadmodule ferrite.so rdma-port 6380 max-clients 500` become the defaults with
//! which the module registers `ferrite.rdma-port` and the other settings. A line
//! `ferrite.rdma-port 6381` in the engine's configuration file overrides such a default. CONFIG
//! REWRITE keeps the arguments and omits settings that have their defaults, so the file that it
//! writes gives the same settings again.

use std::ffi::CString;
use std::net::SocketAddr;
use std::sync::LazyLock;
use std::time::Duration;

use ferrite_config::{
    Kind, Program, Setting, TakesEffect, Value, Values, address, find, nearest, table,
};
use ferrite_fabric::Rdma;
use ferrite_session::{EngineAddress, rdma_policy};

/// The settings that CONFIG has. An index into this list identifies a setting to the engine.
pub(crate) static SETTINGS: LazyLock<Vec<&'static Setting>> =
    LazyLock::new(|| Program::Module.settings().filter(|setting| setting.in_config).collect());

/// How the engine represents a setting.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// A number in this range. A size may have the engine's units (`64kb`).
    Number {
        range: [i64; 2],
        is_size: bool,
    },
    /// One of these words. The value is the word's index.
    Choice(Vec<CString>),
    Text,
}

impl Shape {
    pub(crate) fn of(setting: &Setting) -> Self {
        let words = |words: &[&str]| {
            Self::Choice(words.iter().filter_map(|word| CString::new(*word).ok()).collect())
        };
        let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        match setting.kind {
            Kind::Switch => words(&NO_YES),
            Kind::Choice(choices) => words(choices),
            Kind::Number { min, max } => Self::Number { range: [min, max], is_size: false },
            Kind::Size { min, max } => {
                Self::Number { range: [number(min), number(max)], is_size: true }
            }
            Kind::Time { bare: Some(unit), min, max } => {
                let range = [min, max].map(|time| number(unit.count(time)));
                Self::Number { range, is_size: false }
            }
            Kind::Time { bare: None, .. } | Kind::Text(_) | Kind::List(_) => Self::Text,
        }
    }
}

const NO_YES: [&str; 2] = ["no", "yes"];

/// The value of a setting as the engine has it. The value of a choice is its index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SettingValue {
    Number(i64),
    Text(String),
}

/// Returns whether CONFIG SET may change a setting.
pub(crate) fn is_mutable(setting: &Setting) -> bool {
    setting.takes_effect != TakesEffect::AtStart
}

/// The values of all settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Options(Values);

impl Default for Options {
    fn default() -> Self {
        Self(Values::new(Program::Module))
    }
}

impl Options {
    /// Parses `key value` pairs. The later of two values for one setting applies.
    ///
    /// # Errors
    /// Returns an error that names the wrong argument and says what was expected.
    pub(crate) fn from_arguments(arguments: &[String]) -> Result<Self, String> {
        let mut values = Values::new(Program::Module);
        for pair in arguments.chunks(2) {
            let name = pair[0].trim_start_matches("--").to_ascii_lowercase();
            let name = name.strip_prefix("ferrite.").unwrap_or(&name);
            if let Some(instead) = table::refused(name) {
                return Err(format!("argument {name}: {instead}"));
            }
            let Some((setting, alias)) = find(Program::Module, name) else {
                let known = Program::Module.settings().map(|setting| setting.name);
                let nearest = nearest(name, known).unwrap_or_default();
                return Err(format!("unknown argument {:?}; the nearest is {nearest}", pair[0]));
            };
            let [_, text] = pair else {
                return Err(format!(
                    "argument {name} has no value: expected {}",
                    setting.expected()
                ));
            };
            let value = match alias {
                Some(alias) => alias.parse(setting, text),
                None => setting.parse(text),
            };
            let set = value.and_then(|value| values.replace(setting, value));
            set.map_err(|why| format!("{name} {text:?}: {why}"))?;
        }
        let mut options = Self(values);
        options.check()?;
        options.0.settle_policy()?;
        Ok(options)
    }

    /// Checks that the values fit together.
    ///
    /// # Errors
    /// Returns an error that names each wrong setting and says why it is wrong.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.0.check().map_err(|wrong| {
            let wrong = wrong.iter().map(|(setting, why)| format!("{}: {why}", setting.name));
            wrong.collect::<Vec<_>>().join("; ")
        })
    }

    /// Returns a copy of these options that allows only one attempt to open the devices.
    pub(crate) fn without_retries(&self) -> Self {
        let mut options = self.clone();
        let none = options.0.replace(&table::CONNECTION_RETRIES, Value::Number(0));
        debug_assert!(none.is_ok(), "0 is in the range");
        options
    }

    /// Returns all values.
    pub(crate) fn values(&self) -> &Values {
        &self.0
    }

    /// Returns the value of a setting for the engine.
    pub(crate) fn get(&self, index: usize) -> SettingValue {
        let setting = SETTINGS[index];
        let number = |number: u64| SettingValue::Number(i64::try_from(number).unwrap_or(i64::MAX));
        match (&self.0.entry(setting).value, &setting.kind) {
            (Some(Value::Switch(is_on)), _) => SettingValue::Number((*is_on).into()),
            (Some(Value::Number(number)), _) => SettingValue::Number(*number),
            (Some(Value::Size(bytes)), _) => number(*bytes),
            (Some(Value::Time(time)), Kind::Time { bare: Some(unit), .. }) => {
                number(unit.count(*time))
            }
            (Some(Value::Text(text)), Kind::Choice(choices)) => {
                number(choices.iter().position(|choice| choice == text).unwrap_or(0) as u64)
            }
            (Some(value), _) => SettingValue::Text(value.to_string()),
            (None, _) => SettingValue::Text(String::new()),
        }
    }

    /// Changes a setting.
    ///
    /// # Errors
    /// Returns an error if the value is outside of the setting's limits.
    pub(crate) fn set(&mut self, index: usize, value: SettingValue) -> Result<(), String> {
        let setting = SETTINGS[index];
        let text = match (value, &setting.kind) {
            (SettingValue::Number(number), Kind::Switch) => word(&NO_YES, number),
            (SettingValue::Number(number), Kind::Choice(choices)) => word(choices, number),
            (SettingValue::Number(number), _) => number.to_string(),
            (SettingValue::Text(text), _) => text,
        };
        let set = setting.parse(&text).and_then(|value| self.0.replace(setting, value));
        set.map_err(|why| format!("{} {text:?}: {why}", setting.name))
    }

    /// Returns the addresses and names to listen on; `None` if they are the engine's.
    pub(crate) fn bind(&self) -> Option<impl Iterator<Item = &str>> {
        let text = self.0.text(&table::RDMA_BIND).filter(|text| *text != "auto")?;
        Some(address::words(text).filter_map(address::host))
    }

    /// Returns whether `rdma-device` names devices.
    pub(crate) fn names_devices(&self) -> bool {
        !self.0.list(&table::RDMA_DEVICE).is_empty()
    }

    /// Returns the address of the admin port, if there is to be one.
    pub(crate) fn admin(&self) -> Option<SocketAddr> {
        self.0.text(&table::ADMIN_LISTEN)?.parse().ok()
    }

    pub(crate) fn port(&self) -> u16 {
        self.0.number(&table::RDMA_PORT)
    }

    /// Returns whether clients may connect without TLS although the engine requires TLS.
    pub(crate) fn allow_clear_text(&self) -> bool {
        self.0.switch(&table::ALLOW_CLEAR_TEXT)
    }

    pub(crate) fn rdma(&self) -> Rdma {
        rdma_policy(&self.0)
    }

    pub(crate) fn max_clients(&self) -> usize {
        self.0.number(&table::MAX_CLIENTS)
    }

    pub(crate) fn busy_poll_us(&self) -> u32 {
        u32::try_from(self.0.time(&table::BUSY_POLL_US).as_micros()).unwrap_or(u32::MAX)
    }

    /// Returns whether sessions run on the engine's main thread and call commands there.
    pub(crate) fn call_path(&self) -> bool {
        self.0.switch(&table::CALL_PATH)
    }

    /// Returns whether the thread `ferrite` drives the RDMA devices, although sessions run on the
    /// engine's main thread.
    pub(crate) fn poller_thread(&self) -> bool {
        self.0.switch(&table::POLLER_THREAD)
    }

    /// Returns how long sessions may run before the engine's event loop serves its other clients.
    pub(crate) fn slice(&self) -> Duration {
        self.0.time(&table::SLICE_US)
    }

    /// Returns the sum of the delays before all retries to open the devices.
    pub(crate) fn retries_last(&self) -> Duration {
        let retries: u32 = self.0.number(&table::CONNECTION_RETRIES);
        self.0.time(&table::RETRY_DELAY).saturating_mul(retries)
    }

    /// Returns the engine's socket; `None` if it is to be found automatically.
    pub(crate) fn engine(&self) -> Option<EngineAddress> {
        self.0.text(&table::ENGINE).filter(|text| *text != "auto")?.parse().ok()
    }
}

/// Returns the word with this index. If there is none, returns a text that no setting accepts.
fn word(words: &[&str], index: i64) -> String {
    let word = usize::try_from(index).ok().and_then(|index| words.get(index));
    word.map_or_else(|| index.to_string(), |word| (*word).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(arguments: &str) -> Result<Options, String> {
        let words = arguments.split(' ').filter(|word| !word.is_empty());
        Options::from_arguments(&words.map(Into::into).collect::<Vec<_>>())
    }

    fn windows(options: &Options) -> (u32, u32) {
        let config = ferrite_session::valkey_config(options.values());
        (config.window_bytes, config.window_max_bytes)
    }

    fn index(name: &str) -> usize {
        SETTINGS.iter().position(|setting| setting.name == name).expect(name)
    }

    #[test]
    fn defaults() {
        let options = options("").expect("valid arguments");
        assert!(options.bind().is_none() && options.port() == 6380 && !options.allow_clear_text());
        assert_eq!((options.rdma(), options.engine()), (Rdma::Prefer, None));
        assert_eq!(windows(&options), (64 << 10, 2 << 20));
        assert_eq!((options.max_clients(), options.busy_poll_us()), (10_000, 0));
        assert_eq!((options.call_path(), options.poller_thread()), (true, false));
        assert_eq!(options.slice(), Duration::from_micros(500));
    }

    /// This happens at load: the module registers each setting with its current value as the
    /// default, and the engine sets the setting to this default.
    #[test]
    fn every_setting_survives_the_engines_representation() {
        let mut options =
            options("rdma-fallback none rx-size 1mb busy-poll-us 50").expect("valid arguments");
        let before = options.clone();
        for index in 0..SETTINGS.len() {
            let (value, shape) = (options.get(index), Shape::of(SETTINGS[index]));
            match (&value, shape) {
                (SettingValue::Number(number), Shape::Number { range: [min, max], .. }) => {
                    assert!((min..=max).contains(number), "{}", SETTINGS[index].name);
                }
                (SettingValue::Number(number), Shape::Choice(words)) => {
                    assert!((0..words.len() as i64).contains(number), "{}", SETTINGS[index].name);
                }
                (SettingValue::Text(_), Shape::Text) => {}
                (value, shape) => {
                    panic!("{}: the value {value:?} does not fit {shape:?}", SETTINGS[index].name)
                }
            }
            options.set(index, value).expect("a setting accepts its own value");
        }
        for index in 0..SETTINGS.len() {
            assert_eq!(options.get(index), before.get(index), "{}", SETTINGS[index].name);
        }
        assert_eq!(options.rdma(), Rdma::Require, "rdma-fallback none means rdma require");
    }

    #[test]
    fn arguments_are_pairs() {
        let given = options(
            "rdma-port 7000 RDMA-BIND ::1 rdma Require rx-size 1mb rx-size-max 64kb --max-clients 5 \
             ferrite.rdma-device rxe1,rxe2 engine unix:/run/x.sock",
        )
        .expect("valid arguments");
        let bind: Vec<_> = given.bind().expect("addresses").collect();
        assert_eq!((bind, given.port()), (vec!["::1"], 7000));
        assert_eq!(given.rdma(), Rdma::Require);
        assert_eq!(
            windows(&given),
            (1 << 20, 1 << 20),
            "the largest window is at least as large as the initial one"
        );
        assert_eq!(given.max_clients(), 5);
        assert_eq!(given.values().list(&table::RDMA_DEVICE), ["rxe1", "rxe2"]);
        assert_eq!(given.engine(), Some(EngineAddress::Unix("/run/x.sock".into())));
    }

    #[test]
    fn names_of_other_software_are_arguments() {
        let given =
            options("rdma_sq_size 64 rdma_port 2 rdma_recv_block_type huge send_queue_depth 32")
                .expect("valid arguments");
        assert_eq!(
            given.values().number::<u32>(&table::SEND_QUEUE_DEPTH),
            32,
            "the later value applies"
        );
        assert_eq!(
            (given.values().number::<u8>(&table::RDMA_DEVICE_PORT), given.port()),
            (2, 6380)
        );
        assert_eq!(given.values().size::<u32>(&table::RECV_BUFFER_SIZE), 2 << 20);
    }

    #[test]
    fn rejects_values_that_the_engine_did_not_check() {
        let mut options = Options::default();
        let text = |text: &str| SettingValue::Text(text.into());
        assert!(options.set(index("rdma-bind"), text("localhost:6380")).is_err());
        assert!(options.set(index("rx-size"), SettingValue::Number(4095)).is_err());
        assert!(options.set(index("rdma"), SettingValue::Number(3)).is_err());
        assert!(options.set(index("call-path"), SettingValue::Number(2)).is_err());
        assert_eq!(options, Options::default());
    }

    #[test]
    fn errors_name_the_argument_and_the_expected_value() {
        let wrong = |arguments, words: &[&str]| {
            let error = options(arguments).expect_err(arguments);
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        };
        wrong("rdma-prot 1", &["\"rdma-prot\"", "the nearest is rdma-port"]);
        wrong("rdma-port", &["rdma-port has no value", "from 1 to 65535"]);
        wrong("rdma-port 0", &["rdma-port \"0\"", "from 1 to 65535"]);
        wrong("rdma-port x", &["rdma-port \"x\""]);
        wrong("rdma-bind localhost:1", &["rdma-bind \"localhost:1\"", "without ports"]);
        wrong("rdma-bind 10.0.0.1,x_%", &["rdma-bind \"10.0.0.1,x_%\"", "auto"]);
        wrong("rdma-bind ,", &["rdma-bind \",\""]);
        wrong("rdma maybe", &["rdma \"maybe\"", "prefer or require"]);
        wrong("rx-size 4095", &["rx-size \"4095\"", "from 4kb to 2mb"]);
        wrong("rx-size 1tb", &["rx-size \"1tb\""]);
        wrong("engine localhost", &["engine \"localhost\"", "unix:/PATH"]);
        wrong("rdma_max_sge 0", &["rdma_max_sge", "recv_buffer_size"]);
        wrong("rdma require rdma-fallback tcp", &["contradict each other"]);
        wrong("pin-memory no", &["pin-memory", "always pinned"]);
    }
}
