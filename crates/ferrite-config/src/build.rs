//! How a program was built: what `--version` prints.

/// How a program was built. [`build!`](crate::build!) creates this value in the program's own
/// crate, because the build script of that crate finds the commit.
#[derive(Debug, Clone, Copy)]
pub struct Build {
    /// The name of the program.
    pub program: &'static str,
    /// The version of the program.
    pub version: &'static str,
    /// The commit of the source, or `unknown`.
    pub commit: &'static str,
    /// Cargo's profile, such as `release`.
    pub profile: &'static str,
    /// The target triple.
    pub target: &'static str,
}

impl Build {
    /// Returns the text of `--version`. Its first line has name and version only, as scripts
    /// expect. `rdma_core` describes the rdma-core that this host has at run time.
    #[must_use]
    pub fn describe(&self, rdma_core: &str) -> String {
        let Self { program, version, commit, profile, target } = self;
        format!(
            "{program} {version}\ncommit: {commit}\nbuild: {profile}, {target}\n\
             rdma-core: {rdma_core}\n"
        )
    }
}

/// Describes the build of the calling crate, whose build script is `crates/ferrite/build.rs`.
#[macro_export]
macro_rules! build {
    ($program:literal) => {
        $crate::Build {
            program: $program,
            version: env!("CARGO_PKG_VERSION"),
            commit: env!("FERRITE_BUILD_COMMIT"),
            profile: env!("FERRITE_BUILD_PROFILE"),
            target: env!("FERRITE_BUILD_TARGET"),
        }
    };
}
