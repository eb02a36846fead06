# shellcheck shell=bash disable=SC2034     # versions are for the scripts
# Installs the programs for .ci/run and .ci/long, on a machine that has only Debian 12 and rustup.

# Tools that take minutes to build are kept outside the checkout, like the lab's kernels.
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/ferrite-ci
BUILT_MIB=20000    # limit of the build output; beyond it, the workspace's own crates are removed
NEXTEST=0.9.143
DENY=0.20.2
MDBOOK=0.5.4
GUNGRAUN=0.20.0
CARGO_DEB=3.8.0
GENERATE_RPM=0.21.1
CYCLONEDX=0.5.9
export PATH=$CACHE/bin:$PATH

# In CI, keeps the build output for the next checkout, so that dependencies need not be built again.
# The output is not in the home directory, because tests run programs as other users.
use_built() {
  local built=/var/cache/ferrite-ci/target
  [ -n "${CI:-}" ] && [ ! -e target ] && [ ! -L target ] && mkdir -p $built 2>/dev/null || return 0
  ln -s $built target
}

trim_built() {     # removes build output before it fills the disk; dependencies stay
  [ -L target ] && [ "$(du -sm target/ | cut -f1)" -gt $BUILT_MIB ] || return 0
  cargo clean --workspace
  cargo clean --workspace --release
  rm -rf target/fuzz target/loom target/miri
}

install_packages() {
  as_root apt-get -o Acquire::Retries=3 -qq update
  as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 -qq \
    install -y --no-install-recommends "$@" >/dev/null
}

channel() { sed -n 's/^channel = "\(.*\)"$/\1/p' rust-toolchain.toml; }

install_compiler() {
  rustc --version 2>/dev/null | grep -qF " $(channel) " ||
    rustup toolchain install "$(channel)" --profile minimal
  { cargo fmt --version && cargo clippy --version; } >/dev/null 2>&1 ||
    rustup component add rustfmt clippy
  rustc --version
}

# install_tool CRATE VERSION COMMAND…: installs CRATE, unless COMMAND --version prints VERSION
# TOOL_FEATURES: an argument of `cargo install` that selects the features of the crate
install_tool() {
  local said root=$PWD
  said=$("${@:3}" --version 2>/dev/null | head -1 | sed 's/ v/ /' || true)
  said=${said/cargo-cyclonedx-cyclonedx/cargo-cyclonedx}
  if [[ "$said " != "$1 $2 "* ]]; then
    # Builds in another directory, so that no setting of this project applies.  After a failure, the
    # partial build is kept, so that the next run can continue it.  The tools are not optimised,
    # because they mostly wait.
    (cd / && RUSTUP_TOOLCHAIN=$(cd "$root" && channel) CARGO_PROFILE_DEV_DEBUG=0 \
      cargo install --quiet --locked --debug --root "$CACHE" --target-dir "$CACHE/build" \
        ${TOOL_FEATURES:+"$TOOL_FEATURES"} --version "$2" "$1")
    rm -rf "$CACHE/build"
    said=$("${@:3}" --version | head -1)
  fi
  echo "$said"
}
