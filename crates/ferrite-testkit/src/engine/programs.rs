//! Finds the engines and the module.

use std::path::{Path, PathBuf};

/// The program of Redis, which is found in PATH. CI installs Debian's.
pub const REDIS: &str = "redis-server";

/// Returns the path of the module: the one in the variable `FERRITE_MODULE` or, if this is not set,
/// the one that was built with this test.
///
/// # Panics
/// If the variable is not set and the module is not built.
#[must_use]
pub fn module() -> PathBuf {
    if let Some(named) = std::env::var_os("FERRITE_MODULE") {
        return named.into();
    }
    let test = std::env::current_exe().expect("the path of this test");
    let module = test.with_file_name("libferrite_module.so");
    assert!(
        module.exists(),
        "{} is not built; build it together with the tests, as `cargo test --workspace` does",
        module.display()
    );
    module
}

/// Returns the path of the Valkey server in the lab's cache; `None` if it is not built.
#[must_use]
pub fn valkey() -> Option<PathBuf> {
    let cache = std::env::var_os("FERRITE_LAB_CACHE").map(PathBuf::from).or_else(|| {
        let home = std::env::var_os("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")));
        home.map(|home| home.join("ferrite-lab"))
    });
    cache.map(|cache| cache.join("valkey/valkey-server")).filter(|server| server.exists())
}

/// Returns Redis, Valkey if it is built, and the engines in FERRITE_ENGINES (paths of servers,
/// separated by colons).
#[must_use]
#[expect(clippy::print_stderr, reason = "tells which engines are left out")]
pub fn engines() -> Vec<PathBuf> {
    let named = std::env::var_os("FERRITE_ENGINES").unwrap_or_default();
    // An empty variable is split into one empty path.
    let named = std::env::split_paths(&named).filter(|path| !path.as_os_str().is_empty());
    let engines: Vec<_> =
        [Some(REDIS.into()), valkey()].into_iter().flatten().chain(named).collect();
    if engines.len() == 1 {
        eprintln!(
            "testing Redis only: Valkey is not built (run lab/lab setup valkey), and \
             FERRITE_ENGINES names no engine"
        );
    }
    engines
}
