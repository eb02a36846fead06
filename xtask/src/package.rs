//! `cargo xtask package`: builds all packages of a release into `target/package/out`.
//!
//! ```text
//!   cargo build ──► ferrite, ferrite-cli, libferrite_module.so
//!                     │ their own commands write man pages and completions
//!                     ▼
//!   release/dist ──► cargo deb           .deb, and -dbgsym with the debug symbols
//!                ──► cargo generate-rpm  .rpm, and -debuginfo
//!   Cargo.lock   ──► cargo cyclonedx     SBOM
//!                ──► SHA256SUMS
//! ```
//!
//! Two builds of one commit should give the same files, in any directory: paths are replaced, and
//! times are those of the commit. `packaging/reproducible` checks this.

use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, ensure};
use clap::{Args, ValueEnum};

/// The programs and the module: the file that cargo builds, and its name when it is installed.
const FILES: [(&str, &str); 3] = [
    ("ferrite", "ferrite"),
    ("ferrite-cli", "ferrite-cli"),
    ("libferrite_module.so", "ferrite.so"),
];
/// The crates that become packages: the directory, and the name of the package.
const PACKAGES: [(&str, &str); 2] =
    [("ferrite", "ferrite"), ("ferrite-module", "ferrite-redis-module")];
/// The path of the source, for debuggers and in the SBOM.
const SOURCE: &str = "/usr/src/ferrite";
const SBOM: &str = "sbom.cdx.json";
const MAINTAINER: &str = "The Ferrite authors <maintainers@ferrite.invalid>";

/// Build packages: deb, rpm and SBOM
#[derive(Args)]
pub(crate) struct Options {
    /// Version of the packages [default: that of the workspace]
    #[arg(long, value_name = "VERSION")]
    package_version: Option<String>,
    /// Kinds of packages to build
    #[arg(long, value_enum, value_delimiter = ',', default_value = "deb,rpm,sbom")]
    only: Vec<Kind>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    Deb,
    Rpm,
    Sbom,
}

pub(crate) fn run(root: &Path, options: &Options) -> anyhow::Result<ExitCode> {
    let build = Build::new(root, options.package_version.as_deref())?;
    build.compile()?;
    build.make_assets()?;
    if build.out.exists() {
        fs::remove_dir_all(&build.out)?; // it may contain packages of an earlier version
    }
    fs::create_dir_all(&build.out)?;
    for kind in &options.only {
        match kind {
            Kind::Deb => build.debs()?,
            Kind::Rpm => build.rpms()?,
            Kind::Sbom => build.sbom()?,
        }
    }
    build.checksums()?;
    Ok(ExitCode::SUCCESS)
}

struct Build {
    root: PathBuf,
    /// Cargo's target directory. It is separate, because the flags differ from those of other
    /// builds.
    target: PathBuf,
    dist: PathBuf,
    out: PathBuf,
    version: String,
    /// Seconds since 1970: `SOURCE_DATE_EPOCH`, or the time of the commit.
    epoch: String,
    commit: String,
}

impl Build {
    fn new(root: &Path, version: Option<&str>) -> anyhow::Result<Self> {
        let target = root.join("target/package");
        let given = |name| std::env::var(name).ok().filter(|value: &String| !value.is_empty());
        let epoch = given("SOURCE_DATE_EPOCH")
            .map_or_else(|| git(root, &["log", "-1", "--format=%ct"]), Ok)?;
        let commit = given("FERRITE_COMMIT").map_or_else(|| commit(root), Ok)?;
        Ok(Self {
            root: root.to_path_buf(),
            dist: target.join("release/dist"),
            out: target.join("out"),
            target,
            version: version.unwrap_or(env!("CARGO_PKG_VERSION")).to_owned(),
            epoch,
            commit,
        })
    }

    /// Returns a command with the settings that all steps share.
    fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let cargo_home = std::env::var_os("CARGO_HOME").map(PathBuf::from).unwrap_or_else(|| {
            PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cargo")
        });
        let flags = format!(
            "--remap-path-prefix={}={SOURCE} --remap-path-prefix={}=/usr/src/cargo",
            self.root.display(),
            cargo_home.display()
        );
        let mut command = Command::new(program);
        command
            .current_dir(&self.root)
            .env("CARGO_TARGET_DIR", &self.target)
            .env("RUSTFLAGS", flags)
            .env("SOURCE_DATE_EPOCH", &self.epoch)
            .env("FERRITE_COMMIT", &self.commit)
            .env("TZ", "UTC");
        command
    }

    fn compile(&self) -> anyhow::Result<()> {
        let mut cargo = self.command("cargo");
        cargo.args(["build", "--locked", "--release"]);
        run_to_end(cargo.args(["-p", "ferrite", "-p", "ferrite-cli", "-p", "ferrite-module"]))
    }

    /// Fills `dist`: man pages, completions, changelogs, stripped files and their debug symbols.
    fn make_assets(&self) -> anyhow::Result<()> {
        if self.dist.exists() {
            fs::remove_dir_all(&self.dist)?;
        }
        let release = self.target.join("release");
        let manuals = self.dist.join("manuals");
        for program in ["ferrite", "ferrite-cli"] {
            let mut program = self.command(release.join(program));
            run_to_end(program.arg("--write-manuals").arg(&manuals))?;
        }
        for program in ["ferrite", "ferrite-cli"] {
            for (shell, from, to) in [
                ("bash", format!("{program}.bash"), program.to_owned()),
                ("zsh", format!("_{program}"), format!("_{program}")),
                ("fish", format!("{program}.fish"), format!("{program}.fish")),
            ] {
                place(&manuals.join(from), &self.dist.join(shell).join(to))?;
            }
        }
        fs::rename(manuals, self.dist.join("man"))?; // only the man pages are left
        for page in fs::read_dir(self.dist.join("man"))? {
            self.compress(&page?.path())?;
        }
        for (crate_name, package) in PACKAGES {
            let name = if crate_name == "ferrite" { "changelog" } else { "changelog-module" };
            let file = self.dist.join(name);
            fs::write(&file, self.debian_changelog(package)?)?;
            self.compress(&file)?;
        }
        for (built, installed) in FILES {
            self.strip(&release.join(built), installed)?;
        }
        Ok(())
    }

    /// Compresses a file as Debian requires for documents: with the best compression, without name
    /// and time.
    fn compress(&self, file: &Path) -> anyhow::Result<()> {
        run_to_end(self.command("gzip").args(["-9", "-n"]).arg(file))
    }

    /// Returns a changelog in Debian's format, which packages need. CHANGELOG.md has the changes
    /// themselves.
    fn debian_changelog(&self, package: &str) -> anyhow::Result<String> {
        let mut date = self.command("date");
        let date = output(date.args(["-R", "-d", &format!("@{}", self.epoch)]))?;
        let Self { version, commit, .. } = self;
        Ok(format!(
            "{package} ({version}) unstable; urgency=medium\n\n  * Built from commit {commit}.\n    \
             CHANGELOG.md of the source lists the changes.\n\n -- {MAINTAINER}  {date}\n"
        ))
    }

    /// Writes the file without debug symbols into `dist/stripped`, and the symbols into
    /// `dist/debug`. Debuggers find the symbols by the debug link, or by the build ID.
    fn strip(&self, built: &Path, name: &str) -> anyhow::Result<()> {
        let debug = self.dist.join("debug").join(format!("{name}.debug"));
        let stripped = self.dist.join("stripped").join(name);
        for file in [&debug, &stripped] {
            fs::create_dir_all(file.parent().context("no parent directory in dist")?)?;
        }
        let mut objcopy = self.command("objcopy");
        run_to_end(objcopy.arg("--only-keep-debug").arg(built).arg(&debug))?;
        let link = format!("--add-gnu-debuglink={}", debug.display());
        let mut objcopy = self.command("objcopy");
        run_to_end(objcopy.args(["--strip-unneeded", &link]).arg(built).arg(&stripped))
    }

    fn debs(&self) -> anyhow::Result<()> {
        for (crate_name, _) in PACKAGES {
            let mut cargo = self.command("cargo");
            cargo.args(["deb", "--no-build", "--dbgsym", "--locked", "-p", crate_name]);
            run_to_end(cargo.args(["--deb-version", &self.version, "-o"]).arg(&self.out))?;
        }
        Ok(())
    }

    fn rpms(&self) -> anyhow::Result<()> {
        for (crate_name, _) in PACKAGES {
            // The default compression, zstd at its best, takes many minutes for debug symbols.
            for variant in [&[][..], &["--variant=debuginfo", "--payload-compress=gzip"]] {
                let mut cargo = self.command("cargo");
                cargo.args(["generate-rpm", "-p", &format!("crates/{crate_name}")]);
                cargo.args(["-s", &format!("version = \"{}\"", self.version)]);
                cargo.args(["--source-date", &self.epoch]).args(variant);
                run_to_end(cargo.arg("-o").arg(&self.out))?;
            }
        }
        Ok(())
    }

    /// Lists every crate that the packages contain. cargo cyclonedx writes a file next to each
    /// Cargo.toml of the workspace.
    fn sbom(&self) -> anyhow::Result<()> {
        let mut cargo = self.command("cargo");
        cargo.args(["cyclonedx", "--format", "json", "--spec-version", "1.5"]);
        cargo.args(["--override-filename", "sbom.cdx", "--target", "x86_64-unknown-linux-gnu"]);
        run_to_end(&mut cargo)?;
        for (crate_name, package) in [PACKAGES[0], PACKAGES[1], ("ferrite-cli", "ferrite-cli")] {
            let written = self.root.join("crates").join(crate_name).join(SBOM);
            let text = fs::read_to_string(&written).context(format!("{}", written.display()))?;
            let text = text.replace(&format!("{}", self.root.display()), SOURCE);
            fs::write(self.out.join(format!("{package}.cdx.json")), text)?;
        }
        let crates = fs::read_dir(self.root.join("crates"))?
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<Result<Vec<_>, _>>()?;
        for directory in crates.iter().chain([&self.root.join("xtask")]) {
            match fs::remove_file(directory.join(SBOM)) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
                _ => {}
            }
        }
        Ok(())
    }

    fn checksums(&self) -> anyhow::Result<()> {
        let mut names: Vec<_> = fs::read_dir(&self.out)?
            .map(|entry| entry.map(|entry| entry.file_name()))
            .collect::<Result<_, _>>()?;
        names.sort();
        let mut sums = self.command("sha256sum");
        let text = output(sums.current_dir(&self.out).arg("--").args(names))?;
        fs::write(self.out.join("SHA256SUMS"), format!("{text}\n"))?;
        println!("{}:\n{text}", self.out.display());
        Ok(())
    }
}

/// Moves a file, and creates the directory for it.
fn place(from: &Path, to: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(to.parent().context("the target has no parent directory")?)?;
    fs::rename(from, to)
        .with_context(|| format!("cannot move {} to {}", from.display(), to.display()))
}

/// Returns the commit, with a mark if files differ from it.
fn commit(root: &Path) -> anyhow::Result<String> {
    let commit = git(root, &["rev-parse", "--short=12", "HEAD"])?;
    let changes = git(root, &["status", "--porcelain", "--untracked-files=no"])?;
    Ok(if changes.is_empty() { commit } else { format!("{commit}-modified") })
}

fn git(root: &Path, arguments: &[&str]) -> anyhow::Result<String> {
    output(Command::new("git").current_dir(root).args(arguments))
}

fn output(command: &mut Command) -> anyhow::Result<String> {
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?} failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?.trim_end().to_owned())
}

fn run_to_end(command: &mut Command) -> anyhow::Result<()> {
    let name = format!("{} {:?}", command.get_program().display(), command.get_args().next());
    let status = command.status().with_context(|| format!("cannot start {name}"))?;
    ensure!(
        status.success(),
        "{name} failed ({status}); .ci/setup.sh has the versions of the tools"
    );
    Ok(())
}
