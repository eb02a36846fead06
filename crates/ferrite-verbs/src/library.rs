//! Which rdma-core this process uses.
//!
//! libibverbs has no call that returns its version. The version is at the end of its file name:
//! `libibverbs.so.1.14.44.0` belongs to rdma-core 44.0. The kernel's list of mapped files shows
//! this name even though the program opened `libibverbs.so.1`.

use crate::table::{LIBIBVERBS, Verbs};

/// Returns a text for display: the version and the file of rdma-core, or why it is unavailable.
///
/// Loads the library if it is not loaded yet.
#[must_use]
pub fn rdma_core() -> String {
    if let Err(absence) = Verbs::system() {
        return format!("none ({absence})");
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    mapped_file(&maps).map_or_else(|| format!("unknown version ({LIBIBVERBS})"), describe)
}

/// Returns the path of libibverbs from `maps`, which has the format of `/proc/PID/maps`.
fn mapped_file(maps: &str) -> Option<&str> {
    let paths = maps.lines().filter_map(|line| line.find('/').map(|start| &line[start..]));
    paths.into_iter().find(|path| file_name(path).starts_with("libibverbs.so."))
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn describe(path: &str) -> String {
    // In libibverbs.so.1.14.44.0, the first two numbers are the ABI's and the rest is the version.
    let version = file_name(path).trim_start_matches("libibverbs.so.").splitn(3, '.').nth(2);
    format!("{} ({path})", version.unwrap_or("unknown version"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_version_from_the_mapped_file() {
        let maps = "7f00-7f01 r-xp 00000000 fe:00 1    /usr/lib/libc.so.6\n\
                    7f02-7f03 rw-p 00000000 00:00 0 \n\
                    7f04-7f05 r--p 00000000 fe:00 2    /usr/lib/a b/libibverbs.so.1.14.44.0\n";
        let file = mapped_file(maps).expect("a file");
        assert_eq!(describe(file), "44.0 (/usr/lib/a b/libibverbs.so.1.14.44.0)");
        assert_eq!(describe("/x/libibverbs.so.1"), "unknown version (/x/libibverbs.so.1)");
        assert_eq!(mapped_file("7f00-7f01 r-xp 00000000 fe:00 1  /lib/libc.so.6"), None);
    }

    #[test]
    fn names_the_library_or_why_it_is_missing() {
        let text = rdma_core();
        assert!(text.contains(".so"), "{text}");
        assert_eq!(Verbs::system().is_err(), text.starts_with("none ("), "{text}");
    }
}
