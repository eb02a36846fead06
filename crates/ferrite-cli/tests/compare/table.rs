//! Parses the table of commands, `commands.txt`.

/// Commands whose output is compared together.
#[derive(Debug, Clone, Default)]
pub(crate) struct Case {
    pub(crate) commands: Vec<String>,
    /// Styles in which the output differs on purpose, and the reason.
    pub(crate) differs: Vec<Exception>,
    /// Styles in which the case is left out, and the reason.
    pub(crate) left_out: Vec<Exception>,
}

/// Styles for which a case is an exception, and the reason.
#[derive(Debug, Clone)]
pub(crate) struct Exception {
    pub(crate) styles: Vec<String>,
    pub(crate) reason: String,
}

impl Case {
    /// Returns the reason if the output must differ in a style.
    pub(crate) fn difference(&self, style: &str) -> Option<&str> {
        reason(&self.differs, style)
    }

    pub(crate) fn is_left_out(&self, style: &str) -> bool {
        reason(&self.left_out, style).is_some()
    }
}

fn reason<'a>(exceptions: &'a [Exception], style: &str) -> Option<&'a str> {
    let found =
        exceptions.iter().find(|exception| exception.styles.iter().any(|named| named == style));
    found.map(|exception| exception.reason.as_str())
}

/// Returns all cases, in order.
pub(crate) fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    let mut next = Case::default();
    for line in include_str!("commands.txt").lines() {
        if let Some(text) = line.strip_prefix("! ") {
            next.differs.push(exception(text));
        } else if let Some(text) = line.strip_prefix("? ") {
            next.left_out.push(exception(text));
        } else if let Some(command) = line.strip_prefix("+ ") {
            cases.last_mut().expect("a case to continue").commands.push(command.to_owned());
        } else if !line.is_empty() && !line.starts_with('#') {
            next.commands.push(line.to_owned());
            cases.push(std::mem::take(&mut next));
        }
    }
    assert!(next.differs.is_empty() && next.left_out.is_empty(), "an exception without a case");
    cases
}

fn exception(text: &str) -> Exception {
    let (styles, reason) = text.split_once(": ").expect("STYLES: REASON");
    let styles = styles.split(", ").map(str::to_owned).collect();
    Exception { styles, reason: reason.to_owned() }
}
