//! The engine's program and our module: where they are, or where they were looked for.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use super::config::Choice;

/// In this order: who has both has installed Valkey later.
const ENGINES: [&str; 2] = ["valkey-server", "redis-server"];
/// As it is installed, and as cargo builds it.
const MODULES: [&str; 2] = ["ferrite.so", "libferrite_module.so"];

pub(super) fn engine(choice: &Choice, path: Option<&OsStr>) -> Result<PathBuf, String> {
    match choice {
        Choice::Path(named) if named.components().count() > 1 => {
            if is_program(named) {
                return Ok(named.clone());
            }
            Err(format!("server.engine: {} is not a program", named.display()))
        }
        Choice::Path(name) => in_path(&[name.as_os_str()], path),
        Choice::Auto => in_path(&ENGINES.map(OsStr::new), path),
    }
}

fn in_path(names: &[&OsStr], path: Option<&OsStr>) -> Result<PathBuf, String> {
    let directories: Vec<PathBuf> = path.map(std::env::split_paths).into_iter().flatten().collect();
    let places =
        names.iter().flat_map(|name| directories.iter().map(move |place| place.join(name)));
    places.into_iter().find(|place| is_program(place)).ok_or_else(|| {
        let names: Vec<_> = names.iter().map(|name| name.to_string_lossy()).collect();
        let path = path.unwrap_or_default().to_string_lossy();
        format!(
            "there is no engine: looked for {} in PATH ({path}); install one (apt-get install valkey-server, or \
             redis-server), or name it: server.engine",
            names.join(" and ")
        )
    })
}

fn is_program(path: &Path) -> bool {
    path.metadata().is_ok_and(|about| about.is_file() && about.permissions().mode() & 0o111 != 0)
}

/// `own` is the executable that runs.
pub(super) fn module(choice: &Choice, own: &Path) -> Result<PathBuf, String> {
    let places = match choice {
        // The engine looks for it from its own directory, which may become another.
        Choice::Path(named) => {
            let whole = std::path::absolute(named).unwrap_or_else(|_| named.clone());
            if whole.is_file() {
                return Ok(whole);
            }
            return Err(format!("server.module: there is no file {}", whole.display()));
        }
        Choice::Auto => {
            let beside = own.parent().unwrap_or(Path::new("/"));
            let library =
                beside.parent().unwrap_or(Path::new("/")).join("lib/ferrite").join(MODULES[0]);
            MODULES.map(|name| beside.join(name)).into_iter().chain([library]).collect::<Vec<_>>()
        }
    };
    places.iter().find(|place| place.is_file()).cloned().ok_or_else(|| {
        let places: Vec<_> = places.iter().map(|place| place.display().to_string()).collect();
        format!(
            "there is no module: looked for {}; put it there, or name it: server.module (docs/book)",
            places.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_said() {
        let path = OsStr::new("/nowhere:/nor/here");
        let said = engine(&Choice::Auto, Some(path)).expect_err("none");
        assert!(
            said.contains("valkey-server and redis-server in PATH (/nowhere:/nor/here)"),
            "{said}"
        );
        let said = engine(&Choice::Path("no-such-engine".into()), Some(path)).expect_err("none");
        assert!(said.contains("looked for no-such-engine in PATH"), "{said}");
        let said = engine(&Choice::Path("/etc/passwd".into()), Some(path)).expect_err("no program");
        assert!(said.contains("/etc/passwd is not a program"), "{said}");
        let said = module(&Choice::Auto, Path::new("/nowhere/bin/ferrite")).expect_err("none");
        for place in [
            "/nowhere/bin/ferrite.so",
            "/nowhere/bin/libferrite_module.so",
            "/nowhere/lib/ferrite/ferrite.so",
        ] {
            assert!(said.contains(place), "{said}");
        }
        let said = module(&Choice::Path("/nowhere/x.so".into()), Path::new("/")).expect_err("none");
        assert!(said.contains("there is no file /nowhere/x.so"), "{said}");
    }

    #[test]
    fn what_is_there_is_found() {
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
