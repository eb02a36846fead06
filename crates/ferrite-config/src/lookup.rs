//! Finds settings in the table.

use crate::setting::{Alias, Program, Setting};
use crate::table;

impl Program {
    /// Returns the settings of this program, in the table's order.
    pub fn settings(self) -> impl Iterator<Item = &'static Setting> {
        table::all().filter(move |setting| setting.has(self))
    }
}

/// Finds a program's setting by its name, by the last part of its key in the file, or by a name
/// that other software uses for it. In the last case, also returns the alias.
#[must_use]
pub fn find(program: Program, name: &str) -> Option<(&'static Setting, Option<&'static Alias>)> {
    let is = |known: &str| !known.is_empty() && known.eq_ignore_ascii_case(name);
    let by_name = program.settings().find(|setting| is(setting.name));
    let by_key = || program.settings().find(|setting| is(setting.short_key()));
    by_name.or_else(by_key).map(|setting| (setting, None)).or_else(|| {
        program.settings().find_map(|setting| {
            let alias = setting.aliases.iter().find(|alias| is(alias.name));
            alias.map(|alias| (setting, Some(alias)))
        })
    })
}
