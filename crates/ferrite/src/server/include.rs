//! Passes the engine's own file on, without the lines that name its log file and its pid file.
//!
//! The file often belongs to another engine that runs already. At the end of each included file, an
//! engine opens the log file that is set so far, even if a later line sets another one. Therefore
//! ferrite reads the file itself instead of passing an `include` line.

use std::path::{Path, PathBuf};

/// Directives that ferrite leaves out. It sets them itself.
const DROPPED: [&str; 2] = ["logfile", "pidfile"];
/// The depth of nested includes at which ferrite leaves the files to the engine. Files nested this
/// deeply probably include each other.
const DEPTH_MAX: u32 = 16;

/// Appends the lines of `file`, and of the files that it includes. If ferrite cannot read the file,
/// appends the line `include`, which includes the file. The engine then reports the cause.
pub(super) fn expand(include: &str, file: &Path, out: &mut Vec<u8>) {
    expand_nested(include.as_bytes(), file, out, 0);
}

fn expand_nested(include: &[u8], file: &Path, out: &mut Vec<u8>, depth: u32) {
    let text = if depth < DEPTH_MAX { std::fs::read(file).ok() } else { None };
    let Some(text) = text else {
        out.extend_from_slice(include);
        return;
    };
    for line in text.split_inclusive(|byte| *byte == b'\n') {
        let (name, rest) = split(line);
        if DROPPED.contains(&name.as_str()) {
            continue;
        }
        match included_file(&name, &rest) {
            Some(file) => expand_nested(line, &file, out, depth + 1),
            None => out.extend_from_slice(line),
        }
        if out.last() != Some(&b'\n') {
            out.push(b'\n');
        }
    }
}

/// Returns the name of a directive in lower case, and the rest of its line.
fn split(line: &[u8]) -> (String, String) {
    let line = String::from_utf8_lossy(line);
    let line = line.trim();
    let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    (name.trim_matches(['"', '\'']).to_ascii_lowercase(), rest.trim().to_owned())
}

/// Returns the file that an `include` line names. Returns `None` for other directives. Also returns
/// `None` for patterns, escapes and relative paths: the engine reads those files.
fn included_file(name: &str, rest: &str) -> Option<PathBuf> {
    let path = rest.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(rest);
    let is_plain = path.starts_with('/') && !path.contains(['*', '?', '[', '\\', '"', '\'']);
    (name == "include" && is_plain).then(|| path.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drops_log_file_and_pid_file_of_nested_files() {
        let directory =
            std::env::temp_dir().join(format!("ferrite-include-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory");
        let (outer, inner) = (directory.join("outer.conf"), directory.join("inner file.conf"));
        let lines = format!(
            "# logfile in a comment\n  LogFile /var/log/a\nmaxmemory 1gb\ninclude \"{}\"\n\
             include local-*.conf\n\"pidfile\" /run/a",
            inner.display()
        );
        std::fs::write(&outer, lines).expect("a file");
        std::fs::write(&inner, b"logfile /var/log/b\nrequirepass \xff\xfe").expect("a file");
        let mut out = Vec::new();
        expand("include x\n", &outer, &mut out);
        let expected = b"# logfile in a comment\nmaxmemory 1gb\nrequirepass \xff\xfe\n\
                         include local-*.conf\n";
        assert_eq!(out, expected, "{}", String::from_utf8_lossy(&out));

        std::fs::write(&inner, format!("include {}\n", outer.display())).expect("a file");
        out.clear();
        expand("include x\n", &outer, &mut out);
        let text = String::from_utf8_lossy(&out).into_owned();
        assert!(text.contains(&format!("include {}", outer.display())), "a loop ends: {text}");

        std::fs::remove_dir_all(&directory).expect("removed");
        out.clear();
        expand("include x\n", &outer, &mut out);
        assert_eq!(out, b"include x\n", "an unreadable file is left to the engine");
    }
}
