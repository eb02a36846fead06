//! SIGHUP: reads the settings again, reports which have changed, and applies those that can change
//! while the program runs. The table in `ferrite-config` says which settings can.

use ferrite_config::{Program, Setting, TakesEffect, Values};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::log;

/// Settings that are read again at each SIGHUP.
pub(crate) struct Reload<F> {
    hung_up: Signal,
    current: Values,
    read: F,
}

impl<F: Fn() -> anyhow::Result<Values>> Reload<F> {
    /// Handles SIGHUP from now on. `read` reads the file, the environment and the flags.
    pub(crate) fn new(current: &Values, read: F) -> std::io::Result<Self> {
        let hung_up = signal(SignalKind::hangup())?;
        Ok(Self { hung_up, current: current.clone(), read })
    }

    /// Waits for SIGHUP forever. After each one, reads the settings. If they are valid, calls
    /// `apply` with the values that apply from then on. Otherwise logs the error.
    pub(crate) async fn run(mut self, apply: impl Fn(&Values)) -> std::convert::Infallible {
        loop {
            let (values, changes) = self.next().await;
            apply(&values);
            changes.report();
        }
    }

    /// Waits for a SIGHUP after which the settings are valid. Returns the values that apply from
    /// then on, and what has changed. Logs the errors of others. Cancel-safe.
    pub(crate) async fn next(&mut self) -> (Values, Changes) {
        loop {
            if self.hung_up.recv().await.is_none() {
                std::future::pending::<()>().await;
            }
            match (self.read)() {
                Ok(read) => {
                    let changes = Changes::between(&self.current, &read);
                    self.current = changes.applied_to(&self.current, &read);
                    log::set_level(&self.current);
                    return (self.current.clone(), changes);
                }
                Err(error) => {
                    tracing::error!("SIGHUP received, but no setting was changed: {error:#}");
                }
            }
        }
    }
}

/// The settings that have changed.
pub(crate) struct Changes {
    /// Settings that take effect while the program runs.
    pub(crate) now: Vec<Change>,
    /// Settings that take effect after a restart of the program.
    later: Vec<&'static Setting>,
}

/// A setting that has changed.
pub(crate) struct Change {
    pub(crate) setting: &'static Setting,
    line: String,
}

impl Changes {
    pub(crate) fn between(before: &Values, after: &Values) -> Self {
        let changed = after.iter().filter(|(setting, entry)| {
            before.entry(setting).value != entry.value // the origin does not matter
        });
        let changed = changed.map(|(setting, _)| setting);
        let can_change = |setting: &&Setting| setting.takes_effect != TakesEffect::AtStart;
        let (now, later): (Vec<_>, Vec<_>) = changed.partition(can_change);
        let show = |values: &Values, setting: &Setting| match &values.entry(setting).value {
            Some(value) => value.to_string(),
            None => "unset".into(),
        };
        let change = |setting: &'static Setting| {
            let (old, new) = (show(before, setting), show(after, setting));
            Change { setting, line: format!("{} is now {new} (was {old})", setting.name) }
        };
        Self { now: now.into_iter().map(change).collect(), later }
    }

    /// Returns the values that apply now: the new ones, except for settings that need a restart.
    pub(crate) fn applied_to(&self, before: &Values, after: &Values) -> Values {
        let mut values = before.clone();
        for Change { setting, .. } in &self.now {
            if let Some(value) = &after.entry(setting).value {
                // Cannot fail: the value was checked when it was read.
                let _ = values.replace(setting, value.clone());
            }
        }
        values
    }

    /// Adds the changes of another program, except those of settings that this one has, too.
    pub(crate) fn extend(&mut self, other: Self, this: Program) {
        self.now.extend(other.now.into_iter().filter(|change| !change.setting.has(this)));
        self.later.extend(other.later.into_iter().filter(|setting| !setting.has(this)));
    }

    /// Logs which settings have changed, and which would change at the next start.
    pub(crate) fn report(&self) {
        let lines: Vec<_> = self.now.iter().map(|change| change.line.as_str()).collect();
        match lines.as_slice() {
            [] => tracing::info!("SIGHUP received: no setting was changed"),
            lines => tracing::info!("SIGHUP received: {}", lines.join(", ")),
        }
        if !self.later.is_empty() {
            let names: Vec<_> = self.later.iter().map(|setting| setting.name).collect();
            tracing::warn!("restart to apply these changed settings: {}", names.join(", "));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_config::{Origin, table};

    #[test]
    fn tells_what_changes_now_and_what_at_the_next_start() {
        let before = Values::new(Program::Gateway);
        let mut after = before.clone();
        for (setting, text) in [
            (&table::MAX_CLIENTS, "5"),
            (&table::RDMA_DEVICE, "rxe1"),
            (&table::DRAIN, "5"), // the default, written in another way
        ] {
            after.set_text(setting, None, text, Origin::File { line: 1 }).expect(text);
        }
        let changes = Changes::between(&before, &after);
        let lines: Vec<_> = changes.now.iter().map(|change| change.line.as_str()).collect();
        assert_eq!(lines, ["max-clients is now 5 (was 10000)"]);
        assert_eq!(changes.later.iter().map(|it| it.name).collect::<Vec<_>>(), ["rdma-device"]);
        let applied = changes.applied_to(&before, &after);
        assert_eq!(applied.number::<u32>(&table::MAX_CLIENTS), 5);
        assert_eq!(applied.list(&table::RDMA_DEVICE), [""; 0]);
    }
}
