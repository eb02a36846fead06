//! The screen for terminals that show no characters beyond ASCII: serial lines, and locales without
//! UTF-8.

use ratatui::buffer::Buffer;

/// Returns whether the terminal shows only ASCII, according to its environment variables.
pub(super) fn is_ascii_only(variable: impl Fn(&str) -> Option<String>) -> bool {
    let of = |name: &str| variable(name).filter(|value| !value.is_empty());
    let locale = of("LC_ALL").or_else(|| of("LC_CTYPE")).or_else(|| of("LANG"));
    // Without any of these variables nothing is known, and most terminals show UTF-8.
    let is_utf8 = locale.is_none_or(|locale| {
        let locale = locale.to_lowercase();
        locale.contains("utf-8") || locale.contains("utf8")
    });
    !is_utf8 || of("TERM").is_some_and(|terminal| terminal.starts_with("vt"))
}

/// Replaces all characters that are not ASCII.
pub(super) fn replace(screen: &mut Buffer) {
    for cell in &mut screen.content {
        if !cell.symbol().is_ascii() {
            let symbol = match cell.symbol() {
                "─" | "–" => "-",
                "│" | "▏" => "|",
                "┌" | "┐" | "└" | "┘" => "+",
                "█" => "#",
                "░" => ".",
                "▼" | "↓" => "v",
                "▲" | "↑" => "^",
                "µ" => "u",
                "…" => "~",
                _ => "?",
            };
            cell.set_symbol(symbol);
        }
    }
}
