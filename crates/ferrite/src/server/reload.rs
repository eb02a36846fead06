//! SIGHUP: reads the settings again. CONFIG SET passes the module's settings that can change to the
//! running engine. Settings of ferrite itself apply at once. The log names all others.

use std::path::Path;
use std::time::Duration;

use ferrite_config::{Kind, Program, Setting, Value};

use super::Sources;
use super::config::Config;
use super::ready::config_set;
use crate::log;
use crate::reload::Changes;

/// How long the engine may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Reads the settings again and applies those that can change. Returns the settings that apply from
/// now on. Returns `None` if the settings are wrong; nothing changes then.
pub(super) async fn reload(
    current: &Config,
    sources: Sources<'_>,
    socket: &Path,
) -> Option<Config> {
    let read = match Config::load(sources) {
        Ok(read) => read,
        Err(why) => {
            tracing::error!("SIGHUP received, but no setting was changed: {why}");
            return None;
        }
    };
    let mut changes = Changes::between(current.values(), read.values());
    let mut taken = Vec::new();
    for change in changes.now {
        let is_for_module = change.setting.has(Program::Module) && change.setting.in_config;
        // A setting that the engine rejects keeps its old value, so that the next SIGHUP tries
        // again.
        if !is_for_module || is_taken(current, &read, change.setting, socket).await {
            taken.push(change);
        }
    }
    changes.now = taken;
    let agent = current.agent.clone().map(|values| {
        let read = read.agent.as_ref().unwrap_or(&values);
        let of_agent = Changes::between(&values, read);
        let applied = of_agent.applied_to(&values, read);
        changes.extend(of_agent, Program::Server);
        applied
    });
    changes.report();
    let directives = read.changed_directives(current);
    if !directives.is_empty() {
        tracing::warn!(
            "these directives of [engine] have changed; restart to apply them, or change them in the \
             engine with CONFIG SET: {}",
            directives.join(", ")
        );
    }
    let applied = current.with_values(changes.applied_to(current.values(), read.values()), agent);
    log::set_level(applied.values());
    Some(applied)
}

/// Changes a setting of the module in the running engine. Returns whether the engine accepted it.
/// If not, logs the reason.
async fn is_taken(current: &Config, read: &Config, setting: &Setting, socket: &Path) -> bool {
    let Some(value) = &read.values().entry(setting).value else { return false };
    let (name, text) = (format!("ferrite.{}", setting.name), config_text(setting, value));
    let set = config_set(socket, current.password(), (&name, &text));
    let why = match tokio::time::timeout(TIMEOUT, set).await {
        Ok(Ok(reply)) if reply.starts_with('+') => return true,
        Ok(Ok(reply)) => reply.trim_end().to_owned(),
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {} s", TIMEOUT.as_secs()),
    };
    tracing::warn!("CONFIG SET {name} {text} failed: {why}; send SIGHUP again to retry");
    false
}

/// Returns a value as the engine's CONFIG SET accepts it: without units of time, which CONFIG SET
/// does not know.
fn config_text(setting: &Setting, value: &Value) -> String {
    match (&setting.kind, value) {
        (Kind::Time { bare: Some(unit), .. }, Value::Time(time)) => unit.count(*time).to_string(),
        (_, value) => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_config::table;

    #[test]
    fn values_are_as_the_engine_parses_them() {
        let text = |setting: &Setting, text: &str| {
            config_text(setting, &setting.parse(text).expect("a value"))
        };
        assert_eq!(text(&table::SLICE_US, "1ms"), "1000");
        assert_eq!(text(&table::RX_SIZE, "65536"), "64kb");
        assert_eq!(text(&table::MAX_CLIENTS, "7"), "7");
    }
}
