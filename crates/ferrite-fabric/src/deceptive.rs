//! Characters of a peer's text that must not reach a log or a terminal as they are. It is a file of
//! its own, because the programs need the same list for texts of servers.

/// Returns whether a character could deceive a reader of a peer's text. Such characters control a
/// terminal, begin a new line, change the order of the text around them, or are invisible. Those
/// that only join letters are harmless.
///
/// ```
/// use ferrite_fabric::is_deceptive;
///
/// let shown = "ok\u{202e}\u{2028}über".replace(is_deceptive, "?");
/// assert_eq!(shown, "ok??über");
/// ```
#[must_use]
pub fn is_deceptive(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            // The order of the text.
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
            // Ends of lines and paragraphs.
            | '\u{2028}' | '\u{2029}'
            // Invisible, but for those that join letters (U+200C, U+200D).
            | '\u{ad}' | '\u{180e}' | '\u{200b}' | '\u{2060}'..='\u{2065}' | '\u{206a}'..='\u{206f}'
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinary_text_of_any_language_is_harmless() {
        let text = "az AZ 09 ~ üß€ 漢字 עברית العربية می\u{200c}خواهم 👩\u{200d}🔬 \u{fffd}";
        assert_eq!(text.find(is_deceptive), None);
        for c in "\0\n\x1b\x7f\u{9b}\u{ad}\u{61c}\u{200b}\u{2028}\u{202e}\u{2069}\u{feff}".chars() {
            assert!(is_deceptive(c), "{c:?}");
        }
    }
}
