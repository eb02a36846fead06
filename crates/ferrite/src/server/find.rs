//! Finds the engine's program and our module. Errors list the places that were searched.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use super::config::Choice;

/// Engines in the order of the search. On a host that has both, Valkey was probably added later, on
/// purpose.
const ENGINES: [&str; 2] = ["valkey-server", "redis-server"];
/// The module's file as it is installed, and as cargo builds it.
const MODULES: [&str; 2] = ["ferrite.so", "libferrite_module.so"];

pub(super) fn engine(choice: &Choice, path: Option<&OsStr>) -> Result<PathBuf, String> {
    match choice {
        Choice::Path(named) if named.components().count() > 1 => {
            if is_program(named) {
                return Ok(named.clone());
            }
            Err(format!("server.engine: {} is not an executable file", named.display()))
        }
        Choice::Path(name) => find_in_path(&[name.as_os_str()], path),
        Choice::Auto => find_in_path(&ENGINES.map(OsStr::new), path),
    }
}

fn find_in_path(names: &[&OsStr], path: Option<&OsStr>) -> Result<PathBuf, String> {
    let directories: Vec<PathBuf> = path.map(std::env::split_paths).into_iter().flatten().collect();
    let places =
        names.iter().flat_map(|name| directories.iter().map(move |place| place.join(name)));
    places.into_iter().find(|place| is_program(place)).ok_or_else(|| {
        let names: Vec<_> = names.iter().map(|name| name.to_string_lossy()).collect();
        let path = path.unwrap_or_default().to_string_lossy();
        format!(
            "no engine found: looked for {} in PATH ({path}); install one (apt-get install \
             valkey-server, or redis-server), or set server.engine",
            names.join(" and ")
        )
    })
}

fn is_program(path: &Path) -> bool {
    path.metadata().is_ok_and(|about| about.is_file() && about.permissions().mode() & 0o111 != 0)
}

/// Finds the module. `own` is the path of the running executable.
pub(super) fn module(choice: &Choice, own: &Path) -> Result<PathBuf, String> {
    let places = match choice {
        // Absolute, because the engine may change its working directory before it loads the module.
        Choice::Path(named) => {
            let path = std::path::absolute(named).unwrap_or_else(|_| named.clone());
            if path.is_file() {
                return Ok(path);
            }
            return Err(format!("server.module: no such file: {}", path.display()));
        }
        Choice::Auto => {
            let bin = own.parent().unwrap_or(Path::new("/"));
            let library =
                bin.parent().unwrap_or(Path::new("/")).join("lib/ferrite").join(MODULES[0]);
            MODULES.map(|name| bin.join(name)).into_iter().chain([library]).collect::<Vec<_>>()
        }
    };
    places.iter().find(|place| place.is_file()).cloned().ok_or_else(|| {
        let places: Vec<_> = places.iter().map(|place| place.display().to_string()).collect();
        format!(
            "the module was not found: looked for {}; install it there, or set server.module to its \
             path",
            places.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_the_places_that_were_searched() {
        let path = OsStr::new("/nowhere:/nor/here");
        let error = engine(&Choice::Auto, Some(path)).expect_err("no engine in PATH");
        assert!(
            error.contains("valkey-server and redis-server in PATH (/nowhere:/nor/here)"),
            "{error}"
        );
        let error = engine(&Choice::Path("no-such-engine".into()), Some(path));
        let error = error.expect_err("no such engine in PATH");
        assert!(error.contains("looked for no-such-engine in PATH"), "{error}");
        let error =
            engine(&Choice::Path("/etc/passwd".into()), Some(path)).expect_err("not executable");
        assert!(error.contains("/etc/passwd is not an executable file"), "{error}");
        let error = module(&Choice::Auto, Path::new("/nowhere/bin/ferrite"));
        let error = error.expect_err("no module beside the program");
        for place in [
            "/nowhere/bin/ferrite.so",
            "/nowhere/bin/libferrite_module.so",
            "/nowhere/lib/ferrite/ferrite.so",
        ] {
            assert!(error.contains(place), "{error}");
        }
        let error =
            module(&Choice::Path("/nowhere/x.so".into()), Path::new("/")).expect_err("no file");
        assert!(error.contains("no such file: /nowhere/x.so"), "{error}");
    }

    #[test]
    fn finds_installed_engines_and_named_modules() {
        let found =
            engine(&Choice::Path("sh".into()), Some(OsStr::new("/nowhere:/bin"))).expect("a shell");
        assert_eq!(found, Path::new("/bin/sh"));
        let both = std::env::temp_dir().join(format!("ferrite-find-{}", std::process::id()));
        std::fs::create_dir(&both).expect("a directory");
        for name in ["redis-server", "valkey-server"] {
            std::fs::copy("/bin/true", both.join(name)).expect("a program");
        }
        let found = engine(&Choice::Auto, Some(both.as_os_str()));
        std::fs::remove_dir_all(&both).expect("removed");
        assert_eq!(found, Ok(both.join("valkey-server")));
        assert_eq!(
            module(&Choice::Path("/etc/passwd".into()), Path::new("/")),
            Ok("/etc/passwd".into())
        );
    }
}
